"""Trackers write what they should, and none can stop or delay a run."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from framework.config import FileLogger, NoLogger
from framework.progress import Progress
from framework.report import Reporter, StepReport
from framework.run_folder import RunFolder
from framework.tracking import SafeTracker, make_trackers, missing_package, wandb_logged_in

ROOT = Path(__file__).parent.parent
STEPS = 6
KEY = "0123456789" * 4


class Recorder:
    """A tracker that fails in one way."""

    def __init__(self, failure: str) -> None:
        self.failure = failure
        self.calls: list[tuple] = []
        self.threads: set[int] = set()
        self.released = threading.Event()

    def _call(self, name: str, *arguments) -> None:
        self.calls.append((name, *arguments))
        self.threads.add(threading.get_ident())
        if self.failure == f"{name} blocks":
            self.released.wait(60)
        elif self.failure == f"{name} raises" or (name == "log" and self.failure == f"step {arguments[1]} raises"):
            raise ConnectionError("no route to\nthe tracker")
        elif self.failure == f"{name} exits":
            raise SystemExit(3)

    def start(self) -> None:
        self._call("start")

    def log(self, metrics, step) -> None:
        self._call("log", metrics, step)

    def finish(self, summary) -> None:
        self._call("finish", summary)


def train(folder: RunFolder, trackers: list) -> float:
    """Seconds of a short run that reports to `trackers`."""
    begun_s = time.monotonic()
    reporter = Reporter(folder=folder, progress=Progress(stream=io.StringIO()), trackers=trackers)
    reporter.start(total_steps=STEPS)
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        reporter.step(StepReport(step=step, loss=1.0 / step, lr=0.1, grad_norm=1.0, tokens=8, step_time_s=0.02,
                                 tokens_per_s=400.0, peak_memory_bytes_per_rank=[1, 2],
                                 extra={"val_loss": 0.5} if step == 4 else {}))
    reporter.finish({"status": "completed", "wall_time_s": None, "final_loss": 1.0 / STEPS})
    return time.monotonic() - begun_s


def guarded(tracker, folder: RunFolder, warnings: list[str], *, timeout_s: float = 1.0) -> SafeTracker:
    return SafeTracker(tracker=tracker, name="recorder", folder=folder, timeout_s=timeout_s, warn=warnings.append)


@pytest.mark.parametrize(
    ("failure", "logged"),
    [("start raises", 0), ("start blocks", 0), ("step 3 raises", STEPS), ("log blocks", 1), ("finish blocks", STEPS),
     ("finish raises", STEPS), ("start exits", 0)],
)
def test_a_tracker_in_trouble_costs_one_warning_and_no_time(tmp_path, failure, logged):
    alone_s = train(RunFolder(tmp_path), [])
    folder = RunFolder(tmp_path / "tracked")
    folder.path.mkdir()
    tracker, warnings = Recorder(failure), []
    tracked_s = train(folder, [guarded(tracker, folder, warnings)])
    called = [name for name, *_ in tracker.calls]
    tracker.released.set()
    assert tracked_s - alone_s < 2
    assert [line["step"] for line in folder.read_metrics()] == list(range(1, STEPS + 1))
    assert json.loads(folder.summary_path.read_text())["status"] == "completed"
    assert len(warnings) == 1
    assert "metrics.jsonl" in warnings[0]
    assert "\n" not in warnings[0]
    assert called.count("log") == logged


def test_a_healthy_tracker_gets_everything_in_order_on_one_thread(tmp_path):
    folder, warnings, tracker = RunFolder(tmp_path), [], Recorder("")
    train(folder, [guarded(tracker, folder, warnings)])
    assert warnings == []
    assert [call[0] for call in tracker.calls] == ["start", *["log"] * STEPS, "finish"]
    assert [call[2] for call in tracker.calls if call[0] == "log"] == list(range(1, STEPS + 1))
    assert len(tracker.threads) == 1
    assert threading.get_ident() not in tracker.threads


def test_a_call_that_has_been_stuck_for_long_is_not_waited_for_again(tmp_path):
    folder, warnings, tracker = RunFolder(tmp_path), [], Recorder("start blocks")
    safe = guarded(tracker, folder, warnings, timeout_s=0.3)
    safe.start()
    time.sleep(0.4)
    begun_s = time.monotonic()
    safe.finish({})
    tracker.released.set()
    assert time.monotonic() - begun_s < 0.2
    assert len(warnings) == 1


def test_no_logger_is_no_tracker(tmp_path):
    assert make_trackers(NoLogger(name="none"), RunFolder(tmp_path), {}) == []


def test_csv_has_a_row_per_step_and_columns_for_late_fields(tmp_path):
    folder = RunFolder(tmp_path)
    warnings: list[str] = []
    train(folder, make_trackers(FileLogger(name="csv"), folder, {}, warn=warnings.append))
    assert warnings == []
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert [row["val_loss"] for row in rows] == ["", "", "", "0.5", "", ""]
    assert float(rows[2]["loss"]) == 1.0 / 3
    assert rows[0]["peak_memory_bytes"] == "2"


def test_tensorboard_has_the_scalars_and_the_config(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, warnings = RunFolder(tmp_path), []
    config = {"optimizer": {"lr": 0.1}}
    train(folder, make_trackers(FileLogger(name="tensorboard"), folder, config, warn=warnings.append))
    assert warnings == []
    events = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert [event.step for event in events.Scalars("val_loss")] == [4]
    assert "optimizer.lr: 0.1" in str(events.Tensors("config/text_summary")[0].tensor_proto.string_val)


WANDB = """
import sys
from pathlib import Path
from framework.config import WandbLogger
from framework.run_folder import RunFolder
from framework.tracking import make_trackers
folder = RunFolder(Path(sys.argv[1]))
logger = WandbLogger(name="wandb", project="p", entity=None, run_name="n", mode=sys.argv[2],
                     timeout_s=float(sys.argv[3]))
