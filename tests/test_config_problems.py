"""Wrong configs: each is refused with its key, its value, what is allowed and a fix, and all of them at once."""

import math
from pathlib import Path

import pytest

from framework import schema
from framework.cli import main
from framework.composition import Composer
from framework.machine import Launched, Machine
from framework.preflight import find_problems, find_sweep_problems, prepare
from framework.problems import ConfigError

LAPTOP = Machine(cpu_count=4, gpu_count=lambda: 0)
SERVER = Machine(cpu_count=64, gpu_count=lambda: 4)


@pytest.fixture(scope="module")
def composer():
    return Composer()


def problems(composer, *overrides, machine=LAPTOP, launch_dir=Path("/nowhere")):
    return find_problems(overrides, composer, machine=machine, launch_dir=launch_dir)


# override(s), key, value as shown, a part of what is allowed, a part of the fix
WRONG = [
    ("zero=stage7", "zero", "stage7", "stage0, stage1, stage2, stage3", "zero=stage"),
    ("model=gpt2_nono", "model", "gpt2_nono", "gpt2_nano", "model=gpt2_nano"),
    ("+experiment=gpt2_zer03", "experiment", "gpt2_zer03", "gpt2_zero3", "+experiment=gpt2_zero"),
    ("experiment=gpt2_zero3", "experiment", "gpt2_zero3", "with a plus", "+experiment=gpt2_zero3"),
    ("optimizer.lrr=0.1", "optimizer.lrr", "0.1", "no such key", "optimizer.lr=0.1"),
    ("+optimizer.lrr=0.1", "optimizer.lrr", "0.1", "no such key", "optimizer.lr=0.1"),
    ("++trainer.max_step=3", "trainer.max_step", "3", "no such key", "trainer.max_steps=3"),
    ("model.n_layer=3", "model.n_layer", "3", "no such key", "model.num_layers=3"),
    ("lr=0.1", "lr", "0.1", "no such key", "optimizer.lr=0.1"),
    ("trainer.lr=0.1", "trainer.lr", "0.1", "no such key", "optimizer.lr=0.1"),
    ("optimiser=sgd", "optimiser", "sgd", "no such group or key", "optimizer=sgd"),
    ("optimizer.momentum=0.9", "optimizer.momentum", "0.9", "optimizer=sgd", "optimizer=sgd"),
    ("optimizer.name=sgd", "optimizer.name", "sgd", "option of the group", "optimizer=sgd"),
    ("trainer={max_stepz: 3}", "trainer.max_stepz", "3", "no such key", "trainer.max_steps=3"),
    ("batch=4", "batch", "4", "a section", "batch.<key>=4"),
    ("seed=1,2", "seed", "1,2", "several values", "--multirun"),
    ("optimizer.betas=0.9,0.95", "optimizer.betas", "0.9,0.95", "several values", "optimizer.betas=[0.9,0.95]"),
    ("~optimizer.lr", "~optimizer.lr", "", "every key has a value", "leave out"),
    ("~model", "~model", "", "cannot be taken out", "leave out ~model"),
    ("+seed=3", "+seed=3", "", "exists already", "seed=3"),
    ("hydra.run.dir=here", "hydra.run.dir", "here", "run.dir", "run.dir=here"),
    ("dataset=text", "dataset.files", "", "must be given", "dataset.files=[<text>]"),
    ("trainer.max_steps=ten", "trainer.max_steps", "ten", "an integer at least 1", "trainer.max_steps="),
    ("trainer.max_steps=-5", "trainer.max_steps", "-5", "an integer at least 1", "trainer.max_steps=1"),
    ("dataset.seq_len=64.0", "dataset.seq_len", "64.0", "an integer at least 1", "dataset.seq_len=64"),
    ("optimizer.lr=nan", "optimizer.lr", "nan", "a number at least 0", "optimizer.lr="),
    ("optimizer.lr=inf", "optimizer.lr", "inf", "a number at least 0", "optimizer.lr="),
    ("model.dropout=1", "model.dropout", "1", "below 1", "model.dropout="),
    ("batch.micro_size=true", "batch.micro_size", "true", "an integer", "batch.micro_size=1"),
    ("seed=null", "seed", "null", "an integer", "seed="),
    ("task.save_weights=no", "task.save_weights", "no", "true or false", "task.save_weights=false"),
    ("zero.stage=4", "zero.stage", "4", "one of 0, 1, 2, 3", "zero.stage=3"),
    ("trainer.accelerator=cuda", "trainer.accelerator", "cuda", "one of cpu, gpu or auto", "trainer.accelerator="),
    ("optimizer.betas=0.9", "optimizer.betas", "0.9", "a list of numbers", "optimizer.betas=[0.9]"),
    ("model.num_heads=5", "model.num_heads", "5", "divide model.hidden_size (128)", "model.num_heads=4"),
    ("dataset.seq_len=4096", "dataset.seq_len", "4096", "model.max_seq_len (128)", "dataset.seq_len=128"),
    ("parallel.tensor=2", "parallel.tensor", "2", "size 1 only", "parallel.tensor=1"),
    ("parallel.data=3", "parallel.data", "3", "trainer.devices 2 x trainer.num_nodes 1 = 2", "trainer.devices=3"),
    ("parallel.data_replicate=3", "parallel.data_replicate", "3", "parallel.data (2)", "parallel.data_replicate=2"),
    ("optimizer.betas=[0.9,1.0]", "optimizer.betas", "[0.9,1.0]", "below 1", "optimizer.betas=[0.9,0.95]"),
    ("optimizer.betas=[0.9]", "optimizer.betas", "[0.9]", "two numbers", "optimizer.betas=[0.9,0.95]"),
    ("trainer.accelerator=gpu", "trainer.accelerator", "gpu", "no GPU", "trainer.accelerator=cpu"),
    ("trainer.num_nodes=2", "trainer.num_nodes", "2", "this machine only", "torchrun --nnodes 2"),
    ("model.vocab_size=256", "model.vocab_size", "256", "at least 257", "model.vocab_size=257"),
    ("trainer.gradient_clip_val=0", "trainer.gradient_clip_val", "0", "above 0 or null", "gradient_clip_val=null"),
    ("precision.gradient_dtype=bf16", "precision.gradient_dtype", "bf16", "fp32", "precision=bf16"),
    ("precision=fp8", "precision", "fp8", "bf16, fp16, fp32", "precision=fp"),
    ("precision.on_nonfinite=ignore", "precision.on_nonfinite", "ignore", "one of skip, stop", "on_nonfinite=s"),
    ("precision.max_skipped_steps=-1", "precision.max_skipped_steps", "-1", "at least 0", "max_skipped_steps=0"),
    ("precision.initial_scale=8", "precision.initial_scale", "8", "precision=fp16 has it", "precision=fp16"),
    ("precision.name=fp16", "precision.name", "fp16", "option of the group", "precision=fp16"),
    ("dataset.validation_fraction=0", "dataset.validation_fraction", "0", "held-out", "trainer.val_steps=0"),
    ("model.weights=lost", "model.weights", "/nowhere/lost", "no such file", "model.weights"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "key", "value", "allowed", "fix"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_override_is_refused_with_key_value_allowed_and_fix(composer, override, key, value, allowed, fix):
    found = [problem for problem in problems(composer, override) if problem.key == key]
    assert found, f"no problem about {key}: {problems(composer, override)}"
    named, suggestion = str(found[0]).split("\n    fix: ")
    assert named.startswith(f"{key}={value}: " if value else f"{key}: ")
    assert allowed in named
    assert fix in suggestion


def test_every_problem_is_reported_at_once_whatever_its_kind(composer):
    overrides = [
        "x=[", "zero=stage7", "optimizer.lrr=1", "trainer.max_steps=0", "model.num_heads=7", "seed=1,2",
        "batch.global_size=3",
    ]  # fmt: skip
    keys = {problem.key for problem in problems(composer, *overrides)}
    expected = {"x=[", "zero", "optimizer.lrr", "trainer.max_steps", "model.num_heads", "seed", "batch.global_size"}
    assert keys == expected


def test_a_consequence_of_another_problem_is_not_reported(composer):
    assert {problem.key for problem in problems(composer, "trainer.devices=none", "batch.global_size=7")} == {
        "trainer.devices"
    }


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_the_global_batch_is_checked_against_micro_and_data_size_with_all_numbers(composer, size):
    found = problems(composer, f"batch.global_size={size}", "batch.micro_size=2", "trainer.devices=2")
    (problem,) = found if size != 10 else problems(composer, "batch.global_size=10", "batch.micro_size=3")
    step = 4 if size != 10 else 6
    assert all(text in str(problem) for text in (f"batch.global_size={problem.value}", f"size (2) = {step}"))
    for candidate in problem.fix.split(" or "):
        assert int(candidate.removeprefix("batch.global_size=")) % step == 0


@pytest.mark.parametrize("override", ["batch.global_size=0", "batch.global_size=-4", "batch.micro_size=0"])
def test_batch_sizes_of_zero_and_below_are_refused(composer, override):
    (problem,) = problems(composer, override)
    assert problem.key == override.partition("=")[0]


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["task.prompt=''"], True), (["dataset=synthetic", "task.prompt=hello"], True),
        (["dataset=stdlib", "task.prompt=hello"], False), (["dataset=synthetic"], False),
        (["task=generate", "dataset=synthetic", "task.prompt=hello"], True),
    ],
)  # fmt: skip
def test_a_prompt_that_nothing_can_read_is_refused_before_the_training(composer, overrides, wrong):
    assert [problem.key for problem in problems(composer, *overrides)] == (["task.prompt"] if wrong else [])


