"""Buffers and what else a module keeps: start values, export, reload, recomputation."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import strategies
from models.activation_checkpointing import run_block
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.zero_pairs import adamw, assert_gradients, sgd


class Normed(nn.Module):
    """Blocks with BatchNorm, a counter, a table that is saved and one that is not, and a rebound average."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("table", torch.randn(6))
            self.register_buffer("cache", torch.randn(6), persistent=False)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x, mask=None, cache=None):
            if self.training:
                self.count += 1
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # another tensor object
            return x + torch.tanh(self.norm(self.layer(x)) + self.table) + self.cache

    def __init__(self, run=lambda block, x: block(x)) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Normed.Block() for _ in range(2))
        self.last = nn.BatchNorm1d(6, affine=False)  # buffers alone, at the root
        self.run = run

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.last(x)


def build(seed=0, **options):
    torch.manual_seed(seed)
    return Normed(**options)


def same_on_all(engine, tensor):
    """Whether every rank holds the values of the first."""
    first = tensor.detach().clone()
    engine.mesh.data.broadcast(first, what="the first rank's values")
    return torch.equal(first, tensor)


# -- C44, C88 -------------------------------------------------------------------------------------------------------


def other_starts(rank, world, stage):
    """C88: seed + rank, an orthogonal start: full parameters and all buffers are those of rank 0's plain model."""
    def own(seed):
        model = build(seed)
        nn.init.orthogonal_(model.inlet.weight)
        model.blocks[1].norm.running_mean.normal_()
        return model

    engine, first = strategies.Engine(own(rank), optimizer=sgd, zero=stage), own(0)
    state = engine.state_dict()
    assert state.keys() == first.state_dict().keys()
    for name, value in first.state_dict().items():
        assert torch.equal(state[name], value), name
    for name, value in first.named_buffers():
        assert torch.equal(engine.module.get_buffer(name), value), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_parameters_and_buffers_start_from_the_first_rank(world, stage):
    run_ranks(world, other_starts, world, stage)


def out_and_in(rank, world, stage):
    """C44: a plain model with the export evaluates the same; loading sets every rank's buffers."""
    engine = strategies.Engine(build(rank), optimizer=adamw, zero=stage)
    for step in range(3):
        engine.backward(loss_of(engine(batch(step, 0, 0))))  # the same batch everywhere: so are running statistics
        engine.step()
    state = engine.state_dict()
    assert int(state["blocks.0.count"]) == int(state["blocks.0.norm.num_batches_tracked"]) == 3
    assert "blocks.0.cache" not in state
    alone = build(0)  # unsaved tables are rebuilt by the constructor
    alone.load_state_dict(state)
    alone.eval(), engine.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine(batch(9, rank, 0)), alone(batch(9, rank, 0)), atol=1e-6, rtol=1e-6)
    assert not torch.equal(state["blocks.0.norm.running_mean"], build(0).blocks[0].norm.running_mean)

    pretrained = build(7)
    for buffer in pretrained.buffers():
        if buffer.is_floating_point():
            buffer.normal_()
    other = strategies.Engine(build(rank + 1), optimizer=adamw, zero=stage)
    other.load_state_dict(pretrained.state_dict())
    for name, value in pretrained.state_dict().items():
        if name in dict(pretrained.named_buffers()):
            assert torch.equal(other.module.get_buffer(name), value), name
            assert same_on_all(other, other.module.get_buffer(name)), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_buffers_are_exported_reloaded_and_set_on_every_rank(world, stage):
    run_ranks(world, out_and_in, world, stage)


# -- C50 ------------------------------------------------------------------------------------------------------------

WAYS = {
    "around units, re-entrant": functools.partial(checkpoint, use_reentrant=True),
    "around units": functools.partial(checkpoint, use_reentrant=False),
    "ours, full": lambda block, x: run_block(block, x, None, None, mode="full", random=False),
    "ours, selective": lambda block, x: run_block(block, x, None, None, mode="selective", random=False),
}


def recomputed(rank, world, stage, way, by_engine):
    """C50: the second forward of a block changes no buffer; gradients are those without recomputation."""
    plain, held = build(), build(run=WAYS[way])
    engine, optimizer = strategies.Engine(held, optimizer=sgd, zero=stage), sgd(plain.parameters())
    for step in range(3):
        inputs = batch(step, 0, 0)  # running statistics are a rank's own: the same batch for all
        loss_of(plain(inputs)).backward()
        loss = loss_of(engine(inputs))
        engine.backward(loss) if by_engine else loss.backward()
        assert_gradients(engine, plain)
        engine.step(), optimizer.step(), optimizer.zero_grad()
        for name, value in plain.named_buffers():
            torch.testing.assert_close(held.get_buffer(name), value, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: n + m)
    assert int(held.blocks[0].count) == int(held.blocks[0].norm.num_batches_tracked) == 3
    engine.close()  # plain torch again, its recomputation too
    loss_of(held(batch(0, 0, 0))).backward()
    assert int(held.blocks[0].count) == 5


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_recomputation_does_not_update_running_statistics_again(world, stage, way, by_engine):
    run_ranks(world, recomputed, world, stage, way, by_engine)


class Inside(nn.Module):
    """A block that recomputes a part of itself: the state lies below the unit. Dropout tells what it drew."""

    class Block(nn.Module):
        def __init__(self, reentrant) -> None:
            super().__init__()
            self.reentrant, self.masks = reentrant, []
            self.layer, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

        def part(self, x):
            dropped = self.drop(torch.ones_like(x))
            self.masks.append(dropped.detach() > 0)
            return self.layer(self.norm(x)) * dropped  # the norm's backward needs what comes before: both run again

        def forward(self, x):
            return x + checkpoint(self.part, x, use_reentrant=self.reentrant)

    def __init__(self, reentrant) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Inside.Block(reentrant) for _ in range(2))

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def inside_a_unit(rank, world, stage, reentrant):
    """C50: state below a unit is kept too, and random numbers are replayed."""
    torch.manual_seed(0)
    held = Inside(reentrant)
    engine = strategies.Engine(held, optimizer=sgd, zero=stage)
    for step in range(3):
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        engine.step()
    for block in held.blocks:
        assert int(block.norm.num_batches_tracked) == 3
        assert len(block.masks) == 6
        assert all(torch.equal(first, second) for first, second in
                   zip(block.masks[0::2], block.masks[1::2], strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_state_in_a_recomputed_part_of_a_unit_is_kept_and_random_numbers_are_replayed(world, stage, reentrant):
    run_ranks(world, inside_a_unit, world, stage, reentrant)
