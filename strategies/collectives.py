"""Collectives, chosen and not assumed: the only engine code that calls `torch.distributed`.

Large buffers move by the *transport* that fits the axis: direct reads of each other's memory on one host
(`peer_memory.py`), pairwise messages between a few ranks over gloo, the backend's own collectives on NCCL and between
many ranks (`messages.py`). Small values (votes, counts, norms) always use the backend.

Every collective is entered in the journal before it starts, so that a rank that waits too long can say what it and the
others do.

Sums are taken in rank order, whatever the operation: an all-reduce is a reduce-scatter and an all-gather. So the same
addends give the same bits at every ZeRO stage. (Native collectives have an order of their own.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.journal import CollectiveError, Entry, Journal
from strategies.messages import Native, Pairwise, all_gather_single
from strategies.peer_memory import connect
from strategies.transfer import Pending, Tag

__all__ = ["FEW_RANKS", "TRANSPORTS", "CollectiveError", "Communicator", "Pending", "Tag"]

TRANSPORTS = ("fastest", "peer_memory", "pairwise", "native")
FEW_RANKS = 16  # up to here a rank addresses each other one itself; its Python work per collective grows with them


class Transport(Protocol):
    """A way to move large buffers."""

    name: str
    in_flight: int  # reductions that are best left under way at a time

    def all_gather(self, full: Tensor, own: Tensor, *, tag: Tag, entry: Entry,
                   prepare: Callable[[], None] | None = None) -> Pending: ...

    def reduce_scatter(self, full: Tensor, out: Tensor, *, tag: Tag, entry: Entry, accumulate: bool) -> Pending: ...

    def offer(self, own: Tensor, *, tag: Tag) -> None: ...

    def withdraw(self) -> None: ...

    def drain(self) -> None: ...


class Communicator:
    """One mesh axis as seen from this rank. Every method is collective over the axis; size 1 moves nothing.

    Constructing is collective over the members where the transport may be peer_memory.

    Args:
        group: None where the axis has one member.
        members: global ranks, in the axis's order.
        transport: how large buffers move, one of TRANSPORTS; "fastest" takes the first that works here.
        timeout_s: longest wait for another member.

    Raises:
        ValueError: transport="peer_memory" where ranks cannot read each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup | None, members: Sequence[int], *, rank: int, name: str,
                 device: torch.device, backend: str, journal: Journal, transport: str = "native",
                 timeout_s: float = 600.0) -> None:
        self.name = name
        self.device = device
        self.members = tuple(members)
        self.size = len(self.members)
        self.index = self.members.index(rank)
        self._rank = rank
        self._journal = journal
        self._group = group
        self._transport: Transport = self._choose(transport, backend, timeout_s) if self.size > 1 else Native(group)
        self.in_flight = self._transport.in_flight

    def _choose(self, wanted: str, backend: str, timeout_s: float) -> Transport:
        few_on_gloo = backend == "gloo" and self.size <= FEW_RANKS
        if wanted == "peer_memory" or (wanted == "fastest" and few_on_gloo):
            memory = connect(rank=self._rank, index=self.index, timeout_s=timeout_s,
                             agree=lambda yes: self.agree(yes, what="choice of a transport"),
                             exchange=lambda value: self.gather_objects(value, what="where ranks run"))
            if memory is not None:
                return memory
            if wanted == "peer_memory":
                raise ValueError(f"transport='peer_memory' on axis {self.name}: ranks {list(self.members)} cannot read "
                                 "each other's memory (another host or container, or the kernel forbids it); "
                                 "fix: transport='fastest'")
        if wanted == "pairwise" or (wanted == "fastest" and few_on_gloo):
            return Pairwise(self._group, index=self.index, size=self.size)
        return Native(self._group)

    def algorithm(self) -> str:
        """How large buffers move here, in words."""
        return "none (one rank)" if self.size == 1 else self._transport.name

    def offer(self, own: Tensor, *, tag: Tag) -> None:
        """Let others read `own` for the gather `tag` before this rank starts it. Local.

        `own` must not change before `withdraw` and a collective after it, in which all members have to take part.
        """
        if self.size > 1:
            self._transport.offer(own, tag=tag)

    def withdraw(self) -> None:
        """Take all offers back. Local."""
        self._transport.withdraw()

    def drain(self) -> None:
        """Return when the other members are done with what this rank has lent them.

        Before parameters or reduced gradients are written or freed: direct reads take place after this rank's own
        wait has returned.
        """
        self._transport.drain()

    def slice_of(self, full: Tensor, index: int | None = None) -> Tensor:
        """The slice of a flat buffer (numel divisible by size) that member `index` (default: this rank) owns."""
        length = full.numel() // self.size
        index = self.index if index is None else index
        return full[index * length : (index + 1) * length]

    def all_gather(self, full: Tensor, own: Tensor, *, tag: Tag, prepare: Callable[[], None] | None = None) -> Pending:
        """Fill `full` [size * n] from every member's `own` [n], which may be this rank's slice of `full` itself.

        `own` must not be written before the others have it (`Pending.released`, `drain`). `prepare` is called before
        `full` is first written: now or in `wait`, as the transport needs it.
        """
        full, own = _real(full), _real(own)
        if self.size > 1:
            return self._transport.all_gather(full, own, tag=tag, entry=self._started(tag), prepare=prepare)
        if prepare is not None:
            prepare()
        if full.data_ptr() != own.data_ptr():
            full.copy_(own)
        return Pending()

    def reduce_scatter(self, full: Tensor, out: Tensor, *, tag: Tag, accumulate: bool = False) -> Pending:
        """Sum every member's `full` [size * n]; this rank's slice of the sum lands in `out` [n] at `wait`.

        `out` may be this rank's slice of `full` itself. With `accumulate` the sum is added to what `out` holds. The
        other slices of `full` must not be written before the others have them (`Pending.released`).
        """
        full, out = _real(full), _real(out)
        if self.size > 1:
            return self._transport.reduce_scatter(full, out, tag=tag, entry=self._started(tag), accumulate=accumulate)
        if accumulate:
            out.add_(full)
        elif out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return Pending()

    def all_reduce(self, full: Tensor, *, tag: Tag) -> None:
        """Sum `full` (1-D, any numel) over the axis, in place and in rank order."""
        if self.size == 1:
            return
        if isinstance(self._transport, Native):
            self._guarded(tag, lambda: dist.all_reduce(full, group=self._group))
            return
        padded = full
        if full.numel() % self.size:
            padded = full.new_zeros(-(-full.numel() // self.size) * self.size)
            padded[: full.numel()].copy_(full)
        own = self.slice_of(padded)
        self.reduce_scatter(padded, own, tag=tag).wait()
        self.all_gather(padded, own, tag=tag.second_half()).complete()
        if padded is not full:
            full.copy_(padded[: full.numel()])

    def broadcast(self, tensor: Tensor, *, what: Tag | str, source: int = 0) -> None:
        """Copy member `source`'s contiguous tensor to all members, in place. `what` names it in errors."""
        if self.size > 1:
            self._guarded(what, lambda: dist.broadcast(_real(tensor), group=self._group, group_src=source))

    def sum(self, values: Tensor, *, what: str) -> Tensor:
        """The sum over members of a short tensor, added in rank order: bit-equal on every rank."""
        if self.size == 1:
            return values
        return self._gathered(values, what).sum(0)

    def maximum(self, values: Tensor, *, what: str) -> Tensor:
        """The element-wise maximum over members of a short tensor."""
        if self.size > 1:
            values = values.clone()
            self._guarded(what, lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group))
        return values

    def agree(self, flag: bool, *, what: str) -> bool:
        """Whether every member says True."""
        return not self.maximum(torch.tensor([int(not flag)], device=self.device), what=what).item()

    def gather_list(self, values: Tensor, *, what: str) -> list[Tensor]:
        """Every member's short tensor, in rank order, on every rank."""
        if self.size == 1:
            return [values]
        return list(self._gathered(values, what))

    def _gathered(self, values: Tensor, what: str) -> Tensor:
        """[members, *values.shape]: one call, whatever the number of members."""
        parts = values.new_empty(self.size * values.numel())
        self._guarded(what, lambda: all_gather_single(parts, values.reshape(-1), group=self._group))
        return parts.view(self.size, *values.shape)

    def broadcast_object(self, value: Any, *, what: str, source: int = 0) -> Any:
        """Member `source`'s picklable object, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        self._guarded(what, lambda: dist.broadcast_object_list(box, group=self._group, group_src=source,
                                                               device=self.device))
        return box[0]

    def gather_objects(self, value: Any, *, what: str) -> list[Any]:
        """Every member's picklable object, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        self._guarded(what, lambda: dist.all_gather_object(box, value, group=self._group))
        return box

    def barrier(self, *, what: str) -> None:
        """Return when every member has come."""
        self.sum(torch.zeros(1, device=self.device), what=what)

    def _started(self, what: Tag | str) -> Entry:
        return self._journal.started(what, self.name, self.members)

    def _guarded(self, what: Tag | str, call: Callable[[], Any]) -> None:
        entry = self._started(what)
        entry.waiting()
        try:
            call()
        except RuntimeError as error:
            raise entry.error(error) from None
        entry.finished()


def _real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: messages and sums know no complex ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
