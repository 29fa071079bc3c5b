"""The dynamic loss scale on its own: every decision, by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from strategies.loss_scale import LossScale, LossScaling
from strategies.precision import PrecisionPolicy
from strategies.update_guard import NonFiniteError, UpdateGuard


def values(scale, overflows):
    found = []
    for overflowed in overflows:
        scale.update(overflowed=overflowed)
        found.append(scale.value)
    return found


def test_halves_after_the_hysteresis_and_doubles_after_the_interval():
    scale = LossScale(LossScaling(initial=64.0, growth_interval=3, hysteresis=2))
    #            tolerated, halved, then three clean ones double it and fill the tolerance up again
    overflows = [True, True, False, False, False, True, True]
    assert values(scale, overflows) == [64, 32, 32, 32, 64, 64, 32]


def test_an_overflow_starts_the_growth_interval_again():
    scale = LossScale(LossScaling(initial=64.0, growth_interval=2, hysteresis=1))
    assert values(scale, [False, True, False, False]) == [64, 32, 32, 64]


def test_never_under_the_minimum_which_is_a_collapse():
    scale = LossScale(LossScaling(initial=3.0, hysteresis=1, minimum=1.0))
    assert [scale.update(overflowed=True) for _ in range(4)] == [True, True, False, False]
    assert scale.value == 1.0


def test_odd_counters_survive_a_round_trip():
    policy = PrecisionPolicy.of("fp16", loss_scale=LossScaling(initial=64.0, growth_interval=3, hysteresis=2))
    one = UpdateGuard(policy, logs=False)
    for bad in (False, True, False, False):
        one.record(["w"] if bad else [])
    state = one.state_dict()
    for decisions in itertools.product((False, True), repeat=5):
        pair = []
        for _ in range(2):
            guard = UpdateGuard(policy, logs=False)
            guard.load_state_dict(state)
            pair.append(guard)
        original = UpdateGuard(policy, logs=False)
        for bad in (False, True, False, False, *decisions):
            original.record(["w"] if bad else [])
        for bad in decisions:
            pair[0].record(["w"] if bad else [])
        assert pair[0].state_dict() == original.state_dict()
        assert pair[1].state_dict() == state


def test_an_applied_update_starts_the_count_of_skips_again():
    guard = UpdateGuard(PrecisionPolicy.of("bf16", max_skipped_steps=2), logs=False)
    for bad in (True, True, False, True, True):
        guard.record(["w"] if bad else [])
    with pytest.raises(NonFiniteError, match=r"'w'.*3 updates in a row.*fix"):
        guard.record(["w"])


@pytest.mark.parametrize("wrong", [{"initial": 0.5}, {"minimum": 0.0}, {"hysteresis": 0}, {"growth_interval": 0},
                                   {"initial": float("inf")}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LossScaling(**wrong)


def test_policies_that_do_not_go_together_are_refused():
    for options, says in (({"on_nonfinite": "stop"}, "on_nonfinite"), ({"gradient": "bf16"}, "gradient_dtype")):
        with pytest.raises(ValueError, match=says):
            PrecisionPolicy.of("fp16", **options)
    with pytest.raises(ValueError, match="loss_scale"):
        PrecisionPolicy(name="half", compute=torch.float16)
    with pytest.raises(ValueError, match="on_nonfinite"):
        PrecisionPolicy.of("fp32", on_nonfinite="ignore")
