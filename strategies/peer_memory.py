"""Collectives among ranks of one host that read each other's memory: one copy, no socket, no shared segment.

Linux lets a process copy from another one of the same user (`process_vm_readv`, "cross memory attach", which MPI
libraries use for the same purpose). Between processes on one host this costs what a memcpy costs: 32 MiB each way on
2 ranks in 5-6 ms, against 20 ms by sockets; and it works on any tensor, so parameters and gradients need no special
place, and peers' pages do not count in this process's memory.

Each rank has a *board*, a table of slots in its own memory. A collective goes:

    post     the rank writes into a slot of its board: tag, address and size of what it lends
    wait     for each peer: read the peer's board until the tag stands there, then copy from the address.
             At last mark the own slot FINISHED: this rank needs nothing more of this collective from anybody
    drained  all peers' slots of that tag are FINISHED: what was lent may be written and freed

A rank may post the next gather of parameters as soon as they rest (*offer*), long before it gathers them itself: then
no peer waits for a rank that is a bit behind. Before the parameters change, offers are withdrawn and all ranks agree.

Slots are found by tag, not by order, so ranks may wait for collectives in different orders. They are in lock-step all
the same, as they are over a network: a rank that never posts keeps the others waiting, and past the time limit they
say for whom.

Nothing moves before `wait`, in the caller's thread: ranks that share a host have their cores busy with compute, and a
copy in another thread would take its time from there.

The protocol needs stores of one rank to be seen by another in program order: the tag is stored last and a slot is read
a second time after its tag was seen. x86 keeps the order of stores; elsewhere the locks of the interpreter and of the
kernel's page lookup order them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.journal import Entry
from strategies.transfer import Pending, Tag, add_in_order

SLOTS = 4096  # collectives a rank may have posted before it waits for peers to finish the oldest
_TAG, _ADDRESS, _BYTES, _STATE, _WORDS = 0, 1, 2, 3, 4
_EMPTY, _POSTED, _FINISHED = 0, 1, 2
_CHUNK_BYTES = 1 << 19  # of a peer's gradients at a time: it is still in the cache when it is added
_SPINS = 30  # looks at a board before the first sleep
_LEAVE_LIMIT_S = 3.0
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class PeerGoneError(RuntimeError):
    """The process whose memory was to be read has ended."""


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [ctypes.c_int, ctypes.POINTER(_Piece), ctypes.c_ulong, ctypes.POINTER(_Piece),
                                      ctypes.c_ulong, ctypes.c_ulong]
    return libc


@dataclass(frozen=True)
class _Peer:
    """Where a member's board stands."""

    rank: int
    process: int
    board: int


@dataclass
class _Lent:
    """What stands in one slot of the own board, kept alive until all peers are done with it."""

    tag: int
    tensor: Tensor
    entry: Entry | None = None  # of the collective in the journal; None while it is only offered
    waited: bool = False


