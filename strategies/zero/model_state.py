"""The model's state, whole, in and out of an engine: parameters and persistent buffers under the plain names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from strategies.zero.record import ParameterRecord
from strategies.zero.unit import Unit


def whole_parameters(unit: Unit) -> Iterator[tuple[ParameterRecord, Tensor]]:
    """A copy of each of the unit's parameters, whole, in the type the model came in. Collective over data_shard.

    Trained parameters come from the masters.
    """
    for group in unit.groups:
        wide = group.master is not None and group.master_dtype != group.compute_dtype
        with contextlib.nullcontext() if wide else unit.pinned():
            flat = group.whole_master(tag=unit.tag("read")) if wide else group.full
            for position, record in enumerate(group.records):
                value = flat[group.layout.span(position)].detach().view(record.shape)
                yield record, value.to(record.dtype, copy=True)


def whole_state(model: nn.Module, units: Sequence[Unit], *, wanted: bool) -> dict[str, Tensor]:
    """State dict on the CPU; tied names share one tensor. Collective over data_shard.

    `wanted=False`: this rank takes part, holds one unit at a time, and gets an empty dict.
    """
    by_name = {}
    for unit in units:
        for record, value in whole_parameters(unit):
            if wanted:
                by_name.update(dict.fromkeys((record.name, *record.aliases), value.cpu()))
    # keep_vars hands out the objects themselves, so placeholders are named without being read.
    return {} if not wanted else {
        name: by_name[name] if name in by_name
        else entry.detach().to("cpu", copy=True) if isinstance(entry, Tensor) else entry  # a module's extra state
        for name, entry in model.state_dict(keep_vars=True).items()
    }


class StateFit:
    """A full state dict matched with a model: what does not fit, and setting what does.

    Args:
        strict: missing and unknown names are problems too.
    """

    def __init__(self, model: nn.Module, records: Sequence[ParameterRecord], state: Mapping[str, Tensor], *,
                 strict: bool) -> None:
        self._state = state
        self._records = {name: record for record in records for name in (record.name, *record.aliases)}
        self._buffers = {name: entry for name, entry in model.state_dict(keep_vars=True).items()
                         if name not in self._records}
        self.problems: list[str] = []
        if strict:
            tied = {name for record in records if any(n in state for n in (record.name, *record.aliases))
                    for name in (record.name, *record.aliases)}
            self.problems += [f"missing: {name}" for name in (*self._records, *self._buffers)
                              if name not in state and name not in tied]
            self.problems += [f"unknown: {name}" for name in state
                              if name not in self._records and name not in self._buffers]
        for name, value in state.items():
            known = self._records.get(name, self._buffers.get(name))
            if known is not None and known.shape != value.shape:
                self.problems.append(f"shape of {name}: {tuple(value.shape)}, the model has {tuple(known.shape)}")

    def apply(self, device: torch.device) -> None:
        """Set parameters (masters in full precision) and buffers. Local; no other rank may be reading parameters."""
        for name, value in self._state.items():
            if name in self._records:
                record = self._records[name]
                record.group.load(record.position, value.to(device))
                record.unit.changed()
            elif name in self._buffers:
                self._buffers[name].copy_(value)
