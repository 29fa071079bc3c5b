"""What a run says about itself: a line per logged step and a summary at the end.

One path for every number: the caller measures and fills a `StepReport`; `Reporter` writes it to metrics.jsonl first
and only then shows it and hands it to the trackers, so whatever a tracker does, the file holds everything.
`Recorded` is what the summary derives from those lines. It can also be read back from the file, which is how the
parent writes the summary of a run whose rank 0 was killed.

Imports neither torch nor Lightning, so the parent process can use it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework.config import RunConfig
from framework.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from framework.progress import Progress
    from framework.tracking import Tracker

STATUSES = ("completed", "failed", "interrupted")
VERSIONED = ("shardlight", "torch", "lightning", "numpy", "hydra-core", "omegaconf", "tokenizers", "safetensors",
             "triton", "transformers", "wandb")
STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One logged update, over all ranks."""

    step: int
    """Updates done, counting this one."""
    loss: float
    """Mean over the tokens of the step, unrounded."""
    lr: float
    grad_norm: float | None
    """Before clipping. Infinite or NaN in an update that was skipped for it: null in the line."""
    tokens: int
    """Tokens of this update."""
    step_time_s: float
    tokens_per_s: float
    peak_memory_bytes_per_rank: list[int]
    loss_scale: float | None = None
    """Factor on the loss in this update; None without loss scaling, and then not in the line."""
    skipped_steps: int = 0
    """Updates skipped so far, because gradients were not finite; in the line if there are any."""
    extra: dict[str, float] = field(default_factory=dict)
    """More fields of the same line, such as val_loss."""

    @property
    def has_norm(self) -> bool:
        """Whether the gradient norm is a number."""
        return self.grad_norm is not None and math.isfinite(self.grad_norm)

    def line(self) -> dict[str, Any]:
        """The object written to metrics.jsonl."""
        line = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        if not self.has_norm:
            line["grad_norm"] = None
        for name, absent in (("loss_scale", None), ("skipped_steps", 0)):
            if line[name] == absent:
                del line[name]
        clash = sorted(set(line) & set(self.extra))
        if clash:
            raise ValueError(f"extra metrics {clash} have the names of fields that every step has")
        return line | self.extra


class Recorded:
    """What the lines of metrics.jsonl amount to. A few numbers per line are kept, not the lines."""

    def __init__(self) -> None:
        self.steps = 0
        self.final_loss: float | None = None
        self.val_loss: float | None = None
        self.peak_memory_bytes_per_rank: list[int] | None = None
        self.skipped_steps = 0
        self._times_s: list[float] = []
        self._tokens: list[int] = []

    @classmethod
    def read(cls, folder: RunFolder) -> Recorded:
        """From the metrics.jsonl of a run, finished or not."""
        recorded = cls()
        for line in folder.read_metrics():
            recorded.add(line)
        return recorded

    def add(self, line: Mapping[str, Any]) -> None:
        self.advance(line["step"])
        self.final_loss = line["loss"]
        self.val_loss = line.get("val_loss", self.val_loss)
        self.skipped_steps = line.get("skipped_steps", self.skipped_steps)
        peaks = line["peak_memory_bytes_per_rank"]
        earlier = self.peak_memory_bytes_per_rank or [0] * len(peaks)
        self.peak_memory_bytes_per_rank = [max(pair) for pair in zip(earlier, peaks, strict=True)]
        self._times_s.append(line["step_time_s"])
        self._tokens.append(line["tokens"])

    def advance(self, step: int) -> None:
        """An update that has no line."""
        self.steps = max(self.steps, step)

    @property
    def median_step_time_s(self) -> float | None:
        """Without the first step, which pays for warming up, if there is another."""
        times = self._times_s[1:] or self._times_s
        return statistics.median(times) if times else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens over time of the recorded steps, the first one left out like above."""
        time_s = sum(self._times_s[1:] or self._times_s)
        return sum(self._tokens[1:] or self._tokens) / time_s if time_s > 0 else None

    @property
    def updates(self) -> dict[str, int]:
        """Updates attempted, applied and skipped, as far as they are recorded."""
        return {"attempted": self.steps, "applied": self.steps - self.skipped_steps, "skipped": self.skipped_steps}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the caller measured for the summary. None is "not known", as in a run that failed before it knew."""

    world_size: int | None = None
    layout: Mapping[str, int] | None = None
    """Sizes of data, data_replicate, sequence, tensor, pipeline; None takes the config's."""
    parameters: int | None = None
    """Elements, each counted once however it is sharded or tied."""
    resting_bytes_per_rank: Mapping[str, Sequence[int]] | None = None
    """Of parameters, gradients and optimizer: bytes on every rank, summed from live storages."""
    peak_memory_bytes_per_rank: Sequence[int] | None = None
    """None takes the recorded steps' peak."""
    val_loss: float | None = None
    """None takes the last one recorded."""
    updates: Mapping[str, int] | None = None
    """Updates attempted, applied and skipped; None takes the recorded ones."""
    data_hash: str | None = None
    wall_time_s: float | None = None
    """None takes the reporter's own clock."""