tracker, = make_trackers(logger, folder, {"zero": {"stage": 3}})
tracker.start()
for step in range(1, 4):
    tracker.log({"loss": 1.0 / step}, step)
tracker.finish({"status": "completed", "final_loss": float("nan")})
"""


def run_wandb(folder: Path, mode: str, timeout_s: float, **environment: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", WANDB, str(folder), mode, str(timeout_s)], cwd=ROOT, text=True, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=60, env={**clean, "NETRC": str(folder / "no-netrc"), **environment},
    )


def test_wandb_offline_writes_one_run_into_the_run_folder_and_is_silent(tmp_path):
    pytest.importorskip("wandb")
    done = run_wandb(tmp_path, "offline", 30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    about = json.loads((tmp_path / "wandb.json").read_text())
    run, = (tmp_path / "wandb").glob("offline-run-*")
    assert about["mode"] == "offline"
    assert about["project"] == "p"
    record = run / f"run-{about['id']}.wandb"
    assert b"stage" in record.read_bytes()
    assert b"loss" in record.read_bytes()


def test_wandb_online_without_a_login_records_offline_and_never_asks(tmp_path):
    pytest.importorskip("wandb")
    done = run_wandb(tmp_path, "online", 30)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "needs a login" in done.stderr
    assert json.loads((tmp_path / "wandb.json").read_text())["mode"] == "offline"


def test_wandb_with_a_server_that_never_answers_ends_in_time_with_one_warning(tmp_path):
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts into its backlog and says nothing
        begun_s = time.monotonic()
        done = run_wandb(tmp_path, "online", 2, WANDB_API_KEY=KEY,
                         WANDB_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}")
        took_s = time.monotonic() - begun_s
    assert done.returncode == 0
    assert took_s < 20
    assert done.stderr.count("warning: logger=wandb") == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_the_trackers_own_mode_variable_is_respected(tmp_path):
    pytest.importorskip("wandb")
    done = run_wandb(tmp_path, "online", 30, WANDB_MODE="offline", WANDB_API_KEY=KEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "wandb.json").read_text())["mode"] == "offline"


def test_a_login_is_found_where_wandb_looks_for_it(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    assert not wandb_logged_in()
    file.write_text(f"machine example.org\n  login user\n  password {KEY}\n")
    assert not wandb_logged_in()
    file.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    file.chmod(0o600)
    assert wandb_logged_in()
    file.write_text("this is no netrc file {")
    assert not wandb_logged_in()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wandb_logged_in()


def test_a_tracker_whose_library_is_missing_is_named_and_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    warnings: list[str] = []
    assert make_trackers(FileLogger(name="tensorboard"), RunFolder(tmp_path), {}, warn=warnings.append) == []
    assert len(warnings) == 1
    assert "logger=tensorboard is not used" in warnings[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_package(FileLogger(name="tensorboard")) == "tensorboard"
    assert missing_package(NoLogger(name="none")) is None
