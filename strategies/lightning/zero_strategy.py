"""The Lightning strategy: the engine's life cycle under a Trainer. No arithmetic stands here.

    Trainer(strategy=ZeroStrategy(stage=3), accelerator="cpu", devices=2)      or      Trainer(strategy="zero3")

Under automatic optimization Lightning runs `optimizer.step(closure)` with training_step and backward inside the
closure, calls zero_grad between the two, and clips after the closure. So gradients collect in the ledger and are
handed to the optimizer when the closure has returned (`optimizer_step`). The optimizer's zero_grad empties the ledger
too, as code that skips an update expects.

A module may drive a whole update itself: `strategy.drive(micro_batches, loss)` in its training_step runs forward and
backward of each micro-batch; the zero_grad and `backward` that Lightning calls afterwards find the window done.

Sources: lightning 2.6.6 `ParallelStrategy`, `ModelParallelStrategy`. Private names used, for want of public ones:
`_layer_sync` (SyncBatchNorm conversion), `_update_properties` (`LightningModule.device`), `_MockOptimizer` (a module
without an optimizer), `_after_closure` and `_clip_gradients` (precision.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.engine import Engine
from strategies.lightning.held import held_by, hold, let_go
from strategies.lightning.mesh_strategy import MeshStrategy
from strategies.lightning.optimizer_calls import follow
from strategies.lightning.plateau import follow_the_mean
from strategies.lightning.precision import ZeroPrecision, plain, policy_for
from strategies.lightning.refusals import refuse_callbacks
from strategies.lightning.registry import WRONG_TREE, register
from strategies.mesh import MeshShape
from strategies.precision import PrecisionPolicy
from strategies.zero.placement import Placement, StagePolicy

MicroBatch = TypeVar("MicroBatch")


class ZeroStrategy(MeshStrategy):
    """ZeRO 0-3 on any accelerator, for any LightningModule with one optimizer.

    Args:
        stage: ZeRO stage 0-3.
        precision: "fp32", "bf16", "fp16" or a PrecisionPolicy; None takes the Trainer's `precision=`.
        mesh: axis sizes; None puts all processes on data_shard.
        units: modules, or names inside the LightningModule, to gather together; None finds them.
        prefetch_units: units gathered ahead of their use at stage 3.
        average_gradients: gradients are the mean over data ranks; False gives the sum.
        timeout_s: how long a process waits in a collective.

    Raises:
        ValueError: at construction or setup, naming the argument, its value and what is allowed.
    """

    strategy_name = "zero"

    def __init__(self, *, stage: int = 3, precision: str | PrecisionPolicy | None = None, mesh: MeshShape | None = None,
                 units: Sequence[str | nn.Module] | None = None, prefetch_units: int = 1,
                 average_gradients: bool = True, timeout_s: float = 1800.0,
                 accelerator: pl.accelerators.Accelerator | None = None,
                 parallel_devices: list[torch.device] | None = None,
                 cluster_environment: ClusterEnvironment | None = None, checkpoint_io: Any = None,
                 precision_plugin: Precision | None = None) -> None:
        self._policy = PrecisionPolicy.of(precision) if isinstance(precision, str) else precision
        self._zero_precision: ZeroPrecision | None = None
        super().__init__(mesh=mesh, timeout_s=timeout_s, accelerator=accelerator, parallel_devices=parallel_devices,
                         cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
                         precision_plugin=precision_plugin)
        self.stage = StagePolicy.of(stage)
        self._units = units
        self._prefetch_units = prefetch_units
        self._average = average_gradients
        self._failed = False
        self._driven = False  # `drive` has run this window's backwards, and Lightning's has not been called yet
        self.is_driven = False  # `drive` has run this window's backwards, and the update has not been applied yet
        self._at_boundary = False
        self._stepping = False

    def __repr__(self) -> str:
        # A Trainer of the other tree prints this object when it refuses it.
        return f"ZeroStrategy(stage={self.stage.stage})" + (
            f" ({WRONG_TREE})" if "pytorch_lightning" in sys.modules else "")

    # -- what the Trainer sets and asks ---------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """Ours, whatever the Trainer chose: autocast and GradScaler know nothing of shards."""
        if self._zero_precision is None:
            self._zero_precision = ZeroPrecision(self, self._policy or PrecisionPolicy.of("fp32"), mode=None)
        return self._zero_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, ZeroPrecision):
            return
        wanted = policy_for(plugin)
        if self._policy is not None and plugin.precision != "32-true" and wanted.compute != self._policy.compute:
            raise ValueError(f"Trainer(precision={plugin.precision!r}) differs from "
                             f"ZeroStrategy(precision={self._policy.name!r}); fix: give one of them")
        # A Trainer that was told nothing says 32-true: then the strategy's own precision stands.
        mode = None if self._policy is not None and plugin.precision == "32-true" else plugin.precision
        self._zero_precision = ZeroPrecision(self, self._policy or wanted, mode=mode)

    @property
    def engine(self) -> Engine:
        """The engine that holds the LightningModule. Raises RuntimeError before setup."""
        held = held_by(self.lightning_module)
        if held is None:
            raise RuntimeError("ZeroStrategy has no engine yet: it is made when the Trainer sets the model up")
        return held.engine

    # -- set-up ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connect the processes and make the mesh. Collective over the world; a second call changes nothing.

        Raises:
            ValueError: a callback of the Trainer cannot work on a sharded module.
        """
        precision = self.precision_plugin
        if self.lightning_module is not None:
            refuse_callbacks(
                self.lightning_module.trainer.callbacks,
                rests_sharded=self.stage.parameters is Placement.SHARDED and self.world_size > 1,
                masters_apart=isinstance(precision, ZeroPrecision) and precision.policy.compute is not None)
        super().setup_environment()

    def model_to_device(self) -> None:
        """Nothing: the engine places parameters and buffers."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model (once), then make its optimizer (each fit). Collective over the world."""
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        self._failed = self._driven = self.is_driven = False
        self._hold(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _hold(self, module: pl.LightningModule) -> None:
        precision = self.precision_plugin
        assert isinstance(precision, ZeroPrecision)
        settings = (self.stage, precision.policy, precision.mode, self.mesh.shape, self.mesh.device, self._average,
                    self._prefetch_units, None if self._units is None else tuple(self._units))
        handles: list[Any] = []

        def make() -> Engine:
            if self._layer_sync is not None:
                self.model = self._layer_sync.apply(module)
            handles.extend(precision.prepare(module))
            return Engine(module, zero=self.stage, precision=precision.policy, mesh=self.mesh, units=self._units,
                          prefetch_units=self._prefetch_units, average_gradients=self._average)

        held, new = hold(module, settings=settings, make=make)
        if not new:
            self._mesh = held.engine.mesh  # another Trainer may have made it
            return
        held.handles += handles
        _update_properties(module, device=self.root_device,
                           dtype=precision.policy.compute if precision.mode == "bf16-true" else None)
        for child in module.modules():  # metrics keep tensors that are neither parameters nor buffers
            if type(child)._apply is not nn.Module._apply and not any(True for _ in child.parameters()):
                child.to(self.root_device)

    def unshard(self) -> None:
        """Make the module plain torch again, every parameter whole and in its own type. Collective.

        A later fit shards it again.
        """
        assert self.lightning_module is not None
        let_go(self.lightning_module)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Ask the module for its optimizer and point it at this rank's pieces.

        Raises:
            ValueError: there are several, it is not element-wise, or it holds parameters that are not the module's.
        """
        self.engine.remove_optimizers()
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(f"configure_optimizers returned {len(self.optimizers)} optimizers: ZeroStrategy takes "
                             "one; fix: one optimizer with several parameter groups")
        for optimizer in self.optimizers:
            if isinstance(optimizer, _MockOptimizer):
                continue
            self.engine.add_optimizer(optimizer)
            follow(optimizer, self)
        for config in self.lr_scheduler_configs:
            follow_the_mean(config.scheduler, control=self.mesh.control)

    @MeshStrategy.optimizers.setter  # type: ignore[attr-defined]
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        MeshStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        for wrapper in self._lightning_optimizers:  # it takes zero_grad from the optimizer's class, past `follow`
            wrapper.zero_grad = wrapper.optimizer.zero_grad  # type: ignore[attr-defined]

    # -- the loop -------------------------------------------------------------------------------------------------

    def drive(self, micro_batches: Iterable[MicroBatch], loss: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Run one update's forwards and backwards; for a training_step. Collective over the data axes.

        Args:
            micro_batches: this rank's share of the update, already on the device.
            loss: the loss of one micro-batch; their sum is what is minimised.

        Returns:
            The sum of the losses, detached (fp32 scalar).
        """
        assert self.lightning_module is not None
        windows = self.lightning_module.trainer.accumulate_grad_batches
        if windows != 1:
            raise ValueError(f"accumulate_grad_batches={windows}: a module that drives whole updates accumulates "
                             "itself; fix: accumulate_grad_batches=1")
        batches = list(micro_batches)
        total = torch.zeros((), dtype=torch.float32, device=self.root_device)
        for place, batch in enumerate(batches):
            value = loss(batch)
            self.engine.backward(value, last=place == len(batches) - 1)
            total += value.detach().float()
        self._driven = self.is_driven = True
        return total

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of one micro-batch; nothing for a window that `drive` has done."""
        if self._driven:
            self._driven = False
            return closure_loss
        with self.engine.backward_scope(last=self._at_boundary):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def zero_grad(self) -> None:
        """Drop this window's gradients, but not those that `drive` has just brought. Called by the optimizer's."""
        if not self._driven:
            self.engine.zero_grad()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None,
                       **kwargs: Any) -> Any:
        """One update: closure (forward, backward), close, clip and hooks, optimizer, publish. Collective."""

        def closure_then_close() -> Any:
            self._at_boundary = True
            try:
                result = closure()
            finally:
                self._at_boundary = False
            self.before_step()
            return result

        self._stepping = True
        try:
            result = super().optimizer_step(optimizer, closure_then_close, model, **kwargs)
        finally:
            self._stepping = False
        self.after_step()
        return result

    @property
    def is_stepping(self) -> bool:
        """Inside `optimizer_step`."""
        return self._stepping

    def before_step(self) -> None:
        """Make gradients final for the optimizer. Collective."""
        self.engine.close_gradients()

    def after_step(self) -> None:
        """New values where parameters rest; the next window. Collective."""
        self.engine.publish()
        self._driven = self.is_driven = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.forward_scope():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.forward_scope():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.forward_scope():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.forward_scope():
            return super().predict_step(*args, **kwargs)

    # -- evaluation: replicas of buffers (BatchNorm statistics) follow the first rank's, as the saved file does ------

    def on_validation_start(self) -> None:
        self._share_buffers()

    def on_test_start(self) -> None:
        self._share_buffers()

    def on_predict_start(self) -> None:
        self._share_buffers()

    def on_train_end(self) -> None:
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Collective over the data axes."""
        assert self.lightning_module is not None
        for name, buffer in self.lightning_module.named_buffers():
            dense = buffer.contiguous()
            self.mesh.data.broadcast(dense, what=f"buffer '{name}'")
            if dense is not buffer:
                buffer.copy_(dense)

    # -- checkpoints: plain Lightning files, written by rank 0 ----------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full parameters and buffers under the module's own names. Collective."""
        return self.engine.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take full parameters and buffers, the same on every rank."""
        assert self.lightning_module is not None
        held = held_by(self.lightning_module)
        if held is None:  # a first fit: Lightning loads before `setup` shards
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            held.engine.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full optimizer state in torch's own form, so that any stage, and plain torch, can load it. Collective."""
        if isinstance(plain(optimizer), _MockOptimizer):
            return {}
        return self.engine.optimizer_state_dict(plain(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's pieces of full optimizer states.

        Raises:
            ValueError: the checkpoint has another number of optimizers, or their groups differ.
        """
        states, optimizers = checkpoint["optimizer_states"], self.optimizers
        if len(states) != len(optimizers):
            raise ValueError(f"checkpoint has {len(states)} optimizer states, configure_optimizers returned "
                             f"{len(optimizers)}; fix: resume with the optimizers it was saved with")
        for optimizer, state in zip(optimizers, states, strict=True):
            if not isinstance(optimizer, _MockOptimizer):
                self.engine.load_optimizer_state_dict(state, optimizer)

    # -- end ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        """Parameters stay sharded: a later fit, validate or test goes on with the same engine."""
        held = held_by(self.lightning_module)
        # After a failure a gather may be waiting for a peer that is gone: waiting too would hide the error.
        if held is not None and not self._failed:
            held.engine.rest()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()


register(ZeroStrategy)
