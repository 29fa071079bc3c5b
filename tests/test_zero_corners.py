"""Odd orders of forward, backward and step; ranks that differ; graphs that outlive a turn; exceptions."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import strategies
from strategies.journal import CollectiveError
from strategies.zero.hooks import StaleForwardError
from strategies.zero.unit import Phase
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import Stack, make
from support.zero_pairs import adamw, assert_gradients, engine_and_plain, sgd

# -- orders of forward and backward ---------------------------------------------------------------------------------


def two_losses(engine, x, y):
    for loss in [loss_of(engine(x)), loss_of(engine(y))]:
        yield loss, {}


def one_graph_twice(engine, x, y):
    loss = loss_of(engine(x))
    yield loss, {"retain_graph": True}
    yield loss, {}


def evaluation_before_backward(engine, x, y):
    loss = loss_of(engine(x))
    with torch.no_grad():
        engine(y)
    if isinstance(engine, strategies.Engine):
        engine.state_dict()
        engine.rest()
    yield loss, {}


def penalty(engine, x, y):
    """A gradient penalty: the gradient of the input is part of the loss (WGAN-GP)."""
    leaf = x.clone().requires_grad_()
    loss = loss_of(engine(leaf))
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    yield loss + slope.pow(2).sum(), {}


ORDERS = {f.__name__: f for f in (two_losses, one_graph_twice, evaluation_before_backward, penalty)}


def in_order(rank, name, stage, model, by_engine):
    engine, plain = engine_and_plain(model, zero=stage)
    inputs = batch(0, 0, 0), batch(1, 0, 0)
    for _ in range(2):
        for loss, options in ORDERS[name](engine, *inputs):
            engine.backward(loss, **options) if by_engine else loss.backward(**options)
        for loss, options in ORDERS[name](plain, *inputs):
            loss.backward(**options)
        assert_gradients(engine, plain)
        engine.zero_grad(), plain.zero_grad()


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("model", ["tied", "structured"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("order", list(ORDERS))
def test_any_order_of_forward_and_backward_gives_plain_gradients(order, stage, model, by_engine):
    run_ranks(2, in_order, order, stage, model, by_engine)


class Chosen(Stack):
    """Runs the blocks it is told to, in that order."""

    order = (0, 1, 2)

    def forward(self, x):
        x = self.inlet(x)
        for place in self.order:
            x = self.blocks[place](x)
        return self.norm(x)


def changing_order(rank, stage, prefetch):
    torch.manual_seed(0)
    plain, held = Chosen(), Chosen()
    held.load_state_dict(plain.state_dict())
    engine, optimizer = strategies.Engine(held, optimizer=sgd, zero=stage, prefetch_units=prefetch), sgd(
        plain.parameters())
    for step, order in enumerate([(0, 1, 2), (2, 0, 1), (0, 2), (1, 1, 0), (), (0, 1, 2), (0, 1, 2)]):
        plain.order = held.order = order
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(2)) / 2).backward()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        assert_gradients(engine, plain)
        engine.step(), optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_blocks_may_change_order_or_be_left_out_between_steps(prefetch):
    run_ranks(2, changing_order, 3, prefetch)


def ranks_choose(rank, stage):
    held = Chosen()
    mesh = strategies.Mesh(timeout_s=3.0)
    engine = strategies.Engine(held, optimizer=sgd, zero=stage, mesh=mesh)
    plain = Chosen()
    plain.load_state_dict(engine.state_dict())
    held.order = (0, 1, 2) if rank == 0 else (0, 2)
    if stage == 3:  # a rank cannot gather alone: it says so within the timeout
        with pytest.raises(CollectiveError, match=rf"rank {rank} in .*(blocks\.[012]|vote)"):
            engine.backward(loss_of(engine(batch(0, rank, 0))))
        return
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    for plain.order, r in (((0, 1, 2), 0), ((0, 2), 1)):
        (loss_of(plain(batch(0, r, 0))) / 2).backward()
    assert_gradients(engine, plain)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_skip_different_blocks_are_right_or_refused_with_unit_and_rank(stage):
    run_ranks(2, ranks_choose, stage)


class Experts(nn.Module):
    """In each block a rank runs one expert, all of them ("*") or none ("-"); the others get no gradient there.

    All blocks share an input, which expert "b" alone uses: on the other ranks it has no gradient in that block.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})

        def forward(self, x, name, shared):
            if name == "-":
                return x
            return x + sum(torch.tanh(expert(x) + (shared if key == "b" else 0))
                           for key, expert in self.experts.items() if name in (key, "*"))

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Experts.Block() for _ in range(6))

    def forward(self, x, names):
        x = shared = self.inlet(x)
        for block, name in zip(self.blocks, names, strict=True):
            x = block(x, name, shared)
        return x


