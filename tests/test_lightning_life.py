"""One module through many runs: evaluate before and after, fit twice, other Trainers, other stages, failures."""

from __future__ import annotations

import copy
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import strategies
from strategies.zero.resting import RestingParameter
from support.lightning_modules import Plain
from support.lightning_runs import data, launched, loader, make_module, quiet, trainer
from support.ranks import run_ranks

SINGLE = "auto"


def strategy_of(stage):
    return SINGLE if stage is None else strategies.ZeroStrategy(stage=stage)


def walk(rank, world, stages, inference):
    """Numbers of a long walk with one module; `stages` None is plain Lightning on one device."""
    first, second = stages if stages else (None, None)
    train, val = loader(world, rank), loader(world, rank, seed=1)
    module, numbers = make_module("Notes" if inference else "Plain"), []
    one = trainer(strategy_of(first), world, max_epochs=1)
    numbers.append(one.validate(module, val, verbose=False)[0]["val_loss"])
    one.fit(module, train, val)
    numbers.append(one.test(module, val, verbose=False)[0]["test_loss"])
    rows = torch.cat(one.predict(module, val))
    one.fit_loop.max_epochs = 2
    one.fit(module, train, val)  # goes on at epoch 1, with a new optimizer
    numbers.append(one.validate(module, val, verbose=False)[0]["val_loss"])
    fresh = trainer(strategy_of(first), world)
    numbers.append(fresh.test(module, val, verbose=False)[0]["test_loss"])
    other = trainer(strategy_of(second), world, max_epochs=1)
    other.fit(module, train)
    numbers.append(other.validate(module, val, verbose=False)[0]["val_loss"])
    numbers += module.seen
    return numbers, rows, other.strategy.lightning_module_state_dict(), module.notes


def walk_on_rank(rank, world, stages, inference):
    # Lightning evaluates under no_grad on gloo and under inference_mode elsewhere: this forces the second.
    forced = mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=not inference)
    with launched(rank, world), forced:
        return walk(rank, world, stages, inference)


@pytest.mark.parametrize(("stages", "inference"), [((0, 3), False), ((3, 1), False), ((2, 3), True), ((3, 3), True)])
def test_a_long_walk_gives_the_numbers_of_one_device(stages, inference):
    with quiet():
        numbers, rows, state, _ = walk(0, 1, None, inference)
    world = 2
    found = run_ranks(world, walk_on_rank, world, stages, inference)
    mean = torch.tensor([one[0] for one in found], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(numbers, dtype=torch.float64), atol=5e-6, rtol=0)
    for rank, (_, found_rows, found_state, notes) in enumerate(found):
        torch.testing.assert_close(found_rows, rows[rank::world], atol=5e-6, rtol=0)
        for name, value in state.items():
            torch.testing.assert_close(found_state[name], value, atol=5e-6, rtol=0)
        assert any(notes) is inference


