"""Signals that ask a job to stop: the launcher passes them on as SIGINT, a worker's loop reads a flag.

One signal for each meaning: workers get SIGINT when a person or a scheduler asks the job to stop (whatever signal the
launcher got) and SIGTERM when a peer has failed. So a worker dies of SIGTERM at once and may answer SIGINT at its next
update boundary. Pattern: the handler sets a flag and does nothing else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
AGENT_SIGNAL = signal.SIGUSR2  # torch's agent insists on handling one; those that people send are handled here


class StopRequest:
    """Whether this process has been asked to stop, while the `with` block lasts. Main thread only.

    Earlier handlers still run, except Python's own, which raises KeyboardInterrupt wherever the code happens to be. The
    flag is local to a rank: ranks have to agree (a reduction at the update boundary) before any of them stops. A second
    signal is not a flag any more: it raises KeyboardInterrupt.
    """

    def __init__(self, *, signals: tuple[signal.Signals, ...] = (signal.SIGINT,)) -> None:
        self.received: signal.Signals | None = None
        self._signals = signals
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        self._earlier = {signum: signal.signal(signum, self._note) for signum in self._signals}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)

    def __bool__(self) -> bool:
        return self.received is not None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(signum)
        earlier = self._earlier[self.received]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(signum, frame)


class Interrupts:
    """In the launcher, while the `with` block lasts: the first request to stop raises, every further one kills.

    `error` makes the exception of the first one (KeyboardInterrupt until the caller sets another); `kill` ends the
    job's processes without waiting. A signal that was ignored before (SIGHUP under nohup) stays ignored, except
    SIGINT, which shells ignore for every background job. All handlers are restored at the end, those too that torch's
    agent sets and leaves. Outside the main thread nothing is installed.
    """

    def __init__(self, *, kill: Callable[[], object]) -> None:
        self.received: signal.Signals | None = None
        self.error: Callable[[signal.Signals], BaseException] = KeyboardInterrupt
        self._kill = kill
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            touched = (signal.SIGINT, AGENT_SIGNAL, *ASKS_TO_STOP)
            self._earlier = {signum: signal.getsignal(signum) for signum in touched}
            signal.signal(signal.SIGINT, self._handle)
            for signum in ASKS_TO_STOP:
                if self._earlier[signum] is not signal.SIG_IGN:
                    signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._kill()
            return
        self.received = signal.Signals(signum)
        raise self.error(self.received)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore further requests to stop while the end of a job is put in order. Main thread only; elsewhere nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (*ASKS_TO_STOP, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
