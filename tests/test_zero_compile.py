"""torch.compile with an engine: right with a bounded number of compilations, or refused by name (C68)."""

from __future__ import annotations

import pytest
import torch

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import make
from support.zero_pairs import adamw

WAYS = ("model", "units", "a module in units", "model, after", "units, after", "a wrapper, after")


def compiled(rank, world, stage, way):
    """C68: frozen parts, four updates; what is compiled is what lies between the engine's hooks, once."""
    from torch._dynamo import lookup_backend

    torch.compiler.reset()
    graphs: list[int] = []

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return lookup_backend("aot_eager")(graph, inputs)

    def compile_in_place(model):
        for module in {"model": [model], "units": model.blocks}.get(way.split(",")[0], []):
            module.compile(backend=backend)
        if way == "a module in units":
            for block in model.blocks:
                block.up.forward = torch.compile(block.up.forward, backend=backend)

    plain, held = make("frozen"), make("frozen")
    if "after" not in way:
        compile_in_place(held)
    engine = strategies.Engine(held, optimizer=adamw, zero=stage)
    if "after" in way:
        compile_in_place(held)
    call = torch.compile(held, backend=backend) if way == "a wrapper, after" else engine
    optimizer = adamw([p for p in plain.parameters() if p.requires_grad])
    counts = []
    for step in range(4):
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(world)) / world).backward()
        engine.backward(loss_of(call(batch(step, rank, 0))))
        engine.step(), optimizer.step(), optimizer.zero_grad()
        state = engine.state_dict()
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)
        counts.append(len(graphs))
    assert counts[0] >= 1
    assert counts[-1] == counts[1] <= 3 * len(held.blocks), counts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_compiled_in_place_before_or_after_the_engine_equals_eager(world, stage, way):
    run_ranks(world, compiled, world, stage, way, timeout_s=240.0)


def wrapped(rank, stage):
    """C68: torch.compile(module) in the model would put `_orig_mod.` into the names of checkpoints."""
    with pytest.raises(ValueError, match=r"the model is wrapped by torch\.compile.*module\.compile\(\)"):
        strategies.Engine(torch.compile(make("stack"), backend="eager"), optimizer=adamw, zero=stage)
    model = make("stack")
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with pytest.raises(ValueError, match=r"module 'blocks\.1' is wrapped by torch\.compile"):
        strategies.Engine(model, optimizer=adamw, zero=stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_a_compiled_wrapper_in_the_model_is_refused_by_name(world, stage):
    run_ranks(world, wrapped, stage)
