"""No orphan, whoever is killed: what a worker does at its start so that it and its children never outlive the job.

Three layers, each for a death the one before it does not see:

1. The kernel kills a worker whose parent dies (PR_SET_PDEATHSIG, prctl(2)). This needs no cooperation, so a parent
   that gets SIGKILL takes its workers along.
2. A warden beside each worker: a fork made before anything heavy is imported (a few pages of its own), in the worker's
   process group. It kills the group when the worker is gone, so that data-loading processes go too, and when a request
   to stop is not heeded in time: a rank blocked in C code runs no Python signal handler, and torch's agent waits 30 s.
3. `end_leftovers`: at the end of a job the launcher kills whatever still carries the job's id in its environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
WORKER_IS_GONE = signal.SIGUSR1
# Seconds from a signal to the process group until the warden kills it. SIGTERM means that a peer failed: nothing is
# left to save. SIGINT is a person or a scheduler asking for a clean stop.
GRACE_S = {signal.SIGTERM: 2.0, signal.SIGINT: 6.0, signal.SIGHUP: 6.0, signal.SIGQUIT: 6.0}
LEFTOVER_LIMIT_S = 5.0
STOPPED = "StoppedByWarden"


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    `parent` is the process id of the launcher where it is known: if it died before this call, the process exits here.
    """
    before = os.getppid() if parent is None else parent
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != before:
        os._exit(128 + signal.SIGKILL)


def start_warden(error_file: str | None) -> int | None:
    """Fork the warden of this process and return its id; None where the process shares its group with others.

    Call it before threads and heavy imports. `error_file` (TORCHELASTIC_ERROR_FILE) gets a record when the warden had
    to kill the worker, so that this death is not taken for the cause of the failure.
    """
    if os.getpgrp() != os.getpid():  # SLURM and MPI end their own tasks; killing a shared group would end strangers
        return None
    worker = os.getpid()
    waited = {WORKER_IS_GONE, *GRACE_S}
    # Blocked before the fork, so that the warden never has a moment in which a signal ends it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    warden = os.fork()
    if warden == 0:
        _warden(worker, waited, error_file)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return warden


def _warden(worker: int, waited: set[signal.Signals], error_file: str | None) -> NoReturn:
    try:
        _prctl(PR_SET_PDEATHSIG, WORKER_IS_GONE)
        _prctl(PR_SET_NAME, ctypes.c_char_p(b"rank-warden"))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # a pipe the job's output goes to must close when the workers end
            os.dup2(null, descriptor)
        if os.getppid() == worker:
            received = signal.sigwaitinfo(waited).si_signo
            if received != WORKER_IS_GONE and signal.sigtimedwait({WORKER_IS_GONE}, GRACE_S[received]) is None:
                _record_stop(error_file, signal.Signals(received))
    finally:
        os.killpg(worker, signal.SIGKILL)  # the warden is in that group
        os._exit(1)


def _record_stop(error_file: str | None, received: signal.Signals) -> None:
    """Note in torch's error-file format that the worker was killed for not stopping."""
    if not error_file or os.path.exists(error_file):
        return
    message = f"did not stop within {GRACE_S[received]:g} s of {received.name}"
    extra = {"py_callstack": message, "timestamp": str(int(time.time())), "type": STOPPED}
    with open(error_file, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def end_leftovers(variable: str, value: str) -> list[int]:
    """Kill every process of this user that was started with `variable=value` in its environment, and wait for its end.

    Returns the ids of the killed. Raises RuntimeError naming them when some still live after LEFTOVER_LIMIT_S, which
    happens only to a process stuck inside the kernel.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + LEFTOVER_LIMIT_S
    while left := _started_with(f"{variable}={value}".encode()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} of this job cannot be killed; they hang inside the kernel")
        for pid in left:
            killed.add(pid)
            _kill(pid)
        time.sleep(0.01)
    return sorted(killed)


def _started_with(entry: bytes) -> list[int]:
    """Processes whose initial environment has `entry`. Zombies have none left and do not count."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environ = (folder / "environ").read_bytes()
            except OSError:  # ended meanwhile, or another user's
                continue
            if entry in environ.split(b"\0"):
                found.append(int(folder.name))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = argument if isinstance(argument, ctypes.c_char_p) else ctypes.c_ulong(argument)
    if libc.prctl(option, value, *[ctypes.c_ulong(0)] * 3) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
