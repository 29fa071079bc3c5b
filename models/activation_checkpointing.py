"""What a block keeps from forward for backward, and what backward computes again.

- "none": every intermediate result is kept.
- "full": the block's input is kept, the block runs again in backward (Chen et al. 2016, arXiv:1604.06174).
- "selective": results of matrix products and attention are kept too; norms, activations and additions, cheap to compute
  and large to keep, run again (Korthikanti et al. 2022, arXiv:2205.05198, by kind of operation rather than by layer).

The block is always called as `block(...)`, so that hooks on it fire in the second run as well. That run ends at the
last value backward needs, by an exception inside the block: forward hooks that run *after* it do not fire then.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from models.kv_cache import LayerCache

MODES = ("none", "full", "selective")

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# Fused attention with dropout takes random numbers. It is kept and does not run again, so a dropout after it that did
# run again would draw other numbers than in forward. On a GPU this is the one operation dropout consists of; on a CPU
# attention with dropout is not fused, and everything random runs again in order.
_RANDOM = ("native_dropout",)

_KEPT = [getattr(torch.ops.aten, name).default for name in _MATRIX_PRODUCTS + _ATTENTION + _RANDOM]


def run_block(
    block: nn.Module, hidden_BTD: Tensor, mask: Tensor | None, cache: LayerCache | None, *, mode: str, random: bool
) -> Tensor:
    """`block(hidden_BTD, mask, cache)`, checkpointed as `mode` says when gradients are recorded.

    `random` says that the block draws random numbers: the generators' states are then saved and replayed.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return block(hidden_BTD, mask, cache)
    options = {"use_reentrant": False, "preserve_rng_state": random and block.training}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
    return checkpoint(block, hidden_BTD, mask, cache, **options)