def build_summary(
    config: RunConfig, *, status: str, recorded: Recorded, measured: Measured, error: str | None = None
) -> dict[str, Any]:
    """The content of summary.json. `config` is the resolved one; `error` is there exactly when it is given."""
    if status not in STATUSES:
        raise ValueError(f"status={status!r}: a run ends as one of {', '.join(STATUSES)}")
    axes = config.parallel if measured.layout is None else measured.layout
    resting = measured.resting_bytes_per_rank
    peaks = measured.peak_memory_bytes_per_rank or recorded.peak_memory_bytes_per_rank
    summary = {
        "status": status,
        "steps": recorded.steps,
        "updates": dict(recorded.updates if measured.updates is None else measured.updates),
        "final_loss": recorded.final_loss,
        "val_loss": recorded.val_loss if measured.val_loss is None else measured.val_loss,
        "world_size": measured.world_size,
        "layout": {name: _axis(axes, name) for name in ("data", "data_replicate", "sequence", "tensor", "pipeline")},
        "zero_stage": config.zero.stage,
        "precision": config.precision.name,
        "parameters": measured.parameters,
        "resting_bytes_per_rank": {name: None if resting is None else list(resting[name]) for name in STATES},
        "peak_memory_bytes_per_rank": None if peaks is None else list(peaks),
        "median_step_time_s": recorded.median_step_time_s,
        "tokens_per_s": recorded.tokens_per_s,
        "wall_time_s": measured.wall_time_s,
        "data_hash": measured.data_hash,
        "versions": versions(),
    }
    return summary if error is None else summary | {"error": error}


def versions() -> dict[str, str]:
    """Python and the installed distributions a result can depend on, read from their metadata, none imported."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    return found


class Reporter:
    """Everything a run shows and writes while it trains. Rank 0 alone has one; nothing here is collective.

    Only what concerns metrics.jsonl and summary.json can raise (OSError: the disk is full). The screen and the
    trackers cannot stop a run.
    """

    def __init__(self, *, folder: RunFolder, progress: Progress, trackers: Sequence[Tracker] = ()) -> None:
        self.folder = folder
        self.progress = progress
        self.trackers = list(trackers)
        self.recorded = Recorded()
        self._started_s = time.monotonic()

    @property
    def wall_time_s(self) -> float:
        """Since the reporter was made."""
        return time.monotonic() - self._started_s

    def start(self, *, total_steps: int, done_steps: int = 0, plan: RenderableType | None = None) -> None:
        """Print the plan, start the trackers and the bar. `done_steps`: updates that a resumed run starts after."""
        if plan is not None:
            self.progress.say(plan)
        for tracker in self.trackers:
            tracker.start()
        self.progress.start(total_steps, done_steps=done_steps)

    def step(self, report: StepReport) -> None:
        """Record and show a logged update."""
        line = report.line()
        self.folder.append_metrics(line)
        self.recorded.add(line)
        self.progress.step(report)
        for tracker in self.trackers:
            tracker.log(tracker_values(line), report.step)

    def advance(self, step: int) -> None:
        """Move the bar for an update that is not logged."""
        self.recorded.advance(step)
        self.progress.advance(step)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, close the bar, then let the trackers finish. Call it however the run ended."""
        if summary["wall_time_s"] is None:
            summary["wall_time_s"] = self.wall_time_s
        self.folder.write_json(self.folder.summary_path, summary)
        self.progress.close()
        for tracker in self.trackers:
            tracker.finish(summary)


def tracker_values(line: Mapping[str, Any]) -> dict[str, float]:
    """A line as trackers chart it: plain numbers. A list over ranks becomes its largest, named without `_per_rank`."""
    values = {}
    for key, value in line.items():
        if isinstance(value, list):
            key, value = key.removesuffix("_per_rank"), max(value)
        if value is not None and key != "step":
            values[key] = value
    return values


def _axis(axes: Any, name: str) -> Any:
    return axes[name] if isinstance(axes, Mapping) else getattr(axes, name)
