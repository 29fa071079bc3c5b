"""The benchmark's side of a fork server (framework/benchmark/server.py)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from framework.benchmark.server import SAMPLE

START_LIMIT_S = 120.0
"""For importing torch, and for ending what hangs."""


@dataclass(frozen=True)
class Inputs:
    """What a server starts from."""

    config: Path
    batches: Path
    log: Path
    entry: str = SAMPLE


class SampleServer:
    """One fork server with the environment `environ`. It starts with the first sample, and again after its death."""

    def __init__(self, inputs: Inputs, environ: Mapping[str, str]) -> None:
        self._inputs = inputs
        self._environ = dict(environ)
        self._process: subprocess.Popen[str] | None = None

    def run(self, system: str, *, timeout_s: float) -> dict[str, Any]:
        """{"reports": one dict per rank} or {"error": text}. No failure of a sample raises."""
        process = self._started()
        request = json.dumps({"system": system, "timeout_s": timeout_s})
        try:
            assert process.stdin is not None
            process.stdin.write(request + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        assert process.stdout is not None
        line = _read_line(process.stdout, timeout_s + START_LIMIT_S)
        if line is None:
            self.close()
            return {"error": f"the fork server did not answer within {timeout_s + START_LIMIT_S:g} s"}
        return json.loads(line) if line.endswith("\n") else self._died()

    def close(self) -> None:
        """End the server; its samples die with it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):  # a request that was never read
                    stream.close()

    def __enter__(self) -> SampleServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            inputs = self._inputs
            command = [sys.executable, "-P", "-m", "framework.benchmark.server", "--config", str(inputs.config),
                       "--batches", str(inputs.batches), "--log", str(inputs.log), "--entry", inputs.entry,
                       "--parent", str(os.getpid())]
            self._process = subprocess.Popen(command, env=self._environ, text=True, stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE)
        return self._process

    def _died(self) -> dict[str, Any]:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        return {"error": f"the fork server ended with exit code {code}; see {self._inputs.log}"}


def _read_line(stream: IO[str], limit_s: float) -> str | None:
    """A line, "" at the end of the stream, None when there is neither within the limit."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(limit_s) else None
