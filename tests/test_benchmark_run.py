"""task=benchmark for real, at a tiny size on two ranks: losses, files, going on, failures, interruption."""

import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace

import pytest

from framework import config as schema
from framework.benchmark.samples import plan
from framework.composition import Composer
from framework.machine import Machine
from framework.preflight import find_problems
from framework.run_folder import RunFolder
from framework.tasks.benchmark import benchmark
from support.jobs import MARK, marked, wait_until
from support.run_configs import run_config
from support.source_files import ROOT

TESTS = ROOT / "tests"
OURS = ["zero0", "zero1", "zero2", "zero3"]
STEPS = 5


def benchmark_config(**task):
    """Five updates of two micro-batches on a GPT of two layers; AdamW, a schedule and clipping that bite."""
    config = run_config(devices=2)
    settings = {"systems": ["ddp", "fsdp2", *OURS], "allocators": ["tuned"], "rounds": 1, "warmup_steps": 1,
                "memory_steps": 1, "sample_timeout_s": 60.0}
    return replace(
        config, task=schema.BenchmarkTask(name="benchmark", **(settings | task)),
        optimizer=schema.AdamOptimizer(name="adamw", lr=1e-2, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1),
        schedule=schema.Schedule(name="linear", warmup_steps=2, final_ratio=0.1),
        trainer=replace(config.trainer, max_steps=STEPS, gradient_clip_val=0.5),
        batch=schema.Batch(global_size=8, micro_size=2),
        dataset=schema.SyntheticDataset(name="synthetic", num_samples=100, num_validation_samples=0, seq_len=16))


def run(config, path, **options):
    """The task in this process, as the launcher's one worker would run it; samples see the tests' modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{TESTS}")
        path.mkdir(exist_ok=True)
        benchmark(config, config.task, folder=RunFolder(path), launch_dir=path, **options)
    return json.loads((path / "benchmark.json").read_text())


def lines(path):
    return [json.loads(line) for line in (path / "benchmark.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One round of everything, and its folder."""
    path = tmp_path_factory.mktemp("benchmark")
    run(benchmark_config(), path)
    return path


def test_all_systems_train_alike(finished):
    losses = {line["slot"]["system"]: line["losses"] for line in lines(finished)}
    assert set(losses) == {"ddp", "fsdp2", *OURS}
    assert losses["ddp"][-1] < losses["ddp"][0]
    for system, found in losses.items():
        assert len(found) == STEPS
        assert found == pytest.approx(losses["ddp"], abs=1e-5), system


def test_the_state_at_rest_is_the_published_one(finished):
    """AdamW in fp32 on two ranks: parameters and two moments, of which each stage shards its part."""
    rows = {row["system"]: row for row in json.loads((finished / "benchmark.json").read_text())["rows"]["tuned"]}
    multiple = {system: row["state_bytes"] / (4 * row["parameters"]) for system, row in rows.items()}
    expected = {"ddp": 3.0, "fsdp2": 1.5, "zero0": 3.0, "zero1": 2.0, "zero2": 2.0, "zero3": 1.5}
    assert multiple == pytest.approx(expected, rel=0.05)  # padding
    for row in rows.values():
        assert row["live_bytes"] >= row["state_bytes"]
        assert row["peak_bytes"] > 0
        assert row["step_s"] > 0


def test_a_run_leaves_table_numbers_picture_and_summary(finished):
    text = (finished / "benchmark.md").read_text()
    assert "## Allocator: tuned (`GLIBC_TUNABLES=" in text
    assert [f"| {system}" in text for system in ("ddp", "fsdp2", *OURS)] == [True] * 6
    assert (finished / "benchmark.svg").read_text().startswith("<svg ")
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["status"], summary["samples"], summary["failed_samples"]) == ("completed", 6, 0)
    assert sorted(path.name for path in finished.iterdir()) == [
        "benchmark.json", "benchmark.jsonl", "benchmark.md", "benchmark.svg", "logs", "summary.json"]


