"""Whole gradients on the module's own parameters, for the hooks that look for them there.

The engine takes gradients away as they arrive, so `parameter.grad` is None. Code written for one device reads it all
the same, in `on_before_optimizer_step` or in a `configure_gradient_clipping` of its own, and would quietly find
nothing. Where a module or callback has such a hook, gradients are made whole for its duration and what it left is taken
back. That costs one copy of all gradients per rank; without such a hook nothing is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

if TYPE_CHECKING:
    from strategies.engine import Engine
    from strategies.lightning.zero_strategy import ZeroStrategy
    from strategies.zero.record import ParameterRecord


class ModuleGradients:
    """A context: inside, `parameter.grad` is the whole gradient in the gradient type. Collective to enter.

    Args:
        for_clipping: gradients stay whole until the module's own clipping has run.
    """

    def __init__(self, engine: Engine | None, *, for_clipping: bool) -> None:
        self.for_clipping = for_clipping
        self._engine = engine
        self._given: list[tuple[ParameterRecord, torch.dtype | None]] = []

    @classmethod
    def for_hooks_of(cls, module: pl.LightningModule, strategy: ZeroStrategy) -> ModuleGradients:
        """What the hooks of `module` and its Trainer's callbacks need; nothing for a module that drives the engine."""
        clips = _overrides(module, pl.LightningModule, "configure_gradient_clipping")
        looks = _overrides(module, pl.LightningModule, "on_before_optimizer_step") or any(
            _overrides(callback, pl.Callback, "on_before_optimizer_step") for callback in module.trainer.callbacks)
        needed = (clips or looks) and not strategy.is_driven
        return cls(strategy.engine if needed else None, for_clipping=clips)

    def __enter__(self) -> ModuleGradients:
        if self._engine is None:
            return self
        gradients = self._engine.gradients()
        for record in self._engine.records:
            gradient = gradients.get(record.name)
            if gradient is None:
                continue
            parameter = record.parameter
            self._given.append((record, parameter.grad_dtype))
            parameter.grad_dtype = gradient.dtype  # fp32 gradients of bf16 parameters
            parameter.grad = gradient
        return self

    def take_back(self) -> None:
        """Give each optimizer piece its share of the gradients as they are now; a second call does nothing. Local."""
        given, self._given = self._given, []
        for record, grad_dtype in given:
            gradient, record.parameter.grad = record.parameter.grad, None
            record.parameter.grad_dtype = grad_dtype
            piece = record.group.masters.get(record.position)
            if piece is None:
                continue
            overlap = record.group.layout.overlap(record.position, record.group.optimizer_range)
            if gradient is None or overlap is None:
                piece.grad = None
            elif piece.grad is not None:
                piece.grad.copy_(gradient.reshape(-1)[overlap.in_parameter])

    def __exit__(self, *_exception: Any) -> None:
        self.take_back()


def _overrides(instance: Any, base: type, name: str) -> bool:
    return name in vars(instance) or getattr(type(instance), name) is not getattr(base, name)
