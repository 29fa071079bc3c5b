"""What one process measures of itself: memory from /proc, live tensors, CPU time of its own and of the machine.

All memory is counted above what the process held just before the model was built, after imports and a throw-away
warm-up, so that libraries are not billed to a system.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from strategies.zero.resting import RestingParameter

STATUS = Path("/proc/self/status")
RESET_PEAK = ("/proc/self/clear_refs", "5")
SAMPLING_INTERVAL_S = 0.002


@dataclass(frozen=True)
class Memory:
    """Bytes of this process: resident now, the most since `reset_peak`, and what no file backs (swapped or not)."""

    resident: int
    peak: int
    anonymous: int


def read_memory() -> Memory:
    """From /proc/self/status. Raises OSError where there is no /proc."""
    found = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if line.startswith(("Vm", "Rss")))
    kib = {name: int(value.split()[0]) for name, value in found.items()}
    return Memory(resident=kib["VmRSS"] * 1024, peak=kib["VmHWM"] * 1024,
                  anonymous=(kib["RssAnon"] + kib["VmSwap"]) * 1024)


def reset_peak() -> None:
    """Let the peak start from what is resident now."""
    path, value = RESET_PEAK
    with open(path, "w") as file:
        file.write(value)


@contextmanager
def sampled_anonymous_peak() -> Iterator[list[int]]:
    """Samples anonymous memory on a thread of its own; the list holds the most seen once the block has ended."""
    seen, stop = [read_memory().anonymous], threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLING_INTERVAL_S):
            seen.append(max(seen.pop(), read_memory().anonymous))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def live_storages() -> dict[int, int]:
    """Address and bytes of every CPU storage that Python can see, each once however many tensors view it.

    Of a DTensor its local tensor counts, which is an object of its own; a parameter at rest holds no value.
    """
    gc.collect()
    found: dict[int, int] = {}
    for obj in gc.get_objects():
        kind = type(obj)
        if issubclass(kind, torch.UntypedStorage):
            storage = obj
        elif issubclass(kind, torch.Tensor) and not issubclass(kind, (DTensor, RestingParameter)):
            if obj.device.type != "cpu" or obj.layout != torch.strided:
                continue
            if obj.is_leaf and obj.grad is not None and type(obj.grad) is torch.Tensor:
                _count(obj.grad.untyped_storage(), found)
            storage = obj.untyped_storage()
        else:
            continue
        _count(storage, found)
    return found


def _count(storage: torch.UntypedStorage, found: dict[int, int]) -> None:
    if storage.nbytes():
        found[storage.data_ptr()] = max(found.get(storage.data_ptr(), 0), storage.nbytes())


def held_bytes(before: dict[int, int]) -> int:
    """Bytes of the storages that are alive now and were not among `before`."""
    return sum(size for address, size in live_storages().items() if address not in before)


@dataclass(frozen=True)
class Clocks:
    """Seconds since some start: wall time, CPU time of the whole machine (with stolen time), stolen, this process's."""

    wall_s: float
    machine_s: float
    stolen_s: float
    own_s: float

    @classmethod
    def read(cls) -> Clocks:
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _iowait, irq, softirq, stolen = fields
        own = os.times()
        return cls(time.perf_counter(), (user + nice + system + irq + softirq + stolen) / ticks_per_s,
                   stolen / ticks_per_s, own.user + own.system)

    def since(self, earlier: Clocks) -> Clocks:
        return Clocks(self.wall_s - earlier.wall_s, self.machine_s - earlier.machine_s,
                      self.stolen_s - earlier.stolen_s, self.own_s - earlier.own_s)
