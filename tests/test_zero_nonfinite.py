"""Gradients that are not finite: one agreed decision, nothing moved by a skipped update, a limit, names."""

from __future__ import annotations

import math

import pytest
import torch

import strategies
from strategies.update_guard import NonFiniteError
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import make

BAD_STEP, STEPS = 2, 5


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-4)


def poison(engine, value):
    """Put `value` into one gradient element of the first parameter."""
    parameter = next(record.parameter for record in engine.records if record.trainable)

    def spoil(grad):
        spoiled = grad.clone()
        spoiled.view(-1)[-1] = value
        return spoiled

    return parameter.register_hook(spoil)


def train(rank, stage, precision, value, skip_by_hand):
    """Five windows of two backwards; the third is spoiled on the last rank, or left out by hand."""
    scaling = strategies.LossScaling(initial=1024.0) if precision == "fp16" else None  # else: real overflows
    policy = strategies.PrecisionPolicy.of(precision, loss_scale=scaling)
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=stage, precision=policy, clip_norm=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 0.1, 1.0, total_iters=10)
    trace = []
    for step in range(STEPS):
        bad = step == BAD_STEP
        if bad and skip_by_hand:
            trace.append((None, engine.state_dict(), engine.optimizer_state_dict(), schedule.last_epoch))
            continue
        for micro in range(2):
            hook = poison(engine, value) if bad and micro == 0 and rank == engine.mesh.world.size - 1 else None
            engine.backward(loss_of(engine(batch(step, rank, micro))), last=micro == 1)
            if hook is not None:
                hook.remove()
        result = engine.step()
        if result.applied:
            schedule.step()
        trace.append((result, engine.state_dict(), engine.optimizer_state_dict(), schedule.last_epoch))
    return trace, (engine.guard.attempted, engine.guard.applied, engine.guard.skipped)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "value"), [(1, math.inf), (2, math.nan), (3, -math.inf)])
def test_one_bad_element_on_one_rank_skips_the_update_on_all(world, value, stage, precision):
    found = run_ranks(world, train, stage, precision, value, False)
    expected = run_ranks(world, train, stage, precision, value, True)
    for (trace, counts), (oracle, _) in zip(found, expected, strict=True):
        assert counts == (STEPS, STEPS - 1, 1)
        skipped = trace[BAD_STEP][0]
        assert not skipped.applied
        assert not math.isfinite(skipped.gradient_norm)
        assert skipped.nonfinite == (next(iter(trace[0][1])),), "the one parameter, named on every rank"
        assert trace[BAD_STEP][3] == trace[BAD_STEP - 1][3], "schedule unmoved"
        for step, (one, two) in enumerate(zip(trace, oracle, strict=True)):
            assert one[0].applied == (step != BAD_STEP)
            torch.testing.assert_close(one[1], two[1], rtol=0, atol=0)
            torch.testing.assert_close(one[2], two[2], rtol=0, atol=0)


def train_for_ever(rank, precision, options):
    policy = strategies.PrecisionPolicy.of(precision, **options)
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=3, precision=policy)
    if rank == engine.mesh.world.size - 1:
        poison(engine, math.inf)
    results = []

    def go_on():
        for step in range(100):
            engine.backward(loss_of(engine(batch(step, rank, 0))))
            results.append(engine.step())

    with pytest.raises(NonFiniteError) as caught:
        go_on()
    return len(results), str(caught.value), next(iter(engine.state_dict()))


@pytest.mark.parametrize(("precision", "options", "skips", "says"), [
    ("fp32", {"max_skipped_steps": 3}, 3, "4 updates in a row"),
    ("bf16", {"on_nonfinite": "stop"}, 0, "on_nonfinite=stop"),
    ("fp16", {"loss_scale": strategies.LossScaling(initial=4.0)}, 3, "loss scale is at its minimum"),
])
def test_for_ever_bad_gradients_stop_every_rank_with_names(precision, options, skips, says):
    for count, message, name in run_ranks(2, train_for_ever, precision, options):
        assert count == skips
        assert says in message
        assert f"'{name}'" in message


def count_in_bf16(rank, stage, gradient):
    """Micro-batch gradients of 1 and then 64 times 2^-9."""
    policy = strategies.PrecisionPolicy.of("bf16", gradient=gradient)
    engine = strategies.Engine(torch.nn.Linear(1, 1, bias=False), optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
                               zero=stage, precision=policy)
    for value in [1.0, *[2.0**-9] * 64]:
        engine.backward(engine(torch.full((1, 1), value)).sum())
    return float(engine.gradients()["weight"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_small_gradients_are_summed_in_fp32_unless_told_otherwise(world, stage):
    assert run_ranks(world, count_in_bf16, stage, "fp32") == [1.125] * world
    if world == 1:
        assert run_ranks(world, count_in_bf16, stage, "bf16") == [1.0]


def scale_by_hand(rank):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=3, precision="fp16")
    one = engine(batch(0, rank, 0))
    with pytest.raises(RuntimeError, match=r"engine\.scale_loss"), engine.backward_scope():
        loss_of(one).backward()
    engine.zero_grad()
    with engine.backward_scope():
        engine.scale_loss(loss_of(engine(batch(0, rank, 0)))).backward()
    by_hand = engine.gradients()
    engine.zero_grad()
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    torch.testing.assert_close(by_hand, engine.gradients(), rtol=0, atol=0)


def test_a_backward_of_ones_own_scales_its_loss_or_is_refused():
    run_ranks(2, scale_by_hand)
