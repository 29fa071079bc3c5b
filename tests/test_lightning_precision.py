"""Lightning's precision strings under ZeroStrategy: same bits at every stage, near Lightning's own, else refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strategies.lightning.zero_strategy import ZeroStrategy
from strategies.loss_scale import LossScaling
from strategies.precision import PrecisionPolicy
from support.lightning_modules import Plain
from support.lightning_runs import fit_alone, launched, loader, make_module, trainer
from support.ranks import run_ranks


class Positions(Plain):
    """Mixes types as autocast allows: fp32 inputs into a norm, an fp32 mask, a sum with fp32 constants."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.LayerNorm(6)
        self.attend = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.both = nn.Bilinear(6, 6, 6)

    def loss(self, batch):
        x, y = batch
        x = self.first(x)[:, None] + torch.arange(18).view(3, 6) / 18
        x = self.attend(x, src_mask=torch.full((3, 3), float("-inf")).triu(1)).mean(1)
        assert y.dtype is torch.float32, "targets keep their digits"
        return nn.functional.mse_loss(self.both(x, torch.ones_like(y)).float(), y)


def bf16(rank, stage, precision):
    with launched(rank, 2):
        torch.manual_seed(0)
        module = Positions() if precision == "bf16-mixed" else Plain()
        strategy = ZeroStrategy(stage=stage, precision="bf16" if precision is None else None)
        one = trainer(strategy, 2, max_epochs=1, **({"precision": precision} if precision else {}))
        one.fit(module, loader(2, rank), loader(2, rank))
        assert one.strategy.engine.precision.compute is torch.bfloat16
        return module.seen, one.strategy.engine.state_dict()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", None])
def test_bf16_is_the_same_at_every_stage_and_near_lightnings(precision):
    by_stage = [run_ranks(2, bf16, stage, precision) for stage in (0, 3)]
    for name, value in by_stage[0][0][1].items():
        assert value.dtype is torch.float32
        assert torch.equal(value, by_stage[1][1][1][name])
    torch.manual_seed(0)
    plain = Positions() if precision == "bf16-mixed" else Plain()
    fit_alone(plain, "auto", precision="bf16-mixed", max_epochs=1)
    mean = torch.tensor([seen for seen, _ in by_stage[0]]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(plain.seen), atol=0.02, rtol=0)


def test_a_bf16_batch_norm_is_refused():
    with pytest.raises(ValueError, match=r"BatchNorm \['net\.1'\].*fix: precision='32-true'"):
        fit_alone(make_module("BatchNormed"), precision="bf16-mixed")


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
def test_precisions_that_contradict_or_do_not_exist():
    with pytest.raises(ValueError, match=r"precision='bf16-mixed'\) differs from ZeroStrategy\(precision='fp32'\)"):
        trainer(ZeroStrategy(precision="fp32"), precision="bf16-mixed")
    # On a CPU the Trainer makes bf16-mixed of it before it asks the strategy.
    half = ZeroStrategy(precision_plugin=MixedPrecision("16-mixed", "cuda"))
    assert half.precision_plugin.policy.compute is torch.float16
    with pytest.raises(ValueError, match=r"plugins=\[Own\].*fix: leave the plugin out"):
        trainer("zero2", plugins=[type("Own", (Precision,), {})()])
    with pytest.raises(ValueError, match="fp64"):
        ZeroStrategy(precision="fp64")
    with pytest.raises(ValueError, match="zero stage 4"):
        ZeroStrategy(stage=4)


class Overflows(Plain):
    """Its third batch brings an infinite gradient on the last rank; notes the parameters after each batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.inf if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1 else loss

    def on_train_batch_end(self, *_):
        engine = self.trainer.strategy.engine
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.notes.append((engine.state_dict(), engine.optimizer_state_dict()["state"], rate))


class OverflowsBare(Overflows):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def skipping(rank, bare, stage):
    with launched(rank, 2):
        torch.manual_seed(0)
        module = OverflowsBare() if bare else Overflows()
        policy = PrecisionPolicy.of("fp16", loss_scale=LossScaling(initial=256.0, hysteresis=1))
        one = trainer(ZeroStrategy(stage=stage, precision=policy), 2, max_epochs=1,
                      **({} if bare else {"gradient_clip_val": 0.5}))
        one.fit(module, loader(2, rank))
        plugin = one.strategy.precision_plugin
        state = plugin.state_dict()
        plugin.load_state_dict(state)
        assert plugin.state_dict() == state
        return module.notes, state


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("bare", [False, True])
def test_an_overflow_under_the_trainer_moves_nothing_on_any_rank(bare, stage):
    for notes, state in run_ranks(2, skipping, bare, stage):
        torch.testing.assert_close(notes[2], notes[1], rtol=0, atol=0)
        assert not torch.equal(notes[3][0]["net.inlet.weight"], notes[2][0]["net.inlet.weight"])
        assert (state["attempted"], state["applied"], state["skipped"]) == (5, 4, 1)
        assert state["scale"]["value"] == 128.0


class StepsItself(Overflows):
    """Has a hook of its own for its schedules."""

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


class StepsPerEpoch(Overflows):
    """One schedule for updates and one for epochs; the last update of each epoch overflows."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, 2 if batch_idx == 4 else 0)

    def configure_optimizers(self):
        optimizer = self.optimizer()
        step, epoch = (torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.5, 0.9))
        return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": epoch, "interval": "epoch"}]


def rates_used(rank, world, kind, accumulate):
    """The learning rate of each update inside optimizer.step(), and at the end."""
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        with launched(rank, world):
            module = kind()
            policy = PrecisionPolicy.of("fp16", loss_scale=LossScaling(initial=256.0))  # nothing else overflows
            one = trainer(ZeroStrategy(stage=2, precision=policy), world, accumulate_grad_batches=accumulate)
            one.fit(module, loader(world, rank))
            copied = copy.deepcopy(module) if world == 1 else module
            assert is_overridden("lr_scheduler_step", copied) is (kind is StepsItself)
            assert one.strategy.engine.guard.skipped == 2
            return rates, one.optimizers[0].param_groups[0]["lr"]
    finally:
        hook.remove()


@pytest.mark.parametrize("kind", [Overflows, StepsItself])
@pytest.mark.parametrize(("accumulate", "updates"), [(1, 5), (2, 3)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_schedule_moves_once_per_applied_update(world, accumulate, updates, kind):
    applied = 2 * (updates - 1)
    for rates, end in run_ranks(world, rates_used, world, kind, accumulate):
        assert rates == pytest.approx([1e-2 / (1 + update) for update in range(applied)], rel=1e-12)
        assert end == pytest.approx(1e-2 / (1 + applied), rel=1e-12)


def test_a_schedule_per_epoch_moves_though_the_last_update_was_skipped():
    for rates, end in run_ranks(2, rates_used, 2, StepsPerEpoch, 1):
        assert rates == pytest.approx([1e-2 * 0.5**update * 0.9 ** (update // 4) for update in range(8)], rel=1e-12)
        assert end == pytest.approx(1e-2 * 0.5**8 * 0.9**2, rel=1e-12)
