"""From a config to objects: the only place that knows both.

Everything that depends on the seed depends on it alone: weights by parameter name, data order by step. Neither sees the
number of ranks, the stage or the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from framework.config import (
    AdagradOptimizer,
    AdamOptimizer,
    Fp16Precision,
    GptModel,
    Parallel,
    RmspropOptimizer,
    RunConfig,
    SgdOptimizer,
)
from framework.data.source import DataSource
from framework.data.step_loader import StepLoader
from framework.weights import read_weights
from models.gpt2 import GPT2
from models.initialise import initialise
from strategies.engine import Engine
from strategies.loss_scale import LossScaling
from strategies.mesh import Mesh, MeshShape
from strategies.precision import PrecisionPolicy

if TYPE_CHECKING:
    from strategies.lightning.zero_strategy import ZeroStrategy


def mesh_shape(parallel: Parallel) -> MeshShape:
    """The mesh of resolved `parallel` settings."""
    assert isinstance(parallel.data, int), "parallel.data is resolved before anything is built"
    return MeshShape(pipeline=parallel.pipeline, data_replicate=parallel.data_replicate,
                     data_shard=parallel.data // parallel.data_replicate, sequence=parallel.sequence,
                     tensor=parallel.tensor)


def build_model(config: GptModel, *, seed: int) -> GPT2:
    """The model on the CPU, drawn from the seed or read from `config.weights`."""
    with torch.device("meta"):  # no draw that is thrown away
        model = GPT2(vocab_size=config.vocab_size, max_seq_len=config.max_seq_len, hidden_size=config.hidden_size,
                     num_layers=config.num_layers, num_heads=config.num_heads, dropout=config.dropout,
                     activation_checkpointing=config.activation_checkpointing,
                     loss_chunk_tokens=config.loss_chunk_tokens)
    model.to_empty(device="cpu")
    if config.weights is None:
        initialise(model, seed=seed)
    else:
        read_weights(model, Path(config.weights))
    return model


def build_strategy(config: RunConfig) -> ZeroStrategy:
    """The Lightning strategy of a training run. Gradients are summed: the loss is divided by global token counts."""
    from strategies.lightning.zero_strategy import ZeroStrategy  # Lightning takes seconds to import

    return ZeroStrategy(stage=config.zero.stage, precision=build_precision(config), mesh=mesh_shape(config.parallel),
                        prefetch_units=config.zero.prefetch_units, average_gradients=False,
                        timeout_s=config.trainer.timeout_s)


def build_engine(config: RunConfig, model: nn.Module, mesh: Mesh) -> Engine:
    """The engine of a run that does not train. Collective over the world."""
    return Engine(model, zero=config.zero.stage, precision=build_precision(config), mesh=mesh,
                  prefetch_units=config.zero.prefetch_units)


def build_precision(config: RunConfig) -> PrecisionPolicy:
    precision = config.precision
    if isinstance(precision, Fp16Precision):
        scaling = LossScaling(initial=precision.initial_scale, growth_interval=precision.growth_interval,
                              hysteresis=precision.hysteresis, minimum=precision.min_scale)
        return PrecisionPolicy.of(precision.name, loss_scale=scaling, max_skipped_steps=precision.max_skipped_steps)
    return PrecisionPolicy.of(precision.name, gradient=precision.gradient_dtype, on_nonfinite=precision.on_nonfinite,
                              max_skipped_steps=precision.max_skipped_steps)


def optimizer_maker(config: AdamOptimizer | SgdOptimizer | RmspropOptimizer | AdagradOptimizer
                    ) -> Callable[[nn.Module], Optimizer]:
    """From a model to its optimizer: two groups, matrices with weight decay, biases and norms without."""

    def make(model: nn.Module) -> Optimizer:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ]
        if isinstance(config, AdamOptimizer):
            kind = AdamW if config.name == "adamw" else Adam
            first, second = config.betas
            return kind(groups, lr=config.lr, betas=(first, second), eps=config.eps, fused=True)
        if isinstance(config, SgdOptimizer):
            return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
        if isinstance(config, RmspropOptimizer):
            return RMSprop(groups, lr=config.lr, alpha=config.alpha, eps=config.eps, momentum=config.momentum)
        return Adagrad(groups, lr=config.lr, eps=config.eps, fused=not torch.cuda.is_available())

    return make


def training_loader(config: RunConfig, source: DataSource, *, data_rank: int) -> StepLoader:
    """One entry per update: this data rank's micro-batches."""
    data, (global_size, micro_size) = config.parallel.data, _batch(config)
    assert isinstance(data, int)
    return StepLoader(source.train, global_size=global_size, micro_size=micro_size, data_rank=data_rank,
                      data_size=data, seed=config.seed, num_steps=config.trainer.max_steps)


def validation_loader(config: RunConfig, source: DataSource, *, data_rank: int, steps: int | None) -> StepLoader | None:
    """The first `steps` steps of the validation split, or all of it once; None without a split."""
    if source.validation is None:
        return None
    data, (global_size, micro_size) = config.parallel.data, _batch(config)
    assert isinstance(data, int)
    return StepLoader(source.validation, global_size=global_size, micro_size=micro_size, data_rank=data_rank,
                      data_size=data, seed=config.seed, shuffle=False, once=True, num_steps=steps)


def _batch(config: RunConfig) -> tuple[int, int]:
    assert isinstance(config.batch.global_size, int), "batch.global_size is resolved before anything is built"
    return config.batch.global_size, config.batch.micro_size
