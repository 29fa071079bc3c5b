"""FSDP2 on gloo as a second, independent oracle for stages 2 and 3."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import make


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def side_by_side(rank, world, stage):
    fsdp = make("stack")
    mesh = init_device_mesh("cpu", (world,))
    for block in fsdp.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(fsdp, mesh=mesh, reshard_after_forward=stage == 3)
    optimizer = adamw(fsdp.parameters())
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=stage)
    for step in range(5):
        loss = loss_of(fsdp(batch(step, rank, 0)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ours = loss_of(engine(batch(step, rank, 0)))
        engine.backward(ours)
        engine.step()
        torch.testing.assert_close(ours, loss, atol=1e-6, rtol=1e-6)
    state = engine.state_dict()
    for name, parameter in fsdp.named_parameters():
        torch.testing.assert_close(state[name], parameter.full_tensor().detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_same_losses_and_weights_as_fsdp2(world, stage):
    run_ranks(world, side_by_side, world, stage)
