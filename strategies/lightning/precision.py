"""What the Trainer calls a precision plugin: the engine's policy under Lightning's names, and its clipping.

Masters are fp32 in every mode. The modes differ in what a module's code meets while it computes:

    precision of the strategy   parameters and floating inputs in the compute type, nothing else
    "bf16-true", "16-true"      the same, and new tensors are of that type by default
    "bf16-mixed", "16-mixed"    parameters of that type, inputs as they come, autocast; modules with parameters
                                get inputs cast, since autocast leaves norms alone and those refuse mixed types
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from strategies.lightning.module_gradients import ModuleGradients
from strategies.precision import PrecisionPolicy
from strategies.zero.hooks import ModuleHook

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from strategies.lightning.zero_strategy import ZeroStrategy

NAMES = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16",
         "16-true": "fp16"}  # Lightning's precision strings -> ours


def policy_for(plugin: Precision) -> PrecisionPolicy:
    """The policy of a plugin that the Trainer made from its `precision=`.

    Raises:
        ValueError: the engine has no such precision, or the plugin is not one of Lightning's.
    """
    allowed = f"allowed are precision={', '.join(sorted(NAMES))}"
    if plugin.precision not in NAMES:
        raise ValueError(f"Trainer(precision={plugin.precision!r}): ZeroStrategy does not have it; {allowed}; "
                         "fix: bf16-mixed (it keeps fp32 masters and sums gradients in fp32)")
    if type(plugin) not in (Precision, HalfPrecision, MixedPrecision):
        raise ValueError(f"Trainer(plugins=[{type(plugin).__name__}]): ZeroStrategy brings its own precision plugin; "
                         f"{allowed}; fix: leave the plugin out")
    return PrecisionPolicy.of(NAMES[plugin.precision])


class ZeroPrecision(Precision):
    """The engine's precision under a Trainer.

    Args:
        mode: a key of NAMES, as the Trainer was told; None where the strategy was.
    """

    def __init__(self, strategy: ZeroStrategy, policy: PrecisionPolicy, *, mode: str | None) -> None:
        super().__init__()
        self.policy = policy
        self.mode = mode if policy.compute is not None else None
        self.precision = "32-true" if policy.compute is None else self.mode or (
            "16-true" if policy.compute == torch.float16 else "bf16-true")
        self._strategy = strategy

    @property
    def _is_mixed(self) -> bool:
        return self.mode in ("bf16-mixed", "16-mixed")

    def convert_input(self, data: Any) -> Any:
        """Floating tensors in the compute type, but under "...-mixed": targets keep their digits there."""
        if self.policy.compute is None or self._is_mixed:
            return data
        return _cast(data, self.policy.compute)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """What a step runs in."""
        if self._is_mixed:
            with torch.autocast(self._strategy.root_device.type, dtype=self.policy.compute):
                yield
        elif self.mode in ("bf16-true", "16-true"):
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.policy.compute)
            try:
                yield
            finally:
                torch.set_default_dtype(before)
        else:
            yield

    def prepare(self, module: nn.Module) -> list[Any]:
        """Once per engine, before it is made: refuse what cannot run; returns handles of the hooks installed."""
        compute = self.policy.compute
        if compute is None:
            return []
        batch_norms = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm)]
        if batch_norms:
            raise ValueError(f"precision={self.precision!r}: BatchNorm {batch_norms} has {compute} weights and fp32 "
                             "statistics, which torch refuses; fix: precision='32-true', or GroupNorm")
        if not self._is_mixed:
            return []
        owners = [child for child in module.modules() if child is not module and
                  any(p.is_floating_point() for p in child.parameters(recurse=False))]
        return [child.register_forward_pre_hook(_InputCast(compute), with_kwargs=True) for child in owners]

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and the counts of updates, into the checkpoint; nothing in a precision without a scale."""
        return self._strategy.engine.guard.state_dict() if self.policy.loss_scale is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them from a checkpoint."""
        self._strategy.engine.guard.load_state_dict(state_dict)

    # -- gradients ------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, for automatic and manual optimization alike."""
        return super().pre_backward(self._strategy.engine.scale_loss(tensor), module)

    def optimizer_step(self, optimizer: Any, model: pl.LightningModule, closure: Any,  # type: ignore[override]
                       **kwargs: Any) -> Any:
        """Closure, hooks and clipping; then the optimizer, unless a gradient is not finite."""
        result = closure()
        self._after_closure(model, optimizer)
        if self._strategy.engine.is_finite:
            optimizer.step(**kwargs)
        return result

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """Hooks that look at gradients, then clipping; a hook of the user's finds whole gradients on the parameters.

        Collective over data_shard where such a hook exists.
        """
        with ModuleGradients.for_hooks_of(model, self._strategy) as gradients:
            self._gradients = gradients
            try:
                super()._after_closure(model, optimizer)
            finally:
                self._gradients = None

    _gradients: ModuleGradients | None = None

    def _clip_gradients(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Between the hooks and the clipping: take back what the hooks made of the gradients."""
        if self._gradients is not None and not self._gradients.for_clipping:
            self._gradients.take_back()
        super()._clip_gradients(model, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Collective over the data axes: the norm of all ranks' pieces, each element once."""
        self._settle()
        self._strategy.engine.clip_by_norm(float(clip_val), optimizer=plain(optimizer))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Bound every element of the closed gradients."""
        self._settle()
        self._strategy.engine.clip_by_value(float(clip_val), optimizer=plain(optimizer))

    def _settle(self) -> None:
        """Gradients final and with the optimizer: manual optimization may clip before anything has closed them."""
        self._strategy.engine.close_gradients()
        if self._gradients is not None:
            self._gradients.take_back()


class _InputCast(ModuleHook):
    """A forward pre-hook: floating inputs in the type of the module's parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(lambda *_: None)
        self._dtype = dtype

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        return _cast(args, self._dtype), _cast(kwargs, self._dtype)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if torch.is_floating_point(t) else t)


def plain(optimizer: Any) -> Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