def experts(rank, world, stage):
    torch.manual_seed(0)
    plain, held = Experts(), Experts()
    held.load_state_dict(plain.state_dict())
    mesh = strategies.Mesh(timeout_s=20.0)
    engine, optimizer = strategies.Engine(held, optimizer=sgd, zero=stage, mesh=mesh), sgd(plain.parameters())
    chosen = ["******", "ab*aba", "-cb--*"]
    for step in range(4):
        (sum(loss_of(plain(batch(step, r, 0), chosen[(r + step) % 3])) for r in range(world)) / world).backward()
        for last in (False, True):
            mine = chosen[(rank + step) % 3]
            engine.backward(loss_of(engine(batch(step, rank, 0), mine)) / 2, last=last)
        assert_gradients(engine, plain)
        engine.step(), optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_use_different_experts_of_a_block_or_none_equal_one_process(world, stage):
    run_ranks(world, experts, world, stage, timeout_s=30.0)


def shared_input(rank):
    engine, plain = engine_and_plain("structured")
    engine.backward(loss_of(engine(batch(0, 0, 0))))  # records the order of use
    engine.zero_grad()
    blocks, up = engine.units[:3], []
    assert [unit.name for unit in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    for block in engine.module.blocks:
        block.side.weight.register_hook(lambda _: up.append([unit.phase is not Phase.RESTING for unit in blocks]))
    engine.backward(loss_of(engine(batch(0, 0, 0))))
    assert up == [[False, True, True], [True, True, False], [True, False, False]]  # in use, and the one before it
    loss_of(plain(batch(0, 0, 0))).backward()
    assert_gradients(engine, plain)


def test_blocks_that_share_an_input_are_freed_one_by_one_in_backward():
    run_ranks(2, shared_input)


def nothing_to_step(rank, stage):
    engine, _ = engine_and_plain(zero=stage, optimizer=adamw)
    before = engine.state_dict()
    engine.step()
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    engine.zero_grad()
    engine.step()
    loss_of(engine(batch(0, rank, 0)))
    engine.zero_grad()
    engine.step()
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    with pytest.raises(RuntimeError, match="does not require grad"), torch.no_grad():
        engine.backward(loss_of(engine(batch(0, rank, 0))))
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    engine.step()
    assert not torch.equal(engine.state_dict()["inlet.weight"], before["inlet.weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_without_gradients_changes_nothing(stage):
    run_ranks(2, nothing_to_step, stage)


# -- graphs that outlive a unit's turn ------------------------------------------------------------------------------


class Views(nn.Module):
    """Units return what hides the border: an object of one's own, or a view that the caller changes in place."""

    class Block(nn.Module):
        def __init__(self, hide) -> None:
            super().__init__()
            self.hide, self.layer = hide, nn.Linear(6, 12)

        def forward(self, x):
            x = self.layer(x)
            return types.SimpleNamespace(out=x[:, :6]) if self.hide == "object" else x[:, :6]

    def __init__(self, hide) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Views.Block(hide) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x.mul_(2.0) if isinstance(x, torch.Tensor) else x.out
        return x


def hidden_border(rank, hide):
    engine = strategies.Engine(Views(hide), optimizer=sgd, zero=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        engine.backward(loss_of(engine(batch(0, rank, 0).requires_grad_())))
    assert "rests sharded" in caught.value.__notes__[0]
    torch.manual_seed(0)
    plain = Views(hide)
    torch.manual_seed(0)
    whole = strategies.Engine(Views(hide), optimizer=sgd, zero=3, units=[])  # the fix that the note names
    whole.backward(loss_of(whole(batch(0, 0, 0))))
    loss_of(plain(batch(0, 0, 0))).backward()
    assert_gradients(whole, plain)


@pytest.mark.parametrize("hide", ["object", "view"])
def test_a_weight_that_is_freed_when_backward_needs_it_is_an_error_not_a_crash(hide):
    run_ranks(2, hidden_border, hide)


def stale(rank, stage, scope):
    engine = strategies.Engine(make("stack"), optimizer=sgd, zero=stage, units=[])
    if scope:  # no border that a hook could stand on
        with engine.forward_scope():
            old = loss_of(engine.module.norm(engine.module.inlet(batch(0, rank, 0))))
    else:
        old = loss_of(engine(batch(0, rank, 0)))
    engine.backward(loss_of(engine(batch(1, rank, 0))))
    engine.step()
    with pytest.raises(RuntimeError if scope else StaleForwardError):
        engine.backward(old)


@pytest.mark.parametrize("scope", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_from_before_the_update_is_refused_without_units_too(stage, scope):
    run_ranks(2, stale, stage, scope)


# -- exceptions -----------------------------------------------------------------------------------------------------


class Failing(Stack):
    """Raises where and what it is told to."""

    where, error = "", ValueError

    def forward(self, x):
        if self.where == "forward":
            raise self.error("told to")
        x = super().forward(x)
        if self.where == "backward":
            x.register_hook(self._raise)
        if self.where == "first block's backward":
            self.blocks[0].norm.weight.register_hook(self._raise)
        return x

    def _raise(self, *_):
        if self.where:
            raise self.error("told to")


def failing(rank, stage, where, error):
    torch.manual_seed(0)
    held, plain = Failing(), Failing()
    plain.load_state_dict(held.state_dict())
    engine, optimizer = strategies.Engine(held, optimizer=sgd, zero=stage), sgd(plain.parameters())
    handle = held.blocks[1].register_forward_hook(held._raise) if where == "hook" else None
    for step in range(3):
        held.where, held.error = (where, error) if step == 1 else ("", error)
        if step == 1:
            with pytest.raises(error, match="told to"):
                engine.backward(loss_of(engine(batch(9, rank, 0))))
            held.where = ""
            engine.zero_grad()
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(2)) / 2).backward()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        assert_gradients(engine, plain)
        engine.step(), optimizer.step(), optimizer.zero_grad()
        with torch.no_grad():
            engine(batch(step, rank, 1))
        assert all(unit.phase is Phase.RESTING for unit in engine.units if unit.frees_parameters)
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "hook", "backward", "first block's backward"])
@pytest.mark.parametrize("stage", [1, 3])
def test_after_an_exception_on_all_ranks_training_goes_on_as_if_nothing_had_been(stage, where, error):
    run_ranks(2, failing, stage, where, error)


def refused_gradient(rank):
    engine, plain = engine_and_plain(zero=1)
    loss = loss_of(engine(batch(0, 0, 0)))
    engine.close_gradients()
    with pytest.raises(RuntimeError, match="were closed"):
        loss.backward()
    engine.zero_grad()
    engine.backward(loss_of(engine(batch(0, 0, 0))))
    loss_of(plain(batch(0, 0, 0))).backward()
    assert_gradients(engine, plain)


def test_a_refused_gradient_is_not_in_the_next_window():
    run_ranks(2, refused_gradient)
