"""Arithmetic types: what computes, what the optimizer keeps, what gradients are summed in."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.loss_scale import LossScaling

ON_NONFINITE = ("skip", "stop")
_GRADIENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """The types of one run.

    `compute=None` computes in the master type. Masters are at least fp32: 16-bit parameters are widened, fp64 stays.
    Gradients are summed over micro-batches and ranks in `gradient`, or the master type where that is wider than fp32.
    `loss_scale`: losses are scaled, gradients unscaled. `on_nonfinite`: an update whose gradients are not all finite is
    skipped, or stops the run (not under a loss scale, where an overflow is ordinary). More than
    `max_skipped_steps` skips in a row stop the run.
    """

    name: str
    compute: torch.dtype | None
    gradient: torch.dtype = torch.float32
    loss_scale: LossScaling | None = None
    on_nonfinite: str = "skip"
    max_skipped_steps: int = 20

    def __post_init__(self) -> None:
        if self.on_nonfinite not in ON_NONFINITE:
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r}: allowed are {', '.join(ON_NONFINITE)}")
        limit = self.max_skipped_steps
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ValueError(f"max_skipped_steps={limit!r}: allowed is a whole number from 0")
        if self.loss_scale is not None and self.on_nonfinite == "stop":
            raise ValueError("on_nonfinite='stop' with a loss scale: an overflow is how the scale finds its value; "
                             "allowed is skip; fix: max_skipped_steps limits skips in a row")
        if self.compute == torch.float16 and self.loss_scale is None:
            raise ValueError("loss_scale=None with fp16: small gradients would be zero; fix: LossScaling()")

    @classmethod
    def of(cls, name: str, *, gradient: str = "fp32", loss_scale: LossScaling | None = None,
           on_nonfinite: str = "skip", max_skipped_steps: int = 20) -> PrecisionPolicy:
        """The policy called `fp32`, `bf16` or `fp16` (with a loss scale, by default `LossScaling()`).

        Raises:
            ValueError: naming the argument, its value and what is allowed.
        """
        computes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
        if name not in computes:
            raise ValueError(f"precision={name!r}: allowed are {', '.join(computes)}")
        if gradient not in _GRADIENT_DTYPES:
            raise ValueError(f"gradient_dtype={gradient!r}: allowed are {', '.join(_GRADIENT_DTYPES)}")
        if name == "fp16" and gradient != "fp32":
            raise ValueError(f"gradient_dtype={gradient!r}: allowed is fp32 with precision='fp16'")
        if name != "fp16" and loss_scale is not None:
            raise ValueError(f"loss_scale with precision={name!r}: only fp16 needs one; fix: leave it None")
        if name == "fp16" and loss_scale is None:
            loss_scale = LossScaling()
        return cls(name=name, compute=computes[name], gradient=_GRADIENT_DTYPES[gradient], loss_scale=loss_scale,
                   on_nonfinite=on_nonfinite, max_skipped_steps=max_skipped_steps)

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the optimizer's copy of a parameter of `dtype`."""
        return torch.promote_types(dtype, torch.float32)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type a parameter of `dtype` has in forward and backward."""
        narrow = self.compute is not None and not dtype.is_complex  # there is no complex bf16
        return self.compute if narrow else self.master_dtype(dtype)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type the gradient of a parameter of `dtype` is summed in."""
        master = self.master_dtype(dtype)
        return self.gradient if master == torch.float32 else master


def place_inputs(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Tensors in `value` (also in dicts, lists and tuples) on `device`, floating ones in `dtype` if there is one."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() and dtype else value.dtype)
    if isinstance(value, dict):
        cast = copy.copy(value)  # keeps the type: Hugging Face passes its outputs on as inputs
        for key, item in value.items():
            cast[key] = place_inputs(item, device, dtype)
        return cast
    if type(value) in (tuple, list):
        return type(value)(place_inputs(item, device, dtype) for item in value)
    return value
