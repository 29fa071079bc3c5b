"""The jobs of a `--multirun`: where they go, how each ended, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS = ("job", "status", "final_loss", "overrides", "folder")


@dataclass(frozen=True)
class JobRecord:
    """How one job ended. `folder` is None when it had none yet; `reason` says why it failed."""

    number: int
    overrides: Sequence[str]
    status: str
    final_loss: float | None = None
    folder: Path | None = None
    reason: str = ""


@dataclass
class Sweep:
    """A sweep under way. `stamp` names its folder under outputs/multirun."""

    stamp: str
    folder: Path
    jobs: list[JobRecord] = field(default_factory=list)

    @property
    def failed(self) -> list[JobRecord]:
        return [job for job in self.jobs if job.status != "completed"]

    def table(self, launch_dir: Path) -> str:
        """Every job, one line each; then every failure with its overrides and reason."""
        rows = [COLUMNS, *(_row(job, launch_dir) for job in self.jobs)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for job in self.failed:
            reason = job.reason.replace("\n", "\n    ")
            lines.append(f"job {job.number} {job.status} ({' '.join(job.overrides) or 'no overrides'}):\n    {reason}")
        return "\n".join(lines)


def reserve(launch_dir: Path, run_dir: str) -> Sweep:
    """Make the sweep's folder: `run_dir`, or with "auto" a new one named by the time that no other sweep has."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    if run_dir != "auto":
        folder = launch_dir / Path(run_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return Sweep(stamp, folder)
    parent = launch_dir / "outputs" / "multirun"
    parent.mkdir(parents=True, exist_ok=True)
    name, attempt = stamp, 1
    while True:
        try:
            (parent / name).mkdir()
            return Sweep(name, parent / name)
        except FileExistsError:
            attempt += 1
            name = f"{stamp}-{attempt}"


def _row(job: JobRecord, launch_dir: Path) -> tuple[str, ...]:
    folder = "-"
    if job.folder is not None:
        inside = job.folder.is_relative_to(launch_dir)
        folder = str(job.folder.relative_to(launch_dir) if inside else job.folder)
    loss = "-" if job.final_loss is None else f"{job.final_loss:.4f}"
    return (str(job.number), job.status, loss, " ".join(job.overrides) or "-", folder)
