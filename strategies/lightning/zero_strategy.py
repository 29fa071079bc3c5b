"""The Lightning strategy: the engine's life cycle under a Trainer. No arithmetic stands here.

    Trainer(strategy=ZeroStrategy(stage=3), accelerator="cpu", devices=2)      or      Trainer(strategy="zero3")

Under automatic optimization Lightning runs `optimizer.step(closure)` with training_step and backward inside the
closure, calls zero_grad between the two, and clips after the closure. So gradients collect in the ledger, which
zero_grad does not touch, and are handed to the optimizer when the closure has returned (`optimizer_step`).

A module may drive a whole update itself: `strategy.drive(micro_batches, loss)` in its training_step runs forward and
backward of each micro-batch, and the `backward` that Lightning calls afterwards finds the window done.

Sources: lightning 2.6.6 `ParallelStrategy`, `ModelParallelStrategy`. Private names used, for want of public ones:
`_SubprocessScriptLauncher` (what every Lightning strategy launches with), `_layer_sync` (SyncBatchNorm conversion),
`_init_optimizers_and_lr_schedulers` through the base class. tests/test_lightning.py runs through each.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.engine import Engine
from strategies.lightning.precision import ZeroPrecision, _plain, policy_for
from strategies.mesh import Mesh, MeshShape
from strategies.precision import PrecisionPolicy
from strategies.zero.placement import StagePolicy

MicroBatch = TypeVar("MicroBatch")


class ZeroStrategy(ParallelStrategy):
    """ZeRO 0-3 on any accelerator, for any LightningModule with one optimizer.

    Args:
        stage: ZeRO stage 0-3.
        precision: "fp32", "bf16" or a PrecisionPolicy; None takes the Trainer's `precision=`.
        mesh: axis sizes; None puts all processes on data_shard.
        units: modules, or names inside the LightningModule, to gather together; None finds them.
        prefetch_units: units gathered ahead of their use at stage 3.
        average_gradients: gradients are the mean over data ranks; False gives the sum.
        timeout_s: how long a process waits in a collective.

    Raises:
        ValueError: at construction or setup, naming the argument, its value and what is allowed.
    """

    strategy_name = "zero"
    is_distributed = True  # read by the Trainer when it injects samplers; without it every rank sees all data

    def __init__(self, *, stage: int = 3, precision: str | PrecisionPolicy | None = None, mesh: MeshShape | None = None,
                 units: Sequence[str | nn.Module] | None = None, prefetch_units: int = 1,
                 average_gradients: bool = True, timeout_s: float = 1800.0,
                 accelerator: pl.accelerators.Accelerator | None = None,
                 parallel_devices: list[torch.device] | None = None,
                 cluster_environment: ClusterEnvironment | None = None, checkpoint_io: Any = None,
                 precision_plugin: Precision | None = None) -> None:
        self._policy = PrecisionPolicy.of(precision) if isinstance(precision, str) else precision
        self._zero_precision: ZeroPrecision | None = None
        super().__init__(accelerator=accelerator, parallel_devices=parallel_devices,
                         cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
                         precision_plugin=precision_plugin)
        self.stage = StagePolicy.of(stage)
        self.num_nodes = 1
        self._shape = mesh
        self._units = units
        self._prefetch_units = prefetch_units
        self._average = average_gradients
        self._timeout_s = timeout_s
        self._mesh: Mesh | None = None
        self._engine: Engine | None = None
        self._driven = False
        self._at_boundary = False

    # -- what the Trainer sets and asks ---------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """Ours, whatever the Trainer chose: autocast and GradScaler know nothing of shards."""
        if self._zero_precision is None:
            self._zero_precision = ZeroPrecision(self, self._policy or PrecisionPolicy.of("fp32"))
        return self._zero_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, ZeroPrecision):
            return
        wanted = policy_for(plugin)
        if self._policy is not None and plugin.precision != "32-true" and wanted.compute != self._policy.compute:
            raise ValueError(f"Trainer(precision={plugin.precision!r}) differs from "
                             f"ZeroStrategy(precision={self._policy.name!r}); fix: give one of them")
        self._zero_precision = ZeroPrecision(self, self._policy or wanted)

    @property
    def engine(self) -> Engine:
        """The engine that holds the LightningModule. Raises RuntimeError before setup."""
        if self._engine is None:
            raise RuntimeError("ZeroStrategy has no engine yet: it is made when the Trainer sets the model up")
        return self._engine

    @property
    def mesh(self) -> Mesh:
        """The mesh of this job. Raises RuntimeError before the processes are connected."""
        if self._mesh is None:
            raise RuntimeError("ZeroStrategy has no mesh yet: it is made when the Trainer connects the processes")
        return self._mesh

    def use_mesh(self, mesh: Mesh) -> None:
        """Take a mesh made before the Trainer, instead of making one."""
        self._mesh = mesh

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are cut over data ranks, not over the world."""
        return {"num_replicas": self.mesh.data.size, "rank": self.mesh.data.index}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Called by the Trainer when processes are known, before they are connected."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    # -- set-up ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connect the processes and make the mesh. Collective over the world; a second call changes nothing."""
        super().setup_environment()
        if self._mesh is not None:
            return
        self.set_world_ranks()
        reset_seed()
        if not dist.is_initialized() and self.world_size > 1:
            assert self.cluster_environment is not None
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            backend = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
            dist.init_process_group(backend, rank=self.global_rank, world_size=self.world_size,
                                    timeout=timedelta(seconds=self._timeout_s))
        self._mesh = Mesh(self._shape, device=self.root_device, timeout_s=self._timeout_s)

    def model_to_device(self) -> None:
        """Nothing: the engine places parameters and buffers."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model (once), then make its optimizer (each fit). Collective over the world."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        if self._engine is None or self._engine.module is not self.lightning_module:
            if self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.lightning_module)
            assert isinstance(self.precision_plugin, ZeroPrecision)
            self._engine = Engine(
                self.lightning_module, zero=self.stage, precision=self.precision_plugin.policy, mesh=self.mesh,
                units=self._units, prefetch_units=self._prefetch_units, average_gradients=self._average)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Ask the module for its optimizer and point it at this rank's pieces."""
        self.engine.remove_optimizers()
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(f"configure_optimizers returned {len(self.optimizers)} optimizers: ZeroStrategy takes "
                             "one; fix: one optimizer with several parameter groups")
        for optimizer in self.optimizers:
            self.engine.add_optimizer(optimizer)

    # -- the loop -------------------------------------------------------------------------------------------------

    def drive(self, micro_batches: Iterable[MicroBatch], loss: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Run one update's forwards and backwards; for a training_step. Collective over the data axes.

        Args:
            micro_batches: this rank's share of the update, already on the device.
            loss: the loss of one micro-batch; their sum is what is minimised.

        Returns:
            The sum of the losses, detached (fp32 scalar).
        """
        batches = list(micro_batches)
        total = torch.zeros((), device=self.root_device)
        for place, batch in enumerate(batches):
            value = loss(batch)
            self.engine.backward(value, last=place == len(batches) - 1)
            total += value.detach().float()
        self._driven = True
        return total

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of one micro-batch; nothing for a window that `drive` has done."""
        if self._driven:
            self._driven = False
            return closure_loss
        with self.engine.backward_scope(last=self._at_boundary):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None,
                       **kwargs: Any) -> Any:
        """One update: closure (forward, backward), close, clip and hooks, optimizer, publish. Collective."""

        def closure_then_close() -> Any:
            self._at_boundary = True
            try:
                result = closure()
            finally:
                self._at_boundary = False
            self.engine.close_gradients()
            return result

        result = super().optimizer_step(optimizer, closure_then_close, model, **kwargs)
        self.engine.publish()
        return result

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

    # -- talk between ranks ---------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if self._mesh is not None:
            self.mesh.world.barrier(what=name or "barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.mesh.world.broadcast_object(obj, what="broadcast", source=src) if self._mesh is not None else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the data ranks: "mean" (or "avg"), "sum" or "max"."""
        if not isinstance(tensor, Tensor):
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1].lower()
        if name not in ("mean", "avg", "sum", "max") and reduce_op is not None:
            raise ValueError(f"reduce_op={reduce_op!r}: allowed are mean, sum and max")
        if name == "max":
            return self.mesh.data.maximum(tensor, what="reduce")
        total = self.mesh.data.sum(tensor, what="reduce")
        return total / self.mesh.data.size if name in ("mean", "avg", "none") else total

    # -- checkpoints: plain Lightning files, written by rank 0 ----------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full parameters and buffers under the module's own names. Collective."""
        return self.engine.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take full parameters and buffers, the same on every rank."""
        self.engine.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full optimizer state in torch's own form, so that any stage, and plain torch, can load it. Collective."""
        return self.engine.optimizer_state_dict(_plain(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's pieces of full optimizer states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.engine.load_optimizer_state_dict(state, optimizer)

    # -- end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Parameters stay sharded: a later fit, validate or test goes on with the same engine."""
        if self._engine is not None:
            self._engine.rest()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()


def register() -> None:
    """Make `Trainer(strategy="zero0")` ... `"zero3"` known to `lightning.pytorch`. Idempotent."""
    for stage in range(4):
        with contextlib.suppress(KeyError):
            StrategyRegistry.remove(f"zero{stage}")
        StrategyRegistry.register(f"zero{stage}", ZeroStrategy, description=f"ZeRO stage {stage}", stage=stage)


register()
