"""What every way to move data shares: the identity of a collective, the handle of one under way, the order of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from strategies.journal import Entry


@dataclass(frozen=True)
class Tag:
    """Identity of one collective: what is moved, for whom, in which round. Equal on all ranks that take part.

    Attributes:
        operation: index into OPERATIONS.
        label: for people: the unit's name.
        half: 1 for the second half of an all-reduce, else 0.
    """

    engine: int
    unit: int
    operation: int
    sequence: int
    label: str
    half: int = 0

    OPERATIONS: ClassVar[tuple[str, ...]] = ("gather", "reduce", "replicate", "start", "publish", "edit",
                                             "read")

    def number(self) -> int:
        """A non-negative 31-bit message tag: 3 bits engine, 13 bits unit, 3 bits operation, 12 bits round."""
        return (self.engine % 8) << 28 | (self.unit % 8192) << 15 | self.operation << 12 | self.sequence % 4096

    def identity(self) -> int:
        """A positive 63-bit number, different for all collectives of a communicator's life."""
        return (1 << 62 | (self.engine % (1 << 10)) << 52 | (self.unit % (1 << 16)) << 36 | self.operation << 33
                | self.half << 32 | self.sequence % (1 << 32))

    def second_half(self) -> Tag:
        """For the gather that follows the reduction of the same all-reduce."""
        return Tag(self.engine, self.unit, self.operation, self.sequence, self.label, half=1)

    def __str__(self) -> str:
        return f"{self.OPERATIONS[self.operation]} of unit '{self.label}' (round {self.sequence})"


class Pending:
    """A collective under way. `wait` is idempotent; buffers stay referenced until it returns.

    Args:
        works: torch.distributed works to wait for.
        entry: the collective in the journal; None for one that moves nothing.
        finish: called once after them.
        released: whether peers are done with what this rank lent (True: block until they are). None: they are when
            `wait` has returned.
    """

    def __init__(self, works: Sequence[Any] = (), *, entry: Entry | None = None, keep: Sequence[Tensor] = (),
                 finish: Callable[[], None] | None = None, released: Callable[[bool], bool] | None = None) -> None:
        self._works = list(works)
        self._entry = entry
        self._keep = list(keep)
        self._finish = finish
        self._released = released

    def wait(self) -> None:
        """Return when the result is usable: on a CPU when it is there, on CUDA in stream order.

        Raises:
            CollectiveError: a peer died, diverged or did not come within the timeout.
        """
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.waiting()
            try:
                for work in self._works:
                    work.wait()
                if self._finish is not None:
                    self._finish()
            except (RuntimeError, OSError) as error:
                self._entry = entry  # a second wait fails again
                raise entry.error(error) from None
            entry.finished()
        self._works, self._finish = [], None
        self._keep.clear()

    def released(self, *, block: bool = False) -> bool:
        """After `wait`: whether the buffers this rank gave may be written again. `block`: return when they may.

        Raises:
            CollectiveError: a peer that still reads them died or did not come within the timeout.
        """
        if self._released is None:
            return True
        return self._released(block)

    def complete(self) -> None:
        """`wait`, and return when no other rank reads this rank's buffers any more either."""
        self.wait()
        self.released(block=True)


def add_in_order(terms: Sequence[Tensor], out: Tensor) -> None:
    """Sum equal-sized tensors from the first to the last into `out`, which may be one of them.

    The order is part of the result: the same addends give the same bits whatever moved them.
    """
    if len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)
        return
    total = terms[0] + terms[1]
    for term in terms[2:-1]:
        total.add_(term)
    torch.add(total, terms[-1], out=out)
