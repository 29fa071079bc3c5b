"""Collectives, chosen and not assumed: the only engine code that calls `torch.distributed`.

NCCL has good collectives; they are used as they are. gloo's all-gather and reduce-scatter are slow (64 MB on 2 ranks:
71 and 77 ms, and the latter moves an all-reduce's bytes and blocks its caller), so on gloo every rank sends its slice
straight to every other (`isend`/`irecv`): 19 and 20 ms.

Every collective is entered in the journal before it starts, so that a rank that waits too long can say what it and the
others do.

Pairwise messages carry the collective's tag as the gloo message tag. Ranks that diverge (another unit, another
operation, another round) therefore time out and say where they stand, and never mix equal-sized blocks.

Sums are always taken in rank order, whatever the operation: an all-reduce is a reduce-scatter and an all-gather. So the
same addends give the same bits at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.journal import CollectiveError, Entry, Journal

__all__ = ["CollectiveError", "Communicator", "Pending", "Tag"]


@dataclass(frozen=True)
class Tag:
    """Identity of one collective: what is moved, for whom, in which round. Equal on all ranks that take part."""

    engine: int
    unit: int
    operation: int  # index into OPERATIONS
    sequence: int
    label: str  # for people: the unit's name

    OPERATIONS: ClassVar[tuple[str, ...]] = ("gather", "reduce", "replicate", "start", "publish", "edit",
                                             "read")

    def number(self) -> int:
        """A non-negative 31-bit message tag: 3 bits engine, 13 bits unit, 3 bits operation, 12 bits round."""
        return (self.engine % 8) << 28 | (self.unit % 8192) << 15 | self.operation << 12 | self.sequence % 4096

    def __str__(self) -> str:
        return f"{self.OPERATIONS[self.operation]} of unit '{self.label}' (round {self.sequence})"


class Pending:
    """A collective under way. `wait` is idempotent; buffers stay referenced until it returns."""

    def __init__(self, works: Sequence[Any] = (), *, entry: Entry | None = None, keep: Sequence[Tensor] = (),
                 finish: Callable[[], None] | None = None) -> None:
        self._works = list(works)
        self._entry = entry
        self._keep = list(keep)
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is usable: on a CPU when it is there, on CUDA in stream order.

        Raises:
            CollectiveError: a peer died, diverged or did not come within the timeout.
        """
        if self._entry is not None:
            self._wait(self._entry)
            self._entry = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        self._keep.clear()

    def _wait(self, entry: Entry) -> None:
        entry.waiting()
        try:
            while self._works:
                self._works[0].wait()
                self._works.pop(0)
        except RuntimeError as error:
            raise entry.error(error) from None
        entry.finished()


