"""An engine and a plain copy of its model, side by side."""

from __future__ import annotations

import torch

import strategies
from strategies.zero.unit import Phase
from support.small_models import make


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def engine_and_plain(name="stack", **options):
    options = {"optimizer": sgd, "zero": 3, **options}
    return strategies.Engine(make(name), **options), make(name)


def assert_gradients(engine, plain):
    found = engine.gradients()
    for name, parameter in plain.named_parameters():
        assert (found[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-5)
    assert all(unit.phase is Phase.RESTING for unit in engine.units if unit.frees_parameters)
