"""Whole runs whose gradients overflow: fp16 with its loss scale, and the detector of every precision."""

import json
import math

import pytest
import torch

from framework import schema
from framework.build import build_precision
from framework.composition import Composer
from framework.config import Fp16Precision
from framework.machine import Machine
from framework.preflight import find_problems, prepare
from strategies.loss_scale import LossScaling
from strategies.precision import PrecisionPolicy
from strategies.update_guard import NonFiniteError
from support.run_jobs import read_run, run_here, run_in_pool, training_config
from support.run_oracle import oracle_source, share_of_peak, train_oracle
from support.run_probes import run_watched

LAPTOP = Machine(cpu_count=2, gpu_count=lambda: 0)
TOO_LARGE = 2.0**26  # overflows fp16 for a few updates in this model


def fp16(**settings):
    return Fp16Precision(**{"name": "fp16", "initial_scale": 2.0**10, "growth_interval": 1000, "hysteresis": 1,
                            "min_scale": 1.0, "max_skipped_steps": 20, **settings})


def config_of(precision, devices=2, steps=20, **changes):
    return training_config(devices=devices, precision=precision, batch={"micro_size": 2}, trainer={"max_steps": steps},
                           **changes)


def policy(*overrides, folder):
    return build_precision(prepare(Composer().tree(overrides), machine=LAPTOP, launch_dir=folder).config)


def test_every_key_reaches_the_policy(tmp_path):
    keys = ["initial_scale=4096", "growth_interval=7", "hysteresis=3", "min_scale=2", "max_skipped_steps=5"]
    assert policy("precision=fp16", *(f"precision.{key}" for key in keys), folder=tmp_path) == PrecisionPolicy.of(
        "fp16", loss_scale=LossScaling(initial=4096.0, growth_interval=7, hysteresis=3, minimum=2.0),
        max_skipped_steps=5)
    assert policy("precision=fp16", folder=tmp_path) == PrecisionPolicy.of("fp16")
    keys = ["gradient_dtype=bf16", "on_nonfinite=stop", "max_skipped_steps=5"]
    assert policy("precision=bf16", *(f"precision.{key}" for key in keys), folder=tmp_path) == PrecisionPolicy.of(
        "bf16", gradient="bf16", on_nonfinite="stop", max_skipped_steps=5)
    assert policy(folder=tmp_path) == PrecisionPolicy.of("fp32")


def test_what_the_policy_refuses_is_refused_before_a_process_starts_all_at_once(tmp_path):
    wrong = ["initial_scale=0.5", "gradient_dtype=bf16", "on_nonfinite=stop"]
    found = find_problems(["precision=fp16", *(f"precision.{key}" for key in wrong), "trainer.max_steps=0"], Composer(),
                          machine=LAPTOP, launch_dir=tmp_path)
    assert {problem.key for problem in found} >= {"precision.gradient_dtype", "precision.on_nonfinite",
                                                  "trainer.max_steps"}
    (problem,) = find_problems(["precision=fp16", "precision.initial_scale=0.5"], Composer(), machine=LAPTOP,
                               launch_dir=tmp_path)
    assert (problem.key, problem.value) == ("precision.initial_scale", 0.5)
    assert problem.fix == "precision.initial_scale=65536, or precision.min_scale=0.5"


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_trains_like_one_process_in_fp32(tmp_path, stage):
    run = run_in_pool(config_of(fp16(), zero={"stage": stage}), tmp_path)
    single = training_config()
    expected = train_oracle(single, oracle_source(single, tmp_path))
    assert run.column("loss") == pytest.approx(expected.losses, abs=2e-3, rel=0)
    assert run.column("grad_norm") == pytest.approx(expected.grad_norms, rel=0.05)
    assert run.column("loss_scale") == [1024.0] * 20
    assert all("skipped_steps" not in line for line in run.metrics)
    assert run.summary["updates"] == {"attempted": 20, "applied": 20, "skipped": 0}


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_update_moves_nothing_and_the_schedule_counts_applied_ones(tmp_path, devices, stage):
    """The scale starts too high and grows too soon: updates are skipped at the start and later."""
    config = config_of(fp16(initial_scale=TOO_LARGE, growth_interval=3), devices, zero={"stage": stage})
    run = run_in_pool(config, tmp_path, worker=run_watched)
    applied = [line["grad_norm"] is not None for line in run.metrics]
    first, skipped = applied.index(True), applied.count(False)
    assert 1 < first < 15
    assert skipped > first, "one was skipped in the middle, too"
    rates = [config.optimizer.lr * share_of_peak(config, update + 1) for update in range(20)]
    for seen in run.returned:
        assert len(seen.lrs) == 20 - skipped
        for rate, used in zip(rates, seen.lrs, strict=False):
            assert used == pytest.approx([rate, rate], rel=1e-12), "the rate inside the step"
        for step, (weights, state) in enumerate(seen.states):
            same = all(torch.equal(weights[name], value) for name, value in (
                seen.states[step - 1][0] if step else seen.start).items())
            assert same is not applied[step]
            if step and not applied[step]:
                torch.testing.assert_close(state, seen.states[step - 1][1], rtol=0, atol=0)
    shown = [sum(applied[:step]) for step in range(20)]
    assert run.column("lr") == pytest.approx([rates[update] for update in shown], rel=1e-12)
    assert_records(run, applied)


