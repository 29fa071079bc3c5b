"""Optimizer state whole, in torch's own form: from this rank's pieces to full tensors and back.

State is addressed by parameter, never by position in a shard, so any stage and rank count (and plain torch) can load
it. Entries of the parameter's size are gathered; others (a step count) are the same on every rank that has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.collectives import Communicator
from strategies.zero.record import ParameterRecord

Groups = Sequence[Sequence[ParameterRecord]]


def full_state(optimizer: Optimizer, groups: Groups, *, control: Communicator) -> dict[str, Any]:
    """`optimizer.state_dict()` as if it had stepped whole parameters. Collective over the data axes.

    Args:
        groups: the records of each parameter group, in the order the user's optimizer had them.
    """
    numbers = {record: number for number, record in enumerate(r for group in groups for r in group)}
    state = {number: entry for record, number in numbers.items()
             if (entry := _full_entry(optimizer, record, control=control))}
    param_groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[r] for r in records]}
        for group, records in zip(optimizer.param_groups, groups, strict=True)
    ]
    return {"state": state, "param_groups": param_groups}


def load_full_state(optimizer: Optimizer, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Take this rank's pieces of what `full_state` (or plain torch) saved. Local.

    Raises:
        ValueError: the groups do not match.
    """
    saved = state_dict["param_groups"]
    sizes, found = [len(records) for records in groups], [len(group["params"]) for group in saved]
    if sizes != found:
        raise ValueError(f"optimizer state has groups of {found} parameters, the optimizer has {sizes}; "
                         "fix: load it into the optimizer it was saved from")
    optimizer.state.clear()
    for group, records, old in zip(optimizer.param_groups, groups, saved, strict=True):
        group.update({key: value for key, value in old.items() if key != "params"})
        for record, number in zip(records, old["params"], strict=True):
            piece = record.group.masters.get(record.position)
            entry = state_dict["state"].get(number)
            if piece is not None and entry is not None:
                optimizer.state[piece] = slice_state(record, entry, piece)


def slice_state(record: ParameterRecord, state: Mapping[str, Any], piece: Tensor) -> dict[str, Any]:
    """This rank's piece of one parameter's state, for the 1-D `piece` of it that this rank steps.

    As in `Optimizer.load_state_dict`, "step" stays as it is and state of the parameter's size takes its type.
    """
    overlap = record.group.layout.overlap(record.position, record.group.optimizer_range)
    assert overlap is not None

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == record.shape and key != "step":
            dtype = piece.dtype if value.is_floating_point() else value.dtype
            return value.reshape(-1)[overlap.in_parameter].to(piece.device, dtype, copy=True)
        return value.clone() if isinstance(value, Tensor) else value

    return {key: cut(key, value) for key, value in state.items()}


def _full_entry(optimizer: Optimizer, record: ParameterRecord, *, control: Communicator) -> dict[str, Any]:
    """One parameter's state with whole tensors; empty when no rank has any (it never had a gradient)."""
    piece = record.group.masters.get(record.position)
    mine = dict(optimizer.state.get(piece, {})) if piece is not None else {}
    group = record.group
    if not group.shards_optimizer:
        return {key: _shaped(value, record, piece) for key, value in mine.items()}
    # Ranks without a piece must know the names, types and order of what the others gather.
    layout = {key: _kind(value, piece) for key, value in mine.items()}
    holders = control.gather_objects(layout or None, what=f"optimizer state of '{record.name}'")
    known = next((layout for layout in holders if layout), None)
    if known is None:
        return {}
    entry: dict[str, Any] = {}
    for key, (is_piece, dtype_or_value) in known.items():
        if not is_piece:
            entry[key] = dtype_or_value
            continue
        flat = torch.zeros(group.layout.padded_numel, dtype=dtype_or_value, device=group.device)
        overlap = group.layout.overlap(record.position, group.optimizer_range)
        if overlap is not None:
            flat[overlap.in_buffer].copy_(mine[key])
        group.axis.all_gather(flat, group.axis.slice_of(flat), tag=record.unit.tag("replicate")).complete()
        entry[key] = flat[group.layout.span(record.position)].view(record.shape).clone()
    return entry


def _kind(value: Any, piece: Tensor | None) -> tuple[bool, Any]:
    is_piece = isinstance(value, Tensor) and piece is not None and value.dim() > 0 and value.shape == piece.shape
    return (True, value.dtype) if is_piece else (False, value)


def _shaped(value: Any, record: ParameterRecord, piece: Tensor | None) -> Any:
    if isinstance(value, Tensor) and piece is not None and value.dim() > 0 and value.shape == piece.shape:
        return value.detach().view(record.shape).clone()
    return value.clone() if isinstance(value, Tensor) else value
