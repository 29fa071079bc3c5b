"""Runs of a LightningModule under ZeroStrategy on pool ranks, and the same in one process in plain Lightning.

A rank of the pool looks to Lightning like a rank that torchrun started; its gloo group exists already. Data and batches
are such that step k of `world` ranks sees the samples of step k of one process with `world` times the batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from support.lightning_modules import MODULES, Plain
from support.ranks import run_ranks

ROWS_PER_UPDATE = 12  # over all ranks: divides by 1, 2, 3, 4
UPDATES_PER_EPOCH = 5
CALLBACKS: dict[str, Callable[[], pl.Callback]] = {  # by name: most do not pickle
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    "growing window": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
    "finetuning": lambda: BackboneFinetuning(),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.5),
}


@dataclass
class Outcome:
    """What one rank (or the single process) ended with. `state`: full parameters and buffers."""

    losses: list[float]
    state: dict[str, Tensor]
    notes: list[Any]
    steps: int


@contextlib.contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Variables as torchrun sets them."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29400, "TORCHELASTIC_RUN_ID": "test"}
    before = getattr(rank_zero_only, "rank", None)
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}), quiet():
        yield
    rank_zero_only.rank = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice on workers and loggers, and without what its launcher leaves behind in the process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def data(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS_PER_UPDATE * UPDATES_PER_EPOCH, 6, generator=generator)
    return TensorDataset(x, torch.sin(3 * x.flip(1)))


def loader(world: int, rank: int = 0, *, seed: int = 0) -> DataLoader:
    """In order: the sampler that Lightning puts in of itself shuffles training data."""
    rows = data(seed)
    return DataLoader(rows, batch_size=ROWS_PER_UPDATE // world,
                      sampler=DistributedSampler(rows, num_replicas=world, rank=rank, shuffle=False))


def trainer(strategy: Any = "auto", world: int = 1, *, callbacks: Sequence[Any] = (), **options: Any) -> pl.Trainer:
    """A Trainer of `world` processes; `callbacks` are objects, or names in CALLBACKS."""
    made = [CALLBACKS[entry]() if isinstance(entry, str) else entry for entry in callbacks]
    return pl.Trainer(**{
        "strategy": strategy, "accelerator": "cpu", "devices": world, "max_epochs": 2, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "callbacks": made,
        **options})


def make_module(name: str) -> Plain:
    torch.manual_seed(0)
    return MODULES[name]()


def outcome(one: pl.Trainer, module: Plain) -> Outcome:
    return Outcome(list(module.seen), one.strategy.lightning_module_state_dict(), list(module.notes), one.global_step)


def fit_single(name: str, **options: Any) -> Outcome:
    """Plain Lightning on one device."""
    with quiet():
        module, one = make_module(name), trainer(**options)
        one.fit(module, loader(1), loader(1, seed=1))
        return outcome(one, module)


def fit_alone(module: pl.LightningModule, strategy: Any = "zero3", **options: Any) -> pl.Trainer:
    """One process, no launcher."""
    with quiet():
        one = trainer(strategy, **options)
        one.fit(module, loader(1))
    return one


def fit_rank(rank: int, name: str, stages: list[int], world: int, options: dict[str, Any]) -> list[Outcome]:
    """One fit per stage on a rank of the pool."""
    import strategies

    with launched(rank, world):
        outcomes = []
        for stage in stages:
            module, one = make_module(name), trainer(strategies.ZeroStrategy(stage=stage), world, **options)
            one.fit(module, loader(world, rank), loader(world, rank, seed=1))
            outcomes.append(outcome(one, module))
        return outcomes


def compare(name: str, *, world: int = 2, stages: Sequence[int] = (1, 3), atol: float = 2e-6, **options: Any
            ) -> tuple[Outcome, list[list[Outcome]]]:
    """Fit in one process and on `world` ranks at each stage; returns the first, and the ranks' outcomes by stage."""
    expected = fit_single(name, **options)
    by_rank = run_ranks(world, fit_rank, name, list(stages), world, options)
    by_stage = [list(outcomes) for outcomes in zip(*by_rank, strict=True)]
    for found in by_stage:
        assert_same(found, expected, atol=atol)
    return expected, by_stage


def assert_same(found: list[Outcome], expected: Outcome, *, atol: float = 2e-6) -> None:
    """The mean loss over ranks at each step, the final state on every rank, the number of updates."""
    losses = torch.tensor([one.losses for one in found], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected.losses, dtype=torch.float64), atol=atol, rtol=0)
    for one in found:
        assert one.steps == expected.steps
        assert one.state.keys() == expected.state.keys()
        for key, value in expected.state.items():
            torch.testing.assert_close(one.state[key], value, atol=atol, rtol=0, msg=lambda m, k=key: f"{k}: {m}")
