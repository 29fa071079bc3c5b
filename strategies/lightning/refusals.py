"""What a Trainer can ask for that sharding makes wrong: refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim import Optimizer


def refuse_callbacks(callbacks: Sequence[Callback], *, rests_sharded: bool, masters_apart: bool) -> None:
    """Raise ValueError for a callback that would go wrong quietly.

    Args:
        rests_sharded: parameters have no value between steps (stage 3, several ranks).
        masters_apart: the optimizer steps fp32 copies of the module's parameters.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise ValueError(f"callback {name}: it unfreezes parameters and gives them to the optimizer during a fit, "
                             "after ZeroStrategy has laid out gradients and optimizer state; fix: freeze with "
                             "requires_grad_() before fit, change it and call fit again")
        if isinstance(callback, ModelPruning):
            raise ValueError(f"callback {name}: it replaces parameters during a fit, after ZeroStrategy has sharded "
                             "them; fix: prune before or after the fit")
        if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            continue
        if rests_sharded:
            raise ValueError(f"callback {name}: it copies and averages whole parameters, which rest sharded under "
                             "stage 3; fix: zero stage 0, 1 or 2")
        if masters_apart:
            raise ValueError(f"callback {name}: it writes averages into the module's bf16 parameters, which the fp32 "
                             "masters do not see; fix: precision='32-true'")


def refuse_new_parameters(optimizer: Optimizer, pieces: frozenset[int]) -> None:
    """Raise RuntimeError if parameters joined `optimizer` since the fit was set up: an update would miss them.

    Args:
        pieces: ids of the parameters `optimizer` was set up with.
    """
    for number, group in enumerate(optimizer.param_groups):
        if not all(id(parameter) in pieces for parameter in group["params"]):
            raise RuntimeError(f"optimizer group {number} got parameters after the fit was set up: no gradient would "
                               "reach them; fix: return all groups from configure_optimizers, or end the fit and start "
                               "another")
