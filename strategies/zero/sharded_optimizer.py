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
    by_parameter = {id(record.parameter): record for record in records}
    stepped: list[list[ParameterRecord]] = []
    old_state = dict(optimizer.state)
    new_state: list[tuple[nn.Parameter, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        pieces = []
        stepped.append([])
        for parameter in group["params"]:
            record = by_parameter[id(parameter)]
            stepped[-1].append(record)  # frozen ones too: they keep their number in saved state, and have no piece
            piece = record.group.masters.get(record.position)
            if piece is None:
                continue
            pieces.append(piece)
            if parameter in old_state:
                new_state.append((piece, slice_state(record, old_state[parameter], piece)))
        group["params"] = pieces
    optimizer.state.clear()
    for piece, state in new_state:
        optimizer.state[piece] = state
    return stepped


def check_optimizer(optimizer: Optimizer, records: Sequence[ParameterRecord]) -> None:
    """Raise ValueError if it is not element-wise, or holds a tensor that is no parameter of the model."""
    refuse_whole_tensor(optimizer)
    known = {id(record.parameter) for record in records}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"optimizer group {number}, parameter {place} (shape {tuple(parameter.shape)}) is not a parameter "
                    "of the model given to the engine; fix: build the optimizer from model.parameters() after the "
                    "model has its final modules")


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
