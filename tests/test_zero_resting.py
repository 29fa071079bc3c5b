"""A parameter that rests sharded cannot be read by accident, and comes back whole on request."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import strategies
from strategies.zero.resting import RestingParameter
from support.ranks import run_ranks
from support.small_models import make


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


FORBIDDEN = {
    "sum": lambda p: p.sum(),
    "multiply": lambda p: p * 2,
    "matrix product": lambda p: torch.ones(6, 19) @ p,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: torch.save(p, io.BytesIO()),
    "equal": lambda p: torch.equal(p, p),
    "index": lambda p: p[0, 0],
    "item": lambda p: p.sum().item(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data.fill_(0),
    "assign data": lambda p: setattr(p, "data", torch.zeros(19, 6)),
    "numpy": lambda p: p.numpy(),
    "to": lambda p: p.to(torch.bfloat16),
    "clone": lambda p: p.clone(),
    "copy_": lambda p: p.copy_(torch.zeros(19, 6)),
    "init": nn.init.zeros_,
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 6), p),
    "iterate": list,
}
ALLOWED = {
    "shape": lambda p: tuple(p.shape) == (19, 6),
    "size": lambda p: p.size(0) == 19,
    "numel": lambda p: p.numel() == 114,
    "dim": lambda p: p.dim() == 2 and p.ndim == 2,
    "dtype": lambda p: p.dtype == torch.float32,
    "device": lambda p: p.device.type == "cpu",
    "requires_grad": lambda p: p.requires_grad,
    "leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad is None,
    "floating": lambda p: p.is_floating_point() and torch.is_floating_point(p),
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "repr": lambda p: "blocks.1.up.weight" in repr(p),
    "len": lambda p: len(p) == 19,
    "hash": lambda p: p in {p},
    "optimizer": lambda p: bool(torch.optim.AdamW([p], fused=True).param_groups),
}


def touch_a_resting_parameter(rank):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=3)
    parameter = engine.module.blocks[1].up.weight
    assert type(parameter) is RestingParameter
    for name, act in FORBIDDEN.items():
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight.*unit 'blocks\.1'.*gathered") as caught:
            act(parameter)
        assert caught.type is RuntimeError, name
    for name, ask in ALLOWED.items():
        assert ask(parameter), name
    assert sum(p.numel() for p in engine.module.parameters()) == engine.num_parameters


def test_reading_a_resting_parameter_is_refused_by_name_and_metadata_is_not():
    run_ranks(2, touch_a_resting_parameter)


def module_doors(rank):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=3)
    model = engine.module
    whole = {name: value.clone() for name, value in make("stack").state_dict().items()}
    for door in (lambda: model.state_dict(), lambda: copy.deepcopy(model), lambda: model.to(torch.bfloat16),
                 lambda: torch.save(model, io.BytesIO()), lambda: model.load_state_dict(whole),
                 lambda: model.blocks[0].down.forward(torch.ones(2, 19))):
        with pytest.raises(RuntimeError, match="rests sharded"):
            door()
    with pytest.raises(ValueError, match="already held by an engine"):
        strategies.Engine(model, zero=1)


def test_every_door_of_the_module_raises_at_stage_3():
    run_ranks(2, module_doors)


def read_and_edit(rank, stage, precision):
    engine = strategies.Engine(make("tied"), optimizer=adamw, zero=stage, precision=precision)
    model, plain = engine.module, make("tied")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    masters = {n: v.clone() for n, v in engine.state_dict().items()}
    with strategies.gathered(model.blocks[0]):
        for (name, one), (_, two) in zip(model.blocks[0].named_parameters(), plain.blocks[0].named_parameters(),
                                         strict=True):
            assert torch.equal(one.detach(), two.detach().to(dtype)), name
    assert all(torch.equal(masters[n], v) for n, v in engine.state_dict().items()), "reading must not round masters"
    with strategies.gathered([model.blocks[1].norm.weight, model.head.weight]), torch.no_grad():
        if rank == 0:  # an edit on the first rank is everybody's
            model.blocks[1].norm.weight.fill_(3.0)
            model.head.weight[2] = 7.0
    with strategies.gathered(model, write=False):
        assert torch.equal(model.blocks[1].norm.weight, torch.full((6,), 3.0, dtype=dtype))
        assert model.inlet.weight is model.head.weight
        assert torch.equal(model.inlet.weight[2], torch.full((6,), 7.0, dtype=dtype))
    state = engine.state_dict()
    assert torch.equal(state["inlet.weight"][2], torch.full((6,), 7.0))
    assert torch.equal(state["inlet.weight"][1], masters["inlet.weight"][1])
    engine.backward(engine(torch.ones(2, 6)).float().sum())
    engine.step()
    assert not torch.equal(engine.state_dict()["head.weight"][2], state["head.weight"][2])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gathered_reads_and_edits_at_every_stage(world, stage, precision):
    run_ranks(world, read_and_edit, stage, precision)


def wrong_arguments(rank):
    with pytest.raises(ValueError, match="gathered"):
        strategies.gathered([1])
    with strategies.gathered(nn.Linear(2, 2)):  # of no engine: left alone
        pass


def test_gathered_refuses_what_is_no_parameter():
    run_ranks(1, wrong_arguments)
