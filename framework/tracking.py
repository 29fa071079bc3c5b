"""Experiment trackers, and the wall between them and training.

A tracker is other people's code that talks to disks and networks: it may raise, block for a minute or never come back.
So every call of one runs on its own daemon thread behind a queue (`SafeTracker`). Training only ever puts into the
queue; the one wait is at the end, and it is bounded. What a tracker loses is in metrics.jsonl anyway, so its trouble
is worth one warning.

Which ranks track is not asked here: the caller makes trackers on rank 0 of the initialised group and nowhere else.
Importing a tracker's library happens in `make_trackers`, on the caller's thread: an import on another thread while the
main one imports too can show either of them a half-made module.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import netrc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from framework.config import FileLogger, NoLogger, WandbLogger
from framework.run_folder import RunFolder, plain, write_whole

MOST_CALLS_WAITING = 10_000
FILE_TIMEOUT_S = 10.0
WANDB_HOST = "https://api.wandb.ai"


class Tracker(Protocol):
    """What a tracker does, in this order, on one thread."""

    def start(self) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


def make_trackers(
    logger: NoLogger | FileLogger | WandbLogger,
    folder: RunFolder,
    resolved_config: Mapping[str, Any],
    *,
    warn: Callable[[str], None] | None = None,
) -> list[Tracker]:
    """The trackers of a run, none of which can raise or block. Call on rank 0 alone.

    `warn` gets at most one message per tracker (`Progress.say` is a good one; None prints to standard error).
    """
    warn = _print_warning if warn is None else warn
    if isinstance(logger, NoLogger):
        return []
    try:
        tracker, timeout_s = _make(logger, folder, resolved_config, warn)
    except Exception as error:
        warn(f"logger={logger.name} is not used: {_one_line(error)}. {_kept(folder)}")
        return []
    return [SafeTracker(tracker=tracker, name=logger.name, folder=folder, timeout_s=timeout_s, warn=warn)]


def missing_package(logger: NoLogger | FileLogger | WandbLogger) -> str | None:
    """The package to install before this logger can work, or None. Imports nothing."""
    needed = {"tensorboard": "tensorboard", "wandb": "wandb"}.get(logger.name)
    return needed if needed is not None and importlib.util.find_spec(needed) is None else None


def wandb_logged_in() -> bool:
    """Whether Weights & Biases has a key for its host: environment or netrc file, like `wandb login` leaves it.

    wandb is not imported for the question.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or WANDB_HOST).netloc
    named = os.environ.get("NETRC")
    paths = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in paths:
        try:
            entry = netrc.netrc(path).hosts.get(host)
        except (OSError, netrc.NetrcParseError):  # no file, or one that wandb cannot read either
            continue
        if entry is not None and entry[2]:
            return True
    return False