class Board:
    """What this rank offers its peers, and its view of theirs. Times out after `timeout_s` of waiting for a peer."""

    def __init__(self, peers: Sequence[_Peer], *, index: int, table: Any, timeout_s: float) -> None:
        self.peers = tuple(peers)
        self.index = index
        # Nearest first, so that not all ranks address the same one at once.
        self.others = [(index + step) % len(peers) for step in range(1, len(peers))]
        self._timeout_s = timeout_s
        self._table = table
        self._lent: dict[int, _Lent] = {}
        self._next = 0
        self._libc = _libc()
        self._seen = (ctypes.c_longlong * _WORDS)()

    # -- lending --------------------------------------------------------------------------------------------------

    def post(self, tag: Tag, tensor: Tensor, entry: Entry | None) -> int:
        """Lend `tensor` under `tag`; returns the slot. The same on all ranks that make the same calls."""
        slot = self._free_slot()
        base, table = slot * _WORDS, self._table
        table[base + _TAG] = 0
        table[base + _ADDRESS] = tensor.data_ptr()
        table[base + _BYTES] = tensor.numel() * tensor.element_size()
        table[base + _STATE] = _POSTED
        self._lent[slot] = _Lent(tag.identity(), tensor, entry)
        table[base + _TAG] = tag.identity()  # last: it makes the rest valid
        return slot

    def _free_slot(self) -> int:
        for _ in range(SLOTS):
            slot = self._next
            self._next = (slot + 1) % SLOTS
            lent = self._lent.get(slot)
            if lent is None:
                return slot
            if lent.waited:
                self.take_back(slot, block=True)
                return slot
        raise RuntimeError(f"{SLOTS} collectives are posted and none was waited for; fix: fewer ZeRO units")

    def begin(self, slot: int, entry: Entry) -> None:
        """What was offered in the slot has become this collective."""
        self._lent[slot].entry = entry

    def withdraw(self, slot: int) -> None:
        """Offer it no longer. No peer may be reading it."""
        self._table[slot * _WORDS + _TAG] = 0
        del self._lent[slot]

    def finish(self, slot: int) -> None:
        """This rank needs nothing more of the collective in this slot."""
        self._table[slot * _WORDS + _STATE] = _FINISHED
        self._lent[slot].waited = True

    def lends(self, slot: int, tag: Tag) -> bool:
        """Whether what was posted there may still be read by a peer, as far as this rank knows."""
        lent = self._lent.get(slot)
        return lent is not None and lent.tag == tag.identity()

    def take_back(self, slot: int, *, block: bool) -> bool:
        """Whether every peer is done with what stands in the slot; it is no longer kept alive then.

        Raises:
            CollectiveError: `block`, and a peer is gone or does not come to it within the time limit.
        """
        lent = self._lent[slot]
        assert lent.entry is not None, "an offer is withdrawn, not taken back"
        for other in self.others:
            if self._is_done(other, slot, lent.tag):
                continue
            if not block:
                return False
            lent.entry.waiting()
            try:
                self._poll(other, lambda other=other: self._is_done(other, slot, lent.tag),
                           "to be done with what this rank has lent it")
            except (RuntimeError, OSError) as error:
                raise lent.entry.error(error) from error
            lent.entry.finished()
        del self._lent[slot]
        return True

    def drain(self) -> None:
        """Take back everything this rank has waited for itself."""
        for slot in [slot for slot, lent in self._lent.items() if lent.waited]:
            self.take_back(slot, block=True)

    def leave(self) -> None:
        """Wait a little for peers that still read from this rank; whoever is gone or late is not waited for.

        A rank may end, or free its engine, as soon as it has what it needs itself.
        """
        limit = time.perf_counter() + _LEAVE_LIMIT_S
        waiting = [slot for slot, lent in self._lent.items() if lent.waited]
        try:
            while waiting and time.perf_counter() < limit:
                waiting = [slot for slot in waiting if not self.take_back(slot, block=False)]
                if waiting:
                    time.sleep(1e-4)
        except (PeerGoneError, OSError):
            pass
        self._lent.clear()

    def _is_done(self, other: int, slot: int, tag: int) -> bool:
        """Whether a peer has finished a collective that this rank has waited for (so the peer has posted it)."""
        found = self._find(other, slot, tag)
        return found is None or found[_STATE] == _FINISHED  # a slot is used again only when it was finished

    # -- reading --------------------------------------------------------------------------------------------------

    def find_lent(self, other: int, slot: int, tag: Tag, *, num_bytes: int) -> int:
        """The address of what a peer lends under this tag, once it does. `slot`: where this rank has posted it.

        Raises:
            RuntimeError: the peer is gone, or does not come within the time limit, or lends another size.
        """
        found = self._poll(other, lambda: self._find(other, slot, tag.identity()), "to come to the same collective")
        if found[_BYTES] != num_bytes:
            raise RuntimeError(f"rank {self.peers[other].rank} lends {found[_BYTES]} bytes, this rank {num_bytes}: "
                               "the ranks' models or precisions differ")
        return found[_ADDRESS]

    def read(self, other: int, address: int, into: Tensor) -> None:
        """Copy from a peer's memory into a contiguous tensor."""
        self._copy(self.peers[other], address, into.data_ptr(), into.numel() * into.element_size())

    def can_read(self, other: int) -> bool:
        """Whether the kernel lets this rank read a peer's board, and it is that peer's."""
        seen = ctypes.c_longlong()
        try:
            self._copy(self.peers[other], self.peers[other].board + _STATE * 8, ctypes.addressof(seen), 8)
        except (OSError, RuntimeError):
            return False
        return seen.value == self.peers[other].rank + 1

    def _find(self, other: int, slot: int, tag: int) -> tuple[int, ...] | None:
        """The peer's slot with this tag, or None. Ranks in the same order have it at the same place."""
        peer, seen = self.peers[other], self._seen
        place = peer.board + slot * _WORDS * 8
        self._copy(peer, place, ctypes.addressof(seen), _WORDS * 8)
        if seen[_TAG] != tag:
            table = (ctypes.c_longlong * (SLOTS * _WORDS))()
            self._copy(peer, peer.board, ctypes.addressof(table), ctypes.sizeof(table))
            tags = table[_TAG::_WORDS]
            if tag not in tags:
                return None
            place = peer.board + tags.index(tag) * _WORDS * 8
        self._copy(peer, place, ctypes.addressof(seen), _WORDS * 8)  # again: now the tag is known to stand
        return tuple(seen) if seen[_TAG] == tag else None

    def _poll(self, other: int, look: Callable[[], Any], what: str) -> Any:
        start, spins, pause = time.perf_counter(), 0, 5e-5
        while True:
            found = look()
            if found:
                return found
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            if time.perf_counter() - start > self._timeout_s:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s waiting for rank {self.peers[other].rank} "
                                   f"{what}")
            time.sleep(pause)
            pause = min(pause * 1.2, 1e-3)

    def _copy(self, peer: _Peer, source: int, target: int, length: int) -> None:
        while length:
            mine, theirs = _Piece(target, length), _Piece(source, length)
            copied = self._libc.process_vm_readv(peer.process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
            if copied <= 0:
                number = ctypes.get_errno()
                if number == errno.ESRCH:
                    raise PeerGoneError(f"rank {peer.rank} (process {peer.process}) has ended")
                raise OSError(number, f"reading the memory of rank {peer.rank} (process {peer.process}): "
                                      f"{os.strerror(number)}")
            source, target, length = source + copied, target + copied, length - copied


class PeerMemory:
    """The large collectives of one communicator. Made by `connect`."""

    name = "direct reads of the other ranks' memory"
    in_flight = 2  # a reduction waits for the next two to be posted, so that a rank that is a bit late stops nobody

    def __init__(self, board: Board) -> None:
        self._board = board
        self._size = len(board.peers)
        self._chunks: dict[torch.dtype, list[Tensor]] = {}
        self._offers: dict[int, int] = {}  # tag -> slot
        weakref.finalize(self, board.leave)  # also when the interpreter ends

    def all_gather(self, full: Tensor, own: Tensor, *, tag: Tag, entry: Entry,
                   prepare: Callable[[], None] | None = None) -> Pending:
        """See `Communicator.all_gather`."""
        board = self._board
        offered = self._offers.pop(tag.identity(), None)
        slot = board.post(tag, own, entry) if offered is None else offered
        board.begin(slot, entry)

        def finish() -> None:
            if prepare is not None:
                prepare()
            length = own.numel()
            part = full[board.index * length : (board.index + 1) * length]
            if part.data_ptr() != own.data_ptr():
                part.copy_(own)
            for other in board.others:
                address = board.find_lent(other, slot, tag, num_bytes=own.numel() * own.element_size())
                board.read(other, address, full[other * length : (other + 1) * length])
            board.finish(slot)

        return Pending(entry=entry, keep=[full, own], finish=finish, released=self._released(slot, tag))

    def reduce_scatter(self, full: Tensor, out: Tensor, *, tag: Tag, entry: Entry, accumulate: bool) -> Pending:
        """See `Communicator.reduce_scatter`."""
        board = self._board
        slot = board.post(tag, full, entry)

        def finish() -> None:
            length, item = out.numel(), full.element_size()
            own = full[board.index * length : (board.index + 1) * length]
            places = {other: board.find_lent(other, slot, tag, num_bytes=full.numel() * item)
                      + board.index * length * item for other in board.others}
            chunks = self._chunks_of(full.dtype)
            step = chunks[0].numel()
            for start in range(0, length, step):
                stop = min(start + step, length)
                terms = [part[: stop - start] for part in chunks]
                for other, place in places.items():
                    board.read(other, place + start * item, terms[other])
                terms[board.index] = own[start:stop]
                target = out[start:stop]
                add_in_order([target, *terms] if accumulate else terms, target)
            board.finish(slot)

        return Pending(entry=entry, keep=[full, out], finish=finish, released=self._released(slot, tag))

    def offer(self, own: Tensor, *, tag: Tag) -> None:
        """See `Communicator.offer`."""
        self._offers[tag.identity()] = self._board.post(tag, own, None)

    def withdraw(self) -> None:
        """See `Communicator.withdraw`."""
        for slot in self._offers.values():
            self._board.withdraw(slot)
        self._offers.clear()

    def drain(self) -> None:
        """See `Communicator.drain`."""
        self._board.drain()

    def _chunks_of(self, dtype: torch.dtype) -> list[Tensor]:
        """One buffer per member that stays in the cache, so that what was read is added at once."""
        if dtype not in self._chunks:
            numel = _CHUNK_BYTES // torch.empty((), dtype=dtype).element_size()
            self._chunks[dtype] = [torch.empty(numel, dtype=dtype) for _ in range(self._size)]
        return self._chunks[dtype]

    def _released(self, slot: int, tag: Tag) -> Callable[[bool], bool]:
        board = self._board
        return lambda block: not board.lends(slot, tag) or board.take_back(slot, block=block)


def connect(*, rank: int, index: int, timeout_s: float, exchange: Callable[[Any], list[Any]],
            agree: Callable[[bool], bool]) -> PeerMemory | None:
    """Direct reads among the members of one communicator, or None where any member cannot read any other.

    Collective over the members. Refused across hosts and containers, and where the kernel does not allow it.

    Args:
        exchange: an all-gather of a picklable object.
        agree: whether all members say true.
    """
    table = (ctypes.c_longlong * (SLOTS * _WORDS))()
    _let_peers_read()
    mine = {"host": _host(), "peer": _Peer(rank, os.getpid(), ctypes.addressof(table))}
    table[_STATE] = rank + 1  # what the others must find
    places = exchange(mine)
    board = Board([place["peer"] for place in places], index=index, table=table, timeout_s=timeout_s)
    same_host = all(place["host"] == mine["host"] for place in places)
    readable = same_host and all(board.can_read(other) for other in board.others)
    if not agree(readable):
        return None
    table[_STATE] = _EMPTY
    agree(True)  # nobody posts before this is empty everywhere
    return PeerMemory(board)


def _host() -> tuple[str, str]:
    """Equal for processes that see each other's process ids: one boot of one kernel, one namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unknown {os.getpid()}", ""


def _let_peers_read() -> None:
    """Where the Yama module lets only ancestors read a process's memory, allow the user's other processes to."""
    try:
        with open(_YAMA) as file:
            restricted = file.read().strip() == "1"
    except OSError:
        return
    if restricted:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