def test_accumulation_follows_from_the_data_size_and_is_reported(composer):
    tree = composer.tree(["batch.global_size=24", "batch.micro_size=2", "trainer.devices=3"])
    prepared = prepare(tree, machine=LAPTOP, launch_dir=Path("/"))
    accumulation = next(entry for entry in prepared.resolutions if entry.key == "accumulation")
    assert accumulation.value == 4
    assert "24 / (micro_size 2 x data 3)" in accumulation.why


def test_more_devices_than_gpus_are_refused(composer):
    (problem,) = problems(composer, "trainer.accelerator=gpu", "trainer.devices=8", machine=SERVER)
    assert problem.key == "trainer.devices"
    assert "at most the 4 GPUs" in problem.allowed


def test_processes_of_another_launcher_must_be_the_configs(composer):
    machine = Machine(cpu_count=8, gpu_count=lambda: 0, launched=Launched("torchrun", 4, 2))
    assert problems(composer, machine=machine) == []
    (problem,) = problems(composer, "trainer.devices=3", "trainer.num_nodes=2", machine=machine)
    assert "4 processes that torchrun started" in str(problem)


def test_missing_packages_are_named(composer, monkeypatch):
    monkeypatch.setattr("framework.surroundings._installed", lambda distribution: False)
    found = problems(composer, "logger=tensorboard", "dataset=hf", "dataset.path=wikitext")
    assert {problem.key for problem in found} == {"logger", "dataset"}
    assert all("pip install" in problem.fix for problem in found)


