"""What a run leaves behind: metrics.jsonl, summary.json, and memory that is what the formula says."""

import json
import math
import os
import signal
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from framework.config import FileLogger
from framework.run_folder import RunFolder
from strategies.precision import PrecisionPolicy
from strategies.zero.layout import ALIGN
from strategies.zero.placement import StagePolicy
from support.run_jobs import rank_environment, run_here, run_in_pool, training_config
from support.run_oracle import oracle_model, oracle_source
from support.run_probes import run_watched

METRICS = {"step", "loss", "lr", "grad_norm", "tokens", "step_time_s", "tokens_per_s", "peak_memory_bytes_per_rank"}
SUMMARY = {"status", "steps", "updates", "final_loss", "val_loss", "world_size", "layout", "zero_stage", "precision",
           "parameters", "resting_bytes_per_rank", "peak_memory_bytes_per_rank", "median_step_time_s", "tokens_per_s",
           "wall_time_s", "data_hash", "versions"}


def short(devices=2, **changes):
    trainer = {"max_steps": 5, **changes.pop("trainer", {})}
    return training_config(devices=devices, **{"batch": {"micro_size": 3}, "trainer": trainer, **changes})


def assert_line(line, *, devices, extra=()):
    assert set(line) == METRICS | set(extra)
    assert type(line["step"]) is type(line["tokens"]) is int
    for name in ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_s", *extra):
        assert type(line[name]) is float, name
        assert math.isfinite(line[name]), name
    assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_time_s"])
    assert [type(peak) for peak in line["peak_memory_bytes_per_rank"]] == [int] * devices
    assert min(line["peak_memory_bytes_per_rank"]) > 50 * 2**20


@pytest.mark.parametrize("devices", [1, 3])
def test_records_hold_the_fields_of_the_issue_and_no_others(tmp_path, devices):
    run = run_in_pool(short(devices, batch={"micro_size": 4}, trainer={"val_steps": 1}), tmp_path)
    assert run.column("step") == [1, 2, 3, 4, 5]
    for line in run.metrics[:-1]:
        assert_line(line, devices=devices)
    assert_line(run.metrics[-1], devices=devices, extra=["val_loss"])
    assert run.column("tokens") == [12 * 16] * 5
    assert_summary(run, devices)
    text = run.path.joinpath("metrics.jsonl").read_text()
    assert f'"loss": {run.metrics[2]["loss"]!r}' in text, "unrounded"
    assert text.endswith("}\n")


def assert_summary(run, devices):
    summary = run.summary
    assert set(summary) == SUMMARY
    assert summary["status"] == "completed"
    assert (summary["steps"], summary["world_size"]) == (5, devices)
    assert summary["updates"] == {"attempted": 5, "applied": 5, "skipped": 0}
    assert summary["final_loss"] == run.metrics[-1]["loss"]
    assert summary["val_loss"] == run.metrics[-1]["val_loss"]
    assert summary["layout"] == {"data": devices, "data_replicate": 1, "sequence": 1, "tensor": 1, "pipeline": 1}
    assert (summary["zero_stage"], summary["precision"]) == (3, "fp32")
    assert summary["parameters"] == sum(p.numel() for p in oracle_model(short()).parameters())
    assert set(summary["resting_bytes_per_rank"]) == {"parameters", "gradients", "optimizer"}
    for values in (*summary["resting_bytes_per_rank"].values(), summary["peak_memory_bytes_per_rank"]):
        assert [type(value) for value in values] == [int] * devices
    for name in ("median_step_time_s", "tokens_per_s", "wall_time_s"):
        assert type(summary[name]) is float
        assert summary[name] > 0
    assert summary["wall_time_s"] >= sum(run.column("step_time_s"))
    assert len(summary["data_hash"]) == 64
    assert {"python", "shardlight", "torch", "lightning"} <= set(summary["versions"])


def unit_numels(model):
    """Elements of each unit's parameters: a block each, and the rest."""
    blocks = [[p.numel() for p in block.parameters()] for block in model.transformer.h]
    inside = {id(p) for block in model.transformer.h for p in block.parameters()}
    return [*blocks, [p.numel() for p in model.parameters() if id(p) not in inside]]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("devices", [2, 3])
