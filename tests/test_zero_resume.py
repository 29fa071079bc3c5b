"""Saved and loaded again, an engine goes on to the bit: fp32 masters, moments, step count and loss scale come back."""

from __future__ import annotations

import io
import math

import pytest
import torch

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import make

BEFORE, AFTER = 6, 3
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(params):
    """Updates so small that 16-bit weights would not show them."""
    return torch.optim.AdamW(params, lr=1e-5, weight_decay=0.1)


def engine_of(stage, precision, model):
    scaling = strategies.LossScaling(initial=2.0**10, growth_interval=4, hysteresis=2) if precision == "fp16" else None
    policy = strategies.PrecisionPolicy.of(precision, loss_scale=scaling)
    return strategies.Engine(model, optimizer=adamw, zero=stage, precision=policy, clip_norm=1.0)


def update(engine, rank, step):
    """One update of two backwards; the second step's overflows on the first rank. Returns everything a save holds."""
    for micro in range(2):
        loss = loss_of(engine(batch(step, rank, micro)))
        engine.backward(loss * math.inf if step == 1 and rank == 0 else loss)
    engine.step()
    return {"model": engine.state_dict(), "optimizer": engine.optimizer_state_dict(),
            "guard": engine.guard.state_dict()}


def resumed(rank, stage, other_stage, precision):
    one = engine_of(stage, precision, make("tied"))
    start = one.state_dict()
    for step in range(BEFORE):
        saved = update(one, rank, step)
    file = io.BytesIO()
    torch.save(saved, file)
    unbroken = [update(one, rank, step) for step in range(BEFORE, BEFORE + AFTER)]

    other_weights = make("tied")
    with torch.no_grad():
        for parameter in other_weights.parameters():
            parameter.add_(0.5)
    two = engine_of(other_stage, precision, other_weights)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    two.load_state_dict(loaded["model"])
    two.load_optimizer_state_dict(loaded["optimizer"])
    two.guard.load_state_dict(loaded["guard"])
    same({"model": two.state_dict(), "optimizer": two.optimizer_state_dict(), "guard": two.guard.state_dict()}, saved)
    for step, expected in enumerate(unbroken, BEFORE):
        found = update(two, rank, step)
        if stage == other_stage:  # another stage sums in another order
            same(found, expected)

    assert (saved["guard"]["applied"], saved["guard"]["skipped"]) == (BEFORE - 1, 1)
    if precision in HALF:
        half = HALF[precision]
        moved = sum(bool((saved["model"][name] != value).any()) for name, value in start.items())
        hidden = [bool((saved["model"][name].to(half) == value.to(half)).any()) for name, value in start.items()]
        assert moved
        assert any(hidden), "16-bit weights would have hidden updates from this test"
        assert any((value.to(half).float() != value).any() for value in saved["model"].values())


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("world", "stage", "other_stage"), [
    (1, 3, 3), (2, 0, 0), (2, 1, 1), (3, 2, 2), (3, 3, 3), (2, 0, 3), (3, 3, 1)])
def test_the_next_updates_are_those_of_the_unbroken_run(world, stage, other_stage, precision):
    run_ranks(world, resumed, stage, other_stage, precision)


def weights_only(rank, stage, precision):
    trained = engine_of(stage, precision, make("tied"))
    update(trained, rank, 0)
    weights = trained.state_dict()
    engine = engine_of(stage, precision, make("tied"))
    engine.load_state_dict(weights)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    same(update(engine, rank, 2)["model"], weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_follow_weights_that_are_loaded_alone(stage, precision):
    run_ranks(2, weights_only, stage, precision)
