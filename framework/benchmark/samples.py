"""Which samples there are, in which order, and what is kept of each: one line of benchmark.jsonl.

A round runs every system once under every allocator setting; odd rounds run in reverse (A B C, C B A, ...). So each
round pairs any two systems close in time, and a drift of the machine favours neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from framework.benchmark.catalog import SAMPLES_FILE
from framework.config import BenchmarkTask, RunConfig
from framework.report import versions
from framework.run_folder import append_line, read_lines

FOREIGN_CPU_LIMIT = 0.10
"""Cores used by others during the timed updates above which a sample is marked."""
ROOT = Path(__file__).resolve().parent.parent.parent
MEASURED_CODE = ("kernels", "models", "strategies", "framework/benchmark/meter.py", "framework/benchmark/sample.py",
                 "framework/benchmark/trainers.py")


@dataclass(frozen=True, order=True)
class Slot:
    """One sample of the plan."""

    round: int
    allocator: str
    system: str


def plan(systems: Sequence[str], allocators: Sequence[str], rounds: int) -> list[Slot]:
    """Every sample in the order it runs."""
    slots = []
    for number in range(rounds):
        once = [Slot(number, allocator, system) for allocator in allocators for system in systems]
        slots += once if number % 2 == 0 else once[::-1]
    return slots


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one sample came to. Bytes are the largest of any rank's; all but the slot is None after an error."""

    slot: Slot
    error: str | None = None
    step_s: float | None = None
    """Median time of an update on the slower rank."""
    losses: list[float] | None = None
    """Mean token loss over all ranks, one per update."""
    peak_bytes: int | None = None
    whole_peak_bytes: int | None = None
    anonymous_peak_bytes: int | None = None
    live_bytes: int | None = None
    state_bytes: int | None = None
    parameters: int | None = None
    foreign_cpu: float | None = None
    """Cores used by anything but the ranks while they were timed, stolen time included."""
    stolen_cpu_s: float | None = None

    @property
    def disturbed(self) -> bool:
        return self.foreign_cpu is not None and self.foreign_cpu > FOREIGN_CPU_LIMIT


def sample_of(slot: Slot, reply: Mapping[str, Any]) -> Sample:
    """From a fork server's reply."""
    if "error" in reply:
        return Sample(slot=slot, error=reply["error"])
    reports = reply["reports"]

    def largest(name: str) -> Any:
        values = [report[name] for report in reports]
        return None if None in values else max(values)

    foreign_s = largest("machine_cpu_s") - sum(report["own_cpu_s"] for report in reports)
    losses = [sum(step) / len(reports) for step in zip(*(report["losses"] for report in reports), strict=True)]
    return Sample(
        slot=slot, step_s=largest("step_s"), losses=losses, parameters=reports[0]["parameters"],
        peak_bytes=largest("peak_bytes"), whole_peak_bytes=largest("whole_peak_bytes"),
        anonymous_peak_bytes=largest("anonymous_peak_bytes"), live_bytes=largest("live_bytes"),
        state_bytes=largest("state_bytes"),
        foreign_cpu=round(max(0.0, foreign_s) / largest("wall_s"), 4), stolen_cpu_s=largest("stolen_cpu_s"))


class SampleFile:
    """benchmark.jsonl of a run folder. A line counts only for the setting it was measured with."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.path = folder / SAMPLES_FILE
        self._fingerprint = fingerprint
        self.foreign_lines = 0
        """Lines that another config, code, version or machine has left."""

    def read(self) -> dict[Slot, Sample]:
        """The last sample of every slot; a failed one does not count, so that it is tried again."""
        found: dict[Slot, Sample] = {}
        self.foreign_lines = 0
        for line in read_lines(self.path):
            if line.pop("fingerprint") != self._fingerprint:
                self.foreign_lines += 1
                continue
            sample = Sample(**{**line, "slot": Slot(**line["slot"])})
            if sample.error is None:
                found[sample.slot] = sample
        return found

    def append(self, sample: Sample) -> None:
        """Keep a sample. Raises OSError when it does not fit on the disk."""
        self._end_last_line()
        append_line(self.path, {"fingerprint": self._fingerprint, **asdict(sample)})

    def _end_last_line(self) -> None:
        """Cut off what a crash has left of a line, so that the next one stands on its own."""
        if self.path.exists():
            whole = self.path.read_bytes().rpartition(b"\n")
            os.truncate(self.path, len(whole[0]) + len(whole[1]))


def fingerprint(config: RunConfig, *, data_hash: str) -> str:
    """Equal exactly when two samples measure the same: config, data, code, versions and machine."""
    assert isinstance(config.task, BenchmarkTask)
    trainer = config.trainer
    measured = {
        "model": asdict(config.model), "dataset": asdict(config.dataset), "batch": asdict(config.batch),
        "precision": asdict(config.precision), "optimizer": asdict(config.optimizer),
        "schedule": asdict(config.schedule), "seed": config.seed, "prefetch_units": config.zero.prefetch_units,
        "trainer": [trainer.devices, trainer.threads, trainer.max_steps, trainer.gradient_clip_val],
        "task": [config.task.warmup_steps, config.task.memory_steps], "data": data_hash, "code": _code_hash(),
        "versions": versions(), "machine": machine(),
    }
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:16]


def machine() -> str:
    """The processor as the kernel names it, and how many."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


def _code_hash() -> str:
    found = hashlib.sha256()
    for path in _code_files():
        found.update(path.read_bytes())
    return found.hexdigest()


def _code_files() -> Iterator[Path]:
    for name in MEASURED_CODE:
        place = ROOT / name
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]
