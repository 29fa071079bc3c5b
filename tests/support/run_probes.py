"""What a training run does inside, written down as it happens: for values that the records of a run do not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from framework.config import RunConfig
from framework.data.source import DataSource
from support.run_jobs import run_here


@dataclass
class Seen:
    """One rank's view of a run, one entry per update."""

    start: dict[str, Tensor] = field(default_factory=dict)
    """Full parameters before the first update."""
    batches: list[list[Tensor]] = field(default_factory=list)
    """Tokens of this rank's micro-batches."""
    local_losses: list[float] = field(default_factory=list)
    """This rank's part of the loss."""
    lrs: list[list[float]] = field(default_factory=list)
    """Learning rates of the groups when the optimizer stepped."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm as this rank knows it."""
    states: list[tuple[dict[str, Tensor], dict[str, Any]]] = field(default_factory=list)
    """Full parameters and optimizer state after the update."""


def run_watched(rank: int, config: RunConfig, path: Path, source: Callable[[RunConfig, Path], DataSource] | None = None
                ) -> Seen:
    """A training run on this rank of the pool, watched. `source` (a module-level function) replaces its data."""
    seen = Seen()
    with _watching(seen):
        if source is None:
            run_here(rank, config, path)
        else:
            with mock.patch("framework.tasks.session.prepare", return_value=source(config, path)):
                run_here(rank, config, path)
    return seen


@contextmanager
def _watching(seen: Seen) -> Iterator[None]:
    from framework.module import StepModule
    from framework.tasks.train import StepReporting
    from strategies.lightning.zero_strategy import ZeroStrategy

    plain_start, plain_log = StepReporting.on_train_start, StepReporting._log
    plain_step, plain_drive = StepModule.training_step, ZeroStrategy.drive

    def on_train_start(self: Any, trainer: Any, module: StepModule) -> None:
        seen.start = _plain(module.strategy.engine.state_dict())
        plain_start(self, trainer, module)

    def log(self: Any, module: StepModule, step: int, validates: bool) -> None:
        engine = module.strategy.engine
        seen.norms.append(module.outcome.grad_norm)
        seen.states.append((_plain(engine.state_dict()), engine.optimizer_state_dict()))
        plain_log(self, module, step, validates)

    def training_step(self: Any, micro_batches: Any, batch_idx: int) -> Tensor:
        seen.batches.append([batch.tokens_BT.clone() for batch in micro_batches])
        return plain_step(self, micro_batches, batch_idx)

    def drive(self: Any, *args: Any) -> Tensor:
        loss = plain_drive(self, *args)
        seen.local_losses.append(loss.item())
        return loss

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.lrs.append([group["lr"] for group in optimizer.param_groups])

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        with (mock.patch.object(StepReporting, "on_train_start", on_train_start),
              mock.patch.object(StepReporting, "_log", log),
              mock.patch.object(StepModule, "training_step", training_step),
              mock.patch.object(ZeroStrategy, "drive", drive)):
            yield
    finally:
        hook.remove()


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the plain model's names, without the tied head."""
    return {name.removeprefix("model."): value for name, value in state.items() if not name.endswith("lm_head.weight")}
