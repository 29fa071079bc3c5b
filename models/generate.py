"""Continue prompts with a model, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.gpt2 import GPT2
from models.initialise import generator_for
from models.kv_cache import KVCache


@torch.no_grad()
def generate(
    model: GPT2,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    stop_token: int | None = None,
    forward: Callable[..., Tensor] | None = None,
    use_cache: bool = True,
    device: torch.device | str | None = None,
) -> list[list[int]]:
    """The continuation of each prompt, without the prompt, at most `max_new_tokens` long.

    `temperature` 0 takes the most likely token; otherwise tokens are drawn, among the `top_k` most likely (0: all), by
    a generator per row that depends on `seed` and the row's number alone: the global generators stay untouched. A row
    ends before `stop_token`. Rows may differ in length and do not influence each other. When prompt and continuation
    outgrow `model.max_seq_len`, the model sees the last `max_seq_len` tokens.
    `forward` is called in place of `model` (an engine around it, say); `device` is where tokens are put, by default the
    device of the model's first parameter. The model is in evaluation mode meanwhile.
    Collective if `forward` is: all its ranks must then pass the same arguments. Raises ValueError for an argument out
    of range.
    """
    _check_arguments(model, prompts, max_new_tokens, temperature, top_k)
    device = device if device is not None else next(model.parameters()).device
    rows = [list(prompt) for prompt in prompts]
    generators = [generator_for(seed, f"sample/{index}") for index in range(len(rows))]
    cache = _make_cache(model, rows, max_new_tokens, device) if use_cache else None
    finished: set[int] = set()
    with _evaluation_mode(model):
        for _ in range(max_new_tokens):
            logits_BV = _next_logits(forward or model, rows, cache, model.max_seq_len, device)
            for index, row in enumerate(rows):
                row.append(_choose(logits_BV[index], temperature, top_k, generators[index]))
                if row[-1] == stop_token:
                    finished.add(index)
            if len(finished) == len(rows):
                break
    return [_until(row[len(prompt) :], stop_token) for row, prompt in zip(rows, prompts, strict=True)]


def _next_logits(
    forward: Callable[..., Tensor], rows: list[list[int]], cache: KVCache | None, max_seq_len: int, device
) -> Tensor:
    """fp32 logits on the CPU of the token that follows each row, [B, V]."""
    longest = max(len(row) for row in rows)
    if cache is not None and longest <= max_seq_len:
        tokens_BT = _pad_left(rows)[0] if cache.length == 0 else torch.tensor([row[-1:] for row in rows])
        logits = forward(tokens_BT.to(device), cache=cache, last_only=True)
    else:
        # A full window slides, and with it every token's position: nothing cached would still hold.
        tokens_BT, padding_B = _pad_left([row[-max_seq_len:] for row in rows])
        padding_B = padding_B.to(device) if padding_B is not None else None
        logits = forward(tokens_BT.to(device), padding_B=padding_B, last_only=True)
    return logits[:, -1].float().cpu()


def _pad_left(rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, longest], and the padding of each row [B]; None when rows are equally long."""
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    # Which token stands for padding does not matter, it is masked.
    tokens = torch.tensor([[0] * count + row for count, row in zip(padding, rows, strict=True)])
    return tokens, torch.tensor(padding) if any(padding) else None


def _make_cache(model: GPT2, rows: list[list[int]], max_new_tokens: int, device) -> KVCache | None:
    longest = max(len(row) for row in rows)
    if longest > model.max_seq_len:
        return None
    padding_B = _pad_left(rows)[1]
    return KVCache(
        num_layers=model.num_layers,
        capacity=min(model.max_seq_len, longest + max_new_tokens),
        padding_B=padding_B.to(device) if padding_B is not None else None,
    )


def _choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    num_candidates = min(top_k, len(logits_V)) if top_k > 0 else len(logits_V)
    values, tokens = logits_V.topk(num_candidates)
    probabilities = torch.softmax(values / temperature, dim=0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def _until(tokens: list[int], stop_token: int | None) -> list[int]:
    return tokens[: tokens.index(stop_token)] if stop_token in tokens else tokens


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Modules that were in training mode are again afterwards, each as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_arguments(
    model: GPT2, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, top_k: int
) -> None:
    if not prompts:
        raise ValueError("prompts is empty; give at least one list of token ids")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{index}] is empty; give at least one token, such as the end-of-text token")
        outside = [token for token in prompt if not 0 <= token < model.vocab_size]
        if outside:
            raise ValueError(
                f"prompts[{index}] has token {outside[0]}; the model's vocabulary is 0 to {model.vocab_size - 1}"
            )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0 (0 takes the most likely token)")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must be at least 0 (0 draws among all tokens)")