def test_an_interrupted_benchmark_goes_on_where_it_was(finished, tmp_path, capsys):
    path = tmp_path / "run"
    path.mkdir()
    kept = lines(finished)[:2]
    torn = json.dumps(kept[0])[:30]
    (path / "benchmark.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + torn)
    document = run(benchmark_config(systems=["ddp", "fsdp2"], rounds=2), path)
    assert "2 of them are there already" in capsys.readouterr().out
    assert lines(path)[:2] == kept
    assert [(line["slot"]["round"], line["slot"]["system"]) for line in lines(path)] == [
        (slot.round, slot.system) for slot in plan(["ddp", "fsdp2"], ["tuned"], 2)]
    assert document["rows"]["tuned"][1]["ratios"]["ddp"]["pairs"] in (1, 2)  # disturbed ones may be left out


def test_samples_of_another_config_are_not_mixed_in(finished, tmp_path, capsys):
    path = tmp_path / "run"
    path.mkdir()
    (path / "benchmark.jsonl").write_text((finished / "benchmark.jsonl").read_text())
    run(replace(benchmark_config(systems=["nocomm"]), seed=1), path)
    assert "6 lines there are of another config" in capsys.readouterr().out
    assert len(lines(path)) == 7


def test_bf16_runs_under_every_system(tmp_path):
    precision = schema.Precision(name="bf16", gradient_dtype="fp32", on_nonfinite="skip", max_skipped_steps=20)
    run(replace(benchmark_config(systems=["nocomm", "ddp", "fsdp2", "zero3"]), precision=precision), tmp_path)
    losses = {line["slot"]["system"]: line["losses"] for line in lines(tmp_path)}
    assert losses["fsdp2"] == pytest.approx(losses["ddp"], abs=0.05)
    assert losses["zero3"] == pytest.approx(losses["ddp"], abs=0.05)
    assert losses["nocomm"][0] == pytest.approx(losses["ddp"][0], abs=0.05)


def test_systems_that_raise_or_die_are_reported_and_the_others_run(tmp_path, capsys):
    config = benchmark_config(systems=["ddp", "fsdp2", "zero2"])
    document = run(config, tmp_path, entry="support.benchmark_samples:some_fail")
    errors = {row["system"]: row["errors"] for row in document["rows"]["tuned"]}
    assert errors["ddp"] == ["rank 1: ValueError: rank 1 has had enough"]
    assert errors["fsdp2"] == ["rank 0 was ended by SIGKILL"]
    assert errors["zero2"] == []
    assert "- `ddp` failed: rank 1: ValueError: rank 1 has had enough" in (tmp_path / "benchmark.md").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["failed_samples"] == 2
    log = (tmp_path / "logs" / "samples_tuned.log").read_text()
    assert "and says so at length" in log
    assert "ddp: failed: rank 1: ValueError" in capsys.readouterr().out


def test_a_system_that_hangs_is_ended_and_its_stacks_are_kept(tmp_path):
    config = benchmark_config(systems=["zero1"], sample_timeout_s=4.0)
    with pytest.raises(RuntimeError, match="no result within 4 s; every rank's stack is in the log"):
        run(config, tmp_path, entry="support.benchmark_samples:one_hangs")
    assert "in one_hangs" in (tmp_path / "logs" / "samples_tuned.log").read_text()


def test_failed_samples_are_tried_again(tmp_path):
    config = benchmark_config(systems=["nocomm"])
    with pytest.raises(RuntimeError, match=r"no sample succeeded: rank .: ValueError: nothing works today"):
        run(config, tmp_path, entry="support.benchmark_samples:all_fail")
    run(config, tmp_path)
    assert [line["error"] is None for line in lines(tmp_path)] == [False, True]


def test_what_is_not_installed_is_left_out_and_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="none of them is installed"):
        run(benchmark_config(systems=["deepspeed_1"]), tmp_path)
    assert "Left out, because the package is not installed: deepspeed_1." in capsys.readouterr().out


def test_ctrl_c_leaves_no_process_and_a_folder_that_can_go_on(tmp_path):
    mark = uuid.uuid4().hex
    environ = {**os.environ, MARK: mark, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    command = [sys.executable, "-m", "framework", "+experiment=bench_zero", "model=gpt2_nano", "run.dir=run",
               "trainer.max_steps=6", "task.systems=[nocomm,zero3]", "task.allocators=[stock]", "task.rounds=1000"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        samples = tmp_path / "run" / "benchmark.jsonl"
        wait_until(lambda: samples.exists() and len(samples.read_text().splitlines()) >= 2, 100, "two samples are done")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 130, output
        wait_until(lambda: not marked(mark), 10, "every process of the job has ended")
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
        overrides = [*command[3:5], f"run.dir={tmp_path / 'run'}"]
        machine = Machine(cpu_count=2, gpu_count=lambda: 0)
        assert find_problems(overrides, Composer(), machine=machine, launch_dir=tmp_path) == []
    finally:
        for left in marked(mark):
            left.kill()
        process.wait()
        process.stdout.close()