def test_missing_data_files_name_the_nearest_file(composer, tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(4096))
    (tmp_path / "notes").mkdir()
    (problem,) = problems(composer, "dataset=tokens", "dataset.path=trian.bin", launch_dir=tmp_path)
    assert problem.fix == f"dataset.path={tmp_path / 'train.bin'}"
    (problem,) = problems(composer, "dataset=tokens", "dataset.path=train.bin", "model=gpt2", "dataset.dtype=int64",
                          launch_dir=tmp_path)  # fmt: skip
    assert "holds 512 tokens" in problem.allowed
    (problem,) = problems(composer, "dataset=text", "dataset.files=[notes]", launch_dir=tmp_path)
    assert problem.fix == f"dataset.files=['{tmp_path}/notes/**/*.txt']"


def test_a_finished_run_is_never_overwritten(composer, tmp_path):
    (tmp_path / "run").mkdir()
    assert problems(composer, "run.dir=run", launch_dir=tmp_path) == []
    (tmp_path / "run" / "summary.json").write_text("{}")
    (problem,) = problems(composer, "run.dir=run", launch_dir=tmp_path)
    assert problem.fix == f"run.dir={tmp_path / 'run-2'}, or run.dir=auto"
    (tmp_path / "file").write_text("")
    (problem,) = problems(composer, "run.dir=file/run", launch_dir=tmp_path)
    assert "is a file" in problem.allowed


