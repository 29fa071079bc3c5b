"""The systems at work: each takes the same model and optimizer maker over and gives a trainer.

Its update runs the given micro-batches forward and backward, clips, steps, and returns this rank's mean token loss.
Peers are used as their own documentation shows; nothing of theirs is changed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from framework.benchmark.catalog import SYSTEMS
from framework.build import build_precision, optimizer_maker
from framework.config import RunConfig
from framework.data.step_loader import MicroBatch
from framework.schedule import schedule_factor

Update = Callable[[int, Sequence[MicroBatch]], float]
"""From the updates done so far and this rank's micro-batches to its mean token loss."""


@dataclass(frozen=True)
class Trainer:
    """One system at work on one rank."""

    update: Update
    state_bytes: Callable[[], int | None]
    """Bytes of parameters, masters and optimizer state between two updates; None where a system hides them."""


MakeTrainer = Callable[[nn.Module, RunConfig, int], Trainer]


def make_trainer(system: str, model: nn.Module, config: RunConfig, *, world: int) -> Trainer:
    """The trainer of `system`, which takes `model` over. Collective over the process group, if it has one."""
    stage = SYSTEMS[system].stage
    if system.startswith("zero"):
        assert stage is not None
        return _engine(model, config, stage)
    if system.startswith("deepspeed"):
        assert stage is not None
        return _deepspeed(model, config, stage, world)
    makers: dict[str, MakeTrainer] = {"nocomm": _nocomm, "ddp": _ddp, "fsdp2": _fsdp2}
    return makers[system](model, config, world)


def prepare(system: str) -> None:
    """What a system sets up once per process and is not billed for: imports, and operators it compiles at first use.

    Collective over the process group, which is there already.
    """
    if SYSTEMS[system].distribution == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo")


def preload() -> None:
    """Import what the systems need and what takes long to import, so that forks share it."""
    for module in ("torch.distributed.fsdp", "torch.nn.parallel", "strategies.engine"):
        importlib.import_module(module)
    # The first optimizer of a process imports torch's compiler, for two seconds.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def _nocomm(model: nn.Module, config: RunConfig, world: int) -> Trainer:
    return _plain_loop(model, config, autocast=True)


def _ddp(model: nn.Module, config: RunConfig, world: int) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_loop(parallel, config, autocast=True, unsynchronised=parallel.no_sync)


def _fsdp2(model: nn.Module, config: RunConfig, world: int) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy()
    if config.precision.name == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return _plain_loop(model, config, autocast=False)


def _plain_loop(model: nn.Module, config: RunConfig, *, autocast: bool,
                unsynchronised: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
                ) -> Trainer:
    """The loop of plain torch. `unsynchronised`: the context of micro-batches after which others follow."""
    optimizer = optimizer_maker(config.optimizer)(model)
    set_rate = _rate_setter(optimizer.param_groups, config)
    limit = config.trainer.gradient_clip_val
    mixed = autocast and config.precision.name == "bf16"

    def update(done: int, batches: Sequence[MicroBatch]) -> float:
        set_rate(done)
        total = 0.0
        for number, batch in enumerate(batches, start=1):
            with unsynchronised() if number < len(batches) else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    loss = mean_loss(model, batch, len(batches))
                loss.backward()
            total += loss.item()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Trainer(update, lambda: _state_bytes(model.parameters(), optimizer))


def _engine(model: nn.Module, config: RunConfig, stage: int) -> Trainer:
    from strategies.engine import Engine

    engine = Engine(model, optimizer=optimizer_maker(config.optimizer)(model), zero=stage,
                    precision=build_precision(config), clip_norm=config.trainer.gradient_clip_val,
                    prefetch_units=config.zero.prefetch_units, timeout_s=config.trainer.timeout_s)
    assert engine.optimizer is not None
    set_rate = _rate_setter(engine.optimizer.param_groups, config)

    def update(done: int, batches: Sequence[MicroBatch]) -> float:
        set_rate(done)
        total = 0.0
        for number, batch in enumerate(batches, start=1):
            loss = mean_loss(engine, batch, len(batches))
            engine.backward(loss, last=number == len(batches))
            total += loss.item()
        engine.step()
        return total

    def state_bytes() -> int:
        resting = engine.resting_bytes()
        return resting.parameters + resting.optimizer

    return Trainer(update, state_bytes)


def _deepspeed(model: nn.Module, config: RunConfig, stage: int, world: int) -> Trainer:
    """DeepSpeed with torch's optimizer, so that the losses are everyone's; buckets and prefetch at its defaults."""
    import deepspeed

    accumulation = config.batch.global_size // (config.batch.micro_size * world)
    optimizer: Optimizer = optimizer_maker(config.optimizer)(model)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro_size, "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
        "gradient_clipping": config.trainer.gradient_clip_val or 0.0,  # its default is 1.0
    }
    if config.precision.name == "bf16":
        settings["bf16"] = {"enabled": True}
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    set_rate = _rate_setter(wrapped.param_groups, config)

    def update(done: int, batches: Sequence[MicroBatch]) -> float:
        set_rate(done)
        total = 0.0
        for batch in batches:
            loss = mean_loss(engine, batch, 1)  # it divides by the accumulation itself
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(batches)
        return total

    return Trainer(update, lambda: None)


def mean_loss(model: Callable[[Tensor, Tensor], Tensor], batch: MicroBatch, micro_batches: int) -> Tensor:
    """This micro-batch's share of the update's mean token loss on one rank: a scalar. Every token has a label."""
    return model(batch.tokens_BT, batch.labels_BT) / (batch.tokens_BT.numel() * micro_batches)


def _state_bytes(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Bytes of the distinct storages of parameters and optimizer state; of a DTensor, of this rank's shard."""
    states = [value for state in optimizer.state.values() for value in state.values()
              if isinstance(value, Tensor) and value.dim() > 0]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in [*parameters, *states]]
    storages = [value.untyped_storage() for value in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _rate_setter(groups: Iterable[dict[str, Any]], config: RunConfig) -> Callable[[int], None]:
    """Sets the learning rate of the next update from the updates done, as config.schedule has it."""
    groups = list(groups)
    factor = schedule_factor(config.schedule, config.trainer.max_steps)

    def set_rate(done: int) -> None:
        for group in groups:
            group["lr"] = config.optimizer.lr * factor(done)

    return set_rate
