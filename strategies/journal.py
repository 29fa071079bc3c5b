"""What this rank did last in its collectives, and the sentence a rank that has waited too long ends with.

Every collective is entered here, whichever way it moves its data:

    entry = journal.started(tag, axis, members)     # about a microsecond; nothing is formatted
    entry.waiting()                                 # from here on this rank blocks in it
    entry.finished()
    raise entry.error(error) from None              # instead of `finished`: it failed, or the timeout has passed

Only the last entries of each axis are kept. `peers.py` carries them, with the line each rank is at, to a rank that
asks: past the timeout for the error, at half of it for a warning in the log (logger "strategies").
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from strategies.peers import Peers
from strategies.users_line import users_line

NUM_KEPT = 32  # collectives of an axis
MOST_RANKS_SHOWN = 16


class CollectiveError(RuntimeError):
    """A collective failed or timed out. The message names this rank, the collective, and what the other ranks do."""


class Entry:
    """One collective of this rank."""

    __slots__ = ("_journal", "axis", "ended_s", "failure", "members", "number", "started_s", "waits_since_s", "what")

    def __init__(self, journal: Journal, what: object, axis: str, members: Sequence[int], number: int) -> None:
        self._journal = journal
        self.what = what  # its str() is taken when somebody asks
        self.axis = axis
        self.members = members
        self.number = number  # counts this rank's collectives on the axis, from 1
        self.started_s = time.monotonic()
        self.waits_since_s: float | None = None
        self.ended_s: float | None = None
        self.failure: CollectiveError | None = None

    def waiting(self) -> None:
        """This rank blocks in the collective from now on. Raises CollectiveError again if it has failed before."""
        if self.failure is not None:  # on the way out of the first error: its message is the one to show
            raise self.failure
        self.waits_since_s = time.monotonic()
        self._journal.blocked = self

    def finished(self) -> None:
        """The collective is complete as far as this rank can tell (on CUDA: it is in the stream)."""
        self.ended_s = time.monotonic()
        journal = self._journal
        journal.last_finished = self
        if journal.blocked is self:
            journal.blocked = None

    def error(self, error: BaseException | None = None) -> CollectiveError:
        """What to raise when it failed or did not come within the timeout. Asks the other ranks: `Journal.explain`."""
        return self._journal.explain(self, error)

    def waited_s(self) -> float:
        """Seconds this rank has blocked in it so far."""
        return 0.0 if self.waits_since_s is None else time.monotonic() - self.waits_since_s

    def __str__(self) -> str:
        what = f"'{self.what}'" if isinstance(self.what, str) else str(self.what)
        return f"{what}, call {self.number} on axis {self.axis}"

    def is_same_as(self, number: int, what: str) -> bool:
        """Whether another rank's collective on this axis is this one. A Tag's round tells calls apart, a text not."""
        return what == str(self.what) and (number == self.number or not isinstance(self.what, str))


class Journal:
    """The last collectives of one rank. One per mesh; its communicators write, the watcher of `peers.py` reads.

    Args:
        rank: this process in the world.
        world_size: with one process nothing is watched.
        timeout_s: how long a rank waits in a collective; named in messages.
    """

    def __init__(self, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.blocked: Entry | None = None
        self.last_finished: Entry | None = None
        self._recent: dict[str, deque[Entry]] = {}  # axis -> the last ones started
        self._warned: Entry | None = None
        self._thread = threading.get_ident()  # the one that makes the mesh is the one that trains
        self._peers = Peers(self, rank=rank, world_size=world_size) if world_size > 1 else None

    def started(self, what: object, axis: str, members: Sequence[int]) -> Entry:
        """Enter a collective. `what`: a Tag or a text, equal on all ranks; `members`: the ranks that take part."""
        recent = self._recent.get(axis)
        if recent is None:
            recent = self._recent[axis] = deque(maxlen=NUM_KEPT)
        entry = Entry(self, what, axis, members, recent[-1].number + 1 if recent else 1)
        recent.append(entry)
        return entry

    def close(self) -> None:
        """Stop answering other ranks."""
        if self._peers is not None:
            self._peers.close()

    # -- what other ranks are told --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain values: where this rank is, what it waits in, its last collectives. Called in the watcher's thread."""
        now = time.monotonic()

        def shown(entry: Entry | None) -> dict[str, Any] | None:
            return None if entry is None else {
                "text": str(entry), "failed": entry.failure is not None, "started_ago_s": now - entry.started_s,
                "ended_ago_s": None if entry.ended_s is None else now - entry.ended_s}

        recent = {axis: list(entries) for axis, entries in list(self._recent.items())}
        latest = [entries[-1] for entries in recent.values()]
        return {"line": users_line(self._thread), "blocked": shown(self.blocked),
                "finished": shown(self.last_finished),
                "started": shown(max(latest, key=lambda entry: entry.started_s, default=None)),
                "recent": {axis: [(entry.number, str(entry.what)) for entry in entries]
                           for axis, entries in recent.items()}}

    def look(self) -> None:
        """Warn, once per wait, when half the timeout has passed. Called in the watcher's thread."""
        entry = self.blocked
        if entry is None or entry is self._warned or entry.failure is not None or entry.waited_s() < self.timeout_s / 2:
            return
        self._warned = entry
        assert self._peers is not None
        states = self._peers.ask()
        if self.blocked is entry:
            logging.getLogger("strategies").warning("%s", self.report(entry, states, waited_s=entry.waited_s()))

    # -- what this rank says when it fails ------------------------------------------------------------------------

    def explain(self, entry: Entry, error: BaseException | None = None) -> CollectiveError:
        """The error to raise for a collective that failed or in which this rank has waited past the timeout.

        Asks the other ranks, which takes a second or two where one of them cannot answer.
        """
        waited_s = entry.waited_s()
        states = self._peers.ask() if self._peers is not None else {}
        text = self.report(entry, states, waited_s=waited_s)
        timed_out = waited_s >= 0.9 * self.timeout_s
        entry.failure = CollectiveError(text if timed_out or error is None else f"{text}\n  torch says: {error}")
        entry.ended_s = time.monotonic()
        return entry.failure

    def report(self, entry: Entry, states: Mapping[int, dict[str, Any]], *, waited_s: float) -> str:
        """Who waits in what for whom, where everybody is, and what that means."""
        others = [rank for rank in entry.members if rank != self.rank]
        absent = [rank for rank in others if not _has_come(states.get(rank), entry)]
        awaited = absent or others
        lines = [f"rank {self.rank} in {entry}: waited {waited_s:.1f} s for {_ranks(awaited)} "
                 f"(timeout_s={self.timeout_s:g})",
                 f"  rank {self.rank} is at {users_line(self._thread)}"]
        order = [*awaited, *(rank for rank in range(self.world_size) if rank != self.rank and rank not in awaited)]
        lines += [f"  rank {rank} {_doing(states.get(rank))}" for rank in order[:MOST_RANKS_SHOWN]]
        if len(order) > MOST_RANKS_SHOWN:
            lines.append(f"  and {len(order) - MOST_RANKS_SHOWN} more ranks")
        if absent:
            meaning = _meaning(absent, states)
        elif waited_s >= self.timeout_s / 2:
            meaning = "All ranks have come by now, too late or too slow; raise timeout_s where that is usual."
        else:
            meaning = "All ranks have come; the connection failed."
        return "\n".join([*lines, f"  {meaning}"])


