"""Optimizer state and groups of unusual parameters across rank counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.zero_pairs import adamw


class Branches(nn.Module):
    """Two branches of which a forward uses the one it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"u": nn.Linear(6, 6), "v": nn.Linear(6, 6)})

    def forward(self, x, name):
        return self.branches[name](x)


def build():
    torch.manual_seed(0)
    return Branches()


def until_saved(rank, stage):
    """Three steps with `u` alone, `v` trainable and never used."""
    engine = strategies.Engine(build(), optimizer=adamw, zero=stage)
    for step in range(3):
        engine.backward(loss_of(engine(batch(step, 0, 0), "u")))
        engine.step()
    return engine.state_dict(), engine.optimizer_state_dict()


def resumed(rank, stage, state, optimizer_state, frozen):
    """Three more with `v`; `u` is frozen first where told to."""
    engine = strategies.Engine(build(), optimizer=adamw, zero=stage)
    engine.load_state_dict(state)
    engine.load_optimizer_state_dict(optimizer_state)
    if frozen:
        engine.module.branches["u"].requires_grad_(False)
    for step in range(3, 6):
        engine.backward(loss_of(engine(batch(step, 0, 0), "v")))
        engine.step()
    return engine.state_dict(), engine.optimizer_state_dict()


@pytest.mark.parametrize("frozen", [False, True], ids=["unused later", "frozen later"])
@pytest.mark.parametrize(("saved_at", "loaded_at"), [((2, 3), (3, 3)), ((3, 3), (2, 1)), ((3, 2), (1, 0)),
                                                     ((2, 0), (3, 2))])
def test_a_parameter_that_never_had_a_gradient_has_no_state_and_needs_none(saved_at, loaded_at, frozen):
    """C76: saved and loaded at another rank count and stage, then used for the first time."""
    plain = build()
    optimizer = adamw(plain.parameters())
    for step in range(6):
        loss_of(plain(batch(step, 0, 0), "u" if step < 3 else "v")).backward()
        optimizer.step(), optimizer.zero_grad()
    state, optimizer_state = run_ranks(saved_at[0], until_saved, saved_at[1])[0]
    assert set(optimizer_state["state"]) == {0, 1}, "v has none"
    state, optimizer_state = run_ranks(loaded_at[0], resumed, loaded_at[1], state, optimizer_state, frozen)[0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)
    expected = optimizer.state_dict()["state"]
    assert optimizer_state["state"].keys() == expected.keys()
    for number, entry in expected.items():
        for key, value in entry.items():
            torch.testing.assert_close(optimizer_state["state"][number][key], value, atol=1e-5, rtol=1e-5)
