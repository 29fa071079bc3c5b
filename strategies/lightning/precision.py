"""What the Trainer calls a precision plugin: the engine's policy under Lightning's names, and its clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from strategies.precision import PrecisionPolicy

if TYPE_CHECKING:
    from strategies.lightning.zero_strategy import ZeroStrategy

# Lightning's precision strings -> ours. Masters are fp32 in every one of them, so "true" and "mixed" are the same here.
NAMES = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16"}


def policy_for(plugin: Precision) -> PrecisionPolicy:
    """The policy of a plugin that the Trainer made from its `precision=`.

    Raises:
        ValueError: the engine has no such precision.
    """
    if plugin.precision not in NAMES:
        raise ValueError(f"Trainer(precision={plugin.precision!r}): ZeroStrategy has {', '.join(sorted(NAMES))}; "
                         "fix: one of these (bf16 keeps fp32 masters and sums gradients in fp32)")
    return PrecisionPolicy.of(NAMES[plugin.precision])


class ZeroPrecision(Precision):
    """Casts inputs to the compute type; clips by the global norm of the sharded gradients."""

    def __init__(self, strategy: ZeroStrategy, policy: PrecisionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.precision = "32-true" if policy.compute is None else "bf16-mixed"
        self._strategy = strategy

    def convert_input(self, data: Any) -> Any:
        """Floating tensors in the compute type."""
        if self.policy.compute is None:
            return data
        dtype = self.policy.compute
        return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if torch.is_floating_point(t) else t)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Collective over the data axes: the norm of all ranks' pieces, each element once."""
        self._strategy.engine.clip_by_norm(float(clip_val), optimizer=_plain(optimizer))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Bound every element of the closed gradients."""
        self._strategy.engine.clip_by_value(float(clip_val), optimizer=_plain(optimizer))


def _plain(optimizer: Any) -> Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