class SafeTracker:
    """Runs a tracker so that it can neither stop nor delay the caller.

    A call that raises is dropped and the next one tried; after a failed start none is. At the end the caller waits for
    what is still queued, at most `timeout_s` in total, and a call that has been running longer than that already is
    not waited for at all.
    """

    def __init__(
        self, *, tracker: Tracker, name: str, folder: RunFolder, timeout_s: float, warn: Callable[[str], None]
    ) -> None:
        self._tracker = tracker
        self._name = name
        self._folder = folder
        self._timeout_s = timeout_s
        self._warn = warn
        self._calls: queue.Queue[tuple[str, tuple]] = queue.Queue(MOST_CALLS_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._finished = threading.Event()
        self._running_since_s: float | None = None
        self._trouble: str | None = None
        self._warned = False

    def start(self) -> None:
        self._thread.start()
        self._put("start")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._put("log", dict(metrics), step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Returns within `timeout_s`."""
        deadline_s = time.monotonic() + self._timeout_s
        self._put("finish", summary)
        while not self._finished.is_set():
            now_s, running_since_s = time.monotonic(), self._running_since_s
            if running_since_s is not None:
                deadline_s = min(deadline_s, running_since_s + self._timeout_s)
            if now_s >= deadline_s:
                self._trouble = self._trouble or f"it did not finish within {self._timeout_s:g} s"
                break
            self._finished.wait(min(deadline_s - now_s, 0.1))
        self._warn_once()

    def _put(self, method: str, *arguments: Any) -> None:
        self._warn_once()
        if self._finished.is_set():
            return
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            self._trouble = self._trouble or f"{MOST_CALLS_WAITING} calls are waiting for it"

    def _work(self) -> None:
        method = ""
        while method != "finish":
            method, arguments = self._calls.get()
            self._running_since_s = time.monotonic()
            try:
                getattr(self._tracker, method)(*arguments)
            except BaseException as error:  # SystemExit too: this thread is the tracker's own
                self._trouble = self._trouble or f"{method} failed with {_one_line(error)}"
                if method == "start":
                    break
            finally:
                self._running_since_s = None
        self._finished.set()

    def _warn_once(self) -> None:
        # On the caller's thread: a warning from the tracker's could land in the middle of a line.
        if self._trouble is not None and not self._warned:
            self._warned = True
            self._warn(f"logger={self._name}: {self._trouble}. {_kept(self._folder)}")


class CsvTracker:
    """metrics.csv. A field that appears later (validation) adds a column; the rows before it are empty there."""

    def __init__(self, *, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []

    def start(self) -> None:
        self._path.write_text("")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = {"step": step, **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Every row is on the disk already."""

    def _widen(self, new: list[str]) -> None:
        with self._path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self._columns += new
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self._path, text.getvalue())


class TensorboardTracker:
    """Event files under tensorboard/ in the run folder, with the config as text."""

    def __init__(self, *, directory: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._directory = directory
        self._config = config

    def start(self) -> None:
        self._writer = self._make(log_dir=str(self._directory))
        lines = (f"    {key}: {value}" for key, value in _flat(self._config).items())
        self._writer.add_text("config", "\n".join(lines), 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class WandbTracker:
    """One Weights & Biases run, its files in the run folder, its id in wandb.json there."""

    def __init__(self, *, logger: WandbLogger, folder: RunFolder, config: Mapping[str, Any], mode: str) -> None:
        import wandb

        self._wandb = wandb
        self._logger = logger
        self._folder = folder
        self._config = config
        self._mode = mode

    def start(self) -> None:
        settings = self._wandb.Settings(
            silent=True, quiet=True, console="off", disable_code=True, disable_job_creation=True,
            init_timeout=self._logger.timeout_s, finish_timeout=self._logger.timeout_s, login_timeout=1,
        )
        self._wandb.setup(settings=settings)  # silences what wandb says before there is a run
        self._run = self._wandb.init(
            project=self._logger.project, entity=self._logger.entity, name=self._logger.run_name, mode=self._mode,
            dir=str(self._folder.path), config=plain(self._config), settings=settings, reinit="create_new",
        )
        about = {"id": self._run.id, "project": self._run.project, "entity": self._run.entity, "mode": self._mode,
                 "dir": self._run.dir}
        if self._mode == "online":  # asking offline makes wandb print a warning
            about["url"] = self._run.url
        self._folder.write_json("wandb.json", about)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(plain(summary))
        self._run.finish(exit_code=0 if summary.get("status") == "completed" else 1)


def _make(
    logger: FileLogger | WandbLogger, folder: RunFolder, config: Mapping[str, Any], warn: Callable[[str], None]
) -> tuple[Tracker, float]:
    if isinstance(logger, WandbLogger):
        mode = _wandb_mode(logger, warn)
        return WandbTracker(logger=logger, folder=folder, config=config, mode=mode), logger.timeout_s
    if logger.name == "csv":
        return CsvTracker(path=folder.path / "metrics.csv"), FILE_TIMEOUT_S
    return TensorboardTracker(directory=folder.path / "tensorboard", config=config), FILE_TIMEOUT_S


def _wandb_mode(logger: WandbLogger, warn: Callable[[str], None]) -> str:
    """WANDB_MODE, the tracker's own variable, wins over the config. Never a mode in which wandb asks for a login."""
    mode = os.environ.get("WANDB_MODE") or logger.mode
    if mode == "online" and not wandb_logged_in():
        warn("logger.mode=online needs a login (`wandb login` or WANDB_API_KEY); this run is recorded offline, and "
             "`wandb sync` uploads it later")
        return "offline"
    return mode


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def _kept(folder: RunFolder) -> str:
    return f"Training goes on; every number is in {folder.metrics_path}"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