def assert_records(run, applied):
    skips = [applied[: step + 1].count(False) for step in range(20)]
    assert [line.get("skipped_steps", 0) for line in run.metrics] == skips
    scales = run.column("loss_scale")
    for step in range(19):
        changes = (1.0, 2.0) if applied[step] else (0.5,)
        assert scales[step + 1] / scales[step] in changes
    assert run.summary["updates"] == {"attempted": 20, "applied": 20 - skips[-1], "skipped": skips[-1]}
    for text in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=pytest.fail)
    lines = [line for line in run.terminal.splitlines() if line.startswith("step ")]
    for line, good, count, scale in zip(lines, applied, skips, scales, strict=True):
        assert ("gradient norm not finite" in line) is not good
        assert f"skipped {count} loss scale {scale:g}" in line


def test_nan_losses_in_fp32_are_skipped_and_recorded_as_valid_json(tmp_path):
    run = run_in_pool(config_of({"name": "fp32"}, steps=6, optimizer={"lr": 1e30}), tmp_path)
    skipped = [line.get("skipped_steps", 0) for line in run.metrics]
    assert skipped[-1] >= 1
    for line, before, after in zip(run.metrics, [0, *skipped], skipped, strict=False):
        assert (line["grad_norm"] is None) is (after > before)
        assert "loss_scale" not in line
    assert not math.isfinite(run.metrics[-1]["loss"])
    for text in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=pytest.fail)
    assert run.summary["updates"] == {"attempted": 6, "applied": 6 - skipped[-1], "skipped": skipped[-1]}


def stopped(rank, config, path):
    with pytest.raises(NonFiniteError) as caught:  # caught here: an error that leaves the rank would end the pool
        run_here(rank, config, path)
    return str(caught.value)


@pytest.mark.parametrize(("precision", "optimizer", "says", "attempted"), [
    (fp16(initial_scale=TOO_LARGE, min_scale=TOO_LARGE / 2), {}, "loss scale is at its minimum", 2),
    (fp16(initial_scale=TOO_LARGE, max_skipped_steps=1), {}, "2 updates in a row were skipped", 2),
    ({"name": "bf16", "on_nonfinite": "stop"}, {"lr": 1e30}, "on_nonfinite=stop", 2),
    ({"name": "fp32", "max_skipped_steps": 0}, {"lr": 1e30}, "1 updates in a row", 2),
], ids=["collapse", "fp16 limit", "bf16 stop", "fp32 limit"])
def test_a_run_that_cannot_go_on_stops_on_every_rank_with_names_and_a_fix(tmp_path, precision, optimizer, says,
                                                                          attempted):
    config = config_of(precision, 3, optimizer=optimizer)
    messages = run_in_pool(config, tmp_path, worker=stopped).returned
    assert len(set(messages)) == 1
    for part in (f"update {attempted}: ", says, "'model.transformer.wte.weight'", "fix: "):
        assert part in messages[0]
    summary = read_run(tmp_path).summary
    assert summary["status"] == "failed"
    assert summary["error"]["message"] == messages[0]
    assert summary["updates"]["attempted"] == attempted


def test_a_written_config_comes_back_with_its_kind_of_precision(tmp_path):
    for number, precision in enumerate((fp16(hysteresis=4), {"on_nonfinite": "stop"})):
        config = config_of(precision)
        schema.write(config, tmp_path / f"{number}.yaml")
        assert schema.read(tmp_path / f"{number}.yaml") == config
