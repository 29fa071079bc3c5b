"""One rank of a job.

`python -P -m framework.worker --config PATH --launch-dir DIR` is what framework/launch.py starts: the resolved config
comes by file. `run_as_worker` is the same for a process that torchrun, SLURM or MPI has started from the command line:
rank 0 composes, the others get the result from it.

`-P` keeps the current directory from the front of the import path, where a user's own folder named `models` would stand
before ours; it is appended at the end instead. Nothing heavy is imported before the warden is forked, and torch only by
the task.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from framework import schema
from framework.config import RunConfig
from framework.environment import rank_variables
from framework.failure import Failure, failure_of, interruption, record_error
from framework.launch import TASK
from framework.process import die_with_parent, start_warden
from framework.resolve import Resolution
from framework.run_folder import RunFolder

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"



def main(argv: Sequence[str]) -> None:
    """Run the rank that framework/launch.py has started."""
    parser = argparse.ArgumentParser(prog="python -m framework.worker")
    parser.add_argument("--config", type=Path, required=True, help="resolved config, in the run folder")
    parser.add_argument("--launch-dir", type=Path, required=True, help="directory the command was typed in")
    parser.add_argument("--resolutions", type=Path, help="JSON list of what became of auto values")
    parser.add_argument("--entry", default=TASK, help="module:function to run")
    parser.add_argument("--parent", type=int, help="process id of the launcher")
    arguments = parser.parse_args(argv)
    join_job(parent=arguments.parent)
    rank = int(os.environ["RANK"])

    def task() -> None:
        chosen = json.loads(arguments.resolutions.read_text()) if arguments.resolutions else []
        run_entry(
            arguments.entry,
            schema.read(arguments.config),
            folder=RunFolder(arguments.config.parent),
            launch_dir=arguments.launch_dir,
            resolutions=[Resolution(**item) for item in chosen],
            rank=rank,
        )

    guarded(task, rank=rank)


def run_as_worker(argv: Sequence[str], *, entry: str = TASK) -> int:
    """Run this process as the rank another launcher made it, and return its exit code. Collective: all ranks call it.

    A config that cannot run ends all ranks with exit code 2; rank 0 prints the problems.
    """
    os.environ.update(rank_variables())
    join_job()
    rank, launch_dir = int(os.environ["RANK"]), Path.cwd()
    from framework.joined import receive_job, send_job  # the store needs torch; the warden had to come first

    job = send_job(argv, launch_dir=launch_dir) if rank == 0 else receive_job(rank)
    if job is None:
        return 2

    def task() -> None:
        run_entry(
            entry, job.config, folder=job.folder, launch_dir=launch_dir, resolutions=job.resolutions, rank=rank
        )

    guarded(task, rank=rank, folder=job.folder)
    return 0


def join_job(*, parent: int | None = None) -> None:
    """Tie this process to its launcher (see framework/process.py). Before threads and heavy imports."""
    die_with_parent(parent)
    start_warden(os.environ.get(ERROR_FILE))
    # A shell that starts a job in the background has SIGINT ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A request to stop reaches the whole process group. A data-loading process has to go on until this one stops.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    faulthandler.enable()


def run_entry(
    entry: str,
    config: RunConfig,
    *,
    folder: RunFolder,
    launch_dir: Path,
    resolutions: Sequence[Resolution],
    rank: int,
) -> None:
    """Set up this rank's directory, logs and threads, then call `entry` ("module:function")."""
    sys.path.append(str(launch_dir))
    os.chdir(launch_dir)
    _open_log(folder.logs / f"rank_{rank}.log", redirect=rank > 0 and ERROR_FILE in os.environ)
    module, _, function = entry.partition(":")
    task = getattr(importlib.import_module(module), function)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(config.trainer.threads)
    task(config, folder=folder, launch_dir=launch_dir, resolutions=resolutions)


def guarded(task: Callable[[], None], *, rank: int, folder: RunFolder | None = None) -> None:
    """Run `task`; on an error, leave a record for whoever started this rank and end the process at once.

    At once: waiting for threads or for a communicator's destructor would keep the other ranks hanging. With `folder`,
    where no launcher of ours completes summary.json, this rank does.
    """
    try:
        task()
    except KeyboardInterrupt:
        if folder is not None and rank == 0:
            _complete_summary(folder, interruption(signal.SIGINT))
        _end(128 + signal.SIGINT)
    except Exception as error:
        failure = failure_of(error, rank=rank)
        if folder is not None:
            _complete_summary(folder, failure)
        path = os.environ.get(ERROR_FILE)
        if path:
            record_error(failure, path)
            logging.getLogger(__name__).error("rank %d failed\n%s", rank, failure.traceback)
        else:
            sys.stderr.write(f"Rank {rank} failed.\n{failure.traceback}")
        _end(failure.exit_code)


def _complete_summary(folder: RunFolder, failure: Failure) -> None:
    """Add the failure to summary.json. The first cause stays; what lost peers say is there only until a cause is."""
    summary: dict[str, Any] = json.loads(folder.summary_path.read_text()) if folder.summary_path.exists() else {}
    if "error" in summary and (failure.lost_peer or not Failure(**summary["error"], exit_code=1).lost_peer):
        return
    folder.write_json("summary.json", failure.complete(summary))


def _open_log(path: Path, *, redirect: bool) -> None:
    """Python's logging goes to `path`; with `redirect`, so does all this process and its libraries print."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    if redirect:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=os.fdopen(descriptor, "w", buffering=1), level=logging.INFO, format=form, force=True)


def _end(exit_code: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
