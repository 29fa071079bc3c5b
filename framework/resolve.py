"""Fills in every value left to `auto` and makes paths absolute; says what each became and why.

The result is printed, saved with the run, and is all a worker ever sees. Nothing is refused here: where no value fits,
the nearest is filled in and `framework/validate.py` explains what is wrong with the whole.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from framework.config import AUTO, HfDataset, RunConfig, TextDataset, TokensDataset, WandbLogger
from framework.machine import Machine

CPU_PROCESSES = 2


@dataclass(frozen=True)
class Resolution:
    """A value nobody typed: its key, what it is, and why."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.why})"


def resolve(config: RunConfig, *, machine: Machine, launch_dir: Path) -> list[Resolution]:
    """Change `config` in place until only `run.dir` may still be auto (the run folder is named when it is made)."""
    found: list[Resolution] = []
    for section, key, choose in (
        ("trainer", "accelerator", _accelerator),
        ("trainer", "devices", _devices),
        ("trainer", "num_nodes", _num_nodes),
        ("trainer", "threads", _threads),
        ("parallel", "data", _data),
        ("batch", "global_size", _global_size),
        ("dataset", "seq_len", _seq_len),
        ("logger", "mode", _tracker_mode),
    ):
        owner = getattr(config, section)
        if getattr(owner, key, None) == AUTO:
            value, why = choose(config, machine)
            setattr(owner, key, value)
            found.append(Resolution(f"{section}.{key}", value, why))
    make_paths_absolute(config, launch_dir)
    return [*found, *_derived(config)]


def data_size(config: RunConfig) -> int:
    """Ranks that see different samples, once `parallel.data` is a number."""
    return config.parallel.data


def processes(config: RunConfig) -> int:
    """Ranks of the whole job, once devices and nodes are numbers."""
    return config.trainer.devices * config.trainer.num_nodes


def make_paths_absolute(config: RunConfig, launch_dir: Path) -> None:
    """A relative input or output path means the directory the command was typed in."""
    if config.run.dir != AUTO:
        config.run.dir = _absolute(config.run.dir, launch_dir)
    if config.model.weights is not None:
        config.model.weights = _absolute(config.model.weights, launch_dir)
    dataset = config.dataset
    if isinstance(dataset, TextDataset):
        dataset.files = [_absolute(path, launch_dir) for path in dataset.files]
    elif isinstance(dataset, TokensDataset) or (
        isinstance(dataset, HfDataset) and is_local(dataset.path, launch_dir)
    ):
        dataset.path = _absolute(dataset.path, launch_dir)


def is_local(path: str, launch_dir: Path) -> bool:
    """Whether a Hugging Face dataset is named by path: written as one, or there."""
    return path.startswith(("/", "./", "../", "~")) or (launch_dir / path).exists()


def logged_in_to_wandb(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an API key is in the environment or the netrc file. Asks no network."""
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(environment.get("NETRC", "~/.netrc")).expanduser()
    try:
        return path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError:  # a file wandb cannot read either
        return False


def _accelerator(config: RunConfig, machine: Machine) -> tuple[str, str]:
    count = machine.gpu_count()
    return ("gpu", f"{count} GPU{'s' * (count > 1)} found") if count else ("cpu", "no GPU found")


def _devices(config: RunConfig, machine: Machine) -> tuple[int, str]:
    if machine.launched:
        return machine.launched.processes_per_node, f"processes {machine.launched.by} started per node"
    if config.trainer.accelerator == "gpu":
        return max(1, machine.gpu_count()), "one process per GPU"
    return CPU_PROCESSES, f"{CPU_PROCESSES} processes on a CPU"


def _num_nodes(config: RunConfig, machine: Machine) -> tuple[int, str]:
    if machine.launched:
        return machine.launched.nodes, f"nodes {machine.launched.by} started processes on"
    return 1, "this machine alone"


def _threads(config: RunConfig, machine: Machine) -> tuple[int, str]:
    devices = config.trainer.devices
    return max(1, machine.cpu_count // devices), f"{machine.cpu_count} CPU cores for {devices} processes"


def _data(config: RunConfig, machine: Machine) -> tuple[int, str]:
    parallel, world = config.parallel, processes(config)
    others = parallel.pipeline * parallel.sequence * parallel.tensor
    return max(1, world // others), f"{world} processes over {others} of the other axes"


def _global_size(config: RunConfig, machine: Machine) -> tuple[int, str]:
    micro, data = config.batch.micro_size, data_size(config)
    return micro * data, f"one micro-batch of {micro} on each of {data} data ranks"


def _seq_len(config: RunConfig, machine: Machine) -> tuple[int, str]:
    return config.model.max_seq_len, "the model's max_seq_len"


def _tracker_mode(config: RunConfig, machine: Machine) -> tuple[str, str]:
    assert isinstance(config.logger, WandbLogger)
    asked = os.environ.get("WANDB_MODE")
    if asked in ("online", "offline"):
        return asked, "WANDB_MODE asks for it"
    return ("online", "an API key was found") if logged_in_to_wandb() else ("offline", "not logged in")


def _derived(config: RunConfig) -> list[Resolution]:
    """What follows from the batch sizes, for the reader of the plan; no key of its own."""
    step = config.batch.micro_size * data_size(config)
    if config.batch.global_size % step:
        return []
    why = f"global_size {config.batch.global_size} / (micro_size {config.batch.micro_size} x data {data_size(config)})"
    return [Resolution("accumulation", config.batch.global_size // step, why)]


def _absolute(path: str, launch_dir: Path) -> str:
    return os.path.normpath(launch_dir / Path(path).expanduser())
