"""A fit under ZeroStrategy is the fit of plain single-device Lightning: losses, parameters, number of updates."""

from __future__ import annotations

import pytest
import torch

from support.lightning_runs import UPDATES_PER_EPOCH, compare, fit_rank, fit_single, loader, make_module
from support.ranks import run_ranks


@pytest.mark.parametrize("name", ["Plain", "Manual"])
def test_every_stage_trains_as_one_device(name):
    expected, _ = compare(name, stages=[0, 1, 2, 3])
    assert expected.steps > 0


@pytest.mark.parametrize("name", ["Tied", "Frozen", "Unused", "Built", "StepsEverySecondBatch", "BackwardOfItsOwn",
                                  "NoOptimizer", "OneGroup", "ClipsThroughLightning", "ManualDrops", "ManualBare",
                                  "Drives", "AddsGroup", "Thaws"])
def test_a_module_as_found_trains_as_on_one_device(name):
    compare(name)


@pytest.mark.parametrize("name", ["Plain", "Drives"])
def test_three_ranks(name):
    compare(name, world=3, stages=[2, 3])


@pytest.mark.parametrize("options", [
    {"accumulate_grad_batches": 3},  # 5 batches: a ragged last window
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.02},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
], ids=["accumulate", "accumulate-norm", "value"])
def test_accumulation_and_clipping(options):
    expected, _ = compare("Plain", **options)
    assert expected.steps == 2 * -(-UPDATES_PER_EPOCH // options.get("accumulate_grad_batches", 1))
    unclipped = fit_single("Plain", **{key: value for key, value in options.items() if "clip" not in key})
    clips = "gradient_clip_val" in options
    assert clips != torch.equal(unclipped.state["net.inlet.weight"], expected.state["net.inlet.weight"])


def test_the_window_may_grow_between_epochs():
    expected, _ = compare("Plain", callbacks=["growing window"])
    assert expected.steps == UPDATES_PER_EPOCH + -(-UPDATES_PER_EPOCH // 3)


@pytest.mark.parametrize("name", ["PerEpoch", "Logs", "LooksAtGradients", "ClipsItself", "CallsParts"])
def test_what_hooks_see_is_what_they_see_on_one_device(name):
    expected, by_stage = compare(name)
    assert expected.notes
    for found in by_stage:
        for one in found:
            assert len(one.notes) == len(expected.notes)
            for seen, wanted in zip(one.notes, expected.notes, strict=True):
                assert seen == pytest.approx(wanted, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("callback", ["ema", "swa"])
def test_averaging_callbacks_work_where_parameters_rest_whole(callback):
    compare("Plain", stages=[2], callbacks=[callback])


def batch_norm_by_hand(world):
    """What data-parallel training is with BatchNorm: statistics of each rank's rows, gradients averaged."""
    module = make_module("BatchNormed")
    ranks = [make_module("BatchNormed") for _ in range(world)]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(2):
        for batches in zip(*(loader(world, rank) for rank in range(world)), strict=True):
            for replica, batch in zip(ranks, batches, strict=True):
                for own, shared in zip(replica.parameters(), module.parameters(), strict=True):
                    own.data.copy_(shared.data)
                replica.zero_grad()
                replica.loss(batch).backward()
            for place, shared in enumerate(module.parameters()):
                shared.grad = torch.stack([list(r.parameters())[place].grad for r in ranks]).mean(0)
            optimizer.step()
    return {**ranks[0].state_dict(), **dict(module.named_parameters())}


@pytest.mark.parametrize("stage", [1, 3])
def test_batch_norm_keeps_the_first_ranks_statistics_on_every_rank(stage):
    wanted = batch_norm_by_hand(2)
    for one in run_ranks(2, fit_rank, "BatchNormed", [stage], 2, {"limit_val_batches": 0}):
        for name, value in one[0].state.items():
            torch.testing.assert_close(value, wanted[name].detach(), atol=2e-6, rtol=0)
    assert wanted["net.1.num_batches_tracked"] == 2 * UPDATES_PER_EPOCH
