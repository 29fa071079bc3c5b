"""A job gets a clean start, gives its summary back, and leaves nothing in the process that launched it."""

import json
import os
import signal
import sys
import threading

import psutil
import pytest

from framework import schema
from framework.failure import JobFailed
from framework.interrupt import StopRequest
from framework.launch import run_job, worker_allocator_environment
from framework.resolve import Resolution
from support.run_configs import run_config

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """`launch(entry, folder=, **config)` runs a stand-in task."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))

    def run(entry, *, folder="run", resolutions=(), **config):
        return run_job(
            run_config(**config), run_dir=tmp_path / folder, resolutions=resolutions, launch_dir=tmp_path,
            entry=f"support.launch_tasks:{entry}",
        )  # fmt: skip

    return run


def seen_by(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


def test_every_rank_gets_the_resolved_config_and_the_summary_comes_back(launch, tmp_path):
    chosen = [Resolution("trainer.devices", 2, "2 processes on a CPU")]
    summary = launch("succeeds", resolutions=chosen, seed=5, threads=1)
    assert summary == {"status": "completed", "steps": 3, "final_loss": 1.5}
    assert schema.read(tmp_path / "run" / "config.yaml") == run_config(seed=5, threads=1)
    ranks = seen_by(tmp_path / "run")
    assert [rank["environment"]["RANK"] for rank in ranks] == ["0", "1"]
    for rank in ranks:
        assert rank["seed"] == 5
        assert rank["environment"]["OMP_NUM_THREADS"] == "1"
        assert rank["cwd"] == rank["launch_dir"] == str(tmp_path)
        assert rank["path"][-1] == str(tmp_path), "the user's own modules come last"
        assert rank["path"].count(str(tmp_path)) == 1
        assert rank["resolutions"] == ["trainer.devices = 2 (2 processes on a CPU)"]


def test_the_output_of_ranks_above_0_is_in_their_logs(launch, tmp_path, capfd):
    launch("succeeds")
    assert capfd.readouterr().out == "hello from rank 0\n"
    assert (tmp_path / "run" / "logs" / "rank_1.log").read_text() == "hello from rank 1\n"
    assert not (tmp_path / "run" / "logs" / "launcher.log").exists()


def test_two_jobs_of_one_parent_share_nothing(launch, tmp_path):
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)

    def state():
        listening = [entry for entry in psutil.Process().net_connections() if entry.status == psutil.CONN_LISTEN]
        return dict(os.environ), [signal.getsignal(signum) for signum in signals], len(listening)

    launch("succeeds", folder="warm_up")  # imports torch, which sets variables of its own
    before, threads = state(), threading.active_count()
    launch("succeeds", folder="first", seed=1)
    with pytest.raises(JobFailed, match="rank 1: SystemExit"):
        launch("exits_without_a_word_on_rank_1", folder="second")
    launch("succeeds", folder="third", seed=3, devices=3)
    assert state() == before
    assert threading.active_count() == threads
    assert not set(RANK_NAMES) & set(os.environ)
    assert "torch.distributed" not in sys.modules or not sys.modules["torch.distributed"].is_initialized()
    first, third = seen_by(tmp_path / "first"), seen_by(tmp_path / "third")
    assert len(third) == 3
    assert not {rank["pid"] for rank in first} & {rank["pid"] for rank in third}
    assert {rank["seed"] for rank in third} == {3}


def test_rank_variables_of_the_parent_do_not_reach_the_workers(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "elsewhere.example")
    monkeypatch.setenv("LOCAL_RANK", "7")
    launch("succeeds")
    for number, rank in enumerate(seen_by(tmp_path / "run")):
        assert rank["environment"]["MASTER_ADDR"] == "localhost"
        assert rank["environment"]["LOCAL_RANK"] == str(number)
    assert os.environ["MASTER_ADDR"] == "elsewhere.example"


def test_nothing_of_an_earlier_summary_survives(launch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"status": "completed", "final_loss": 99}')
    with pytest.raises(JobFailed) as failed:
        launch("exits_without_a_word_on_rank_1")
    assert failed.value.summary["final_loss"] is None
    assert failed.value.exit_code == 7
    assert not failed.value.interrupted
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == failed.value.summary


def test_a_task_without_a_summary_still_has_a_status(launch, tmp_path):
    assert launch("leaves_a_child") == {"status": "completed"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"status": "completed"}


def test_a_job_outside_the_main_thread_runs_too(launch):
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(launch("succeeds")))
    thread.start()
    thread.join(timeout=60)
    assert summaries[0]["status"] == "completed"


def test_allocator_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert worker_allocator_environment() == {}
    assert set(worker_allocator_environment({})) == {"GLIBC_TUNABLES"}


def test_a_stop_request_sets_a_flag_and_earlier_handlers_still_run():
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("earlier"))
    try:
        with StopRequest() as stop:
            assert not stop
            signal.raise_signal(signal.SIGINT)
            assert stop.received is signal.SIGINT
            assert heard == ["earlier"]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert heard == ["earlier", "earlier"]
    finally:
        signal.signal(signal.SIGINT, before)
