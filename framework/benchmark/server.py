"""A fork server: imports torch once, then forks the ranks of one sample after the other.

`python -P -m framework.benchmark.server ...` is what framework/benchmark/client.py starts, one per allocator setting
(glibc reads its tunables when a program starts, so forks have those of the server). Requests are lines of JSON on
standard input, replies on standard output; all else that is printed goes to a log.

Every sample is a fresh process, at the cost of a fork instead of seconds of imports. Forking is safe as long as the
server has no second thread, no process group and has computed nothing: it makes sure of the first before each fork.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from framework import schema
from framework.config import RunConfig
from framework.environment import RANK_VARIABLES
from framework.failure import LOST_PEER
from framework.process import die_with_parent

SAMPLE = "framework.benchmark.sample:run_sample"
LAST_WORDS_S = 3.0
"""How long the other ranks have to say why they fail once one has."""


def main(argv: Sequence[str]) -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m framework.benchmark.server")
    parser.add_argument("--config", type=Path, required=True, help="resolved config")
    parser.add_argument("--batches", type=Path, required=True, help="tokens and labels of all ranks and updates")
    parser.add_argument("--log", type=Path, required=True, help="file for what the samples print")
    parser.add_argument("--entry", default=SAMPLE, help="module:function that runs a sample on a rank")
    parser.add_argument("--parent", type=int, required=True, help="process id of the benchmark")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark decides; this process ends with it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # waited for in `_reap`
    replies = os.fdopen(os.dup(1), "w")
    log = os.open(arguments.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    config = schema.read(arguments.config)
    module, _, name = arguments.entry.partition(":")
    run_sample = getattr(importlib.import_module(module), name)
    from framework.benchmark.trainers import preload

    preload()
    for line in sys.stdin:
        request = json.loads(line)
        reply = _Sample(request["system"], config, arguments.batches, run_sample).run(request["timeout_s"])
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class _Sample:
    """The processes of one sample, from fork to the last exit."""

    def __init__(self, system: str, config: RunConfig, batches: Path, run_sample: Callable[..., Any]) -> None:
        self.system = system
        self.config = config
        self.batches = batches
        self.run_sample = run_sample
        self.world = int(config.trainer.devices)
        self.ended: dict[int, int] = {}  # rank -> exit code, negative for a signal

    def run(self, timeout_s: float) -> dict[str, Any]:
        """{"reports": one per rank} or {"error": why there are none}."""
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            return {"error": f"the fork server has {threads} threads; forking it could leave a lock held for ever"}
        with tempfile.TemporaryDirectory(prefix="sample_", dir=self.batches.parent) as folder:
            self.folder = Path(folder)
            self.wait_for_all = multiprocessing.get_context("fork").Barrier(self.world).wait
            server = os.getpid()
            self.ranks = {self._fork(rank, server): rank for rank in range(self.world)}
            timed_out = not self._reap(time.monotonic() + timeout_s, until_failure=True)
            if timed_out:
                self._log_stacks()
            elif len(self.ended) < self.world:
                self._reap(time.monotonic() + LAST_WORDS_S, until_failure=False)
            ended = dict(self.ended)
            self._signal(signal.SIGKILL)
            self._reap(time.monotonic() + LAST_WORDS_S, until_failure=False)
            if timed_out:
                return {"error": f"no result within {timeout_s:g} s; every rank's stack is in the log"}
            return self._reply(ended)

    def _fork(self, rank: int, server: int) -> int:
        pid = os.fork()
        if pid == 0:
            self._run_rank(rank, server)
        return pid

    def _run_rank(self, rank: int, server: int) -> NoReturn:
        """In the child: run, leave a report or an error, and end without the server's clean-up."""
        code = 1
        try:
            die_with_parent(server)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            _set_rank(rank, self.world, connected=self.system != "nocomm")
            from framework.benchmark.sample import Place

            place = Place(rank, self.world, self.batches, self.folder / "store", self.wait_for_all)
            report = self.run_sample(self.system, self.config, place)
            self._report_file(rank).write_text(json.dumps(report))
            code = 0
        except BaseException as error:
            traceback.print_exc()
            text = str(error).strip().split("\n", 1)[0]
            record = {"error": f"{type(error).__name__}: {text}", "time_s": time.time()}
            self._report_file(rank).write_text(json.dumps(record))
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def _reap(self, deadline_s: float, *, until_failure: bool) -> bool:
        """Wait for ranks to end. False when the deadline passed; with `until_failure`, a failed rank ends the wait."""
        while len(self.ended) < self.world:
            for pid, rank in self.ranks.items():
                if rank not in self.ended:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        self.ended[rank] = os.waitstatus_to_exitcode(status)
            if len(self.ended) == self.world or (until_failure and any(self.ended.values())):
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or signal.sigtimedwait({signal.SIGCHLD}, left_s) is None:
                return False
        return True

    def _log_stacks(self) -> None:
        """One rank after the other: they share the log."""
        for pid, rank in self.ranks.items():
            if rank not in self.ended:
                print(f"{self.system}, rank {rank}, when its time was up:", file=sys.stderr, flush=True)
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stack of every thread
                time.sleep(0.2)

    def _signal(self, signum: signal.Signals) -> None:
        for pid, rank in self.ranks.items():
            if rank not in self.ended:  # not reaped: the id is still this child's
                os.kill(pid, signum)

    def _reply(self, ended: Mapping[int, int]) -> dict[str, Any]:
        """`ended`: exit codes of the ranks that ended by themselves."""
        files = [self._report_file(rank) for rank in range(self.world)]
        records = {rank: json.loads(file.read_text()) for rank, file in enumerate(files) if file.exists()}
        errors = [(_is_consequence(record["error"]), record["time_s"], rank, record["error"])
                  for rank, record in records.items() if "error" in record]
        killed = [(rank, signal.Signals(-code).name) for rank, code in ended.items() if code < 0]
        if killed and all(consequence for consequence, *_ in errors):
            return {"error": "rank {} was ended by {}".format(*killed[0])}
        if errors:
            _, _, rank, error = min(errors)
            return {"error": f"rank {rank}: {error}"}
        if len(records) < self.world:
            return {"error": f"ranks left no report; exit codes {dict(ended)}"}
        return {"reports": [records[rank] for rank in range(self.world)]}

    def _report_file(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"


def _is_consequence(error: str) -> bool:
    return any(text in error for text in LOST_PEER) or error.startswith("BrokenBarrierError")


def _set_rank(rank: int, world: int, *, connected: bool) -> None:
    """The variables a launcher sets for one rank of this machine; none where the ranks do not talk."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    if connected:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                           "LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"})


if __name__ == "__main__":
    main(sys.argv[1:])
