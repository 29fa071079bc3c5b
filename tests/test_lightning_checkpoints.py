"""Checkpoints are plain Lightning files: saved at any stage and rank count, resumed at any other, or without us."""

from __future__ import annotations

import argparse

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import strategies
from support.lightning_modules import Plain
from support.lightning_runs import launched, loader, make_module, outcome, quiet, trainer
from support.ranks import run_ranks

EPOCHS = 2


def strategy_of(stage):
    return "auto" if stage is None else strategies.ZeroStrategy(stage=stage)


def part(rank, world, stage, name, epochs, path, folder, **options):
    """Fit up to `epochs`, from `path` if given, saving each epoch's checkpoint in `folder`."""
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True, monitor="val_loss")
    module, one = make_module(name), trainer(
        strategy_of(stage), world, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver], **options)
    module.strict_loading = True
    one.fit(module, loader(world, rank), loader(world, rank, seed=1), ckpt_path=path)
    return outcome(one, module)


def part_on_rank(rank, *arguments):
    with launched(rank, arguments[0]):
        return part(rank, *arguments)


def run_part(world, stage, *arguments):
    if stage is None:
        with quiet():
            return part(0, 1, None, *arguments)
    return run_ranks(world, part_on_rank, world, stage, *arguments)[0]


LAYOUTS = [((2, 3), (1, None)), ((1, None), (2, 3)), ((2, 3), (3, 1)), ((3, 2), (2, 0)), ((2, 1), (2, 3))]


def names(layout):
    return f"{layout[0]}x{'plain' if layout[1] is None else layout[1]}"


@pytest.mark.parametrize(("saved", "resumed"), LAYOUTS, ids=lambda layout: names(layout))
def test_a_run_resumed_in_another_layout_ends_like_an_unbroken_one(saved, resumed, tmp_path):
    whole = run_part(1, None, "PerEpoch", EPOCHS, None, str(tmp_path / "whole"))
    run_part(*saved, "PerEpoch", 1, None, str(tmp_path / "first"))
    found = run_part(*resumed, "PerEpoch", EPOCHS, str(tmp_path / "first/epoch=0.ckpt"), str(tmp_path / "second"))
    assert found.steps == whole.steps
    for name, value in whole.state.items():
        torch.testing.assert_close(found.state[name], value, atol=3e-6, rtol=0)
    assert found.notes[0] == pytest.approx(whole.notes[1])  # learning rates after the second epoch
    one, two = (torch.load(tmp_path / folder / "last.ckpt", weights_only=True) for folder in ("whole", "second"))
    assert one.keys() == two.keys()
    assert one["optimizer_states"][0]["param_groups"] == two["optimizer_states"][0]["param_groups"]
    assert one["optimizer_states"][0]["state"].keys() == two["optimizer_states"][0]["state"].keys()


@pytest.mark.parametrize("name", ["Frozen", "Tied", "Built", "NoOptimizer"])
def test_modules_with_habits_resume_there_and_back(name, tmp_path):
    whole = run_part(1, None, name, EPOCHS, None, str(tmp_path / "whole"))
    run_part(2, 3, name, 1, None, str(tmp_path / "ours"))
    run_part(1, None, name, 1, None, str(tmp_path / "plain"))
    back = run_part(1, None, name, EPOCHS, str(tmp_path / "ours/epoch=0.ckpt"), str(tmp_path / "back"))
    there = run_part(2, 3, name, EPOCHS, str(tmp_path / "plain/epoch=0.ckpt"), str(tmp_path / "there"))
    for found in (back, there):
        for key, value in whole.state.items():
            torch.testing.assert_close(found.state[key], value, atol=3e-6, rtol=0)


class Hyper(Plain):
    """Its checkpoint holds an object that safe loading refuses."""

    def __init__(self, options: argparse.Namespace | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def best_last_and_weights(rank, folder):
    with launched(rank, 2):
        module = Hyper(argparse.Namespace(width=6))
        saver = ModelCheckpoint(folder, save_top_k=1, monitor="val_loss", mode="max")
        one = trainer("zero3", 2, enable_checkpointing=True, callbacks=[saver])
        one.fit(module, loader(2, rank), loader(2, rank, seed=1))
        scores = [float(saver.best_model_score), one.test(
            module, loader(2, rank, seed=1), ckpt_path="best", weights_only=False, verbose=False)[0]["test_loss"]]
        assert scores[0] == pytest.approx(scores[1], abs=1e-6)
        one.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        fresh = trainer("zero2", 2, max_epochs=3)
        with pytest.raises(Exception, match="Weights only load failed"):
            fresh.fit(Hyper(), loader(2, rank), ckpt_path=saver.best_model_path)
        fresh = trainer("zero2", 2, max_epochs=3)
        fresh.fit(Hyper(), loader(2, rank), ckpt_path=saver.best_model_path, weights_only=False)
        assert fresh.current_epoch == 3
        return one.strategy.engine.state_dict()


def test_best_paths_hyperparameters_and_weights_only_files(tmp_path):
    state, _ = run_ranks(2, best_last_and_weights, str(tmp_path))
    loaded = Hyper.load_from_checkpoint(tmp_path / "weights.ckpt", weights_only=False)
    assert loaded.hparams.options.width == 6
    for name, value in state.items():
        assert torch.equal(loaded.state_dict()[name], value)


class Worsens(Plain):
    def validation_step(self, batch, batch_idx):
        # Only the mean over ranks says when to stop: rank 0 alone would go on.
        self.log("val_loss", float(self.current_epoch * self.global_rank), sync_dist=True)


def stops_early(rank, folder):
    with launched(rank, 2):
        monitor, stop = LearningRateMonitor(), EarlyStopping("val_loss", patience=1)
        one = trainer("zero3", 2, max_epochs=10, callbacks=[monitor, stop], logger=CSVLogger(folder))
        module = Worsens()
        one.fit(module, loader(2, rank), loader(2, rank))
        return one.current_epoch, monitor.lrs, len(module.seen)


def test_callbacks_that_decide_and_monitor_agree_on_all_ranks(tmp_path):
    one, two = run_ranks(2, stops_early, str(tmp_path))
    assert one[0] == two[0] == 2
    assert one[2] == two[2] == 10
    assert set(one[1]) == {"lr-AdamW/pg1", "lr-AdamW/pg2"}
