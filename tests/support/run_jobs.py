"""Whole runs in the pool of ranks: each rank calls the task's entry as a launcher's worker would.

The pool has formed the process group already, so a run costs about a second instead of the ten that starting
processes takes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from framework import config as schema
from framework.config import RunConfig
from framework.run_folder import RunFolder
from support.ranks import run_ranks
from support.run_configs import run_config

GLOBAL_SIZE = 12
STEPS = 20


@dataclass(frozen=True)
class Run:
    """What a run left in its folder, and what each rank returned."""

    path: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    returned: list[Any]

    def column(self, name: str) -> list[Any]:
        """One field of every logged step."""
        return [line[name] for line in self.metrics]

    @property
    def terminal(self) -> str:
        """What the run has printed."""
        return (self.path / "terminal.txt").read_text()

    @property
    def weights(self) -> Path:
        return self.path / "checkpoints" / "final"


def training_config(*, devices: int = 2, **changes: dict[str, Any]) -> RunConfig:
    """Twenty updates of 12 samples on synthetic data: AdamW, cosine with warm-up, clipping that bites.

    `changes` are the fields to replace in each group: `training_config(zero={"stage": 2}, seed=3)`.
    """
    config = run_config(devices=devices)
    config = replace(
        config,
        dataset=schema.SyntheticDataset(name="synthetic", num_samples=100, num_validation_samples=20, seq_len=16),
        optimizer=schema.AdamOptimizer(name="adamw", lr=1e-2, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1),
        schedule=schema.Schedule(name="cosine", warmup_steps=4, final_ratio=0.1),
        trainer=replace(config.trainer, max_steps=STEPS, gradient_clip_val=0.5),
        batch=schema.Batch(global_size=GLOBAL_SIZE, micro_size=1),
    )
    return changed(config, **changes)


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    """A copy with other values: a dict changes fields of a group, anything else takes the place of the value."""
    new = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(config, **new)


def run_in_pool(config: RunConfig, path: Path, *, worker: Any = None, arguments: tuple[Any, ...] = (),
                timeout_s: float = 90.0) -> Run:
    """Run `config` on as many ranks as its mesh has, in the folder `path`, which is also where the command was typed.

    `worker(rank, config, path, *arguments)` runs in each rank in place of `run_here`; it has to call that.
    """
    path.mkdir(parents=True, exist_ok=True)
    returned = run_ranks(world_size(config), worker or run_here, config, path, *arguments, timeout_s=timeout_s)
    return read_run(path, returned)


def run_here(rank: int, config: RunConfig, path: Path) -> None:
    """The task on this rank of the pool; what rank 0 prints goes to the run's `terminal.txt`."""
    from framework.tasks.run import run_task

    with (
        rank_environment(rank, world_size(config), cache=path / "cache"),
        open(path / f"terminal{rank or ''}.txt", "w") as terminal,
        contextlib.redirect_stdout(terminal),
    ):
        run_task(config, folder=RunFolder(path), launch_dir=path)


def world_size(config: RunConfig) -> int:
    parallel = config.parallel
    return parallel.pipeline * parallel.data * parallel.sequence * parallel.tensor


def read_run(path: Path, returned: list[Any] | None = None) -> Run:
    """The records in a run folder."""
    folder = RunFolder(path)
    summary = json.loads(folder.summary_path.read_text()) if folder.summary_path.exists() else {}
    return Run(path, folder.read_metrics(), summary, returned or [])


@contextlib.contextmanager
def rank_environment(rank: int, world: int, *, cache: Path) -> Iterator[None]:
    """The variables that a launcher sets for one rank on one machine, and a cache of prepared data of its own."""
    before = dict(os.environ)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                       "LOCAL_WORLD_SIZE": str(world), "SHARDLIGHT_CACHE": str(cache)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
