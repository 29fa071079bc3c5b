"""The user's own optimizer on this rank's pieces.

An element-wise optimizer does the same to an element wherever it stands, so it runs unchanged on 1-D pieces of the
parameters. Its `param_groups` keep their identity, order and options (schedulers hold on to them); only the list in
`group["params"]` is replaced, each parameter by the piece of it that this rank steps, if any.

An optimizer that looks at whole tensors would silently compute something else. Known ones are refused by name, unknown
ones are tried once on a split tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from strategies.zero.optimizer_state import slice_state
from strategies.zero.record import ParameterRecord

ELEMENTWISE = frozenset({"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
                         "SGD"})
WHOLE_TENSOR = frozenset({"Adafactor", "FusedLAMB", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon", "SOAP", "Shampoo",
                          "SparseAdam"})


def shard_optimizer(optimizer: Optimizer, records: Sequence[ParameterRecord]) -> list[list[ParameterRecord]]:
    """Point `optimizer` at this rank's pieces, in place; carry over state it already has. Local.

    Returns the records of each parameter group, in the group's order.

    Raises:
        ValueError: see `check_optimizer`; nothing has been changed then.
    """
    check_optimizer(optimizer, records)
    stepped = [_records_of(group, records) for group in optimizer.param_groups]
    list_pieces(optimizer, stepped)
    return stepped


def shard_new_groups(optimizer: Optimizer, stepped: list[list[ParameterRecord]],
                     records: Sequence[ParameterRecord]) -> None:
    """Take over parameter groups that were added (`add_param_group`) since `stepped` was made, and add to it. Local.

    Raises:
        ValueError: a parameter is not the model's, or in the optimizer already.
    """
    if len(optimizer.param_groups) == len(stepped):
        return
    taken = {record for group in stepped for record in group}
    for number in range(len(stepped), len(optimizer.param_groups)):
        group = optimizer.param_groups[number]
        _check_group(group, number, records)
        ids = {id(parameter) for parameter in group["params"]}
        twice = [record.name for record in taken if id(record.parameter) in ids]
        if twice:
            raise ValueError(f"optimizer group {number}: parameters {twice} are in an earlier group too; fix: one "
                             "group each")
        stepped.append(_records_of(group, records))
    list_pieces(optimizer, stepped)


def refuse_edited_groups(optimizer: Optimizer, stepped: Sequence[Sequence[ParameterRecord]]) -> None:
    """Raise ValueError if parameters were put into a group, or taken out, by editing its list."""
    for number, (group, group_records) in enumerate(zip(optimizer.param_groups, stepped, strict=False)):
        expected = sum(record.position in record.group.masters for record in group_records)
        if len(group["params"]) != expected:
            raise ValueError(f"optimizer group {number} has {len(group['params'])} tensors, the engine gave it "
                             f"{expected}: its list of parameters was edited; fix: optimizer.add_param_group(...)")


def list_pieces(optimizer: Optimizer, stepped: Sequence[Sequence[ParameterRecord]]) -> None:
    """Set each group's "params" to the pieces that its records have on this rank, with the state they came with."""
    for group, group_records in zip(optimizer.param_groups, stepped, strict=False):
        group["params"] = []
        for record in group_records:
            if not record.group.trainable:
                continue  # frozen: no piece, and its state waits
            state = optimizer.state.pop(record.parameter, None)
            piece = record.group.masters.get(record.position)
            if piece is None:
                continue
            group["params"].append(piece)
            if state is not None:
                optimizer.state[piece] = slice_state(record, state, piece)


def _records_of(group: dict[str, Any], records: Sequence[ParameterRecord]) -> list[ParameterRecord]:
    """The records of a group's parameters, frozen ones too: they keep their number in saved state."""
    by_parameter = {id(record.parameter): record for record in records}
    return [by_parameter[id(parameter)] for parameter in group["params"]]


def check_optimizer(optimizer: Optimizer, records: Sequence[ParameterRecord]) -> None:
    """Raise ValueError if it is not element-wise, or holds a tensor that is no parameter of the model."""
    refuse_whole_tensor(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        _check_group(group, number, records)


def _check_group(group: dict[str, Any], number: int, records: Sequence[ParameterRecord]) -> None:
    known = {id(record.parameter) for record in records}
    for place, parameter in enumerate(group["params"]):
        if id(parameter) not in known:
            raise ValueError(
                f"optimizer group {number}, parameter {place} (shape {tuple(parameter.shape)}) is not a parameter of "
                "the model given to the engine; fix: build the optimizer from model.parameters() after the model has "
                "its final modules")


def refuse_whole_tensor(optimizer: Optimizer) -> None:
    """Raise ValueError unless `optimizer` treats every element alone."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim") and name in ELEMENTWISE:
        return
    allowed = (f"allowed are element-wise optimizers ({', '.join(sorted(ELEMENTWISE))} of torch.optim, and others "
               "that give the same numbers on a tensor and on its pieces)")
    if name in WHOLE_TENSOR:
        raise ValueError(f"optimizer={name} looks at whole tensors and cannot run on pieces of them; {allowed}")
    try:
        difference = _split_difference(optimizer)
    except Exception as error:
        raise ValueError(f"optimizer={name} could not be tried on a split tensor ({type(error).__name__}: {error}); "
                         f"{allowed}") from error
    if difference > 1e-6:
        raise ValueError(f"optimizer={name} gives other numbers on a split tensor (difference {difference:.1e}), so it "
                         f"looks at whole tensors; {allowed}")


def _split_difference(optimizer: Optimizer) -> float:
    """Largest difference between stepping a 6 x 8 tensor and stepping two halves of it, over three updates."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 8, generator=generator)
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(start.reshape(-1)[:21].clone()), nn.Parameter(start.reshape(-1)[21:].clone())]
    options = {key: value for key, value in optimizer.defaults.items() if key != "fused"}
    one, two = type(optimizer)([whole], **options), type(optimizer)(halves, **options)
    for _ in range(3):
        grad = torch.randn(6, 8, generator=generator)
        whole.grad = grad
        halves[0].grad, halves[1].grad = grad.reshape(-1)[:21].clone(), grad.reshape(-1)[21:].clone()
        one.step()
        two.step()
    joined = torch.cat([half.detach() for half in halves])
    return float((whole.detach().reshape(-1) - joined).abs().max())
