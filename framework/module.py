"""The LightningModule whose step is one optimizer update.

The loader yields all micro-batches of an update. The number of labelled tokens over all of them and all data ranks is
known before the first forward, every micro-batch's loss is divided by it, and gradients are summed: so the loss and the
gradient are those of one token mean over the whole batch, however it is cut. Accumulation, schedule, clipping and
logging all count in updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from framework.config import Schedule
from framework.data.step_loader import MicroBatch
from framework.evaluation import count_labels
from framework.schedule import schedule_factor
from strategies.lightning.zero_strategy import ZeroStrategy


@dataclass
class StepOutcome:
    """What one update came to, over all data ranks. `loss` is a device scalar: reading it may wait for the device."""

    loss: Tensor
    tokens: int
    grad_norm: float | None = None
    lr: float = 0.0


class StepModule(pl.LightningModule):
    """Trains `model`, whose forward(tokens, labels) returns the sum of the token losses.

    Args:
        make_optimizer: from the model to its optimizer.
        schedule, max_steps: learning rate over updates.
        asked_to_stop: read once per update on every rank; true on any of them makes that update the last on all.
    """

    def __init__(self, *, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], schedule: Schedule,
                 max_steps: int, asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.model = model
        self.outcome: StepOutcome | None = None
        self._make_optimizer = make_optimizer
        self._schedule = schedule
        self._max_steps = max_steps
        self._asked_to_stop = asked_to_stop
        self.stopped = False

    @property
    def strategy(self) -> ZeroStrategy:
        """The strategy that runs this module."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, ZeroStrategy), "StepModule runs under ZeroStrategy"
        return strategy

    def training_step(self, micro_batches: Sequence[MicroBatch], batch_idx: int) -> Tensor:
        """One update's forwards and backwards; returns its global token-mean loss. Collective over the data axes."""
        mesh = self.strategy.mesh
        mine = torch.tensor([count_labels(micro_batches), int(self._asked_to_stop())])
        tokens, stops = mesh.control.sum(mine, what="count of labelled tokens").tolist()
        if stops:  # asked on any rank, agreed on all: this update is the last
            self.trainer.should_stop = self.stopped = True
        # Without a label anywhere there is nothing to learn: no backward, so neither weights nor moments move.
        used = micro_batches if tokens else []
        loss = self.strategy.drive(used, lambda batch: self.model(batch.tokens_BT, batch.labels_BT) / tokens)
        loss = mesh.data.sum(loss.reshape(1), what="loss of the step")[0]
        lr = float(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.outcome = StepOutcome(loss=loss, tokens=tokens, lr=lr)
        return loss

    def configure_gradient_clipping(self, optimizer: Optimizer, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        """Measure the global norm, then clip as the Trainer was told. Collective over the data axes."""
        engine = self.strategy.engine
        assert self.outcome is not None
        if gradient_clip_val and gradient_clip_algorithm != "value":
            self.outcome.grad_norm = engine.clip_by_norm(gradient_clip_val)
            return
        self.outcome.grad_norm = engine.gradient_norm()
        if gradient_clip_val:
            engine.clip_by_value(gradient_clip_val)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self._make_optimizer(self.model)
        factor = schedule_factor(self._schedule, self._max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Once per update that had something to learn. The strategy leaves out skipped ones."""
        if self.outcome is not None and self.outcome.tokens:
            scheduler.step()
