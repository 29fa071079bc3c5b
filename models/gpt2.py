"""GPT-2, with the architecture, parameter names and layout of Hugging Face's GPT2LMHeadModel.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; names from transformers'
modeling_gpt2.py, so that weights travel both ways without conversion. Single-device code: nothing here knows of ranks.
Letters in names: B batch, T positions, D width, H heads, d width of a head, S positions attended to, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cross_entropy import linear_cross_entropy_sum
from models.activation_checkpointing import MODES, run_block
from models.kv_cache import KVCache, LayerCache

INIT_STD = 0.02


class Conv1D(nn.Module):
    """A linear layer whose weight is stored [in, out], as GPT-2's released checkpoints have it."""

    def __init__(self, *, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_normal(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, *, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.c_attn = Conv1D(in_features=hidden_size, out_features=3 * hidden_size)
        self.c_proj = Conv1D(in_features=hidden_size, out_features=hidden_size)

    def forward(self, hidden_BTD: Tensor, mask: Tensor | None, cache: LayerCache | None) -> Tensor:
        B, T, D = hidden_BTD.shape
        # Views only: the kernels of scaled_dot_product_attention take strides.
        qkv = self.c_attn(hidden_BTD).view(B, T, 3, self.num_heads, D // self.num_heads)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        causal = mask is None and T > 1
        if cache is not None:
            key, value = cache.append(key, value)
        mixed_BHTd = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, dropout_p=self.dropout if self.training else 0.0
        )
        mixed_BTD = mixed_BHTd.transpose(1, 2).reshape(B, T, D)
        return F.dropout(self.c_proj(mixed_BTD), self.dropout, self.training)


class Mlp(nn.Module):
    """Two linear layers, four times the width between them, GELU in its tanh form (Hugging Face's gelu_new)."""

    def __init__(self, *, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.c_fc = Conv1D(in_features=hidden_size, out_features=4 * hidden_size)
        self.c_proj = Conv1D(in_features=4 * hidden_size, out_features=hidden_size)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = self.c_proj(F.gelu(self.c_fc(hidden_BTD), approximate="tanh"))
        return F.dropout(hidden_BTD, self.dropout, self.training)


class Block(nn.Module):
    """One transformer block, the unit ZeRO gathers and frees together."""

    def __init__(self, *, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.attn = Attention(hidden_size=hidden_size, num_heads=num_heads, dropout=dropout)
        self.ln_2 = nn.LayerNorm(hidden_size, eps=1e-5)
        self.mlp = Mlp(hidden_size=hidden_size, dropout=dropout)

    def forward(self, hidden_BTD: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """`mask` is boolean, broadcast to [B, H, T, S], True where a query may look; None is plain causal."""
        hidden_BTD = hidden_BTD + self.attn(self.ln_1(hidden_BTD), mask, cache)
        return hidden_BTD + self.mlp(self.ln_2(hidden_BTD))


class GPT2(nn.Module):
    """The whole model, output head tied to the token embedding.

    `activation_checkpointing` is one of "none", "full", "selective" (see models/activation_checkpointing.py).
    `loss_chunk_tokens` bounds the tokens whose logits the loss holds at once; None holds all. Raises ValueError for
    sizes that do not fit each other. May be built on the meta device; `models.initialise` then fills it.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_seq_len: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        dropout: float = 0.0,
        activation_checkpointing: str = "none",
        loss_chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.hidden_size, self.num_layers, self.num_heads = hidden_size, num_layers, num_heads
        self.dropout = dropout
        self.activation_checkpointing = activation_checkpointing
        self.loss_chunk_tokens = loss_chunk_tokens
        self._check_sizes()
        blocks = [Block(hidden_size=hidden_size, num_heads=num_heads, dropout=dropout) for _ in range(num_layers)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding.from_pretrained(_normal(vocab_size, hidden_size), freeze=False),
                "wpe": nn.Embedding.from_pretrained(_normal(max_seq_len, hidden_size), freeze=False),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(hidden_size, eps=1e-5),
            }
        )
        # On the meta device, because its own weight is replaced at once.
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, device="meta")
        self.tie_weights()

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size % self.num_heads:
            fitting = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
            nearest = min(fitting, key=lambda n: abs(n - self.num_heads))
            raise ValueError(
                f"num_heads={self.num_heads} must divide hidden_size={self.hidden_size}; nearest that does: {nearest}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.activation_checkpointing not in MODES:
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r} must be one of {', '.join(MODES)}"
            )
        if self.loss_chunk_tokens is not None and self.loss_chunk_tokens < 1:
            raise ValueError(f"loss_chunk_tokens={self.loss_chunk_tokens} must be at least 1, or None for all at once")

    def tie_weights(self) -> None:
        """Make the output head's weight the very Parameter of the token embedding."""
        self.lm_head.weight = self.transformer.wte.weight

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> GPT2:
        """As nn.Module's, which alone would leave the two tied names with a Parameter each."""
        super().to_empty(device=device, recurse=recurse)
        self.tie_weights()
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        padding_B: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [B, T, V] without labels; with labels the summed cross-entropy, an fp32 scalar.

        tokens_BT and labels_BT are integers. labels_BT[b, t] is the token that follows tokens_BT[b, t]: shifting is the
        data loader's work; -100 counts for nothing, and a batch of nothing else gives 0 with zero gradients.
        `cache` holds the positions before tokens_BT and is extended by them. `padding_B` counts the padding tokens at
        the left of each row (with a cache: given to the cache). `last_only` returns the last position's logits alone,
        [B, 1, V]. Raises ValueError when positions run past max_seq_len or the cache's capacity.
        """
        hidden_BTD = self._hidden(tokens_BT, cache, padding_B)
        if labels_BT is not None:
            if labels_BT.shape != tokens_BT.shape:
                raise ValueError(f"labels {tuple(labels_BT.shape)} must be shaped as tokens {tuple(tokens_BT.shape)}")
            return linear_cross_entropy_sum(
                hidden_BTD.flatten(0, 1), self.lm_head.weight, labels_BT.flatten(), chunk_tokens=self.loss_chunk_tokens
            )
        return self.lm_head(hidden_BTD[:, -1:] if last_only else hidden_BTD)

    def _hidden(self, tokens_BT: Tensor, cache: KVCache | None, padding_B: Tensor | None) -> Tensor:
        """What the output head reads, [B, T, D]."""
        num_past = cache.length if cache is not None else 0
        self._check_length(num_past, tokens_BT.shape[1], cache)
        if cache is not None:
            padding_B = cache.padding_B
        positions, mask = _positions_and_mask(num_past, tokens_BT.shape[1], padding_B, tokens_BT.device)
        hidden_BTD = self.transformer.wte(tokens_BT) + self.transformer.wpe(positions)
        hidden_BTD = F.dropout(hidden_BTD, self.dropout, self.training)
        for index, block in enumerate(self.transformer.h):
            layer_cache = cache.layers[index] if cache is not None else None
            hidden_BTD = run_block(
                block, hidden_BTD, mask, layer_cache, mode=self.activation_checkpointing, random=self.dropout > 0
            )
        return self.transformer.ln_f(hidden_BTD)

    def _check_length(self, num_past: int, num_new: int, cache: KVCache | None) -> None:
        if num_past + num_new > self.max_seq_len:
            raise ValueError(
                f"{num_past + num_new} positions exceed max_seq_len={self.max_seq_len}; shorten the sequence or build "
                "the model with a larger max_seq_len"
            )
        if cache is not None and num_past + num_new > cache.capacity:
            raise ValueError(f"{num_past + num_new} positions exceed the cache's capacity={cache.capacity}")

    def zero_units(self) -> list[tuple[str, nn.Module]]:
        """(qualified name, block) in forward order; what is in no block belongs to the root unit."""
        return [(f"transformer.h.{index}", block) for index, block in enumerate(self.transformer.h)]

    def num_flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token, a multiply-add counted as two.

        Formula of PaLM, appendix B (arXiv:2204.02311): 6 per weight that takes part in a matrix product, the tied head
        included, and 12 * layers * width * seq_len for attention scores and their use, not halved for causality.
        Recomputation by activation checkpointing is not counted.
        """
        weights = 12 * self.num_layers * self.hidden_size**2 + self.vocab_size * self.hidden_size
        return 6 * weights + 12 * self.num_layers * self.hidden_size * seq_len


def _normal(rows: int, columns: int) -> Tensor:
    """Weights from torch's global generator, for who builds a model without `models.initialise`."""
    weight = torch.empty(rows, columns)
    # Drawing on the meta device would do nothing, and import 900 modules of torch's compiler (1.1 s) to do it.
    return weight if weight.is_meta else weight.normal_(0.0, INIT_STD)


def _positions_and_mask(
    num_past: int, num_new: int, padding_B: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Position ids [T] or [B, T], and the mask of Block.forward for T new tokens after `num_past` cached ones."""
    queries_T = torch.arange(num_past, num_past + num_new, device=device)
    if padding_B is None and (num_past == 0 or num_new == 1):
        return queries_T, None
    keys_S = torch.arange(num_past + num_new, device=device)
    mask_TS = keys_S <= queries_T[:, None]
    if padding_B is None:
        return queries_T, mask_TS
    padding_B = padding_B.to(device)
    # A padding token sees itself: a query that sees nothing makes softmax return NaN.
    mask_BTS = (mask_TS & (keys_S >= padding_B[:, None, None])) | (keys_S == queries_T[:, None])
    return (queries_T - padding_B[:, None]).clamp(min=0), mask_BTS[:, None]
