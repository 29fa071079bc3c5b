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


def refuse_callbacks(callbacks: Sequence[Callback], *, rests_sharded: bool, masters_apart: bool) -> None:
    """Raise ValueError for a callback that would go wrong quietly.

    Args:
        rests_sharded: parameters have no value between steps (stage 3, several ranks).
        masters_apart: the optimizer steps fp32 copies of the module's parameters.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise ValueError(f"callback {name}: it looks the optimizer's parameters up in the module, and this rank "
                             "steps pieces of them; fix: a hook of the module, such as on_train_epoch_start, that "
                             "calls requires_grad_() and self.optimizers().add_param_group(...)")
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
