"""Jobs in a process of their own, to be signalled and killed; all their processes carry a mark in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parent.parent
MARK = "SHARDLIGHT_TEST_JOB"
GONE_LIMIT_S = 10.0
START_LIMIT_S = 60.0


class StartedJob:
    """A parent process running one job of stand-in tasks in `folder`."""

    def __init__(self, command: list[str], *, folder: Path, environ: dict[str, str]) -> None:
        self.mark, self.folder = uuid.uuid4().hex, folder
        environ = {**os.environ, **environ, MARK: self.mark, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
        self.process = subprocess.Popen(
            command, env=environ, cwd=folder.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def living(self) -> list[psutil.Process]:
        """Every process of the job but its parent, zombies not counted."""
        return [process for process in marked(self.mark) if process.pid != self.process.pid]

    def wait_for_ranks(self, count: int = 2) -> list[int]:
        """Process ids of the ranks, once all have said that they are where the test wants them."""
        files = [self.folder / f"rank_{rank}.json" for rank in range(count)]
        try:
            wait_until(lambda: all(file.exists() for file in files), START_LIMIT_S, "the ranks have started")
        except AssertionError as error:
            self.process.kill()
            raise AssertionError(f"{error}; output:\n{self.process.communicate()[0]}") from None
        time.sleep(0.3)  # from the file to the wait that follows it
        return [json.loads(file.read_text())["pid"] for file in files]

    def end(self) -> tuple[int, str, float]:
        """Exit code, output, and the seconds until no process of the job was left. At most GONE_LIMIT_S."""
        start = time.monotonic()
        output, _ = self.process.communicate(timeout=GONE_LIMIT_S)
        wait_until(lambda: not marked(self.mark), GONE_LIMIT_S, "every process of the job has ended")
        return self.process.returncode, output, time.monotonic() - start


@contextmanager
def started_job(entry: str, *, folder: Path, environ: dict[str, str] | None = None) -> Iterator[StartedJob]:
    """Start `support.launch_tasks:<entry>` on two ranks; whatever is left of it at the end is killed."""
    command = [sys.executable, "-m", "support.launch_tasks", str(folder), entry]
    job = StartedJob(command, folder=folder, environ=environ or {})
    try:
        yield job
    finally:
        for process in marked(job.mark):
            process.kill()
        job.process.wait()
        job.process.stdout.close()


def marked(mark: str) -> list[psutil.Process]:
    """Living processes with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Raise AssertionError when `condition` does not hold within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {limit_s:g} s still not: {what}")
        time.sleep(0.02)