def test_resting_bytes_are_the_published_formula_and_padding(tmp_path, devices, stage, precision):
    config = short(devices, batch={"micro_size": 2}, zero={"stage": stage}, precision={"name": precision},
                   trainer={"max_steps": 2})
    held = run_in_pool(config, tmp_path).summary["resting_bytes_per_rank"]
    units, policy = unit_numels(oracle_model(config)), PrecisionPolicy.of(precision)
    formula = [StagePolicy.of(stage).resting_bytes(numel=sum(unit), num_shards=devices, precision=policy)
               for unit in units]
    # Each parameter starts on a multiple of ALIGN, each shard ends on one; the widest element is 12 bytes of state.
    padding = sum(ALIGN * (len(unit) + devices) for unit in units)
    for state in ("parameters", "gradients", "optimizer"):
        wanted = sum(getattr(part, state) for part in formula)
        assert [abs(value - wanted) <= 12 * padding for value in held[state]] == [True] * devices, (state, held)
        assert max(held[state]) >= wanted
    whole = sum(map(sum, units))
    # Exact over all ranks: AdamW's two moments cover parameters and no padding; the fp32 masters of bf16 are padded.
    copies = devices if stage == 0 else 1
    if precision == "fp32":
        assert sum(held["optimizer"]) == 2 * 4 * whole * copies


class Slow:
    """Samples that take their time."""

    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.base[index]


def slow_data(config, path):
    source = oracle_source(config, path)
    return replace(source, train=Slow(source.train))


def test_the_time_of_a_step_counts_the_loading_of_its_samples(tmp_path):
    run = run_in_pool(short(1), tmp_path, worker=run_watched, arguments=(slow_data,))
    assert min(run.column("step_time_s")) > 12 * 0.01


def without_local_ranks(rank, config, path):
    from framework.tasks.run import run_task

    with rank_environment(rank, config.trainer.devices, cache=path / "cache"):
        del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
        run_task(config, folder=RunFolder(path), launch_dir=path)


def test_a_launcher_that_tells_no_local_ranks_will_do(tmp_path):
    run = run_in_pool(short(), tmp_path, worker=without_local_ranks)
    assert run.summary["world_size"] == 2
    assert run.column("step") == [1, 2, 3, 4, 5]


def test_lines_are_thinned_and_the_last_step_has_one_whatever_its_number(tmp_path):
    run = run_in_pool(short(log={"every_steps": 2}), tmp_path)
    assert run.column("step") == [2, 4, 5]
    assert run.summary["steps"] == 5


def test_validation_has_its_own_rhythm_and_its_loss_stands_in_the_steps_line(tmp_path):
    run = run_in_pool(short(log={"every_steps": 4}, trainer={"val_every_steps": 3, "val_steps": 1}), tmp_path)
    assert [(line["step"], "val_loss" in line) for line in run.metrics] == [(3, True), (4, False), (5, True)]
    assert run.summary["val_loss"] == run.metrics[-1]["val_loss"]
    assert run.metrics[0]["val_loss"] != run.metrics[-1]["val_loss"]


