"""Training through the command line, processes and all: what a person types and what is there afterwards."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from support.jobs import StartedJob, marked, wait_until
from support.run_jobs import read_run

TINY = ["model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.vocab_size=64",
        "model.max_seq_len=16", "batch.global_size=12", "batch.micro_size=3", "trainer.threads=1",
        "trainer.accelerator=cpu", "schedule.warmup_steps=1", "dataset.seq_len=16"]
SYNTHETIC = ["dataset=synthetic", "dataset.num_samples=60", "dataset.num_validation_samples=12"]
END_LIMIT_S = 30.0


@pytest.fixture
def command(tmp_path):
    """Starts `python -m framework` in a folder of its own; whatever is left of it at the end is killed."""
    jobs = []

    def start(*arguments, cwd=tmp_path):
        job = StartedJob([sys.executable, "-m", "framework", *arguments], folder=cwd / "any",
                         environ={"SHARDLIGHT_CACHE": str(tmp_path / "cache"), "COLUMNS": "120"})
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        for process in marked(job.mark):
            process.kill()
        job.process.wait()
        job.process.stdout.close()


def finish(job, limit_s=120):
    """(exit code, output) of a job that ends by itself."""
    output, _ = job.process.communicate(timeout=limit_s)
    wait_until(lambda: not marked(job.mark), 5, "every process of the job has ended")
    return job.process.returncode, output


def wait_for_steps(job, run_dir: Path, count: int):
    def reached():
        assert job.process.poll() is None, job.process.communicate()[0]
        path = run_dir / "metrics.jsonl"
        return path.exists() and len(path.read_text().splitlines()) >= count

    wait_until(reached, 90, f"{count} updates are done")


def rank_process(job, rank):
    """The process that trains as this rank."""
    (found,) = [process for process in job.living() if process.environ().get("RANK") == str(rank)
                and "framework.worker" in process.cmdline() and process.parent().pid == job.process.pid]
    return found


def test_own_config_folder_tracker_and_files_from_any_directory(command, tmp_path):
    home = tmp_path / "elsewhere"
    for folder in ("models", "kernels", "conf/experiment", "conf/model"):
        (home / folder).mkdir(parents=True)
    for name in ("models", "kernels"):
        (home / name / "__init__.py").write_text("raise RuntimeError('a folder of the user is not ours')")
    (home / "conf" / "model" / "mine.yaml").write_text(
        "defaults: [gpt2_nano]\nhidden_size: 16\nnum_layers: 2\nnum_heads: 2\nvocab_size: 280\nmax_seq_len: 16\n")
    (home / "conf" / "experiment" / "short.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /model: mine\n  - override /dataset: text\n  - override /zero: stage2\n"
        "dataset:\n  files: [own.txt]\ntrainer:\n  max_steps: 4\n  val_steps: 1\nbatch:\n  micro_size: 2\n")
    (home / "own.txt").write_text("a rose is a rose is a rose. " * 200)
    job = command("--config-dir", "conf", "+experiment=short", "logger=csv", "schedule.warmup_steps=1",
                  "task.sample_tokens=6", "task.prompt=a rose", "trainer.threads=1", "run.dir=out", cwd=home)
    code, output = finish(job)
    assert code == 0, output
    run = read_run(home / "out")
    assert (run.summary["status"], run.summary["steps"], run.summary["world_size"]) == ("completed", 4, 2)
    assert run.summary["zero_stage"] == 2
    assert run.column("step") == [1, 2, 3, 4]
    saved = yaml.safe_load((home / "out" / "config.yaml").read_text())
    assert saved["batch"]["global_size"] == 4, "auto is frozen into what it became"
    assert saved["model"]["vocab_size"] == 280
    for text in ("Plan", "training tokenizer", "step 1/4", "prompt: 'a rose'", "completed: 4 steps"):
        assert text in output
    assert "Traceback" not in output
    assert "Warning" not in output
    assert len(next((home / "out").rglob("*.csv")).read_text().splitlines()) == 5
    assert {path.name for path in (home / "out" / "checkpoints" / "final").iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json"}
    assert sorted(path.name for path in (home / "out" / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_a_sweep_over_stages_and_processes_survives_a_job_that_fails(command, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 64, 2000).astype("<u2")
    for devices in (1, 2):
        for stage in (0, 3):
            if (devices, stage) == (1, 3):
                np.append(tokens, [64] * 200).astype("<u2").tofile(tmp_path / f"{devices}_{stage}.bin")
            else:
                tokens.tofile(tmp_path / f"{devices}_{stage}.bin")
    job = command("--multirun", *TINY, "dataset=tokens", "dataset.path=${trainer.devices}_${zero.stage}.bin",
                  "zero=stage0,stage3", "trainer.devices=1,2", "trainer.max_steps=4", "trainer.val_steps=0",
                  "task.sample_tokens=0", "task.save_weights=false", "run.dir=sweep")
    code, output = finish(job, 240)
    assert code == 1
    runs = [read_run(tmp_path / "sweep" / str(number)) for number in range(4)]
    assert [run.summary["status"] for run in runs] == ["completed", "completed", "failed", "completed"]
    assert [(run.summary["zero_stage"], run.summary["world_size"]) for run in runs] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    losses = [run.column("loss") for run in runs]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-6, rel=0)
    assert losses[3] == pytest.approx(losses[0], abs=1e-6, rel=0)
    assert "the token at position 2000 is 64" in runs[2].summary["error"]["message"]
    table = output.split("\njob  status")[1]
    assert table.count("completed") == 3
    assert "job 2 failed" in table
    for run in (runs[0], runs[1], runs[3]):
        assert f"{run.metrics[-1]['loss']:.4f}" in table


def test_fp16_completes_after_the_overflows_with_which_its_scale_starts(command, tmp_path):
    job = command("model=gpt2_nano", *TINY, *SYNTHETIC, "precision=fp16", "precision.initial_scale=1e8",
                  "precision.hysteresis=1", "trainer.max_steps=10", "trainer.val_steps=1", "task.sample_tokens=4",
                  "run.dir=out")
    code, output = finish(job)
    assert code == 0, output
    run = read_run(tmp_path / "out")
    updates = run.summary["updates"]
    assert (run.summary["status"], run.summary["precision"], updates["attempted"]) == ("completed", "fp16", 10)
    assert updates["skipped"] >= 1
    assert updates["applied"] >= 1
    assert run.column("loss_scale")[-1] == 1e8 / 2 ** updates["skipped"]
    assert run.metrics[-1]["skipped_steps"] == updates["skipped"]
    assert f"skipped {updates['skipped']} loss scale" in output
    log = (tmp_path / "out" / "logs" / "rank_0.log").read_text()
    assert "update 1 skipped: gradients are not finite: 'model.transformer.wte.weight'" in log


def test_a_loss_scale_that_collapses_ends_the_job_with_names_and_the_fix(command, tmp_path):
    job = command("model=gpt2_nano", *TINY, *SYNTHETIC, "precision=fp16", "precision.initial_scale=1e8",
                  "precision.min_scale=1e8", "precision.hysteresis=1", "trainer.max_steps=10", "run.dir=out")
    code, output = finish(job)
    assert code == 1
    assert output.count("Traceback") == 1
    error = read_run(tmp_path / "out").summary["error"]
    assert error["type"] == "NonFiniteError"
    assert error["message"] in output
    for part in ("update 1: ", "'model.transformer.wte.weight'", "loss scale is at its minimum", "fix: "):
        assert part in error["message"]


@pytest.mark.parametrize("victim", ["rank 1", "parent"])
def test_a_kill_in_the_middle_of_training_ends_the_job_and_leaves_no_process(command, tmp_path, victim):
    job = command(*TINY, *SYNTHETIC, "trainer.max_steps=1000000", "trainer.val_steps=0", "log.every_steps=5",
                  "run.dir=out")
    wait_for_steps(job, tmp_path / "out", 2)
    process = psutil.Process(job.process.pid) if victim == "parent" else rank_process(job, int(victim[-1]))
    process.kill()
    start = time.monotonic()
    output, _ = job.process.communicate(timeout=END_LIMIT_S)
    wait_until(lambda: not marked(job.mark), END_LIMIT_S, "every process of the job has ended")
    assert time.monotonic() - start < END_LIMIT_S
    assert job.process.returncode != 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5 * (number + 1) for number in range(len(lines))]
    if victim == "parent":
        return
    run = read_run(tmp_path / "out")
    assert run.summary["status"] == "failed"
    assert run.summary["error"]["type"] == "SIGKILL", run.summary["error"]
    assert run.summary["error"]["rank"] == int(victim[-1])
    assert run.summary["steps"] >= 5 * len(lines)
    assert run.summary["final_loss"] == run.metrics[-1]["loss"]
    assert output.count("SIGKILL") >= 1


def test_a_request_to_stop_keeps_the_weights_and_says_so(command, tmp_path):
    job = command(*TINY, *SYNTHETIC, "trainer.max_steps=1000000", "run.dir=out")
    wait_for_steps(job, tmp_path / "out", 2)
    job.process.send_signal(signal.SIGINT)
    code, output = finish(job, END_LIMIT_S)
    assert code == 128 + signal.SIGINT
    run = read_run(tmp_path / "out")
    assert run.summary["status"] == "interrupted"
    assert run.summary["steps"] == run.metrics[-1]["step"]
    assert len(run.summary["resting_bytes_per_rank"]["parameters"]) == 2
    assert (run.weights / "model.safetensors").exists()
    assert "Traceback" not in output


def test_ranks_started_by_hand_are_one_job(command, tmp_path):
    """RANK and WORLD_SIZE alone, as a script of one's own may set them: no process starts further ones."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    before = dict(os.environ)
    jobs = []
    try:
        for rank in (0, 1):
            os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port})
            jobs.append(command(*TINY, *SYNTHETIC, "trainer.max_steps=3", "trainer.val_steps=1", "task.sample_tokens=0",
                                "run.dir=out", "trainer.devices=2"))
    finally:
        os.environ.clear()
        os.environ.update(before)
    outcomes = [finish(job) for job in jobs]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    run = read_run(tmp_path / "out")
    assert (run.summary["status"], run.summary["world_size"]) == ("completed", 2)
    assert run.column("step") == [1, 2, 3]