def _has_come(state: dict[str, Any] | None, entry: Entry) -> bool:
    """Whether the rank with this state has started the same collective."""
    theirs = state["recent"].get(entry.axis, []) if state is not None else []
    if any(entry.is_same_as(number, what) for number, what in theirs):
        return True
    return bool(theirs) and theirs[0][0] > entry.number  # so long ago that it is forgotten


def _doing(state: dict[str, Any] | None) -> str:
    if state is None:
        return ("does not answer: its process is gone or stopped, it has not made this mesh, or C code holds its "
                "interpreter")
    blocked, started, finished = state["blocked"], state["started"], state["finished"]
    text = f"is at {state['line']}"
    if blocked is not None and not blocked["failed"]:
        text += f"; waits in {blocked['text']}, started {blocked['started_ago_s']:.1f} s ago"
    elif blocked is not None:
        text += f"; has given up on {blocked['text']}"
    elif started is not None and started["ended_ago_s"] is None:
        text += f"; waits in no collective, has started {started['text']} {started['started_ago_s']:.1f} s ago"
    else:
        text += "; in no collective"
    if finished is not None:
        text += f"; the last it finished is {finished['text']}, {finished['ended_ago_s']:.1f} s ago"
    return text


def _meaning(absent: Sequence[int], states: Mapping[int, dict[str, Any]]) -> str:
    """One sentence on the likely cause, with what to do."""
    silent = [rank for rank in absent if rank not in states]
    if silent:
        return f"The cause is on {_ranks(silent)}: its own output says more."
    waiting = [rank for rank in absent if states[rank]["blocked"] is not None]
    idle = [rank for rank in (absent if len(waiting) < len(absent) else states) if states[rank]["blocked"] is None]
    if not idle:
        return ("The ranks have diverged: each waits for the other in another collective. All ranks have to make the "
                "same collective calls in the same order: the same number of steps, no call inside `if rank == 0`.")
    chain = "" if idle[0] in absent else f"{_ranks(absent)} waits in turn. "
    return (f"{chain}{_ranks(idle)} did not come: slow or stuck at that line, or past its last step. All ranks have to "
            "make this call (no `if rank == 0` around it, as many steps on each); raise timeout_s if it is slow.")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS_SHOWN])) + (", ..." if len(ranks) > MOST_RANKS_SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

