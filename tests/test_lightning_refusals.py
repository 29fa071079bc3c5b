"""What ZeroStrategy cannot do is refused by name, on every rank, before or at the place where it would go wrong."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import strategies
from strategies.lightning.registry import register
from strategies.lightning.zero_strategy import ZeroStrategy
from support.lightning_modules import Plain
from support.lightning_runs import fit_alone, launched, loader, make_module, quiet, trainer
from support.ranks import run_ranks


class TwoOptimizers(Plain):
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.inlet.parameters(), lr=0.1),
                torch.optim.SGD(self.net.norm.parameters(), lr=0.1)]


class Captured(Plain):
    """Takes its parameter list before the layers it trains are in place."""

    def __init__(self):
        super().__init__()
        self.early = list(self.net.parameters())
        self.net = make_module("Plain").net

    def configure_optimizers(self):
        return torch.optim.SGD(self.early, lr=0.1)


class WholeTensor(Plain):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Drives(Plain):
    def training_step(self, batch, batch_idx):
        return self.trainer.strategy.drive([batch], self.loss)


class BareClosure(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers(use_pl_optimizer=False).step(closure=lambda: self.loss(batch))


@pytest.mark.parametrize(("module", "options", "error", "words"), [
    (TwoOptimizers, {}, ValueError, r"returned 2 optimizers: ZeroStrategy takes one; fix: one optimizer with several"),
    (Captured, {}, ValueError, r"optimizer group 0, parameter 0 \(shape \(6, 6\)\) is not a parameter of the model"),
    (WholeTensor, {}, ValueError, r"optimizer=LBFGS looks at whole tensors"),
    (Drives, {"accumulate_grad_batches": 2}, ValueError, r"accumulate_grad_batches=2: a module that drives"),
    (BareClosure, {}, RuntimeError, r"optimizer\.step\(closure\) on the bare optimizer.*fix: self\.optimizers\(\)"),
    (Plain, {"precision": "64-true"}, ValueError, r"precision='64-true'.*allowed are.*bf16-mixed"),
    (Plain, {"callbacks": ["finetuning"]}, ValueError, r"callback BackboneFinetuning.*fix: a hook of the module"),
    (Plain, {"callbacks": ["pruning"]}, ValueError, r"callback ModelPruning.*fix: prune before"),
    (Plain, {"callbacks": ["ema"], "precision": "bf16-mixed"}, ValueError, r"EMAWeightAveraging.*precision='32-true'"),
], ids=lambda value: value.__name__ if isinstance(value, type) else None)
def test_refused_with_the_reason(module, options, error, words):
    with pytest.raises(error, match=words):
        fit_alone(module(), **options)


class CopiesItself(Plain):
    def on_fit_start(self):
        import copy

        copy.deepcopy(self)


class SavesItself(Plain):
    def on_train_start(self):
        torch.save(self.net.state_dict(), "/dev/null")


class SkipsNone(Plain):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def refused_on_rank(rank, stage):
    cases = [(CopiesItself(), [], r"copy\.deepcopy on parameter 'net\.\S+'.*rests sharded"),
             (SavesItself(), [], r"parameter 'net\.\S+'.*engine\.state_dict\(\)"),
             (Plain(), ["ema"], r"callback EMAWeightAveraging.*fix: zero stage 0, 1 or 2"),
             (Plain(), ["swa"], r"callback StochasticWeightAveraging.*fix: zero stage 0, 1 or 2"),
             (SkipsNone(), [], r"Skipping the `training_step` by returning None in distributed")]
    with launched(rank, 2):
        for module, callbacks, words in cases:
            with pytest.raises((ValueError, RuntimeError), match=words):
                trainer(ZeroStrategy(stage=stage), 2, callbacks=callbacks).fit(module, loader(2, rank))
        with pytest.raises(ValueError, match="reduce_op='product': allowed are mean, sum, max and min"):
            module.trainer.strategy.reduce(torch.ones(1), reduce_op="product")


def test_refused_where_parameters_rest_sharded():
    run_ranks(2, refused_on_rank, 3)


def test_none_skips_a_batch_on_one_process_as_it_does_on_one_device():
    ours, plain = SkipsNone(), SkipsNone()
    plain.load_state_dict(ours.state_dict())
    state = fit_alone(ours).strategy.engine.state_dict()
    fit_alone(plain, "auto")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0)


def test_names_are_registered_once_in_lower_case():
    for _ in range(2):
        register(ZeroStrategy)
    names = [name for name in StrategyRegistry.available_strategies() if name.startswith("zero")]
    assert names == [f"zero{stage}" for stage in range(4)]
    for stage in range(4):
        with quiet():
            one = Trainer(strategy=f"ZeRO{stage}", accelerator="cpu", devices=1, logger=False)
        assert isinstance(one.strategy, strategies.ZeroStrategy)
        assert one.strategy.stage.stage == stage
    with pytest.raises(RuntimeError, match="no engine yet"):
        _ = one.strategy.engine
    with pytest.raises(RuntimeError, match="no mesh yet"):
        _ = one.strategy.mesh
