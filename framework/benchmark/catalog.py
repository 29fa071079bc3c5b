"""What can be compared: the systems by name, and the allocator settings. Data alone; torch is not imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """One way to train. `stage` is the ZeRO stage where it has one; `distribution` is what has to be installed."""

    name: str
    does: str
    stage: int | None = None
    distribution: str | None = None


SYSTEMS: dict[str, System] = {system.name: system for system in (
    System("nocomm", "independent processes that never talk: the floor that computing alone sets"),
    System("ddp", "torch DistributedDataParallel"),
    System("fsdp2", "torch fully_shard on every block and the root, resharded after forward"),
    System("deepspeed_1", "DeepSpeed ZeRO-1", stage=1, distribution="deepspeed"),
    System("deepspeed_2", "DeepSpeed ZeRO-2", stage=2, distribution="deepspeed"),
    System("deepspeed_3", "DeepSpeed ZeRO-3", stage=3, distribution="deepspeed"),
    System("zero0", "strategies.Engine, stage 0", stage=0),
    System("zero1", "strategies.Engine, stage 1", stage=1),
    System("zero2", "strategies.Engine, stage 2", stage=2),
    System("zero3", "strategies.Engine, stage 3", stage=3),
)}
BASELINES = ("fsdp2", "ddp", "nocomm")
"""What every system's step time is divided by, in the order of the table's columns."""
ALLOCATORS = ("tuned", "stock")
SAMPLES_FILE = "benchmark.jsonl"


def installed(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The systems among `names` whose packages are here, and those whose are not."""
    here, absent = [], []
    for name in names:
        (here if _is_installed(SYSTEMS[name].distribution) else absent).append(name)
    return here, absent


def allocator_environment(setting: str, environ: Mapping[str, str], tuned: Mapping[str, str]) -> dict[str, str]:
    """`environ` with exactly one allocator setting: `tuned` holds the launcher's variables, "stock" sets none.

    Whatever the shell has set of them, or of glibc's MALLOC_* variables, is taken out: every system gets the same.
    """
    if setting not in ALLOCATORS:
        raise ValueError(f"allocator setting {setting!r}: allowed are {', '.join(ALLOCATORS)}")
    plain = {name: value for name, value in environ.items() if name not in tuned and not name.startswith("MALLOC_")}
    return plain | dict(tuned) if setting == "tuned" else plain


def _is_installed(distribution: str | None) -> bool:
    if distribution is None:
        return True
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
