"""Whoever dies, the job ends within seconds, says why once, and leaves no process behind."""

import json
import re
import signal

import psutil
import pytest

from support.jobs import started_job, wait_until
from support.launch_tasks import STALL_TIMEOUT_S


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def test_the_first_error_is_shown_once_with_its_rank(run_dir):
    with started_job("raises_on_rank_1", folder=run_dir) as job:
        job.process.wait(timeout=90)
        code, output, _ = job.end()
    summary = summary_of(run_dir)
    assert code == 1
    assert output.count("Traceback") == 1
    assert "Rank 1 failed" in output
    assert "Connection" not in output
    assert summary["status"] == "failed"
    assert summary["steps"] == 1, "what rank 0 had written stays"
    assert (summary["error"]["rank"], summary["error"]["type"]) == (1, "ValueError")
    assert summary["error"]["message"] == "the data of rank 1 is bad"
    assert "raises_on_rank_1" in summary["error"]["traceback"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_and_is_named(run_dir, victim):
    with started_job("last_rank_waits_for_a_signal", folder=run_dir) as job:
        psutil.Process(job.wait_for_ranks()[victim]).kill()
        code, output, seconds = job.end()
    assert code == 128 + signal.SIGKILL
    assert f"Rank {victim} failed" in output
    assert "SIGKILL" in output
    assert (summary_of(run_dir)["error"]["rank"], summary_of(run_dir)["error"]["type"]) == (victim, "SIGKILL")
    assert seconds < 5


def test_a_stalled_rank_ends_the_job_with_its_line_and_who_waits_for_it(run_dir):
    with started_job("stalls_in_its_data_on_rank_1", folder=run_dir) as job:
        job.wait_for_ranks()
        job.process.wait(timeout=STALL_TIMEOUT_S + 8)
        code, output, _ = job.end()
    assert code == 1
    assert output.count("Traceback") == 1
    assert "Rank 0 failed" in output
    error = summary_of(run_dir)["error"]
    assert (error["rank"], error["type"]) == (0, "CollectiveError")
    assert error["message"] in output
    assert error["message"].startswith("rank 0 in gather of unit '")
    assert re.search(r"rank 0 is at \S*launch_tasks\.py:\d+ in stalls_in_its_data_on_rank_1: `engine\.backward\(",
                     error["message"])
    assert re.search(r"rank 1 is at \S*launch_tasks\.py:\d+ in stalls_in_its_data_on_rank_1: `time\.sleep\(300\)`",
                     error["message"])


def test_a_rank_that_exits_without_a_word_is_named_with_its_code(run_dir):
    with started_job("exits_without_a_word_on_rank_1", folder=run_dir) as job:
        job.process.wait(timeout=60)
        code, output, _ = job.end()
    assert code == 7
    assert "Rank 1 failed" in output
    assert "exit code 7" in output


@pytest.mark.parametrize("entry", ["last_rank_waits_for_a_signal", "deaf_in_c", "light_wait"])
def test_a_killed_parent_takes_everything_along(run_dir, entry):
    with started_job(entry, folder=run_dir) as job:
        job.wait_for_ranks()
        assert len(job.living()) >= 4, "two ranks with a child each"
        job.process.kill()
        code, _, seconds = job.end()
    assert code == -signal.SIGKILL
    assert seconds < 3


@pytest.mark.parametrize(
    ("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_parent_ends_the_job_as_interrupted(run_dir, signum, exit_code):
    with started_job("light_wait", folder=run_dir) as job:
        job.wait_for_ranks()
        job.process.send_signal(signum)
        code, output, seconds = job.end()
    assert code == exit_code
    assert output.count("Interrupted") == 1
    assert "Traceback" not in output
    assert summary_of(run_dir)["status"] == "interrupted"
    assert summary_of(run_dir)["error"]["type"] == signum.name
    assert seconds < 5


def test_ranks_that_answer_no_signal_are_killed_in_time(run_dir):
    with started_job("deaf_in_c", folder=run_dir) as job:
        job.wait_for_ranks()
        job.process.send_signal(signal.SIGTERM)
        code, _, _ = job.end()  # fails after 10 s; torch's agent alone would take 30
    assert code == 143


def test_a_second_interrupt_does_not_wait_for_ranks_that_answer_none(run_dir):
    with started_job("deaf_in_c", folder=run_dir) as job:
        job.wait_for_ranks()
        job.process.send_signal(signal.SIGINT)
        wait_until(lambda: (run_dir / "logs" / "launcher.log").exists(), 5, "the agent has told the ranks")
        job.process.send_signal(signal.SIGINT)
        code, _, seconds = job.end()
    assert code == 130
    assert seconds < 3


def test_a_deaf_peer_of_a_failed_rank_is_killed_and_not_blamed(run_dir):
    with started_job("deaf_in_c", folder=run_dir, environ={"RANK_1_RAISES": "1"}) as job:
        job.wait_for_ranks()
        code, output, _ = job.end()
    assert code == 7
    assert "Rank 1 failed" in output


def test_a_loop_that_asks_for_requests_to_stop_ends_by_itself(run_dir):
    with started_job("stops_when_asked", folder=run_dir) as job:
        job.wait_for_ranks()
        job.process.send_signal(signal.SIGTERM)
        code, _, seconds = job.end()
    assert code == 143
    assert summary_of(run_dir)["steps"] > 0
    assert summary_of(run_dir)["status"] == "interrupted"
    assert seconds < 3


def test_an_interrupt_before_the_ranks_are_there_is_an_interrupted_job(run_dir):
    with started_job("light_wait", folder=run_dir) as job:
        wait_until(lambda: (run_dir / "config.yaml").exists(), 30, "the parent has begun")
        job.process.send_signal(signal.SIGINT)
        code, _, _ = job.end()
    assert code == 130
    assert summary_of(run_dir)["status"] == "interrupted"


def test_processes_that_a_completed_task_leaves_behind_are_ended(run_dir):
    with started_job("leaves_a_child", folder=run_dir) as job:
        job.process.wait(timeout=60)
        code, _, seconds = job.end()
    assert code == 0
    assert summary_of(run_dir)["status"] == "completed"
    assert seconds < 1


def test_an_error_of_the_launcher_itself_ends_in_the_summary(run_dir):
    with started_job("light_wait", folder=run_dir, environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}) as job:
        job.process.wait(timeout=60)
        code, output, _ = job.end()
    assert code == 1
    assert "The launcher failed" in output
    assert summary_of(run_dir)["status"] == "failed"
    assert summary_of(run_dir)["error"]["rank"] is None