class Numbered(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, torch.ones(6)


class Counts(Plain):
    """Notes which samples came in which stage."""

    def training_step(self, batch, batch_idx):
        self.notes.append((f"train {self.current_epoch}", batch[0].tolist()))
        return self.net(batch[1]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.notes.append(("val", batch[0].tolist()))

    def predict_step(self, batch, batch_idx):
        self.notes.append(("predict", batch[0].tolist()))


def samples(rank, world):
    with launched(rank, world):
        module, one = Counts(), trainer("zero2", world, num_sanity_val_steps=0)
        one.fit(module, DataLoader(Numbered(), batch_size=3, shuffle=True), DataLoader(Numbered(), batch_size=4))
        one.predict(module, DataLoader(Numbered(), batch_size=5))
        return module.notes


def test_the_ranks_samples_are_the_dataset_without_repeats():
    found = run_ranks(3, samples, 3)
    for stage in ("train 0", "train 1", "val", "predict"):
        parts = [[i for name, batch in notes if name == stage for i in batch] for notes in found]
        times = 2 if stage == "val" else 1
        assert sorted(i for part in parts for i in part) == sorted(list(range(24)) * times), stage
    orders = [[i for name, batch in found[0] if name == f"train {epoch}" for i in batch] for epoch in (0, 1)]
    assert orders[0] != orders[1], "the sampler is told the epoch"


class Fails(Plain):
    fails = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.fails and batch_idx == 1:
            raise ValueError("bad batch")
        return loss


def fails_then_fits(rank, stage):
    with launched(rank, 2):
        module, one = Fails(), trainer(strategies.ZeroStrategy(stage=stage), 2)
        with pytest.raises(ValueError, match="bad batch"):
            one.fit(module, loader(2, rank))
        module.fails = False
        start = copy.deepcopy({k: v.clone() for k, v in one.strategy.engine.state_dict().items()})
        again = trainer(strategies.ZeroStrategy(stage=stage), 2, max_epochs=1)
        module.seen.clear()
        again.fit(module, loader(2, rank))
        plain = Fails()
        plain.fails = False
        plain.load_state_dict(start)
    with quiet():
        single = trainer(max_epochs=1)
        single.fit(plain, loader(1))
    for name, value in again.strategy.engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=2e-6, rtol=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_after_a_failed_fit_another_one_works(stage):
    run_ranks(2, fails_then_fits, stage)


def changes_between_fits(rank):
    """Thawed parameters, replaced layers, another module: each fit sees the module as it is."""
    with launched(rank, 2):
        module = Plain()
        module.net.inlet.requires_grad_(False)
        one = trainer("zero3", 2, max_epochs=1)
        one.fit(module, loader(2, rank))
        frozen = one.strategy.engine.state_dict()
        module.net.inlet.requires_grad_(True)
        module.net.blocks[1] = type(module.net.blocks[1])()
        other = Plain()
        one.fit_loop.max_epochs = 2
        one.fit(module, loader(2, rank))
        trained = one.strategy.engine.state_dict()
        assert not torch.equal(trained["net.inlet.weight"], frozen["net.inlet.weight"])
        fresh = trainer("zero3", 2, max_epochs=1)
        fresh.fit(other, loader(2, rank))
        fresh.test(module, loader(2, rank), verbose=False)
        assert torch.equal(fresh.strategy.engine.state_dict()["net.inlet.weight"], trained["net.inlet.weight"])
        return trained


def test_a_fit_follows_what_was_changed_in_the_module():
    one, two = run_ranks(2, changes_between_fits)
    assert all(torch.equal(one[name], two[name]) for name in one)


def given_back(rank):
    with launched(rank, 2):
        module, one = Plain(), trainer("zero3", 2, max_epochs=1)
        one.fit(module, loader(2, rank))
        assert all(isinstance(p, RestingParameter) for p in module.parameters())
        assert sum(p.numel() for p in module.parameters()) == one.strategy.engine.num_parameters
        with pytest.raises(RuntimeError, match=r"deepcopy on parameter 'net\.inlet\.weight'.*rests sharded"):
            copy.deepcopy(module)
        state = one.strategy.engine.state_dict()
        one.strategy.unshard()
        assert all(type(p) is nn.Parameter for p in module.parameters())
        twin = copy.deepcopy(module)
        for name, value in state.items():
            assert torch.equal(twin.state_dict()[name], value)
            assert torch.equal(module.state_dict()[name], value)
        twin.loss(next(iter(loader(2, rank)))).backward()
        assert twin.net.inlet.weight.grad is not None
        twin.zero_grad()
        assert twin.net.inlet.weight.grad is None
        again = trainer("zero1", 2, max_epochs=1)
        again.fit(module, loader(2, rank))
        twin = copy.deepcopy(module)  # whole parameters can be copied while they are held
        twin.loss(next(iter(loader(2, rank)))).backward()
        assert module.net.inlet.weight.grad is None
        assert not again.strategy.engine.ledger.storages()


def test_unshard_gives_the_module_back_as_plain_torch():
    run_ranks(2, given_back)


def types_survive(rank):
    """From bf16 to fp32 and back: what the masters know is not rounded away."""
    with launched(rank, 2):
        module = Plain()
        one = trainer("zero3", 2, max_epochs=1, precision="bf16-mixed")
        one.fit(module, loader(2, rank))
        state = one.strategy.engine.state_dict()
        fresh = trainer("zero1", 2)
        fresh.validate(module, loader(2, rank), verbose=False)
        for name, value in state.items():
            assert value.dtype is torch.float32
            assert torch.equal(fresh.strategy.engine.state_dict()[name], value)
        assert all(parameter.dtype is torch.float32 for parameter in module.parameters())


def test_another_precision_starts_from_the_full_masters():
    run_ranks(2, types_survive)


def batch_norm_evaluates(rank):
    with launched(rank, 2), mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized",
                                       return_value=False):
        module, one = make_module("BatchNormed"), trainer("zero3", 2)
        one.fit(module, loader(2, rank), loader(2, rank, seed=1))
        before = module.net[1].running_mean.clone()
        module.net[1].running_mean += rank  # as other batches would have made it
        one.validate(module, loader(2, rank, seed=1), verbose=False)
        assert torch.equal(module.net[1].running_mean, before)
        one.fit_loop.max_epochs = 3
        one.fit(module, loader(2, rank))
        return before


def test_ranks_evaluate_with_the_first_ranks_buffers():
    one, two = run_ranks(2, batch_norm_evaluates)
    assert torch.equal(one, two)


def device_and_dtype(rank):
    with launched(rank, 2):
        module = Plain()
        module._device = torch.device("meta")  # as a module made before the Trainer knows its device
        one = trainer("zero3", 2, max_epochs=1, precision="bf16-true")
        one.fit(module, loader(2, rank))
        assert module.device == torch.device("cpu")
        assert module.dtype is torch.bfloat16
        assert isinstance(one, pl.Trainer)
        assert one.strategy.engine.state_dict()["net.inlet.weight"].dtype is torch.float32


def test_the_module_knows_its_device_and_type():
    run_ranks(2, device_and_dtype)


def test_one_process_alone_needs_no_launcher():
    with quiet():
        module, plain = make_module("Plain"), make_module("Plain")
        trainer("zero3").fit(module, loader(1))
        trainer().fit(plain, loader(1))
        state = module.trainer.strategy.engine.state_dict()
        assert len(data()) == sum(len(batch[0]) for batch in loader(1))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0)
