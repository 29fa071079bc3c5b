"""Reading and editing sharded parameters: `with gathered(model.head.weight): ...`"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.zero.record import ParameterRecord
from strategies.zero.resting import record_of
from strategies.zero.unit import Unit


def gathered(parameters: Iterable[nn.Parameter] | nn.Parameter | nn.Module,
             *, write: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside the block the given parameters have their full values on every rank, and may be edited in place.

    Collective over the data axes: every rank enters and leaves. On leaving, the first rank's values are taken by all
    ranks and written back to where parameters rest (and to the fp32 masters of the elements that changed), so an edit
    under `if rank == 0` is enough and replicas never drift. `write=False` skips that for a block that only reads.

    Args:
        parameters: a parameter, several, or a module (all its parameters). Whole units are gathered.

    Raises:
        ValueError: something given is no parameter.
    """
    # Ordinary parameters, of no engine, are left as they are.
    records = [record for record in map(record_of, _as_parameters(parameters)) if record is not None]
    return gathered_records(records, write=write)


@contextlib.contextmanager
def gathered_records(records: Sequence[ParameterRecord], *, write: bool = True) -> Iterator[None]:
    """`gathered`, by record."""
    units = sorted({record.unit for record in records}, key=lambda unit: unit.index)
    with contextlib.ExitStack() as stack:
        if write:
            for unit in units:
                unit.withdraw()
            for data in {unit.data for unit in units}:
                data.barrier(what="edit of parameters")
        for unit in units:
            stack.enter_context(unit.pinned())
        before = {unit: [group.full.clone() for group in unit.groups] for unit in units} if write else {}
        try:
            yield
        finally:
            for unit, copies in before.items():
                _write_back(unit, copies)


def _write_back(unit: Unit, copies: list[Tensor]) -> None:
    for group, copy in zip(unit.groups, copies, strict=True):
        group.refuse_lost_edits(in_place=False)
        with torch.no_grad():
            unit.data.broadcast(group.full, what=f"edit of unit '{unit.name}'")
            group.absorb_edit(copy)
    unit.changed()


def _as_parameters(given: Any) -> list[nn.Parameter]:
    if isinstance(given, nn.Module):
        return list(given.parameters())
    if isinstance(given, nn.Parameter):
        return [given]
    parameters = list(given)
    for entry in parameters:
        if not isinstance(entry, nn.Parameter):
            raise ValueError(f"gathered: {type(entry).__name__} is not a parameter; allowed are a parameter, an "
                             "iterable of parameters, or a module")
    return parameters
