"""A training run in one process and plain torch: no engine, no Lightning, none of the framework's loop.

It shares with the framework what is not under test here (the model, the starting weights, the samples of a step) and
does the rest by itself: token mean over the whole batch, clipping, learning rate, validation.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from framework.config import RunConfig
from framework.data.source import DataSource, prepare
from framework.data.step_loader import StepLoader
from models.gpt2 import GPT2
from models.initialise import initialise


@dataclass
class OracleRun:
    """What each update came to, and the model after the last."""

    model: GPT2
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    val_loss: float = math.nan


def oracle_model(config: RunConfig) -> GPT2:
    """The model of a config with its starting weights."""
    model = GPT2(vocab_size=config.model.vocab_size, max_seq_len=config.model.max_seq_len,
                 hidden_size=config.model.hidden_size, num_layers=config.model.num_layers,
                 num_heads=config.model.num_heads)
    initialise(model, seed=config.seed)
    return model


def oracle_source(config: RunConfig, path: Path) -> DataSource:
    """The data of a config, prepared in this process."""
    return prepare(config.dataset, vocab_size=config.model.vocab_size, max_seq_len=config.model.max_seq_len,
                   seed=config.seed, base=path, scratch=path, notify=lambda *_: None,
                   environ={"SHARDLIGHT_CACHE": str(path / "cache")})


def train_oracle(config: RunConfig, source: DataSource, *, steps: int | None = None) -> OracleRun:
    """Run the updates of `config` with AdamW, as one data rank; `steps` stops earlier on the same schedule."""
    run = OracleRun(oracle_model(config))
    named = dict(run.model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in named.values() if p.dim() > 1], "weight_decay": config.optimizer.weight_decay},
         {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0}],
        lr=config.optimizer.lr, betas=tuple(config.optimizer.betas), eps=config.optimizer.eps)
    loader = StepLoader(source.train, global_size=config.batch.global_size, micro_size=config.batch.micro_size,
                        data_rank=0, data_size=1, seed=config.seed)
    applied = 0
    for step in range(steps or config.trainer.max_steps):
        micro_batches = loader.step_batches(step)
        tokens = sum(int((batch.labels_BT != -100).sum()) for batch in micro_batches)
        run.lrs.append(config.optimizer.lr * share_of_peak(config, applied + 1))
        for group in optimizer.param_groups:
            group["lr"] = run.lrs[-1]
        run.losses.append(_gradients(run.model, micro_batches, tokens, config.precision.name) if tokens else 0.0)
        run.tokens.append(tokens)
        run.grad_norms.append(_clip(list(named.values()), config))
        if tokens:
            optimizer.step()
            applied += 1
        optimizer.zero_grad()
    if source.validation is not None:
        run.val_loss = oracle_val_loss(run.model, source, config)
    return run


def share_of_peak(config: RunConfig, update: int) -> float:
    """Learning rate of an update, counted from 1, as a share of the peak: cosine or constant after a linear warm-up."""
    warmup, last, final = config.schedule.warmup_steps, config.trainer.max_steps, config.schedule.final_ratio
    if update <= warmup:
        return update / warmup
    if config.schedule.name == "constant":
        return 1.0
    assert config.schedule.name == "cosine"
    progress = (update - warmup - 1) / (last - warmup - 1)
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def oracle_val_loss(model: GPT2, source: DataSource, config: RunConfig, *, steps: int | None = None) -> float:
    """Token mean over the first `steps` (by default `trainer.val_steps`) batches of the held-out samples."""
    steps = steps or config.trainer.val_steps
    total, tokens = 0.0, 0
    for index in range(min(steps * config.batch.global_size, len(source.validation))):
        inputs_T, labels_T = source.validation[index]
        total += model(inputs_T[None], labels_T[None]).item()
        tokens += int((labels_T != -100).sum())
    return total / tokens if tokens else math.nan


def _gradients(model: GPT2, micro_batches: list, tokens: int, precision: str) -> float:
    """Fill `.grad` with the gradient of the token mean; returns the loss. bf16: on a rounded copy, summed in fp32."""
    total = 0.0
    for batch in micro_batches:
        worker: nn.Module = model if precision == "fp32" else copy.deepcopy(model).to(torch.bfloat16)
        loss = worker(batch.tokens_BT, batch.labels_BT) / tokens
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(worker.parameters())),
                                       strict=True):
            wide = gradient.float()
            parameter.grad = wide if parameter.grad is None else parameter.grad + wide
        total += loss.item()
    return total


def _clip(parameters: list[nn.Parameter], config: RunConfig) -> float:
    limit = config.trainer.gradient_clip_val
    if limit is not None and config.trainer.gradient_clip_algorithm == "norm":
        return float(nn.utils.clip_grad_norm_(parameters, limit))
    norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if limit is not None:
        nn.utils.clip_grad_value_(parameters, limit)
    return norm
