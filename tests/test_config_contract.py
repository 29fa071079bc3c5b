"""The contract between conf/, the schema and the code: no dead knob, no key without a default, every option runs."""

import ast
import dataclasses
from pathlib import Path

import pytest

from framework import schema
from framework.composition import Composer, conf_dir
from framework.config import GROUPS, VARIANTS, RunConfig
from framework.machine import Machine
from framework.preflight import find_problems

FRAMEWORK = Path(schema.__file__).parent
CONFIGURED = [group for group in (*VARIANTS, *GROUPS) if group not in schema.PLAIN_SECTIONS]
# What an option cannot run without.
REQUIRED = {"text": ["dataset.files=[a.txt]"], "tokens": ["dataset.path=a.bin"], "hf": ["dataset.path=a.bin"]}
COMPOSER = Composer()
OPTIONS = [(group, option) for group in CONFIGURED for option in COMPOSER.options(group)]
EXPERIMENTS = COMPOSER.options("experiment")


@pytest.fixture(scope="module")
def launch_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "a.txt").write_text("text")
    (folder / "a.bin").write_bytes(bytes(1 << 16))
    return folder


def problems(overrides, launch_dir):
    machine = Machine(cpu_count=4, gpu_count=lambda: 0)
    return find_problems(overrides, COMPOSER, machine=machine, launch_dir=launch_dir)


def is_about_this_environment(problem):
    return "which is not installed" in problem.allowed


def test_every_group_has_options_and_every_folder_of_conf_is_a_group():
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()} - {"hydra", "experiment", "__pycache__"}
    assert folders == set(CONFIGURED)
    assert {"gpt2_zero3", "gpt2_zero2", "gpt2_zero1", "gpt2_ddp"} <= set(EXPERIMENTS)


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS])
def test_every_option_sets_exactly_the_keys_of_its_schema_and_runs(group, option, launch_dir):
    overrides = [f"{group}={option}", *REQUIRED.get(option, [])]
    section = COMPOSER.tree(overrides)[group]
    variant = VARIANTS[group][section["name"]] if group in VARIANTS else GROUPS[group]
    assert set(section) == {field.name for field in dataclasses.fields(variant)}
    assert [problem for problem in problems(overrides, launch_dir) if not is_about_this_environment(problem)] == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_is_valid(experiment, launch_dir):
    assert problems([f"+experiment={experiment}"], launch_dir) == []


@pytest.mark.parametrize(
    ("experiment", "stage"), [("gpt2_ddp", 0), ("gpt2_zero1", 1), ("gpt2_zero2", 2), ("gpt2_zero3", 3)]
)
def test_the_gpt2_experiments_differ_in_the_stage_alone(experiment, stage):
    tree, reference = COMPOSER.tree([f"+experiment={experiment}"]), COMPOSER.tree(["+experiment=gpt2_zero3"])
    assert tree["zero"]["stage"] == stage
    assert tree["model"]["hidden_size"] == 768
    assert {name: value for name, value in tree.items() if name != "zero"} == {
        name: value for name, value in reference.items() if name != "zero"
    }


def test_overrides_win_over_an_experiment():
    tree = COMPOSER.tree(["+experiment=gpt2_zero3", "zero=stage1", "trainer.max_steps=7", "model=gpt2_nano"])
    assert (tree["zero"]["stage"], tree["trainer"]["max_steps"], tree["model"]["num_layers"]) == (1, 7, 4)


def test_schema_fields_have_help_and_no_defaults():
    classes = {variant for variants in VARIANTS.values() for variant in variants.values()} | set(GROUPS.values())
    for config_class in classes:
        assert config_class.__doc__
        for field in dataclasses.fields(config_class):
            assert field.metadata["help"]
            assert field.default is dataclasses.MISSING
            assert field.default_factory is dataclasses.MISSING


def test_no_knob_is_dead():
    """Every schema field is read as an attribute somewhere in framework/ that is not a check of it."""
    read = set()
    for path in FRAMEWORK.rglob("*.py"):
        if path.name not in ("config.py", "validate.py", "surroundings.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    classes = {variant for variants in VARIANTS.values() for variant in variants.values()} | {*GROUPS.values()}
    classes.add(RunConfig)
    knobs = {f"{each.__name__}.{field.name}" for each in classes for field in dataclasses.fields(each)}
    assert {knob for knob in knobs if knob.partition(".")[2] not in read} == set()
