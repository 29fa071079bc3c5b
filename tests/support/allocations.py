"""How much memory a piece of CPU code takes, from the allocator's own records (torch.profiler)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Allocations(NamedTuple):
    """Bytes above what was allocated before; `held_bytes` is what the result of the call keeps alive."""

    peak_bytes: int
    held_bytes: int
    result: Any


def measure_allocations(run: Callable[[], Any]) -> Allocations:
    """Run once under the profiler; the result stays alive while memory is counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        marker = torch.empty(1)
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [(event["ts"], event["args"]) for event in events if event.get("name") == "[memory]"]
    memory.sort(key=lambda event: event[0])
    totals = [args["Total Allocated"] for _, args in memory]
    before = totals[0] - memory[0][1]["Bytes"]
    del marker
    return Allocations(max(totals) - before, totals[-1] - before, result)
