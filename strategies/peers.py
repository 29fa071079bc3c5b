"""Asking the other ranks where they are when collectives no longer answer: through the store they all met in.

A rank that wants to know raises the number under `asked`; each rank's watcher thread looks at it up to twice a second
and writes its rank's state under its own key. So nothing is sent in a run that does not hang, and a rank asleep in its
data loader, or in an endless loop, answers all the same. A rank that holds the interpreter in C code does not.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from typing import Any, Protocol

import torch.distributed as dist

LEAST_LOOK_S, MOST_LOOK_S = 0.5, 2.0  # between two looks of a watcher
LOOKS_PER_S = 1000  # at the store, of all ranks together
POLL_S = 0.05


class Watched(Protocol):
    """What a watcher calls, in its own thread."""

    def state(self) -> dict[str, Any]:
        """What to answer with: plain values."""
        ...

    def look(self) -> None:
        """Called at every look."""
        ...


class Peers:
    """This rank's watcher, and the means to ask the others'. Needs the default process group; more than one rank.

    Args:
        watched: held weakly; the watcher ends with it.
    """

    def __init__(self, watched: Watched, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._watched = weakref.ref(watched)
        self._answered = 0
        self._look_s = min(MOST_LOOK_S, max(LEAST_LOOK_S, world_size / LOOKS_PER_S))
        group = dist.group.WORLD
        assert group is not None
        store = group.get_group_store().clone()  # a connection of its own: the group's may be in use for minutes
        prefix = dist.PrefixStore("shardlight/peers", store)
        # The n-th mesh of this rank is the n-th of every rank: meshes are made by all ranks together.
        self._store = dist.PrefixStore(str(prefix.add(f"meshes/{rank}", 1)), prefix)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._stop, self._look_s),
                                        daemon=True, name="shardlight-peers")
        self._thread.start()
        # Before the interpreter goes: a thread that comes back from C code later is ended in the middle of it.
        atexit.register(_close, weakref.ref(self))

    def ask(self) -> dict[int, dict[str, Any]]:
        """The state of every other rank that answers within a few looks of its watcher. Answers others meanwhile."""
        states: dict[int, dict[str, Any]] = {}
        missing = [rank for rank in range(self._world_size) if rank != self._rank]
        deadline_s = time.monotonic() + 2 * self._look_s + 1.5
        try:
            number = self._store.add("asked", 1)
            while missing and time.monotonic() < deadline_s:
                for rank in [rank for rank in missing if self._store.check([f"state/{rank}"])]:
                    answer = json.loads(self._store.get(f"state/{rank}"))
                    if answer["asked"] >= number:
                        states[rank] = answer["state"]
                        missing.remove(rank)
                self.answer()
                time.sleep(POLL_S)
        except RuntimeError:  # the store went with the process that served it: no more answers
            pass
        return states

    def answer(self) -> bool:
        """Write this rank's state if somebody has asked since the last time. False: there is nothing left to watch."""
        watched = self._watched()
        if watched is None:
            return False
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._answered = asked
            self._store.set(f"state/{self._rank}", json.dumps({"asked": asked, "state": watched.state()}))
        return True

    def look(self) -> bool:
        """One look of the watcher. False: it is over."""
        watched = self._watched()
        try:
            if watched is None or not self.answer():
                return False
            watched.look()
        except RuntimeError:  # the store went with the process that served it: the job is over
            return False
        return True

    def close(self) -> None:
        """End the watcher. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=2 * MOST_LOOK_S)

    def __del__(self) -> None:
        stop = getattr(self, "_stop", None)  # absent where the constructor failed
        if stop is not None:
            stop.set()


def _watch(reference: weakref.ref[Peers], stop: threading.Event, look_s: float) -> None:
    while not stop.wait(look_s):
        peers = reference()
        if peers is None or not peers.look():
            return
        del peers


def _close(reference: weakref.ref[Peers]) -> None:
    peers = reference()
    if peers is not None:
        peers.close()