class Communicator:
    """One mesh axis as seen from this rank. Every method is collective over the axis; size 1 moves nothing."""

    def __init__(self, group: dist.ProcessGroup | None, members: Sequence[int], *, rank: int, name: str,
                 device: torch.device, backend: str, journal: Journal) -> None:
        self.name = name
        self.device = device
        self.members = tuple(members)
        self.size = len(self.members)
        self.index = self.members.index(rank)
        self._journal = journal
        self._group = group
        self._pairwise = backend == "gloo"

    def algorithm(self) -> str:
        """How large buffers move here, in words."""
        if self.size == 1:
            return "none (one rank)"
        return "pairwise exchange over gloo" if self._pairwise else "native collectives"

    def slice_of(self, full: Tensor, index: int | None = None) -> Tensor:
        """The slice of a flat buffer (numel divisible by size) that member `index` (default: this rank) owns."""
        length = full.numel() // self.size
        index = self.index if index is None else index
        return full[index * length : (index + 1) * length]

    def all_gather(self, full: Tensor, *, tag: Tag) -> Pending:
        """Fill `full` [size * n] from every member's own slice, which must already stand in place."""
        if self.size == 1:
            return Pending()
        full = _real(full)
        own = self.slice_of(full)
        entry = self._started(tag)
        if not self._pairwise:
            work = dist.all_gather_into_tensor(full, own, group=self._group, async_op=True)
            return Pending([work], entry=entry, keep=[full])
        works: list[Any] = []
        for peer in self._peers():
            works.append(dist.irecv(self.slice_of(full, peer), group=self._group, group_src=peer, tag=tag.number()))
        for peer in self._peers():
            works.append(dist.isend(own, group=self._group, group_dst=peer, tag=tag.number()))
        return Pending(works, entry=entry, keep=[full])

    def reduce_scatter(self, full: Tensor, out: Tensor, *, tag: Tag, accumulate: bool = False,
                       scratch: Callable[[int, torch.dtype], Tensor] | None = None) -> Pending:
        """Sum every member's `full` [size * n]; this rank's slice of the sum lands in `out` [n] at `wait`.

        `out` may be this rank's slice of `full` itself. With `accumulate` the sum is added to what `out` holds.
        `full` must not be written before `wait` returns.
        """
        full, out = _real(full), _real(out)
        own = self.slice_of(full)
        if self.size == 1:
            if accumulate:
                out.add_(own)
            elif out.data_ptr() != own.data_ptr():
                out.copy_(own)
            return Pending()
        entry = self._started(tag)
        if not self._pairwise:
            landed = torch.empty_like(own)
            work = dist.reduce_scatter_tensor(landed, full, group=self._group, async_op=True)
            land = (lambda: out.add_(landed)) if accumulate else (lambda: out.copy_(landed))
            return Pending([work], entry=entry, keep=[full, landed, out], finish=land)
        make = scratch or (lambda numel, dtype: torch.empty(numel, dtype=dtype, device=full.device))
        parts: list[Tensor] = [own] * self.size
        works: list[Any] = []
        for peer in self._peers():
            parts[peer] = make(own.numel(), own.dtype)
            works.append(dist.irecv(parts[peer], group=self._group, group_src=peer, tag=tag.number()))
        for peer in self._peers():
            works.append(dist.isend(self.slice_of(full, peer), group=self._group, group_dst=peer, tag=tag.number()))

        def add_in_rank_order() -> None:
            terms = [out, *parts] if accumulate else parts
            if len(terms) == 2:
                torch.add(terms[0], terms[1], out=out)
                return
            total = terms[0] + terms[1]
            for term in terms[2:-1]:
                total.add_(term)
            torch.add(total, terms[-1], out=out)

        return Pending(works, entry=entry, keep=[full, out, *parts], finish=add_in_rank_order)

    def all_reduce(self, full: Tensor, *, tag: Tag) -> None:
        """Sum `full` (1-D, any numel) over the axis, in place and in rank order."""
        if self.size == 1:
            return
        if not self._pairwise:
            self._guarded(tag, lambda: dist.all_reduce(full, group=self._group))
            return
        padded = full
        if full.numel() % self.size:
            padded = full.new_zeros(-(-full.numel() // self.size) * self.size)
            padded[: full.numel()].copy_(full)
        self.reduce_scatter(padded, self.slice_of(padded), tag=tag).wait()
        self.all_gather(padded, tag=tag).wait()
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
        parts = [torch.empty_like(values) for _ in self.members]
        self._guarded(what, lambda: dist.all_gather(parts, values, group=self._group))
        return torch.stack(parts).sum(0)

    def maximum(self, values: Tensor, *, what: str) -> Tensor:
        """The element-wise maximum over members of a short tensor."""
        if self.size > 1:
            values = values.clone()
            self._guarded(what, lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group))
        return values

    def gather_list(self, values: Tensor, *, what: str) -> list[Tensor]:
        """Every member's short tensor, in rank order, on every rank."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in self.members]
        self._guarded(what, lambda: dist.all_gather(parts, values, group=self._group))
        return parts

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

    def _peers(self) -> list[int]:
        """The other members, nearest first, so that not all ranks address the same one at once."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

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
