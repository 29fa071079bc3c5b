"""Large collectives by messages through `torch.distributed`.

`Native`: the backend's own, as NCCL has them, or where there are many ranks.
`Pairwise`: every rank sends its slice straight to every other. On gloo, between a few ranks: its own all-gather and
reduce-scatter take 71 and 77 ms for 64 MB on 2 ranks (and the latter moves an all-reduce's bytes and blocks its
caller), pairwise exchange 19 and 20 ms. Messages carry the collective's tag as the gloo message tag: ranks that diverge
(another unit, another operation, another round) time out and say where they stand, and never mix equal-sized blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.journal import Entry
from strategies.transfer import Pending, Tag, add_in_order

# torch 2.13 has renamed them, and warns at the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native:
    """The backend's own collectives."""

    name = "native collectives"
    in_flight = 2

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def all_gather(self, full: Tensor, own: Tensor, *, tag: Tag, entry: Entry,
                   prepare: Callable[[], None] | None = None) -> Pending:
        """See `Communicator.all_gather`."""
        if prepare is not None:
            prepare()
        work = all_gather_single(full, own, group=self._group, async_op=True)
        return Pending([work], entry=entry, keep=[full, own])

    def reduce_scatter(self, full: Tensor, out: Tensor, *, tag: Tag, entry: Entry, accumulate: bool) -> Pending:
        """See `Communicator.reduce_scatter`."""
        landed = torch.empty_like(out)
        work = reduce_scatter_single(landed, full, group=self._group, async_op=True)
        land = (lambda: out.add_(landed)) if accumulate else (lambda: out.copy_(landed))
        return Pending([work], entry=entry, keep=[full, landed, out], finish=land)

    def offer(self, own: Tensor, *, tag: Tag) -> None:
        """Nothing: a message is sent when it is asked for."""

    def withdraw(self) -> None:
        """Nothing."""

    def drain(self) -> None:
        """Nothing: buffers are free when a wait has returned."""


class Pairwise:
    """One message from every rank to every other.

    Args:
        index, size: this rank's position and the number of members.
    """

    name = "pairwise exchange over gloo"
    in_flight = 2

    def __init__(self, group: dist.ProcessGroup | None, *, index: int, size: int) -> None:
        self._group = group
        self._index = index
        self._size = size
        # Nearest first, so that not all ranks address the same one at once.
        self._others = [(index + step) % size for step in range(1, size)]
        self._landing: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def all_gather(self, full: Tensor, own: Tensor, *, tag: Tag, entry: Entry,
                   prepare: Callable[[], None] | None = None) -> Pending:
        """See `Communicator.all_gather`."""
        if prepare is not None:
            prepare()
        works: list[Any] = []
        for other in self._others:
            works.append(dist.irecv(self._slice(full, other), group=self._group, group_src=other, tag=tag.number()))
        for other in self._others:
            works.append(dist.isend(own, group=self._group, group_dst=other, tag=tag.number()))
        part = self._slice(full, self._index)
        if part.data_ptr() != own.data_ptr():
            part.copy_(own)
        return Pending(works, entry=entry, keep=[full, own])

    def reduce_scatter(self, full: Tensor, out: Tensor, *, tag: Tag, entry: Entry, accumulate: bool) -> Pending:
        """See `Communicator.reduce_scatter`."""
        own = self._slice(full, self._index)
        parts: list[Tensor] = [own] * self._size
        works: list[Any] = []
        for other in self._others:
            parts[other] = self._take(own)
            works.append(dist.irecv(parts[other], group=self._group, group_src=other, tag=tag.number()))
        for other in self._others:
            works.append(dist.isend(self._slice(full, other), group=self._group, group_dst=other, tag=tag.number()))

        def land() -> None:
            add_in_order([out, *parts] if accumulate else parts, out)
            for other in self._others:
                self._landing.setdefault((own.numel(), own.dtype), []).append(parts[other])

        return Pending(works, entry=entry, keep=[full, out], finish=land)

    def offer(self, own: Tensor, *, tag: Tag) -> None:
        """Nothing: a message is sent when it is asked for."""

    def withdraw(self) -> None:
        """Nothing."""

    def drain(self) -> None:
        """Nothing: buffers are free when a wait has returned."""

    def _slice(self, full: Tensor, index: int) -> Tensor:
        length = full.numel() // self._size
        return full[index * length : (index + 1) * length]

    def _take(self, like: Tensor) -> Tensor:
        free = self._landing.get((like.numel(), like.dtype))
        return free.pop() if free else torch.empty_like(like)
