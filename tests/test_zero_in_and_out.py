"""What goes in and comes out of an engine: models, optimizers and their state, full weights, inputs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import make
from support.zero_pairs import adamw, assert_gradients, engine_and_plain, sgd


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
        norm = engine.step().gradient_norm
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
