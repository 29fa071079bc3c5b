"""A pool of ranks kept for the test session.

Spawning and importing torch costs seconds; a test's work costs milliseconds. The pool starts `MAX_RANKS` processes
once, and `run_ranks(n, fn, ...)` runs `fn(rank, ...)` on the first `n` of them inside a fresh gloo process group of
exactly `n` ranks. A rank that raises or a call that outlives its timeout ends the pool; the next call starts a new one.
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

MAX_RANKS = 4
TESTS = Path(__file__).resolve().parent.parent


class RankError(AssertionError):
    """A rank raised, died or did not finish; the message holds the first failing rank's traceback."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Run module-level `fn(rank, *args)` on `world_size` ranks and return their results in rank order.

    `args` and results are pickled. gloo is initialised with exactly those ranks; torch uses one thread in each.
    """
    pool = _Pool.current()
    try:
        return pool.run(world_size, fn, args, timeout_s)
    except RankError:
        pool.close()
        raise


class _Pool:
    _current: _Pool | None = None

    @classmethod
    def current(cls) -> _Pool:
        if cls._current is None:
            cls._current = cls()
            atexit.register(cls._current.close)
        return cls._current

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.calls = 0
        self.pipes, self.processes = [], []
        for rank in range(MAX_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True, name=f"rank-{rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        assert 1 <= world_size <= MAX_RANKS, f"the pool has {MAX_RANKS} ranks"
        self.calls += 1
        store = os.path.join(self.folder.name, f"store-{self.calls}")
        module = sys.modules[fn.__module__]
        call = pickle.dumps((module.__file__, fn.__module__, fn.__qualname__, args, world_size, store, timeout_s))
        for pipe in self.pipes[:world_size]:
            pipe.send_bytes(call)
        results: dict[int, Any] = {}
        failures: list[tuple[int, str]] = []
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < world_size:
            for rank in set(range(world_size)) - set(results) - {r for r, _ in failures}:
                if self.pipes[rank].poll(0.002):
                    self._receive(rank, results, failures)
            if failures:
                deadline = min(deadline, time.monotonic() + 3.0)
            if time.monotonic() > deadline:
                break
        if failures:
            rank, text = failures[0]
            raise RankError(f"rank {rank} of {world_size} failed:\n{text}")
        if len(results) < world_size:
            late = sorted(set(range(world_size)) - set(results))
            raise RankError(f"ranks {late} of {world_size} did not finish {fn.__qualname__} in {timeout_s} s")
        return [results[rank] for rank in range(world_size)]

    def _receive(self, rank: int, results: dict[int, Any], failures: list[tuple[int, str]]) -> None:
        try:
            ok, value = pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            failures.append((rank, f"the process ended with exit code {self.processes[rank].exitcode}"))
            return
        if ok:
            results[rank] = value
        else:
            failures.append((rank, value))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()
        if _Pool._current is self:
            _Pool._current = None


def _serve(rank: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path.insert(0, str(TESTS))
    # Arguments may hold functions of `tests.test_x`, as pytest names its modules. Made here and not found: only
    # `python -m pytest` puts the checkout on the path, and an installed package may have a `tests` of its own.
    package = types.ModuleType("tests")
    package.__path__ = [str(TESTS)]
    sys.modules["tests"] = package
    while True:
        try:
            file, module_name, qualname, args, world_size, store, timeout_s = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            fn: Any = _load(module_name, file)
            for part in qualname.split("."):
                fn = getattr(fn, part)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            try:
                answer = (True, fn(rank, *args))
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def _load(name: str, file: str) -> Any:
    """A test module, by file: under importlib mode it is not importable by name."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
