"""Norms and padding: what lies on one rank, in a few elements, or in no parameter at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.zero_pairs import sgd

# -- C25: the norm is of all ranks' gradients ----------------------------------------------------------------------


class Given(nn.Module):
    """A loss whose gradient of the weight is what is given, wherever the shards lie."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, for_weight, for_bias):
        return (self.weight * for_weight).sum() + (self.bias * for_bias).sum()


def uneven(rank, world, stage, norm_type):
    """C25: one rank holds almost all of a norm of 5; torch's norm and clipping in one process are the measure."""
    for place in (0, 39):  # in the first rank's shard, or in the last one that has elements
        for_weight, for_bias = torch.zeros(40), torch.tensor([1e-3, 0.0, -2e-3])
        for_weight[place], for_weight[20] = 3.0, 4e-3
        scale = 5.0 / torch.linalg.vector_norm(torch.cat([for_weight, for_bias]), norm_type).item()
        for_weight, for_bias = for_weight * scale, for_bias * scale
        plain, engine = Given(), strategies.Engine(Given(), optimizer=sgd, zero=stage)
        plain(for_weight, for_bias).backward()
        part = (rank + 1) * 2.0 / (world + 1)  # of each rank another part; their mean is 1
        engine.backward(engine(for_weight * part, for_bias * part))
        engine.close_gradients()
        reported = engine.clip_by_norm(1.0, norm_type)
        expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type))
        assert reported == pytest.approx(5.0, rel=1e-6)
        assert expected == pytest.approx(5.0, rel=1e-6)
        for name, gradient in engine.gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, atol=1e-7, rtol=1e-6)
        assert engine.gradient_norm(norm_type) == pytest.approx(1.0, rel=1e-5)
        engine.close()
    return reported


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_norm_that_one_rank_holds_is_reported_and_clipped_alike_on_all(world, stage, norm_type):
    assert len(set(run_ranks(world, uneven, world, stage, norm_type))) == 1


# -- C47: fewer elements than ranks, padding of garbage -------------------------------------------------------------


class Few(nn.Module):
    """Scalars, one and three elements: each block a unit, so every buffer is mostly padding."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.one = nn.Parameter(torch.tensor([0.25]))
            self.three = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

        def forward(self, x):
            return torch.tanh(x * self.scalar + self.one + self.three.repeat(2))

    class Single(nn.Module):
        """A whole unit of one element."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.75))

        def forward(self, x):
            return x * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Few.Block(), Few.Single(), Few.Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def momentum(model):
    """A parameter group that holds a single element."""
    gain = model.blocks[1].gain
    return torch.optim.SGD([{"params": [gain], "lr": 0.3},
                            {"params": [p for p in model.parameters() if p is not gain]}], lr=0.1, momentum=0.9)


def padding_of(layout, within):
    """Positions in `within` (a range of the buffer) that belong to no parameter."""
    spans = [layout.span(index) for index in range(len(layout.shapes))]
    covered = {place for span in spans for place in range(span.start, span.stop)}
    return [i - within.start for i in within if i not in covered]


def poison(engine):
    """NaN in the padding of every buffer that holds parameters or masters; how many elements that were."""
    poisoned = 0
    for unit in engine.units:
        for group in unit.groups:
            layout = group.layout
            buffers = [(group.master, group.optimizer_range), (group.resting, layout.shard_range(group.axis.index))]
            if group.full.untyped_storage().size() > 0:
                buffers.append((group.full, range(layout.padded_numel)))
            for buffer, within in buffers:
                places = padding_of(layout, within)
                with torch.no_grad():
                    buffer[places] = math.nan
                poisoned += len(places)
    return poisoned


def garbage_from_the_pool(engine):
    """Let the pool hand out buffers full of NaN, as memory that was used before may be."""
    pool = engine.ledger._pool
    take = pool.take

    def taken(numel, dtype):
        return take(numel, dtype).fill_(math.nan)

    pool.take = taken


def few_elements(rank, world, stage, precision):
    """C47: three updates with clipping equal one process; no NaN of the padding reaches a norm, a vote or an export."""
    model, plain = Few(), Few()
    engine = strategies.Engine(model, optimizer=momentum(model), zero=stage, precision=precision, clip_norm=0.05)
    optimizer = momentum(plain)
    garbage_from_the_pool(engine)
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if precision == "fp32" else {"atol": 2e-2, "rtol": 2e-2}
    for step in range(3):
        assert poison(engine) > 0
        for micro in range(2):
            (sum(loss_of(plain(batch(step, r, micro))) for r in range(world)) / world).backward()
            engine.backward(loss_of(engine(batch(step, rank, micro))), last=micro == 1)
        gradients = engine.gradients()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, **tolerance)
            assert gradients[name].shape == parameter.shape
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        result = engine.step()
        assert result.applied, "the detector was fooled by padding"
        torch.testing.assert_close(torch.tensor(result.gradient_norm), norm, **tolerance)
        optimizer.step(), optimizer.zero_grad()
        state = engine.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, **tolerance)
    full, expected = engine.optimizer_state_dict(), optimizer.state_dict()
    assert full["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        torch.testing.assert_close(full["state"][number]["momentum_buffer"], entry["momentum_buffer"], **tolerance)
    with strategies.gathered(engine.module, write=False):
        assert all(torch.isfinite(parameter).all() for parameter in engine.module.parameters())
    engine.close()
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_nan_in_all_padding_changes_nothing_where_ranks_outnumber_elements(world, stage, precision):
    run_ranks(world, few_elements, world, stage, precision)


def a_true_nan(rank, world, stage):
    """C47: and the detector still sees one bad element among padding of NaN, and names it."""
    model = Few()
    engine = strategies.Engine(model, optimizer=momentum(model), zero=stage, precision=strategies.PrecisionPolicy.of(
        "fp32", on_nonfinite="skip"))
    garbage_from_the_pool(engine)
    poison(engine)
    loss = loss_of(engine(batch(0, rank, 0)))
    engine.backward(loss + (math.nan * model.blocks[1].gain if stage < 3 and rank == 0 else 0.0) if stage < 3
                    else loss * (math.nan if rank == 0 else 1.0))
    result = engine.step()
    assert not result.applied
    return result.nonfinite


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_a_bad_element_is_seen_among_padding(world, stage):
    for names in run_ranks(world, a_true_nan, world, stage):
        assert "blocks.1.gain" in names
        assert stage == 3 or names == ("blocks.1.gain",)
