"""metrics.jsonl, summary.json and the printed plan: the promised fields, from the measured numbers."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from framework import config as schema
from framework.memory import current_memory_bytes, peak_memory_bytes
from framework.plan import PlanFacts, bytes_text, count_text, render_plan
from framework.progress import Progress
from framework.report import Measured, Recorded, Reporter, StepReport, build_summary
from framework.run_folder import RunFolder

METRICS_KEYS = ["step", "loss", "lr", "grad_norm", "tokens", "step_time_s", "tokens_per_s",
                "peak_memory_bytes_per_rank"]
SUMMARY_KEYS = ["status", "steps", "updates", "final_loss", "val_loss", "world_size", "layout", "zero_stage",
                "precision", "parameters", "resting_bytes_per_rank", "peak_memory_bytes_per_rank", "median_step_time_s",
                "tokens_per_s", "wall_time_s", "data_hash", "versions"]


def small_config() -> schema.RunConfig:
    return schema.RunConfig(
        task=schema.GenerateTask(name="generate", prompt=None, max_new_tokens=1, temperature=0.0, top_k=0),
        model=schema.GptModel(name="gpt2", vocab_size=512, max_seq_len=64, hidden_size=32, num_layers=4, num_heads=4,
                              dropout=0.0, activation_checkpointing="none", loss_chunk_tokens=None, weights=None),
        dataset=schema.SyntheticDataset(name="synthetic", num_samples=8, num_validation_samples=0, seq_len=64),
        parallel=schema.Parallel(pipeline=1, data=4, data_replicate=2, sequence=1, tensor=1, transport="fastest"),
        zero=schema.Zero(stage=3, prefetch_units=1),
        precision=schema.Precision(name="bf16", gradient_dtype="fp32", on_nonfinite="skip", max_skipped_steps=20),
        optimizer=schema.SgdOptimizer(name="sgd", lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0),
        schedule=schema.Schedule(name="cosine", warmup_steps=2, final_ratio=0.1),
        trainer=schema.Trainer(accelerator="cpu", devices=4, num_nodes=1, threads=1, max_steps=20,
                               gradient_clip_val=1.0, gradient_clip_algorithm="norm", val_every_steps=None,
                               val_steps=0, timeout_s=60.0),
        logger=schema.NoLogger(name="none"),
        batch=schema.Batch(global_size=8, micro_size=1),
        run=schema.Run(dir="auto"),
        log=schema.Log(every_steps=1),
        seed=1,
    )


def report(step: int, *, time_s: float = 1.0, peaks: tuple[int, ...] = (10, 20), **extra: float) -> StepReport:
    return StepReport(step=step, loss=10.0 / step, lr=1e-3, grad_norm=None, tokens=100, step_time_s=time_s,
                      tokens_per_s=100 / time_s, peak_memory_bytes_per_rank=list(peaks), extra=extra)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def start(self):
        self.calls.append(("start",))

    def log(self, metrics, step):
        self.calls.append(("log", step, metrics))

    def finish(self, summary):
        self.calls.append(("finish", summary["status"]))


def run_reporter(folder: RunFolder, tracker: Recorder) -> dict:
    reporter = Reporter(folder=folder, progress=Progress(stream=io.StringIO()), trackers=[tracker])
    reporter.start(total_steps=5, plan="the plan")
    reporter.step(report(1, time_s=9.0, peaks=(30, 5)))
    reporter.advance(2)
    reporter.step(report(3, time_s=1.0))
    reporter.step(report(4, time_s=2.0, val_loss=3.5))
    reporter.step(report(5, time_s=4.0))
    summary = build_summary(small_config(), status="completed", recorded=reporter.recorded,
                            measured=Measured(world_size=4, parameters=7, data_hash="ab"))
    reporter.finish(summary)
    return summary


def test_a_line_of_metrics_has_the_promised_keys_and_validation_fields(tmp_path):
    run_reporter(RunFolder(tmp_path), Recorder())
    lines = RunFolder(tmp_path).read_metrics()
    assert [line["step"] for line in lines] == [1, 3, 4, 5]
    assert list(lines[0]) == METRICS_KEYS
    assert list(lines[2]) == [*METRICS_KEYS, "val_loss"]
    assert lines[1]["loss"] == 10.0 / 3


def test_the_summary_has_the_promised_keys_and_leaves_the_first_step_out_of_times(tmp_path):
    run_reporter(RunFolder(tmp_path), Recorder())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == SUMMARY_KEYS
    assert summary["layout"] == {"data": 4, "data_replicate": 2, "sequence": 1, "tensor": 1, "pipeline": 1}
    assert (summary["steps"], summary["final_loss"], summary["val_loss"]) == (5, 2.0, 3.5)
    assert summary["median_step_time_s"] == 2.0
    assert summary["tokens_per_s"] == pytest.approx(300 / 7)
    assert summary["peak_memory_bytes_per_rank"] == [30, 20]
    assert summary["wall_time_s"] > 0
    assert {"python", "torch", "lightning"} <= set(summary["versions"])


def test_a_single_step_still_has_a_time():
    recorded = Recorded()
    recorded.add(report(1, time_s=3.0).line())
    assert recorded.median_step_time_s == 3.0


def test_trackers_get_plain_numbers_in_order(tmp_path):
    tracker = Recorder()
    run_reporter(RunFolder(tmp_path), tracker)
    assert [call[:2] for call in tracker.calls] == [
        ("start",), ("log", 1), ("log", 3), ("log", 4), ("log", 5), ("finish", "completed")]
    assert tracker.calls[3][2] == {"loss": 2.5, "lr": 1e-3, "tokens": 100, "step_time_s": 2.0, "tokens_per_s": 50.0,
                                   "peak_memory_bytes": 20, "val_loss": 3.5}


def test_a_run_that_died_is_summed_up_from_its_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics(report(1).line())
    folder.append_metrics(report(2).line())
    summary = build_summary(small_config(), status="failed", recorded=Recorded.read(folder), measured=Measured(),
                            error="rank 0 was killed by SIGKILL")
    assert list(summary) == [*SUMMARY_KEYS, "error"]
    assert (summary["steps"], summary["final_loss"]) == (2, 5.0)
    assert summary["resting_bytes_per_rank"] == {"parameters": None, "gradients": None, "optimizer": None}
    folder.write_json("summary.json", summary)


def test_a_run_without_a_step_can_be_summed_up():
    summary = build_summary(small_config(), status="failed", recorded=Recorded(), measured=Measured(), error="x")
    assert summary["steps"] == 0
    assert summary["median_step_time_s"] is None


def test_an_unknown_status_and_a_clashing_field_are_refused():
    with pytest.raises(ValueError, match="completed, failed, interrupted"):
        build_summary(small_config(), status="done", recorded=Recorded(), measured=Measured())
    with pytest.raises(ValueError, match="loss"):
        report(1, loss=2.0).line()


def test_the_plan_shows_layout_memory_and_the_reasons_for_auto():
    facts = PlanFacts(
        model="gpt2", parameters=124_439_808,
        axes={"pipeline": 1, "data_replicate": 2, "data_shard": 2, "sequence": 1, "tensor": 1}, accumulation=2,
        rests={"parameters": "sharded over 2", "gradients": "sharded over 2", "optimizer": "sharded over 2"},
        resting_bytes_per_rank={"parameters": [2**20] * 4, "gradients": [2**20] * 4, "optimizer": [2**21] * 4},
        training_tokens=1000, data_hash="0123456789abcdef", run_dir="outputs/x",
    )
    auto = [SimpleNamespace(key="trainer.devices", value=4, why="2 cores [and] more")]
    text = io.StringIO()
    Progress(stream=text).say(render_plan(small_config(), facts, auto))
    shown = " ".join(text.getvalue().split())
    for part in ("gpt2: 124.4M parameters (124,439,808)", "stage 3: parameters sharded over 2",
                 "4.0 MiB per rank: parameters 1.0 MiB", "bf16, gradients in fp32",
                 "8 samples per update = 1 x 2 micro-batches x 4 data ranks; 512 tokens", "cosine over 20 steps",
                 "hash 0123456789ab", "rank data_replicate data_shard 0 0 0 1 0 1 2 1 0 3 1 1",
                 "trainer.devices=4 2 cores [and] more", "gradients clipped by norm to 1"):
        assert part in shown, f"{part!r} not in {shown}"


def test_a_large_layout_is_shown_in_part():
    facts = PlanFacts(model="gpt2", parameters=1, axes={"data_shard": 64, "tensor": 2}, accumulation=1, rests={},
                      resting_bytes_per_rank={"parameters": range(100, 228)}, training_tokens=None, data_hash=None,
                      run_dir="x")
    text = io.StringIO()
    Console(file=text, width=120).print(render_plan(small_config(), facts))
    assert "127" in text.getvalue()
    assert "63       1" in text.getvalue()
    assert "100 B to 227 B per rank" in text.getvalue()
    assert len(text.getvalue().splitlines()) < 40


def test_sizes_read_well():
    assert [bytes_text(0), bytes_text(1023), bytes_text(1536), bytes_text(5 * 2**40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
    assert [count_text(999), count_text(1_500), count_text(175e9)] == ["999", "1.5K", "175.0B"]


def test_memory_of_this_process_is_counted_in_bytes():
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    assert current_memory_bytes() > 64 * 2**20
    assert peak_memory_bytes() >= current_memory_bytes() * 0.9
