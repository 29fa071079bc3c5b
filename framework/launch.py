"""Starts the ranks of one job from a parent that takes no part in it, and sees to it that one outcome comes back.

torch's elastic agent does the starting and the watching: it runs the rendezvous on a free port of this host, starts one
`python -m framework.worker` per rank, and ends the others when one fails. What is added here: the workers get the
resolved config by file and never see the command line; the parent's environment, signal handlers and loggers are the
same afterwards as before, so a sweep's next job starts clean; the cause of a failure is told once; summary.json is
always there and never mixes two runs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework import schema
from framework.config import BenchmarkTask, RunConfig
from framework.environment import RANK_VARIABLES
from framework.failure import Failure, JobFailed, failure_of, first_failure, interruption
from framework.interrupt import AGENT_SIGNAL, Interrupts, undisturbed
from framework.process import end_leftovers
from framework.report import Measured, Recorded, build_summary
from framework.resolve import processes
from framework.run_folder import RunFolder

TASK = "framework.tasks.run:run_task"
JOB_VARIABLE = "TORCHELASTIC_RUN_ID"  # the agent puts it into the environment of every worker
MONITOR_INTERVAL_S = 0.1
SHOW_CURSOR = "\x1b[?25h"


def run_job(
    config: RunConfig, *, run_dir: Path, resolutions: Sequence[Any], launch_dir: Path, entry: str = TASK
) -> dict[str, Any]:
    """Run the job in its claimed folder `run_dir` and return its summary. The config is checked and resolved.

    `entry` is "module:function", called in every worker as `function(config, folder=, launch_dir=, resolutions=)`.
    Raises JobFailed, after the error has been shown, when a rank fails or the job is told to stop.
    """
    folder = RunFolder(run_dir)
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.summary_path.unlink(missing_ok=True)
    schema.write(config, folder.config_path)
    job = f"shardlight-{uuid.uuid4().hex}"
    failure: Failure | None
    with ExitStack() as stack:
        stack.enter_context(_job_environment(config))
        stack.enter_context(_quiet_agent(folder.logs / "launcher.log"))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".launch_", dir=folder.logs)))
        chosen = scratch / "resolutions.json"
        chosen.write_text(json.dumps([asdict(resolution) for resolution in resolutions]))
        command = [
            "-P", "-m", "framework.worker", "--config", str(folder.config_path), "--launch-dir", str(launch_dir),
            "--resolutions", str(chosen), "--entry", entry, "--parent", str(os.getpid()),
        ]  # fmt: skip
        try:
            failure = _run_agent(command, processes=_workers(config), job=job, scratch=scratch)
        finally:
            with undisturbed():
                end_leftovers(JOB_VARIABLE, job)
    with undisturbed():
        return _conclude(folder, failure, config)


def _workers(config: RunConfig) -> int:
    """Ranks to start. A benchmark is one process, which starts the ranks of each of its samples itself."""
    return 1 if isinstance(config.task, BenchmarkTask) else config.trainer.devices


def _run_agent(command: list[str], *, processes: int, job: str, scratch: Path) -> Failure | None:
    """Start the workers, wait for their end, and return why the job did not complete."""
    with Interrupts(kill=lambda: end_leftovers(JOB_VARIABLE, job)) as interrupts:
        try:
            return _start_and_watch(command, processes=processes, job=job, scratch=scratch, interrupts=interrupts)
        except (Exception, KeyboardInterrupt) as error:
            if interrupts.received is not None:
                return interruption(interrupts.received)
            if isinstance(error, KeyboardInterrupt):
                raise
            return failure_of(error, rank=None)


def _start_and_watch(
    command: list[str], *, processes: int, job: str, scratch: Path, interrupts: Interrupts
) -> Failure | None:
    """The agent's part. Imports torch."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent passes the signal in this exception on to the workers: SIGINT, whichever the launcher got.
    interrupts.error = lambda signum: SignalException(f"told to stop by {signum.name}", sigval=signal.SIGINT)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=job,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # the store picks a free port itself, so that no other job takes it in between
        local_addr="localhost",  # a laptop's own host name often does not resolve
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
        signals_to_handle=AGENT_SIGNAL.name,
    )
    try:
        elastic_launch(launch, sys.executable)(*command)
    except ChildFailedError as error:
        return first_failure(error.failures)
    return None


def _conclude(folder: RunFolder, failure: Failure | None, config: RunConfig) -> dict[str, Any]:
    """Complete what rank 0 has left of summary.json. Raises JobFailed after a failure."""
    summary = json.loads(folder.summary_path.read_text()) if folder.summary_path.exists() else {}
    if failure is None:
        if "status" not in summary:
            summary = {"status": "completed", **summary}
            folder.write_json("summary.json", summary)
        return summary
    if "steps" not in summary:  # rank 0 did not come to it: what metrics.jsonl says
        known = Measured(world_size=processes(config))
        summary = build_summary(config, status="failed", recorded=Recorded.read(folder), measured=known) | summary
    summary = failure.complete(summary)
    folder.write_json("summary.json", summary)
    _show(failure, folder)
    raise JobFailed(failure.exit_code, summary)


def _show(failure: Failure, folder: RunFolder) -> None:
    if sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)  # a progress bar that was killed has left it hidden
        sys.stdout.flush()
    if failure.interrupted:
        text = f"Interrupted: {failure.message}. Run folder: {folder.path}"
    else:
        who = "The launcher failed" if failure.rank is None else f"Rank {failure.rank} failed"
        what = failure.traceback.rstrip() or f"{failure.type}: {failure.message}"
        text = f"{who}; the job was ended. Logs of all ranks: {folder.logs}\n{what}"
    print(text, file=sys.stderr, flush=True)


def worker_allocator_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Allocator settings of the workers: freed memory is kept for the next step instead of given back to the system.

    On a CPU, mapping fresh pages costs as much as copying into them. On GPT-2 124M, 2 ranks, one run each: 0.86 of the
    step time for 1.15 of the peak memory (stage 3; without communication 0.88 and 1.09); transparent huge pages gained
    nothing.
    What the user has set in `environ` stays: GLIBC_TUNABLES= (empty) switches it off.
    """
    kept = ("glibc.malloc.mmap_threshold=4294967295:glibc.malloc.trim_threshold=4294967295:"
            "glibc.malloc.top_pad=268435456")
    settings = {"GLIBC_TUNABLES": kept}
    return {name: value for name, value in settings.items() if name not in environ}


@contextmanager
def _job_environment(config: RunConfig) -> Iterator[None]:
    """os.environ as the workers of this job get it; afterwards it is as before, whatever the agent has put there."""
    before = dict(os.environ)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(worker_allocator_environment())
    os.environ.update({"OMP_NUM_THREADS": str(config.trainer.threads), "PYTHONUNBUFFERED": "1"})
    # A peer that ends makes torch's sockets complain in C++, which would bury the error that counts.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(_importable(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _importable(environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH for workers of a checkout that is not installed (they leave the current directory off their path)."""
    root = Path(__file__).resolve().parent.parent
    if root.name in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, [environ.get("PYTHONPATH")])])}


@contextmanager
def _quiet_agent(log: Path) -> Iterator[None]:
    """Send the agent's warnings to a file, which is made when there is one; the terminal belongs to the run."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(log, mode="w", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.close()
