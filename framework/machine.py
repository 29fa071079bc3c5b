"""What this machine and its launcher offer: CPUs, GPUs, processes that torchrun, SLURM or MPI started.

Passed to `resolve` and `validate` as one object, so that both can be tested for machines that are not here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from framework.environment import Launcher, detect, rank_variables

# Any of these is there when a driver of an NVIDIA or AMD GPU is. Without one, torch need not be imported to know.
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvhost*", "/dev/nvgpu*")


@dataclass(frozen=True)
class Launched:
    """Processes some other launcher has started: this one is among them."""

    by: str
    processes: int
    processes_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.processes // self.processes_per_node)


@dataclass(frozen=True)
class Machine:
    """`gpu_count` is asked only when the config may use GPUs."""

    cpu_count: int
    gpu_count: Callable[[], int]
    launched: Launched | None = None


def this_machine(launched: Launched | None = None) -> Machine:
    """The machine this process runs on."""
    return Machine(cpu_count=available_cpus(), gpu_count=available_gpus, launched=launched)


def available_cpus(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs this process may use: its affinity, cut to the container's quota. At least 1."""
    count = len(os.sched_getaffinity(0))
    if quota_file.is_file():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return count


def available_gpus() -> int:
    """GPUs torch can use. Imports torch only when there is a GPU driver; initialises no GPU."""
    if not any(glob.glob(pattern) for pattern in GPU_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def launched_processes(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """The processes another launcher started, this one among them; None when this process starts its own."""
    launcher = detect(environment)
    if launcher is Launcher.NONE:
        return None
    variables = rank_variables(environment)
    count = int(variables["WORLD_SIZE"])
    name = "torchrun" if launcher is Launcher.TORCHRUN else launcher.name
    return Launched(name, count, int(variables.get("LOCAL_WORLD_SIZE", count)))
