"""Arithmetic types: what computes, what the optimizer keeps, what gradients are summed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GRADIENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """The types of one run.

    `compute=None` computes in the master type. Masters are at least fp32: 16-bit parameters are widened, fp64 stays.
    Gradients are summed over micro-batches and ranks in `gradient`, or the master type where that is wider than fp32.
    """

    name: str
    compute: torch.dtype | None
    gradient: torch.dtype = torch.float32

    @classmethod
    def of(cls, name: str, *, gradient: str = "fp32") -> PrecisionPolicy:
        """The policy called `fp32` or `bf16`. Raises ValueError for any other name."""
        computes = {"fp32": None, "bf16": torch.bfloat16}
        if name not in computes:
            raise ValueError(f"precision={name!r}: allowed are {', '.join(computes)}")
        if gradient not in _GRADIENT_DTYPES:
            raise ValueError(f"gradient_dtype={gradient!r}: allowed are {', '.join(_GRADIENT_DTYPES)}")
        return cls(name=name, compute=computes[name], gradient=_GRADIENT_DTYPES[gradient])

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
