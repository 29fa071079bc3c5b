"""Ranks whose data ends at different times: one agreed decision before each batch, so that all stop at the same one.

A rank that goes on alone would wait for ever for shards and sums of the others. All stop where the first one does; what
the others have left is not read, and the log (logger "strategies") says how it was. torch's `Join` lets ranks go on
with shadow collectives instead; that needs every rank to know the order of all collectives to come.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from strategies.collectives import Communicator

Batch = TypeVar("Batch")


def in_step(batches: Iterable[Batch], *, control: Communicator) -> Iterator[Batch]:
    """This rank's batches for as long as every rank has one. Collective over `control` before each batch."""
    iterator, taken, nothing = iter(batches), 0, object()
    while True:
        batch = next(iterator, nothing)
        if not control.agree(batch is not nothing, what="vote on another batch"):
            break
        yield batch  # type: ignore[misc]
        taken += 1
    left = control.gather_list(torch.tensor([int(batch is not nothing)]), what="who has another batch")
    more = [rank for rank, has in zip(control.members, left, strict=True) if int(has)]
    if more and control.index == 0:
        ended = [rank for rank in control.members if rank not in more]
        _warn(f"the data of ranks {ended} ended after {taken} batches: all ranks stop there; ranks {more} had more, "
              "which is not used")


class InStepLoader:
    """A data loader whose iteration and length are the same on all ranks; everything else is the loader's own.

    Args:
        loader: any iterable.
        length: batches of one iteration where all ranks know theirs: the least. None: they agree on each batch.
        control: the ranks that have to stay together.
    """

    def __init__(self, loader: Any, *, length: int | None, control: Communicator) -> None:
        vars(self).update(_loader=loader, _length=length, _control=control)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the ranks do not all know how many batches they have")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._length is not None:
            return itertools.islice(self._loader, self._length)
        return in_step(self._loader, control=self._control)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_loader", "_length", "_control"):  # absent in a copy under construction
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def kept_in_step(loader: Any, *, control: Communicator) -> Any:
    """The loader itself where every rank's has the same number of batches, else an InStepLoader.

    Collective over `control`. A length is not trusted where the data are a stream (an IterableDataset with workers may
    bring more or less).
    """
    if control.size == 1:
        return loader
    lengths = [int(length) for length in control.gather_list(
        torch.tensor([_length(loader)]), what="number of batches")]
    if min(lengths) == max(lengths) >= 0:
        return loader
    if min(lengths) < 0:
        return InStepLoader(loader, length=None, control=control)
    if control.index == 0:
        _warn(f"ranks {list(control.members)} have {lengths} batches: each takes {min(lengths)}, the rest is not used")
    return InStepLoader(loader, length=min(lengths), control=control)


def _length(loader: Any) -> int:
    """Batches of one iteration; -1 where nobody can be sure."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return -1
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def _warn(text: str) -> None:
    logging.getLogger("strategies").warning("%s", text)
