"""How ranks that torchrun, SLURM or MPI started from one command line come to one config and one run folder.

Rank 0 composes and claims the folder; the others wait for the result in torch's key-value store, reached through the
same env:// variables as the process group later. So Hydra runs once, and a folder name with the time in it means the
same on every rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework import schema
from framework.config import AUTO, RunConfig
from framework.problems import ConfigError, Problem
from framework.resolve import Resolution
from framework.run_folder import RunFolder, claim

if TYPE_CHECKING:
    from torch.distributed import Store

JOB = "shardlight/job"
COMPOSE_LIMIT = timedelta(minutes=10)
READ_LIMIT = timedelta(seconds=30)


@dataclass(frozen=True)
class Job:
    """What every rank needs to start. `store` keeps the connection open until the process group has its own."""

    config: RunConfig
    folder: RunFolder
    resolutions: list[Resolution]
    store: Store


def send_job(argv: Sequence[str], *, launch_dir: Path) -> Job | None:
    """On rank 0: compose, claim the run folder, tell the other ranks. None when the config cannot run."""
    try:
        config, resolutions, folder = _prepare(argv, launch_dir)
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        _refuse()
        return None
    except BaseException:
        _refuse()
        raise
    schema.write(config, folder.config_path)
    message = {
        "config": schema.dump(config),
        "run_dir": str(folder.path),
        "resolutions": [asdict(resolution) for resolution in resolutions],
    }
    store = _store()
    store.set(JOB, json.dumps(message))
    return Job(config, folder, resolutions, store)


def receive_job(rank: int) -> Job | None:
    """On the other ranks: what rank 0 has composed. None when it could not. Raises DistStoreError when it is silent."""
    store = _store()
    store.set_timeout(COMPOSE_LIMIT)
    message: dict[str, Any] | None = json.loads(store.get(JOB))
    store.set(f"{JOB}/read/{rank}", "")
    if message is None:
        return None
    resolutions = [Resolution(**item) for item in message["resolutions"]]
    return Job(schema.load(message["config"]), RunFolder(message["run_dir"]), resolutions, store)


def _prepare(argv: Sequence[str], launch_dir: Path) -> tuple[RunConfig, list[Resolution], RunFolder]:
    from framework.cli import compose_argv, label  # Hydra, which the other ranks do not need

    config, resolutions = compose_argv(argv)
    problems = mismatches(config, os.environ)
    if problems:
        raise ConfigError(problems)
    asked = config.run.dir
    try:
        folder = claim(asked, launch_dir=launch_dir, label=label(config, {}))
    except ValueError as error:
        raise ConfigError([Problem("run.dir", asked, str(error), "run.dir=auto")]) from error
    config.run.dir = str(folder.path)
    if asked == AUTO:
        resolutions = [*resolutions, Resolution("run.dir", config.run.dir, "a new folder for this job")]
    return config, resolutions, folder


def mismatches(config: RunConfig, environ: Mapping[str, str]) -> list[Problem]:
    """Where the config contradicts the processes of this node (`validate` compares those of all nodes)."""
    devices, local = config.trainer.devices, environ.get("LOCAL_WORLD_SIZE")
    if local is None or int(local) == devices:
        return []
    allowed = f"must be the {local} processes the launcher started on this node (LOCAL_WORLD_SIZE={local})"
    return [Problem("trainer.devices", devices, allowed, "trainer.devices=auto and trainer.num_nodes=auto")]


def _refuse() -> None:
    """Tell the other ranks to end, and stay until they know: this process may be the one that serves the store."""
    store = _store()
    store.set(JOB, json.dumps(None))
    store.wait([f"{JOB}/read/{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))], READ_LIMIT)


def _store() -> Store:
    """The store of this job, by torch's own rules: torchrun's when there is one, else served by rank 0."""
    from torch.distributed import rendezvous

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return next(rendezvous("env://", rank, world_size, timeout=COMPOSE_LIMIT))[0]
