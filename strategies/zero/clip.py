"""Norm and clipping of sharded gradients: each element counted once, the same number on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from strategies.collectives import Communicator


def global_norm(pieces: Sequence[nn.Parameter], *, norm_type: float, axis: Communicator, sharded: bool,
                device: torch.device) -> Tensor:
    """p-norm of the gradients of `pieces` over all ranks that hold different pieces (fp64 scalar).

    Collective over `axis`. `sharded=False`: every rank holds everything, and the local norm is the norm.
    """
    grads = [piece.grad for piece in pieces if piece.grad is not None]
    local = get_total_norm(grads, norm_type).to(device, torch.float64)
    if not sharded:
        return local
    if math.isinf(norm_type):
        return axis.maximum(local.reshape(1), what="gradient norm")[0]
    return axis.sum(local.pow(norm_type).reshape(1), what="gradient norm")[0].pow(1.0 / norm_type)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is infinite or NaN: the largest absolute value, which either one shows in. Local."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return not filled or math.isfinite(get_total_norm(filled, math.inf))


def clip_by_norm(pieces: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients so that their norm is at most `max_norm` (torch.nn.utils.clip_grad_norm_'s formula)."""
    grads = [piece.grad for piece in pieces if piece.grad is not None]
    if grads:
        clip_grads_with_norm_(pieces, max_norm, norm.to(grads[0].dtype.to_real()))


def clip_by_value(pieces: Sequence[nn.Parameter], limit: float) -> None:
    """Bound every gradient element to [-limit, limit]."""
    for piece in pieces:
        if piece.grad is not None:
            piece.grad.clamp_(-limit, limit)
