"""Copies, pickles, `.grad`, compiled units, meshes of several engines: what each is, at every stage, or why not."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import make
from support.zero_pairs import adamw, assert_gradients, engine_and_plain, sgd


def copied(rank, world, stage):
    engine, plain = engine_and_plain(zero=stage)
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy on parameter .* rests sharded"):
            copy.deepcopy(engine.module)
    with strategies.gathered(engine.module, write=False):
        twin = copy.deepcopy(engine.module)
    for step in range(2):
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(world)) / world).backward()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        if step == 0:
            assert_gradients(engine, plain)
            engine.step()
            plain.zero_grad()
    for name, value in make("stack").state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), "the copy has values of its own"
    loss_of(twin(batch(0, rank, 0))).backward()  # plain torch: gradients stay where torch puts them
    assert twin.inlet.weight.grad is not None
    other = strategies.Engine(twin, optimizer=sgd, zero=stage, mesh=engine.mesh)
    other.backward(loss_of(other(batch(0, 0, 0))))
    assert other.gradients()["inlet.weight"] is not None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_a_deep_copy_of_a_held_model_is_plain_torch_or_refused(world, stage):
    run_ranks(world, copied, world, stage)


def pickled(rank, stage):
    engine, _ = engine_and_plain(zero=stage)
    for dump in (lambda: pickle.dumps(engine.module), lambda: torch.save(engine.module, io.BytesIO())):
        with pytest.raises(RuntimeError, match=r"fix: save engine\.state_dict\(\)|rests sharded"):
            dump()
    state = pickle.loads(pickle.dumps(engine.state_dict()))
    engine.close()
    again = pickle.loads(pickle.dumps(engine.module))
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_pickling_a_held_model_is_refused_and_a_closed_one_is_plain(world, stage):
    run_ranks(world, pickled, stage)


def grad_attribute(rank, world, stage):
    """C25: torch's own clipping sees no gradient; the engine's uses the norm of all, the same on every rank."""
    for norm_type in (2.0, 1.0, float("inf")):
        engine, plain = engine_and_plain(zero=stage)
        (sum(loss_of(plain(batch(0, r, 0))) for r in range(world)) / world).backward()
        engine.backward(loss_of(engine(batch(0, rank, 0))))
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3) == 0.0
        assert_gradients(engine, plain)  # and it changed nothing
        norm = engine.clip_by_norm(0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        torch.testing.assert_close(torch.tensor(norm), expected)
        assert_gradients(engine, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_are_the_engines_to_read_and_to_clip(world, stage):
    run_ranks(world, grad_attribute, world, stage)


def compiled_units(rank, world, stage):
    """C68: a unit's forward compiled, the engine's hooks around it."""
    from torch._dynamo import lookup_backend

    torch.compiler.reset()
    compiled: list[int] = []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return lookup_backend("aot_eager")(graph, inputs)

    plain, held = make("frozen"), make("frozen")

    for block in held.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    engine = strategies.Engine(held, optimizer=adamw, zero=stage)
    optimizer = adamw([p for p in plain.parameters() if p.requires_grad])
    counts = []
    for step in range(4):
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(world)) / world).backward()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        engine.step(), optimizer.step(), optimizer.zero_grad()
        state = engine.state_dict()
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)
        counts.append(len(compiled))
    assert counts[0] >= 1
    assert len(set(counts[1:])) == 1, counts


def test_units_with_a_compiled_forward_equal_eager_and_compile_once():
    run_ranks(2, compiled_units, 2, 3, timeout_s=240.0)


def groups_destroyed(rank):
    shared = strategies.Mesh()
    before = len(dist.distributed_c10d._world.pg_map)
    for stage in (3, 1):
        engine, _ = engine_and_plain(zero=stage)
        assert len(dist.distributed_c10d._world.pg_map) > before
        engine.backward(loss_of(engine(batch(0, rank, 0))))
        engine.step()
        engine.close()
        engine.close()
        assert len(dist.distributed_c10d._world.pg_map) == before
        for read in (engine.state_dict, engine.optimizer_state_dict, engine.step):
            with pytest.raises(RuntimeError, match="the engine is closed"):
                read()
    given, _ = engine_and_plain(mesh=shared)
    given.close()
    other, _ = engine_and_plain(mesh=shared)  # a mesh that was given is its owner's
    other.backward(loss_of(other(batch(0, rank, 0))))
    other.close()
    shared.close()
    assert len(dist.distributed_c10d._world.pg_map) < before


@pytest.mark.parametrize("world", [2, 3])
def test_closing_an_engine_destroys_the_groups_it_made(world):
    run_ranks(world, groups_destroyed)
