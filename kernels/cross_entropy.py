"""Summed cross-entropy of a linear head, without holding the logits of all tokens.

For a vocabulary of 50k the logits of one sequence outweigh every other activation, and a plain loss keeps them three
times (logits, log-probabilities, gradient). The chunked form keeps one number per token from forward to backward, the
log of the softmax denominator, and computes the logits a second time in backward, a chunk of tokens at a time.

The loss is a sum, not a mean: who calls knows the number of labelled tokens of the whole step over all ranks, and a
batch without any label is then 0 with zero gradients where a mean would be NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_cross_entropy_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum over labelled rows of -log softmax(hidden @ weight.T)[label]: an fp32 scalar.

    hidden_ND and weight_VD are floating point, labels_N integers in [0, V) or `ignore_index`. Softmax and sums are fp32
    whatever the inputs are. `chunk_tokens=None` computes all logits at once; otherwise at most `chunk_tokens` rows of
    logits exist at any time and ignored rows are left out (counting them makes the host wait for the device once).
    Raises ValueError for shapes that do not fit and for a chunk below 1. Not collective.
    """
    _check(hidden_ND, weight_VD, labels_N, chunk_tokens)
    labels_N = labels_N.long()
    if chunk_tokens is None:
        logits_NV = F.linear(hidden_ND, weight_VD).float()
        return F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction="sum")
    if torch.is_autocast_enabled(hidden_ND.device.type):
        # Autocast does not see inside an autograd.Function, so what it would do to a linear layer is done here.
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    labelled = (labels_N != ignore_index).nonzero().squeeze(1)
    if labelled.numel() < labels_N.numel():
        hidden_ND, labels_N = hidden_ND[labelled], labels_N[labelled]
    return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk_tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Rows must all be labelled. Saves its inputs and log-denominators [N], never logits."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int) -> Tensor:
        log_denominator_N = hidden_ND.new_empty(len(labels_N), dtype=torch.float32)
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        buffer = _logits_buffer(hidden_ND, weight_VD, chunk_tokens)
        for rows in _chunks(len(labels_N), chunk_tokens):
            logits = _logits(hidden_ND[rows], weight_VD, buffer)
            label_logits = logits.gather(1, labels_N[rows, None]).squeeze(1)
            largest = logits.amax(1, keepdim=True)
            # In place, because a second copy of a chunk is what the chunk size promised not to have.
            log_denominator = logits.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))
            log_denominator_N[rows] = log_denominator
            total += (log_denominator - label_logits).sum()
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, log_denominator_N)
        ctx.chunk_tokens = chunk_tokens
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor):
        hidden_ND, weight_VD, labels_N, log_denominator_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        # fp32 also for bf16 weights: chunks are summed here. Autograd casts it to the type the weight's gradient has.
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        buffer = _logits_buffer(hidden_ND, weight_VD, ctx.chunk_tokens)
        for rows in _chunks(len(labels_N), ctx.chunk_tokens):
            grad_logits = _logits(hidden_ND[rows], weight_VD, buffer)
            grad_logits.sub_(log_denominator_N[rows, None]).exp_()
            grad_logits.scatter_add_(1, labels_N[rows, None], grad_logits.new_full((len(grad_logits), 1), -1.0))
            grad_logits = grad_logits.mul_(grad_total).to(weight_VD.dtype)
            if needs_hidden:
                torch.mm(grad_logits, weight_VD, out=grad_hidden[rows])
            if needs_weight and weight_VD.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.t(), hidden_ND[rows])
            elif needs_weight:
                grad_weight += grad_logits.t() @ hidden_ND[rows]
        return grad_hidden, grad_weight, None, None


def _check(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int | None) -> None:
    if hidden_ND.dim() != 2 or weight_VD.dim() != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_ND.shape)} and weight {tuple(weight_VD.shape)} must be [tokens, width] and "
            "[vocabulary, width] with one width; flatten batch and sequence first"
        )
    if labels_N.shape != hidden_ND.shape[:1]:
        raise ValueError(f"labels {tuple(labels_N.shape)} must be [{len(hidden_ND)}], one per row of hidden")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1, or None to compute all logits at once")


def _chunks(num_rows: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_rows)) for start in range(0, num_rows, chunk_tokens)]


def _logits_buffer(hidden_ND: Tensor, weight_VD: Tensor, chunk_tokens: int) -> Tensor:
    """One buffer for all chunks: on a CPU freshly mapped pages cost as much as writing them."""
    return hidden_ND.new_empty(min(chunk_tokens, len(hidden_ND)), len(weight_VD))


def _logits(hidden: Tensor, weight_VD: Tensor, buffer: Tensor) -> Tensor:
    """fp32 logits of a chunk [rows, V], which the caller may overwrite."""
    return torch.mm(hidden, weight_VD.t(), out=buffer[: len(hidden)]).float()