def test_a_sweep_is_checked_job_by_job_before_it_starts(composer):
    overrides = ["seed=range(0,2)", "model.num_heads=4,5", "optimizer=adamw,sgd", "optimizer.momentum=0.5"]
    found = find_sweep_problems(overrides, composer, machine=LAPTOP, launch_dir=Path("/"))
    assert {problem.key: problem.where for problem in found} == {
        "optimizer.momentum": "jobs 0, 2, 4, 6",
        "model.num_heads": "jobs 2, 3, 6, 7",
    }
    good = ["optimizer=adamw,sgd", "trainer.devices=1,2", "model.num_heads=choice(2,4)"]
    assert find_sweep_problems(good, composer, machine=LAPTOP, launch_dir=Path("/")) == []


def test_one_value_of_a_sweep_may_be_unknown(composer):
    (problem,) = find_sweep_problems(["zero=stage1,stage9"], composer, machine=LAPTOP, launch_dir=Path("/"))
    assert (problem.key, problem.value, problem.where) == ("zero", "stage9", "job 1")


def test_unknown_keys_in_a_file_are_found_at_every_depth(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\noptimizer: {lrr: 1}\nbatch: {global_sise: 2}\nsead: 3\nmodel: {deep: {er: 1}}\n"
    )
    found = problems(Composer(config_dir=str(tmp_path)), "+experiment=mine")
    assert {problem.key for problem in found} == {"optimizer.lrr", "batch.global_sise", "sead", "model.deep.er"}
    fixes = {problem.key: problem.fix for problem in found}
    assert fixes["optimizer.lrr"] == "optimizer.lr=1"
    assert fixes["batch.global_sise"] == "batch.global_size=2"
    assert fixes["sead"] == "seed=3"


def test_a_broken_file_is_a_problem_and_not_a_traceback(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [override /zero: stage9]\n")
    (problem,) = problems(Composer(config_dir=str(tmp_path)), "+experiment=mine")
    assert "zero/stage9" in str(problem)


def test_problems_are_printed_together_with_exit_code_2_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["trainer.max_steps=0", "optimizer.lrr=1", "model.num_heads=7"]) == 2
    assert main(["--multirun", "trainer.max_steps=0,5", "seed=1,2"]) == 2
    error = capsys.readouterr().err
    assert "3 problems in the config; nothing was started." in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_schema_accepts_what_yaml_leaves_as_text_and_refuses_what_is_no_number(composer):
    tree = composer.tree([])
    tree["optimizer"]["lr"] = "1e-3"
    tree["optimizer"]["eps"] = 1
    config = schema.load(tree)
    assert config.optimizer.lr == 1e-3
    assert isinstance(config.optimizer.eps, float)
    for value in ("fast", math.nan, math.inf, True, None, [1.0]):
        tree["optimizer"]["lr"] = value
        assert [problem.key for problem in schema.check(tree)] == ["optimizer.lr"]


def test_schema_names_missing_keys_sections_and_variants(composer):
    tree = composer.tree([])
    del tree["trainer"]["max_steps"], tree["batch"]
    tree["optimizer"]["name"] = "adamm"
    tree["logger"] = None
    found = {problem.key: problem for problem in schema.check(tree)}
    assert set(found) == {"trainer.max_steps", "batch", "optimizer.name", "logger"}
    assert found["optimizer.name"].fix == "optimizer.name=adam"
    with pytest.raises(ConfigError, match="4 problems"):
        schema.load(tree)


def test_a_config_survives_being_written_and_read(composer, tmp_path):
    config = prepare(composer.tree(["logger=wandb"]), machine=LAPTOP, launch_dir=tmp_path).config
    schema.write(config, tmp_path / "config.yaml")
    assert schema.read(tmp_path / "config.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
