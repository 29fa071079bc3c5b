"""The resolved plan of a run, as it is printed before training.

Pure presentation: every number comes from the caller, nothing is measured or decided here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from framework.config import Fp16Precision, RunConfig

MOST_RANKS_SHOWN = 16
HASH_PREFIX = 12
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Resolved(Protocol):
    """An `auto` value: the key, what it became and why (`Resolution` in framework/resolve.py)."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What the plan shows beside the config."""

    model: str
    """As the user named it, for example "gpt2"."""
    parameters: int
    """Elements, tied ones once."""
    axes: Mapping[str, int]
    """Size of every mesh axis, outermost first; the product is the number of processes."""
    accumulation: int
    """Micro-batches of one update on one data rank."""
    rests: Mapping[str, str]
    """Where parameters, gradients and optimizer state rest: "replicated", "sharded over 2", ..."""
    resting_bytes_per_rank: Mapping[str, Sequence[int]]
    """Expected bytes of parameters, gradients and optimizer state on every rank."""
    training_tokens: int | None
    """Tokens of the training split; None where the dataset does not know it yet."""
    data_hash: str | None
    run_dir: str
    collectives: str = ""
    """How large buffers move between data ranks, in words."""


def render_plan(config: RunConfig, facts: PlanFacts, resolutions: Sequence[Resolved] = ()) -> RenderableType:
    """A rich renderable for `Progress.say`. `config` is the resolved one."""
    parts: list[RenderableType] = [Text("Plan", style="bold"), Padding(_settings(config, facts), (0, 0, 0, 2))]
    if math.prod(facts.axes.values()) > 1:
        parts.append(Padding(_layout(facts.axes), (0, 0, 0, 2)))
    if resolutions:
        parts += [Text("Chosen for auto", style="bold"), Padding(_chosen(resolutions), (0, 0, 0, 2))]
    return Group(*parts)


def bytes_text(count: float) -> str:
    """A size for people: 474.7 MiB."""
    power = 0
    while count >= 1024 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {UNITS[power]}"


def count_text(count: float) -> str:
    """A count for people: 124.4M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def _settings(config: RunConfig, facts: PlanFacts) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in (
        ("run folder", facts.run_dir),
        ("model", _model(config, facts)),
        ("zero", _zero(config, facts)),
        ("resting memory", _resting(facts.resting_bytes_per_rank)),
        ("precision", _precision(config)),
        ("batch", _batch(config, facts)),
        ("optimizer", _optimizer(config)),
        ("schedule", _schedule(config)),
        ("data", _data(config, facts)),
        ("processes", _processes(config, facts)),
        *([("collectives", facts.collectives)] if facts.collectives else []),
    ):
        table.add_row(name, Text(value))
    return table


def _model(config: RunConfig, facts: PlanFacts) -> str:
    model = config.model
    return (
        f"{facts.model}: {count_text(facts.parameters)} parameters ({facts.parameters:,}), {model.num_layers} layers, "
        f"{model.num_heads} heads, width {model.hidden_size}, vocabulary {model.vocab_size:,}"
    )


def _zero(config: RunConfig, facts: PlanFacts) -> str:
    return f"stage {config.zero.stage}: " + ", ".join(f"{state} {where}" for state, where in facts.rests.items())


def _resting(bytes_per_rank: Mapping[str, Sequence[int]]) -> str:
    """One figure where all ranks hold the same, else the range."""
    parts = [f"{state} {_range_text(sizes)}" for state, sizes in bytes_per_rank.items()]
    totals = [sum(sizes) for sizes in zip(*bytes_per_rank.values(), strict=True)]
    return f"{_range_text(totals)} per rank: " + ", ".join(parts)


def _range_text(sizes: Sequence[int]) -> str:
    low, high = bytes_text(min(sizes)), bytes_text(max(sizes))
    return low if low == high else f"{low} to {high}"


def _precision(config: RunConfig) -> str:
    precision = config.precision
    if isinstance(precision, Fp16Precision):
        return f"fp16, loss scale from {precision.initial_scale:g}, gradients in fp32, masters in fp32"
    return f"{precision.name}, gradients in {precision.gradient_dtype}, masters in fp32"


def _batch(config: RunConfig, facts: PlanFacts) -> str:
    batch, data_ranks = config.batch, config.parallel.data
    return (
        f"{batch.global_size} samples per update = {batch.micro_size} x {facts.accumulation} micro-batches x "
        f"{data_ranks} data ranks; {batch.global_size * config.dataset.seq_len:,} tokens"
    )


def _optimizer(config: RunConfig) -> str:
    settings = {key: value for key, value in vars(config.optimizer).items() if key != "name"}
    trainer = config.trainer
    clipping = "no clipping"
    if trainer.gradient_clip_val is not None:
        clipping = f"gradients clipped by {trainer.gradient_clip_algorithm} to {trainer.gradient_clip_val:g}"
    return f"{config.optimizer.name} " + ", ".join(f"{k}={v}" for k, v in settings.items()) + f"; {clipping}"


def _schedule(config: RunConfig) -> str:
    schedule = config.schedule
    end = f", down to {schedule.final_ratio:g} of the peak" if schedule.name in ("linear", "cosine") else ""
    return f"{schedule.name} over {config.trainer.max_steps} steps, {schedule.warmup_steps} of them warm-up{end}"


def _data(config: RunConfig, facts: PlanFacts) -> str:
    parts = [config.dataset.name]
    if facts.training_tokens is not None:
        run_tokens = config.trainer.max_steps * config.batch.global_size * config.dataset.seq_len
        times = run_tokens / max(facts.training_tokens, 1)
        parts.append(f"{facts.training_tokens:,} training tokens, read {times:.2g} times")
    if facts.data_hash is not None:
        parts.append(f"hash {facts.data_hash[:HASH_PREFIX]}")
    return ", ".join(parts)


def _processes(config: RunConfig, facts: PlanFacts) -> str:
    trainer = config.trainer
    split = " x ".join(f"{name} {size}" for name, size in facts.axes.items() if size > 1)
    return (
        f"{math.prod(facts.axes.values())} on {trainer.accelerator} ({trainer.num_nodes} node"
        f"{'s' if trainer.num_nodes > 1 else ''}, {trainer.threads} threads each)" + (f": {split}" if split else "")
    )


def _layout(axes: Mapping[str, int]) -> Table:
    """Which place every rank has on the axes that are used; the innermost axis changes fastest."""
    used = {name: size for name, size in axes.items() if size > 1}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    for name in ("rank", *used):
        table.add_column(name, justify="right")
    world_size = math.prod(axes.values())
    for rank in range(min(world_size, MOST_RANKS_SHOWN)):
        table.add_row(str(rank), *map(str, _place(rank, list(used.values()))))
    if world_size > MOST_RANKS_SHOWN:
        table.add_row("...", *("" for _ in used))
        table.add_row(str(world_size - 1), *map(str, _place(world_size - 1, list(used.values()))))
    return table


def _place(rank: int, sizes: Sequence[int]) -> list[int]:
    place = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.append(index)
    return place[::-1]


def _chosen(resolutions: Sequence[Resolved]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for resolution in resolutions:
        table.add_row(Text(f"{resolution.key}={resolution.value}"), Text(str(resolution.why)))
    return table
