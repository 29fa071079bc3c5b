"""One sample on one rank: a fresh process trains under one system and reports what it measured."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework.benchmark.meter import (
    Clocks,
    held_bytes,
    live_storages,
    read_memory,
    reset_peak,
    sampled_anonymous_peak,
)
from framework.benchmark.trainers import make_trainer, prepare
from framework.build import build_model, optimizer_maker
from framework.config import BenchmarkTask, GptModel, RunConfig
from framework.data.step_loader import MicroBatch

WARM_UP_MODEL = {"vocab_size": 64, "max_seq_len": 8, "hidden_size": 16, "num_layers": 1, "num_heads": 2,
                 "weights": None}


@dataclass(frozen=True)
class Place:
    """Where a sample runs: its rank among `world`, the files its ranks share, and how they wait for each other."""

    rank: int
    world: int
    batches: Path
    store: Path
    wait_for_all: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured. Bytes are above those before the model was built; times are of the timed updates."""

    parameters: int
    losses: list[float]
    """Mean token loss of this rank, one per update."""
    step_s: float
    """Median time of an update."""
    wall_s: float
    machine_cpu_s: float
    stolen_cpu_s: float
    own_cpu_s: float
    peak_bytes: int
    """Resident memory, the most during the timed updates."""
    whole_peak_bytes: int
    """The same with building the model and warming up."""
    anonymous_peak_bytes: int | None
    """Memory no file or other process shares, sampled during the updates after the timed ones."""
    live_bytes: int
    """Distinct tensor storages alive between two updates: state, buffers kept for reuse, all."""
    state_bytes: int | None
    """Of them, parameters, masters and optimizer state."""


def run_sample(system: str, config: RunConfig, place: Place) -> dict[str, Any]:
    """Train under `system` and return a RankReport as a dict. All ranks of the sample call it."""
    assert isinstance(config.task, BenchmarkTask)
    torch.set_num_threads(int(config.trainer.threads))
    data = torch.load(place.batches, weights_only=True)
    tokens, labels = data["tokens"][place.rank].clone(), data["labels"][place.rank].clone()
    del data
    with _process_group(place, config) if system != "nocomm" else contextlib.nullcontext():
        prepare(system)
        _warm_libraries(config)
        before = live_storages()
        reset_peak()
        base = read_memory()
        model = build_model(config.model, seed=config.seed)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        trainer = make_trainer(system, model, config, world=place.world)
        losses: list[float] = []

        def run(steps: int) -> list[float]:
            times = []
            for _ in range(steps):
                done = len(losses)
                batches = [MicroBatch(*pair) for pair in zip(tokens[done], labels[done], strict=True)]
                start_s = time.perf_counter()
                losses.append(trainer.update(done, batches))
                times.append(time.perf_counter() - start_s)
            return times

        timed_steps = config.trainer.max_steps - config.task.warmup_steps
        run(config.task.warmup_steps)
        place.wait_for_all()
        early_peak = read_memory().peak
        reset_peak()
        start = Clocks.read()
        times = run(timed_steps)
        clocks = Clocks.read().since(start)
        peak = read_memory().peak
        place.wait_for_all()
        live = held_bytes(before)
        anonymous_peak = None
        if config.task.memory_steps:
            with sampled_anonymous_peak() as anonymous:
                run(config.task.memory_steps)
            anonymous_peak = anonymous[0] - base.anonymous
        place.wait_for_all()
        return asdict(RankReport(
            parameters=parameters, losses=losses[: config.trainer.max_steps], step_s=statistics.median(times),
            wall_s=clocks.wall_s, machine_cpu_s=clocks.machine_s, stolen_cpu_s=clocks.stolen_s,
            own_cpu_s=clocks.own_s, peak_bytes=peak - base.resident,
            whole_peak_bytes=max(early_peak, peak) - base.resident, anonymous_peak_bytes=anonymous_peak,
            live_bytes=live, state_bytes=trainer.state_bytes()))


@contextlib.contextmanager
def _process_group(place: Place, config: RunConfig) -> Any:
    """gloo over this sample's ranks. They meet in a file, so that no port can be taken by another job."""
    store = dist.FileStore(str(place.store), place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world,
                            timeout=timedelta(seconds=config.trainer.timeout_s))
    yield
    dist.destroy_process_group()


def _warm_libraries(config: RunConfig) -> None:
    """One update of a tiny model, so that what libraries set up at first use is billed to no system."""
    tiny: GptModel = replace(config.model, **WARM_UP_MODEL)
    model = build_model(tiny, seed=0)
    optimizer = optimizer_maker(config.optimizer)(model)
    tokens = torch.zeros(1, tiny.max_seq_len, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision.name == "bf16"):
        loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
