"""The one folder a job writes to: who makes it, what lies in it, and how a file in it gets written whole.

The launcher claims the folder once, before any rank starts, and hands its path to the ranks; a rank never works out a
name for itself (a pattern with the time in it gives every process its own folder). Rank 0 alone writes the shared
files:

    config.yaml      the resolved config
    metrics.jsonl    one JSON object per logged step
    summary.json     how the run ended
    checkpoints/     weights
    logs/            output per rank

JSON has no word for a number that is not finite, and a diverging loss is exactly what a reader of these files looks
for. NaN and the infinities are therefore written as the strings "NaN", "Infinity" and "-Infinity", which `float()`
reads in Python and `Number()` in JavaScript; `read_metrics` turns them back.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
RECORDS = ("config.yaml", "metrics.jsonl", "summary.json")


class RunFolder:
    """Paths of a run and the writing of its files.

    Pickles as its path, so it can be sent to a rank. The object `claim` returns also holds the folder's lock; keep it
    until the job ends.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._lock: int | None = None

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.path,)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __del__(self) -> None:
        self.release()

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def write_json(self, path: str | os.PathLike[str], obj: Any) -> None:
        """Write `obj` to `path` (relative to the folder) so that a reader sees the old file or the new, never a part.

        Raises OSError when it cannot be written; the old file is then untouched.
        """
        write_whole(self.path / path, json.dumps(plain(obj), indent=2, allow_nan=False) + "\n")

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl. Raises OSError naming the file when it does not fit on the disk."""
        append_line(self.metrics_path, metrics)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; empty when there is none. A line cut off by a crash is left out."""
        return read_lines(self.metrics_path)

    def lock(self) -> None:
        """Keep other jobs out of the folder until `release`. Raises ValueError when one is in it."""
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"run.dir={self.path}: another running job writes there. "
                "Choose another folder, or leave run.dir=auto for a new one."
            ) from None
        except OSError:
            # Some network file systems have no locks. Folders named by `claim` are exclusive without one.
            self.release()

    def release(self) -> None:
        """Give the lock up. Without a lock nothing happens."""
        lock, self._lock = getattr(self, "_lock", None), None
        if lock is not None:
            os.close(lock)

    def set_aside(self) -> None:
        """Rename what an earlier run left (metrics.jsonl to metrics.1.jsonl, ...), so that two runs never mix."""
        left = [self.path / name for name in RECORDS if (self.path / name).exists()]
        if not left:
            return
        number = 1
        while any(_numbered(self.path / name, number).exists() for name in RECORDS):
            number += 1
        for path in left:
            path.rename(_numbered(path, number))


def claim(run_dir: str, *, launch_dir: Path, label: str, sweep: tuple[str, int] | None = None) -> RunFolder:
    """Make the folder of one job, so that no other job can have it, and lock it.

    `run_dir` "auto" is `<launch_dir>/outputs/<date>/<time>_<label>`, or `outputs/multirun/<stamp>/<number>` for job
    `sweep=(stamp, number)`. Anything else is used as given, relative to `launch_dir`; the jobs of a sweep then get a
    numbered folder each inside it, and the records of an earlier run there are renamed, never overwritten.
    Raises ValueError naming `run.dir` when the folder cannot be made or a running job has it.
    """
    if run_dir == "auto" and sweep is None:
        day, now = time.strftime("%Y-%m-%d %H-%M-%S").split()
        wanted, exclusive = launch_dir / "outputs" / day / f"{now}_{_file_name(label)}", True
    elif run_dir == "auto":
        wanted, exclusive = launch_dir / "outputs" / "multirun" / sweep[0] / str(sweep[1]), True
    else:
        given = launch_dir / Path(run_dir).expanduser()
        wanted, exclusive = (given if sweep is None else given / str(sweep[1])), False
    try:
        folder = RunFolder(_make_new(wanted) if exclusive else _make(wanted))
        folder.lock()
        folder.set_aside()
        folder.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"run.dir={run_dir}: the run folder {wanted} cannot be made: {error.strerror}. "
            "Set run.dir to a folder you can write to."
        ) from error
    return folder


def append_line(path: Path, obj: Mapping[str, Any]) -> None:
    """Append `obj` as one line of JSON with a single write, so that a killed run leaves whole lines.

    Raises OSError naming the file when the line does not fit on the disk; no part of it stays in the file.
    """
    line = (json.dumps(plain(obj), allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, size)
            raise OSError(f"{path}: {written} of {len(line)} bytes written; is the disk full?")
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects `append_line` has written; empty without the file. A line cut off by a crash is left out."""
    if not path.exists():
        return []
    return [_restore(json.loads(line)) for line in path.read_text().split("\n")[:-1]]


def write_whole(path: Path, text: str) -> None:
    """Write a text file by way of a temporary one beside it: complete and on the disk before it has its name."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def plain(obj: Any) -> Any:
    """`obj` as JSON can hold it: numbers that are not finite as strings, one-element tensors and arrays as numbers."""
    if isinstance(obj, Mapping):
        return {str(key): plain(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [plain(value) for value in obj]
    if hasattr(obj, "item"):
        obj = obj.item()
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else ("Infinity" if obj > 0 else "-Infinity")
    return str(obj) if isinstance(obj, os.PathLike) else obj


def _restore(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: _restore(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [_restore(value) for value in obj]
    return NOT_FINITE.get(obj, obj) if isinstance(obj, str) else obj


def _make(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _make_new(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    candidate, attempt = path, 1
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            attempt += 1
            candidate = path.with_name(f"{path.name}-{attempt}")


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "_", label)[:80]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