def test_without_held_out_data_a_run_completes_and_says_null(tmp_path):
    run = run_in_pool(short(dataset={"num_validation_samples": 0}, trainer={"val_steps": 2}), tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["val_loss"] is None
    assert "val_loss" not in run.metrics[-1]


def test_the_plan_is_printed_before_the_steps(tmp_path):
    text = run_in_pool(short(), tmp_path).terminal
    assert text.index("Plan") < text.index("sharded over 2") < text.index("step 1/5") < text.index("completed: 5 steps")


@pytest.mark.parametrize("logger", ["csv", "tensorboard"])
def test_trackers_get_every_line(tmp_path, logger):
    if logger == "tensorboard":
        pytest.importorskip("tensorboard")
    run = run_in_pool(short(logger=FileLogger(name=logger)), tmp_path)
    if logger == "csv":
        (table,) = run.path.rglob("*.csv")
        rows = table.read_text().splitlines()
        assert len(rows) == 1 + 5
        assert "loss" in rows[0]
        assert repr(run.metrics[-1]["loss"]) in rows[-1]
    else:
        assert list(run.path.rglob("events.out.tfevents*"))


# -- runs that do not complete --------------------------------------------------------------------------------------


def interrupted(rank, config, path):
    """The last rank alone is told to stop, during its third update."""
    from framework.module import StepModule

    plain = StepModule.training_step

    def training_step(self, micro_batches, batch_idx):
        if batch_idx == 2 and rank == config.trainer.devices - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, micro_batches, batch_idx)

    with mock.patch.object(StepModule, "training_step", training_step):
        run_here(rank, config, path)
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("stage", [0, 3])
def test_a_request_to_stop_ends_all_ranks_after_the_same_update_and_keeps_the_weights(tmp_path, stage):
    config = short(trainer={"max_steps": 50, "val_steps": 1}, zero={"stage": stage}, log={"every_steps": 10})
    config.task.save_weights = True
    run = run_in_pool(config, tmp_path, worker=interrupted)
    assert run.summary["status"] == "interrupted"
    assert set(run.summary) == SUMMARY
    assert run.summary["steps"] in (3, 4)
    assert run.column("step") == [run.summary["steps"]], "the last update has its line though it was not due"
    assert (run.weights / "model.safetensors").exists()
    assert run.returned == [True, True], "signal handlers are as before"


def fails_in_the_third_update(rank, config, path):
    from framework.module import StepModule

    plain = StepModule.training_step

    def training_step(self, micro_batches, batch_idx):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the launcher can end a rank that waits"
        if batch_idx == 2:
            raise FloatingPointError(f"rank {rank} has had enough")
        return plain(self, micro_batches, batch_idx)

    # Caught here: an error that leaves the rank would end the whole pool.
    with mock.patch.object(StepModule, "training_step", training_step), pytest.raises(FloatingPointError):
        run_here(rank, config, path)


def test_a_failed_run_says_what_it_was_and_why_it_failed(tmp_path):
    config = short(logger=FileLogger(name="csv"))
    run = run_in_pool(config, tmp_path, worker=fails_in_the_third_update)
    assert set(run.summary) == SUMMARY | {"error"}
    assert run.summary["status"] == "failed"
    assert (run.summary["steps"], run.summary["final_loss"]) == (2, run.metrics[-1]["loss"])
    assert run.summary["world_size"] == 2
    assert len(run.summary["data_hash"]) == 64
    assert run.summary["parameters"] == sum(p.numel() for p in oracle_model(config).parameters())
    error = run.summary["error"]
    assert (error["rank"], error["type"], error["message"]) == (0, "FloatingPointError", "rank 0 has had enough")
    assert "in training_step" in error["traceback"]
    (table,) = tmp_path.rglob("*.csv")
    assert len(table.read_text().splitlines()) == 1 + 2, "the tracker has finished its work"


def another_rank_has_told_the_cause(rank, config, path):
    if rank == 0:
        error = {"rank": 1, "type": "ValueError", "message": "the cause", "traceback": ""}
        (path / "summary.json").write_text(json.dumps({"status": "failed", "error": error}))
    fails_in_the_third_update(rank, config, path)


def test_the_cause_that_another_rank_has_told_stays(tmp_path):
    summary = run_in_pool(short(), tmp_path, worker=another_rank_has_told_the_cause).summary
    assert summary["error"]["message"] == "the cause"
    assert summary["steps"] == 2


def test_a_diverging_loss_is_recorded_as_what_it_is(tmp_path):
    run = run_in_pool(short(optimizer={"lr": 1e30}, trainer={"val_steps": 1}), tmp_path)
    assert len(run.metrics) == 5
    assert run.summary["status"] == "completed"
    assert not math.isfinite(run.metrics[-1]["loss"])
    assert torch.tensor(run.metrics[0]["loss"]).isfinite()
