"""Every stage, rank count, accumulation and precision equals one process: gradients and parameters, every update."""

from __future__ import annotations

import functools

import pytest
import torch

from strategies.loss_scale import LossScaling
from strategies.precision import PrecisionPolicy
from support.oracle import Trace, assert_same, train_engine, train_oracle
from support.ranks import run_ranks
from support.small_models import MODELS, make

SCALE = 256.0  # of losses in fp16: no gradient here overflows


def adamw(params):
    # eps: Adam divides by it where a gradient is zero up to rounding, which would turn 1e-16 into 1e-8.
    return torch.optim.AdamW(params, lr=3e-2, weight_decay=0.1, eps=1e-4)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def engine_trace(rank: int, model: str, optimizer, options: dict) -> Trace:
    dtype = options.get("dtype", torch.float32)
    return train_engine(rank, functools.partial(make, model, seed=rank if options.pop("own_seed", False) else 0,
                                                dtype=dtype), optimizer, **options)


def compare(model: str, *, world: int, stage: int, accumulate: int, steps: int = 4, optimizer=adamw, atol: float,
            dtype: torch.dtype = torch.float32, **options) -> None:
    oracle_options = {k: options[k] for k in ("clip_norm", "clip_value") if k in options}
    precision = options.get("precision")
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    expected = train_oracle(functools.partial(make, model, dtype=dtype), optimizer, world_size=world,
                            accumulate=accumulate, steps=steps, compute=compute, dtype=dtype,
                            loss_scale=SCALE if precision == "fp16" else 1.0, **oracle_options)
    if precision == "fp16":
        options["precision"] = PrecisionPolicy.of("fp16", loss_scale=LossScaling(initial=SCALE))
    traces = run_ranks(world, engine_trace, model, optimizer,
                       {"world_size": world, "accumulate": accumulate, "steps": steps, "stage": stage, "dtype": dtype,
                        **options})
    for trace in traces:
        assert_same(trace, expected, atol=atol)
    for trace in traces[1:]:
        assert_same(trace, traces[0], atol=0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_fp64_equals_one_process_to_ten_decimals(world, stage, accumulate):
    """C02: LayerNorm, AdamW with decay, clipping, accumulation."""
    compare("stack", world=world, stage=stage, accumulate=accumulate, dtype=torch.float64, atol=1e-10, clip_norm=0.5)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_fp32_equals_one_process(world, stage, accumulate):
    compare("stack", world=world, stage=stage, accumulate=accumulate, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_compute_with_fp32_masters_equals_one_process(world, stage, accumulate, precision):
    # SGD: Adam turns a rounding of a tiny gradient into a full step.
    compare("stack", world=world, stage=stage, accumulate=accumulate, precision=precision, optimizer=sgd, steps=3,
            atol=2e-4)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "stack"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_kind_of_model_equals_one_process(world, stage, model):
    """Among them C46: sizes of zero first, in the middle and last ("tiny")."""
    atol = 1e-6 if model == "mixed" else 1e-10  # it has fp32 parameters whatever the type
    compare(model, world=world, stage=stage, accumulate=2, dtype=torch.float64, atol=atol, clip_norm=0.5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_the_last_hint_the_numbers_are_the_same(stage):
    compare("stack", world=2, stage=stage, accumulate=2, dtype=torch.float64, atol=1e-10, mark_last=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_by_value_equals_one_process(stage):
    compare("stack", world=2, stage=stage, accumulate=1, dtype=torch.float64, atol=1e-10, clip_value=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_built_from_different_seeds_start_from_the_first_rank(stage):
    """C88; buffers: test_zero_buffers.py."""
    compare("stack", world=2, stage=stage, accumulate=1, dtype=torch.float64, atol=1e-10, own_seed=True)
