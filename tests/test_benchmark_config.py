"""What task=benchmark cannot honour is refused before anything starts; what it adds to is not."""

import pytest

from framework.benchmark.catalog import SYSTEMS
from framework.benchmark.targets import SIZE_A, SIZE_B, setting_of
from framework.cli import label
from framework.composition import Composer
from framework.machine import Launched, Machine
from framework.preflight import find_problems, prepare

COMPOSER = Composer()
LAPTOP = Machine(cpu_count=2, gpu_count=lambda: 0)
EXPERIMENT = "+experiment=bench_zero"


def problems(*overrides, machine=LAPTOP, folder=None):
    return find_problems([EXPERIMENT, *overrides], COMPOSER, machine=machine, launch_dir=folder)


def prepared(experiment, folder, *overrides):
    return prepare(COMPOSER.tree([f"+experiment={experiment}", *overrides]), machine=LAPTOP, launch_dir=folder)


# override(s), key, a part of what is allowed, a part of the fix
WRONG = [
    ("task.systems=[zero4,ddp]", "task.systems", "one of nocomm, ddp", "task.systems=[zero3,ddp]"),
    ("task.systems=[]", "task.systems", "at least one", "task.systems=[nocomm]"),
    ("task.systems=[ddp,ddp]", "task.systems", "at most once", "task.systems=[ddp]"),
    ("task.systems=ddp", "task.systems", "a list of texts", "task.systems=[ddp]"),
    ("task.allocators=[tuned,jemalloc]", "task.allocators", "one of tuned, stock", "task.allocators=[tuned]"),
    ("task.rounds=0", "task.rounds", "at least 1", "task.rounds=1"),
    ("task.warmup_steps=20", "task.warmup_steps", "below trainer.max_steps (20)", "task.warmup_steps=19"),
    ("task.memory_steps=-1", "task.memory_steps", "at least 0", "task.memory_steps=0"),
    ("task.sample_timeout_s=0", "task.sample_timeout_s", "above 0", "task.sample_timeout_s="),
    ("parallel.data_replicate=2", "parallel.data_replicate", "1 for task=benchmark", "parallel.data_replicate=1"),
    ("precision=bf16 precision.gradient_dtype=bf16", "precision.gradient_dtype", "fp32", "gradient_dtype=fp32"),
    ("precision=fp16", "precision", "fp32 or bf16 for task=benchmark", "precision=bf16"),
    ("precision.on_nonfinite=stop", "precision.on_nonfinite", "skip for task=benchmark", "on_nonfinite=skip"),
    ("model.dropout=0.1", "model.dropout", "equal losses", "model.dropout=0"),
    ("trainer.gradient_clip_val=1 trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_algorithm", "norm",
     "trainer.gradient_clip_val=null"),
    ("logger=csv", "logger", "none for task=benchmark", "logger=none"),
]


@pytest.mark.parametrize(("overrides", "key", "allowed", "fix"), WRONG, ids=[case[0] for case in WRONG])
def test_what_it_cannot_honour_is_refused(overrides, key, allowed, fix, tmp_path):
    (problem,) = problems(*overrides.split(), folder=tmp_path)
    assert problem.key == key
    assert allowed in problem.allowed
    assert fix in problem.fix


def test_gpus_and_other_launchers_are_refused(tmp_path):
    server = Machine(cpu_count=8, gpu_count=lambda: 2)
    (problem,) = problems("trainer.accelerator=auto", machine=server, folder=tmp_path)
    assert (problem.key, problem.fix) == ("trainer.accelerator", "trainer.accelerator=cpu")
    torchrun = Launched("torchrun", processes=2, processes_per_node=2)
    launched = Machine(cpu_count=8, gpu_count=lambda: 0, launched=torchrun)
    (problem,) = problems(machine=launched, folder=tmp_path)
    assert problem.key == "task"
    assert "torchrun has already started this one" in problem.allowed


def test_other_tasks_are_free_of_these_rules(tmp_path):
    free = ["task=train", "model.dropout=0.1", "logger=csv", "trainer.max_steps=2"]
    assert problems(*free, folder=tmp_path) == []


def test_a_folder_with_samples_can_be_gone_on_in_and_no_other(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    (problem,) = problems(f"run.dir={tmp_path}", folder=tmp_path)
    assert problem.key == "run.dir"
    (tmp_path / "benchmark.jsonl").write_text("")
    assert problems(f"run.dir={tmp_path}", folder=tmp_path) == []
    (problem,) = problems(f"run.dir={tmp_path}", "task=train", folder=tmp_path)
    assert problem.key == "run.dir"


@pytest.mark.parametrize(("experiment", "size"), [("bench_zero", SIZE_A), ("bench_zero_124m", SIZE_B)])
def test_the_experiments_are_the_sizes_the_targets_are_for(experiment, size, tmp_path):
    config = prepared(experiment, tmp_path).config
    assert size.items() <= setting_of(config).items()
    assert (config.trainer.devices, config.trainer.threads, config.trainer.gradient_clip_val) == (2, 1, None)
    assert config.task.systems == list(SYSTEMS)
    assert config.task.rounds >= 5


def test_accumulation_follows_from_the_global_batch(tmp_path):
    setting = setting_of(prepared("bench_zero", tmp_path, "batch.global_size=32").config)
    assert (setting["accumulation"], setting["micro_size"], setting["ranks"]) == (4, 4, 2)


def test_the_run_folder_is_named_after_the_task(tmp_path):
    assert label(prepared("bench_zero", tmp_path).config, {"model": "gpt2_10m"}) == "gpt2_10m_benchmark"
