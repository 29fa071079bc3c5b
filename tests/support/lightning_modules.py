"""LightningModules that nobody wrote for sharding: each with one habit that breaks sharded engines."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torchmetrics import MeanMetric

from support.small_models import make


class Plain(pl.LightningModule):
    """`net` maps [rows, 6] to [rows, 6]; two parameter groups, a schedule per step. `seen`: losses, and what hooks saw.

    Every module here must end at the same parameters at any stage and rank count.
    """

    def __init__(self, net: str = "stack") -> None:
        super().__init__()
        self.net = make(net)
        self.seen: list[float] = []
        self.notes: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def optimizer(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                                 lr=1e-2, eps=1e-4)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__("tied")


class Frozen(Plain):
    """Frozen parameters, and the optimizer is given all parameters all the same."""

    def __init__(self) -> None:
        super().__init__("frozen")


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__("unused")


class Built(Plain):
    """Layers made in configure_model, guarded against its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = make("stack")


class PerEpoch(Plain):
    """Two schedulers per epoch, one of them on a logged value."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.9), {"scheduler": plateau, "monitor": "val_loss"}]

    def on_train_epoch_end(self) -> None:
        self.notes.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])


class Logs(Plain):
    """Logs in every way; metrics must be those of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        for name in ("min", "max", "sum"):
            self.log(name, batch[0].mean(), reduce_fx=name, on_epoch=True, on_step=False, sync_dist=True)
        return {"loss": loss, "extra": loss.detach()}

    def on_train_epoch_end(self) -> None:
        self.notes.append({name: float(self.trainer.callback_metrics[name]) for name in ("metric", "loss_epoch")})


class LooksAtGradients(Plain):
    """The documented recipes: log norms, then change the gradients in place."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.notes.append({name: float(value) for name, value in norms.items()})
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.02, 0.02)
        self.net.inlet.bias.grad = None


class ClipsItself(Plain):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None,
                                    gradient_clip_algorithm: Any = None) -> None:
        total = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.notes.append(float(total))


class ClipsThroughLightning(Plain):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None,
                                    gradient_clip_algorithm: Any = None) -> None:
        limit = 0.05 if self.trainer.global_step % 2 else 0.1
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


class StepsEverySecondBatch(Plain):
    """Lightning's documented `optimizer_step`: other batches run their closure, and their gradients are dropped."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class BackwardOfItsOwn(Plain):
    def backward(self, loss: Tensor) -> None:
        (loss * 0.5).backward(retain_graph=True)
        (loss * 0.5).backward()


class NoOptimizer(Plain):
    def configure_optimizers(self) -> None:
        return None


class OneGroup(Plain):
    """One parameter group over `self.parameters()`, SGD with momentum, a bare optimizer returned."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class CallsParts(Plain):
    """Uses sub-modules outside of steps, where nothing has gathered the root."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append(float(self.net.inlet(torch.ones(1, 6)).sum().detach()))

    def on_validation_epoch_end(self) -> None:
        self.notes.append(float(self.net.norm(self.net.blocks[0](self.net.inlet(torch.ones(1, 6)))).std()))
        self.notes.append(float(self.net(torch.ones(1, 6)).sum()))


class Notes(Plain):
    """Notes whether evaluation runs under inference_mode."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.notes.append(torch.is_inference_mode_enabled())


class Manual(Plain):
    """Manual optimization: accumulation over two batches, clipping, a schedule, zero_grad before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class ManualDrops(Manual):
    """Drops the gradients of every third batch, steps with a closure in others, and returns the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        if batch_idx % 3 == 1:
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.zero_grad()
            return loss.detach()

        def closure() -> Tensor:
            loss = self.loss(batch)
            self.seen.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        with optimizer.toggle_model():
            return optimizer.step(closure=closure)


class ManualBare(Manual):
    """Steps the torch optimizer itself, with a bare backward, several updates in one step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.seen.append(loss.item())
            loss.backward()
            optimizer.step()


class BatchNormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Thaws(Plain):
    """Unfreezes in its second epoch what it froze, and freezes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.blocks[0].requires_grad_(True)
            self.net.blocks[1].requires_grad_(False)


class AddsGroup(Thaws):
    """Gives the optimizer what it unfreezes then."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.net.blocks[0].parameters()), "lr": 3e-2})


class Drives(Plain):
    """Cuts its batch into micro-batches and drives them itself; in plain Lightning it accumulates by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(zip(*(torch.split(part, 2) for part in batch), strict=True))
        drive = getattr(self.trainer.strategy, "drive", None)
        if drive is None:
            loss = sum((self.loss(part) / len(parts) for part in parts), torch.zeros(()))
        else:
            loss = drive(parts, lambda part: self.loss(part) / len(parts))
        self.seen.append(loss.item())
        return loss


MODULES: dict[str, type[Plain]] = {
    cls.__name__: cls for cls in (
        Plain, Tied, Frozen, Unused, Built, PerEpoch, Logs, LooksAtGradients, ClipsItself, ClipsThroughLightning,
        StepsEverySecondBatch, BackwardOfItsOwn, NoOptimizer, OneGroup, CallsParts, Notes, Manual, ManualDrops,
        ManualBare, BatchNormed, Drives, Thaws, AddsGroup)
}
