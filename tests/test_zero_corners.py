"""Odd orders of forward, backward and step; exceptions; graphs that outlive a turn; what goes in and comes out."""

from __future__ import annotations

import gc
import types

import pytest
import torch
from torch import nn

import strategies
from strategies.collectives import CollectiveError
from strategies.zero.hooks import StaleForwardError
from strategies.zero.unit import Phase
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import Stack, make


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
    """Each rank runs an expert of its own in every block; the other ones get no gradient there."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})

        def forward(self, x, name):
            return x + torch.tanh(self.experts[name](x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts.Block() for _ in range(6))

    def forward(self, x, names):
        for block, name in zip(self.blocks, names, strict=True):
            x = block(x, name)
        return x


def experts(rank, world, stage):
    torch.manual_seed(0)
    plain, held = Experts(), Experts()
    held.load_state_dict(plain.state_dict())
    engine, optimizer = strategies.Engine(held, optimizer=sgd, zero=stage), sgd(plain.parameters())
    chosen = ["aaaaaa", "bababa", "aacbbb"]
    for step in range(4):
        (sum(loss_of(plain(batch(step, r, 0), chosen[(r + step) % 3])) for r in range(world)) / world).backward()
        for last in (False, True):
            mine = chosen[(rank + step) % 3]
            engine.backward(loss_of(engine(batch(step, rank, 0), mine)) / 2, last=last)
        assert_gradients(engine, plain)
        engine.step(), optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_use_different_experts_of_a_block_do_not_wait_for_ever(world, stage):
    run_ranks(world, experts, world, stage, timeout_s=30.0)


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


# -- taking, giving back, loading -----------------------------------------------------------------------------------


def refused_optimizer(rank):
    model = make("stack")
    loss_of(model(batch(5, rank, 0))).backward()  # gradients from before do not count
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for wrong in (torch.optim.LBFGS, lambda p: sgd([nn.Parameter(torch.ones(1))])):
        with pytest.raises(ValueError, match="optimizer"):
            strategies.Engine(model, optimizer=wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine, plain = strategies.Engine(model, optimizer=sgd), make("stack")
    engine.backward(loss_of(engine(batch(0, 0, 0))))
    loss_of(plain(batch(0, 0, 0))).backward()
    assert_gradients(engine, plain)


def test_a_refused_optimizer_leaves_the_model_as_it_was():
    run_ranks(2, refused_optimizer)


def closing(rank, precision):
    model = make("frozen")
    for stage in (3, 1, 2):
        engine = strategies.Engine(model, optimizer=adamw, zero=stage, precision=precision)
        engine.backward(loss_of(engine(batch(stage, rank, 0))))
        engine.step()
        state = engine.state_dict()
        engine.close()
        engine.close()
        for name, value in model.state_dict().items():
            assert value.dtype is torch.float32
            assert torch.equal(value, state[name]), name
        with pytest.raises(RuntimeError, match="closed"):
            engine.step()
    loss_of(model(batch(0, rank, 0))).backward()
    assert model.inlet.weight.grad is not None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_closed_engine_gives_back_full_precision_and_another_takes_over(precision):
    run_ranks(2, closing, precision)


def forgotten(rank):
    kept = make("stack")
    strategies.Engine(kept, zero=1)
    sharded = make("stack")
    strategies.Engine(sharded, zero=3)
    gc.collect()
    loss_of(kept(batch(0, rank, 0))).backward()
    assert kept.inlet.weight.grad is not None
    with pytest.raises(RuntimeError, match="engine is gone"):
        sharded(batch(0, rank, 0))


def test_a_model_whose_engine_is_gone_is_plain_or_says_so():
    run_ranks(2, forgotten)


def adagrad(params):
    return torch.optim.Adagrad(params, lr=0.1)


def nadam(params):
    return torch.optim.NAdam(params, lr=0.01)


def optimizer_state(rank, world, stage, make_optimizer, model):
    engine = strategies.Engine(make(model), optimizer=make_optimizer, zero=stage)
    plain = make(model)
    optimizer = make_optimizer([p for p in plain.parameters() if p.requires_grad])
    for step in range(3):
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(world)) / world).backward()
        optimizer.step(), optimizer.zero_grad()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        engine.step()
        engine.load_optimizer_state_dict(engine.optimizer_state_dict())
    found, expected = engine.optimizer_state_dict(), optimizer.state_dict()
    sizes = [parameter.numel() for parameter in plain.parameters()]
    assert found["state"].keys() == {number for number in expected["state"] if sizes[number]}
    for number, entry in found["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(value, expected["state"][number][key], atol=1e-4, rtol=1e-4)
            assert value.shape == expected["state"][number][key].shape
    optimizer.load_state_dict(found)  # plain torch takes it
    engine.load_optimizer_state_dict(expected)  # and the other way round


@pytest.mark.parametrize("make_optimizer", [adamw, adagrad, nadam], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stage", [0, 3])
def test_optimizer_state_of_tiny_parameters_goes_out_and_in(stage, make_optimizer):
    run_ranks(3, optimizer_state, 3, stage, make_optimizer, "tiny")


def frozen_in_the_optimizer(rank):
    def build(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    plain, held = make("frozen"), make("frozen").bfloat16()
    optimizer, held_optimizer = build(plain), build(held)
    loss_of(held(batch(0, 0, 0).bfloat16())).backward()
    held_optimizer.step()  # its state is bf16; the engine's masters are fp32
    engine = strategies.Engine(held, optimizer=held_optimizer, zero=2)
    assert {v.dtype for s in held_optimizer.state.values() for v in s.values()} == {torch.float32}
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    engine.step()
    loss_of(plain(batch(0, 0, 0))).backward()
    optimizer.step()
    engine.load_optimizer_state_dict(optimizer.state_dict())
    assert engine.optimizer_state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert all(value.dtype is torch.bfloat16 for value in engine.state_dict().values())


def test_frozen_parameters_in_an_optimizer_and_a_bf16_model_keep_plain_torchs_form():
    run_ranks(2, frozen_in_the_optimizer)


def several_optimizers(rank, stage):
    engine, plain = engine_and_plain(zero=stage, optimizer=None)
    pairs = []
    for model in (engine.module, plain):
        named = list(model.named_parameters())
        pairs.append((sgd([p for n, p in named if "norm" in n]), adamw([p for n, p in named if "norm" not in n])))
    for optimizer in pairs[0]:
        engine.add_optimizer(optimizer)
    with pytest.raises(ValueError, match=r"inlet\.weight.*earlier optimizer"):
        engine.add_optimizer(sgd([engine.module.inlet.weight]))
    for step in range(3):
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(2)) / 2).backward()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        engine.step()
        for optimizer in pairs[1]:
            optimizer.step(), optimizer.zero_grad()
    state = engine.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_several_optimizers_each_step_their_own(stage):
    run_ranks(2, several_optimizers, stage)


def round_trip(rank, stage, precision):
    engine, _ = engine_and_plain("tied", zero=stage, precision=precision, optimizer=adamw)
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    engine.step()
    state = engine.state_dict()
    gathers = {unit.name: unit.num_gathers for unit in engine.units}
    engine.state_dict()
    assert all(unit.num_gathers - gathers[unit.name] <= 1 for unit in engine.units), "one gather of a unit is enough"
    other, _ = engine_and_plain("tied", zero=3 - stage, precision=precision, optimizer=adamw)
    other.load_state_dict(state)
    found = other.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in state.items())
    assert found["head.weight"] is found["inlet.weight"]
    assert (engine.state_dict(only_rank=1) == {}) == (rank != 1)
    with strategies.gathered(other.module, write=False):
        assert torch.equal(other.module.inlet.weight.float(), state["inlet.weight"].to(
            other.module.inlet.weight.dtype).float())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_full_weights_go_out_and_in_without_a_rounding(stage, precision):
    run_ranks(3, round_trip, stage, precision)


def replicas_of_shards(rank, stage):
    mesh = strategies.Mesh(strategies.MeshShape(data_replicate=2, data_shard=2))
    engine, plain = engine_and_plain("tied", zero=stage, mesh=mesh, optimizer=sgd, clip_norm=0.1)
    optimizer = sgd(plain.parameters())
    for step in range(3):
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(4)) / 4).backward()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        assert_gradients(engine, plain)
        norm = engine.step()
        torch.testing.assert_close(torch.tensor(norm), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_replicas_of_two_shards_equal_one_process(stage):
    run_ranks(4, replicas_of_shards, stage)


def inputs_keep_their_type(rank):
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, given):
            assert type(given) is Given
            return self.layer(given["x"])

    engine = strategies.Engine(Taking(), zero=2, precision="bf16")
    given = Given(x=batch(0, rank, 0))
    assert engine(given).dtype is torch.bfloat16
    assert given["x"].dtype is torch.float32, "the caller's own object stays as it is"


class Given(dict):
    """A dict of one's own, as Hugging Face's outputs are."""


def test_a_mapping_given_to_the_engine_keeps_its_type():
    run_ranks(2, inputs_keep_their_type)


def a_list_is_no_unit(rank):
    with pytest.raises(ValueError, match="'blocks' is a ModuleList, which is never called"):
        strategies.Engine(make("stack"), units=["blocks"])


def test_a_container_named_as_a_unit_is_refused():
    run_ranks(2, a_list_is_no_unit)
