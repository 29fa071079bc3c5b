"""What the README says is so: commands compose, snippets run, tables and file lists are those of the code."""

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from framework import overrides
from framework.cli import BAD_CONFIG, FAILED, INTERRUPTED
from framework.composition import Composer, parse_arguments
from framework.config import GROUPS, VARIANTS
from framework.machine import Machine
from framework.preflight import find_problems, find_sweep_problems
from framework.report import STATUSES, Measured, Recorded, StepReport, build_summary
from strategies.zero.placement import StagePolicy
from support.ranks import run_ranks
from support.run_configs import run_config
from support.source_files import ROOT

README = (ROOT / "README.md").read_text()
READMES = [ROOT / "README.md", *sorted(ROOT.glob("[a-z]*/**/README.md"))]
# Lines that .ci/run executes as they stand; here only their form is checked.
INSTALL = ["python3 -m venv .venv", "source .venv/bin/activate", "pip install -e ."]
TEST = ["pip install -e '.[dev]'", "pytest"]


def blocks(text, language):
    """Contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def shell_lines():
    return [line.strip() for block in blocks(README, "bash") for line in block.splitlines() if line.strip()]


def commands():
    """Every `-m framework` command in a block or in the text, with what the shell makes of variables and comments."""
    typed = [*shell_lines(), *re.findall(r"`(python -m framework[^`\n]*)`", README)]
    variables = dict(line.split("#")[0].strip().split("=", 1) for line in typed if re.match(r"[A-Z]+=", line))
    found = []
    for line in typed:
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        if "framework" in words:
            found.append(words[words.index("framework") + 1 :])
    return found


COMMANDS = commands()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory that holds the files the README's commands name."""
    folder = tmp_path_factory.mktemp("typed_here")
    (folder / "notes" / "deep").mkdir(parents=True)
    for name in ("notes/deep/a.md", "story.txt"):
        (folder / name).write_text("text")
    (folder / "train.bin").write_bytes(bytes(1 << 16))
    for arguments in COMMANDS:
        for value in arguments:
            if value.startswith("model.weights="):
                weights = folder / value.removeprefix("model.weights=")
                weights.mkdir(parents=True, exist_ok=True)
                (weights / "model.safetensors").write_bytes(b"")
    return folder


def problems(typed, folder):
    arguments, _ = parse_arguments(typed)
    find = find_sweep_problems if overrides.asks_for_sweep(arguments) else find_problems
    machine = Machine(cpu_count=2, gpu_count=lambda: 0)
    found = find(arguments.overrides, Composer(config_dir=arguments.config_dir), machine=machine, launch_dir=folder)
    return [problem for problem in found if "which is not installed" not in problem.allowed]


def test_the_two_blocks_at_the_top_install_train_and_test():
    first, second = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[:2]
    assert first == ("bash", "\n".join([*INSTALL, "python -m framework +experiment=gpt2_zero3", ""]))
    assert second == ("bash", "\n".join([*TEST, ""]))


def test_every_block_is_of_a_kind_that_is_checked():
    languages = re.findall(r"^```(\w*)\n.*?^```$", README, re.DOTALL | re.MULTILINE)
    assert set(languages) == {"bash", "python"}
    unknown = [line for line in shell_lines() if line not in INSTALL + TEST and "-m framework" not in line
               and not re.match(r"[A-Z]+=", line)]
    assert unknown == []
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("typed", COMMANDS, ids=[" ".join(words) or "nothing" for words in COMMANDS])
def test_every_command_composes_and_could_start(typed, folder):
    assert problems(typed, folder) == []


def table(heading):
    """Cells of the rows of the table under a heading."""
    lines = README.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


OVERRIDES = [row[0].strip("`") for row in table("Overrides people use")]


@pytest.mark.parametrize("override", OVERRIDES)
def test_every_override_of_the_table_is_one(override, folder):
    assert problems([override], folder) == []


def test_the_options_the_table_names_are_there():
    composer = Composer()
    for override, chooses in table("Overrides people use"):
        group = override.strip("`").split("=")[0]
        options = composer.options(group)
        named = set(re.findall(r"`([a-z][a-z0-9_]*)`", chooses)) - {"auto"}
        if group in VARIANTS or group in GROUPS:
            assert named <= set(options), f"{override} names {named - set(options)}, which {group} has not"
            if group in ("dataset", "optimizer", "schedule"):
                assert named == set(options)


@pytest.mark.parametrize("stage", range(4))
def test_the_stage_table_is_the_engines(stage):
    number, *placements = table("ZeRO stages")[stage]
    policy = StagePolicy.of(stage)
    assert int(number) == stage
    assert [placement.split()[0].upper() for placement in placements] == [
        policy.parameters.name, policy.gradients.name, policy.optimizer.name]


def test_the_files_of_a_run_are_described_as_they_are():
    rows = {file.strip("`"): set(re.findall(r"`([a-z_]+)`", content)) for file, content in table("What a run leaves")}
    fields = {field.name for field in dataclasses.fields(StepReport)} - {"extra"}
    assert rows["metrics.jsonl"] == fields | {"val_loss"}
    summary = build_summary(run_config(), status="failed", recorded=Recorded(), measured=Measured(), error="lost")
    assert rows["summary.json"] == set(summary) | set(STATUSES)


def test_exit_codes_are_those_of_the_command_line():
    text = " ".join(README.split())
    assert f"exit code is 0 when done, {FAILED} when a job failed, {BAD_CONFIG} when the config cannot run" in text
    assert f"{INTERRUPTED} when interrupted" in text


def test_the_range_of_torch_is_the_one_of_the_package():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch_range,) = [entry for entry in dependencies if re.match(r"torch\b", entry)]
    assert f"pip install '{torch_range}'" in README


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_the_readmes_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path}: {target}"


# -- snippets -------------------------------------------------------------------------------------------------------


def snippet(text, marker):
    (found,) = [block for block in blocks(text, "python") if marker in block]
    return found


def run_snippet(rank, code):
    """In the pool a group of ranks is up already, as torchrun would have made the script do."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    return shown.getvalue()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_plain_torch_snippet_runs(world_size):
    first, *others = run_ranks(world_size, run_snippet, snippet(README, "strategies.Engine("))
    assert re.fullmatch(r"loss 0\.\d+, norm \d+\.\d+, 8 tensors\n", first)
    assert set(others) <= {""}


def test_the_lightning_snippet_runs_on_two_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(snippet(README, "LightningModule"))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "max_epochs=1` reached" in done.stderr


def test_the_strategy_has_the_name_the_readme_says(tmp_path):
    import lightning.pytorch as pl

    import strategies

    importlib.reload(strategies)  # as if imported now, after lightning.pytorch
    (name,) = re.findall(r'Trainer\(strategy="(\w+)"\)', README)
    trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                         default_root_dir=tmp_path)
    assert isinstance(trainer.strategy, strategies.ZeroStrategy)
    assert trainer.strategy.stage == StagePolicy.of(3)


def test_the_snippet_of_the_tests_readme_is_a_test_that_passes(tmp_path):
    path = tmp_path / "test_from_readme.py"
    path.write_text(snippet((ROOT / "tests" / "README.md").read_text(), "run_ranks"))
    spec = importlib.util.spec_from_file_location("test_from_readme", path)
    module = sys.modules["test_from_readme"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_a_sum_reaches_every_rank()


def test_the_snippet_of_the_models_readme_runs():
    run_snippet(0, snippet((ROOT / "models" / "README.md").read_text(), "initialise(model"))
