"""What the command line does with a config that can run. The job itself is replaced: these tests start no processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from framework import cli, guard
from framework.failure import JobFailed
from framework.problems import ConfigError

ROOT = Path(cli.__file__).resolve().parent.parent


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Runs every job by noting it; `jobs.outcome` may be set to raise instead."""
    from framework import launch

    started = []

    def run_job(config, *, run_dir, resolutions, launch_dir):
        started.append((config, run_dir, resolutions, launch_dir))
        outcome = jobs_outcome.get(len(started) - 1)
        if outcome:
            raise outcome
        return {"status": "completed", "final_loss": 1.5, "val_loss": 1.25}

    jobs_outcome = {}
    monkeypatch.setattr(launch, "run_job", run_job)
    monkeypatch.setattr(cli, "worker_environment", lambda: False)
    monkeypatch.chdir(tmp_path)
    started_and_outcome = type("Jobs", (), {"started": started, "outcome": jobs_outcome})
    return started_and_outcome


def failed(status="failed", exit_code=1):
    error = {"rank": 1, "type": "RuntimeError", "message": "lost", "traceback": ""}
    return JobFailed(exit_code, {"status": status, "error": error})


def test_a_job_gets_its_resolved_config_and_its_own_folder(jobs, tmp_path):
    assert cli.main(["zero=stage2", "seed=4"]) == 0
    assert cli.main(["seed=5"]) == 0
    (config, run_dir, resolutions, launch_dir), second = jobs.started
    assert (config.zero.stage, config.seed, config.trainer.devices) == (2, 4, 2)
    assert config.run.dir == str(run_dir)
    assert run_dir.parent.parent == tmp_path / "outputs"
    assert "gpt2_nano_stage2" in run_dir.name
    assert run_dir.is_dir()
    assert second[1] != run_dir
    assert launch_dir == tmp_path
    assert {entry.key for entry in resolutions} >= {"trainer.devices", "batch.global_size", "run.dir"}
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


def test_run_dir_and_flags_in_any_order(jobs, tmp_path):
    assert cli.main(["seed=1", "--run", "run.dir=mine"]) == 0
    assert jobs.started[0][1] == tmp_path / "mine"


def test_a_changed_directory_moves_neither_inputs_nor_outputs(jobs, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert cli.main(["dataset=text", "dataset.files=[a.txt]", "run.dir=mine", "hydra.job.chdir=true"]) == 0
    assert jobs.started[0][0].dataset.files == [str(tmp_path / "a.txt")]
    assert jobs.started[0][1] == tmp_path / "mine"


def test_a_failed_job_is_an_exit_code_and_no_traceback(jobs, capsys):
    jobs.outcome[0] = failed()
    assert cli.main([]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("exit_code", [130, 143])
def test_an_interrupted_job_ends_with_its_signals_exit_code(jobs, exit_code):
    jobs.outcome[0] = failed("interrupted", exit_code)
    assert cli.main([]) == exit_code


def test_a_failing_job_of_a_sweep_leaves_the_others_alone_and_is_listed(jobs, tmp_path, capsys):
    jobs.outcome[1] = failed()
    assert cli.main(["--multirun", "seed=1,2,3", "trainer.devices=1"]) == 1
    assert [config.seed for config, *_ in jobs.started] == [1, 2, 3]
    (sweep,) = (tmp_path / "outputs" / "multirun").iterdir()
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "multirun.yaml"]
    assert [run_dir for _, run_dir, *_ in jobs.started] == [sweep / "0", sweep / "1", sweep / "2"]
    table = capsys.readouterr().out.split("\njob  status")[1]
    assert table.count("completed") == 2
    assert "job 1 failed (seed=2 trainer.devices=1):\n    failed: rank 1: RuntimeError: lost" in table
    assert "1.5000" in table
    assert str(Path("outputs") / "multirun" / sweep.name / "1") in table


def test_a_failure_nobody_foresaw_is_recorded_too(jobs, capsys):
    jobs.outcome[0] = ZeroDivisionError("half")
    assert cli.main(["--multirun", "seed=1,2"]) == 1
    assert len(jobs.started) == 2
    captured = capsys.readouterr()
    assert "ZeroDivisionError: half" in captured.out
    assert "Traceback" in captured.err


def test_an_interrupt_ends_a_sweep(jobs, capsys):
    jobs.outcome[1] = failed("interrupted", 130)
    assert cli.main(["--multirun", "seed=1,2,3"]) == 130
    assert len(jobs.started) == 2
    assert "interrupted" in capsys.readouterr().out


def test_a_sweep_with_a_folder_puts_its_jobs_inside_and_two_sweeps_never_share_one(jobs, tmp_path):
    name = "my sweep, part 1 = 'a'"
    assert cli.main(["--multirun", "seed=1,2", f'run.dir="{name}"']) == 0
    assert [run_dir for _, run_dir, *_ in jobs.started] == [tmp_path / name / "0", tmp_path / name / "1"]
    assert cli.main(["--multirun", "seed=1"]) == 0
    assert cli.main(["--multirun", "seed=1"]) == 0
    assert jobs.started[2][1] != jobs.started[3][1]


def test_finished_jobs_of_a_sweep_are_not_overwritten(jobs, tmp_path, capsys):
    (tmp_path / "mine" / "1").mkdir(parents=True)
    (tmp_path / "mine" / "1" / "summary.json").write_text("{}")
    assert cli.main(["--multirun", "seed=1,2", "run.dir=mine"]) == 2
    assert jobs.started == []
    assert "[job 1]" in capsys.readouterr().err


def test_a_sweep_inside_another_launcher_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "worker_environment", lambda: True)
    assert cli.main(["--multirun", "seed=1,2"]) == 2
    assert "torchrun, SLURM or MPI" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="multirun"):
        cli.compose_argv(["--multirun", "seed=1,2"])


def test_a_worker_composes_what_the_command_line_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config, resolutions = cli.compose_argv(["+experiment=gpt2_zero2", "trainer.accelerator=cpu"])
    assert (config.zero.stage, config.dataset.seq_len) == (2, 256)
    assert {entry.key for entry in resolutions} >= {"parallel.data", "batch.global_size"}
    with pytest.raises(ConfigError, match="2 problems"):
        cli.compose_argv(["seeds=1", "zero=stage9"])
    assert list(tmp_path.iterdir()) == []


def test_own_options_and_experiments_come_from_config_dir(jobs, tmp_path):
    own = tmp_path / "my conf"
    (own / "experiment").mkdir(parents=True)
    (own / "model").mkdir()
    (own / "model" / "tiny.yaml").write_text("defaults: [gpt2_nano, _self_]\nnum_layers: 2\n")
    (own / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: tiny, _self_]\nseed: 9\n"
    )
    assert cli.main(["+experiment=mine", "--config-dir", "my conf", "trainer.max_steps=20"]) == 0
    config = jobs.started[0][0]
    assert (config.model.num_layers, config.seed, config.trainer.max_steps) == (2, 9, 20)


def test_cfg_job_prints_the_config_and_runs_nothing(jobs, capsys):
    assert cli.main(["--cfg", "job", "+experiment=gpt2_zero1"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["zero"]["stage"] == 1
    assert "hydra" not in tree
    assert cli.main(["--cfg", "job", "zero=stage9"]) == 2
    assert cli.main(["--info", "defaults-tree"]) == 0
    assert jobs.started == []


def run_module(*arguments, cwd, code=None):
    """`python -m framework` as a person starts it, or a program run with our packages importable."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "framework"]), *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_help_is_quick_imports_no_torch_and_lists_groups_keys_and_examples(tmp_path):
    code = (
        "import json, sys, time; start = time.perf_counter(); from framework.cli import main; code = main(['--help']);"
        "print(json.dumps({'code': code, 's': time.perf_counter() - start,"
        " 'torch': [name for name in ('torch', 'lightning', 'numpy', 'rich') if name in sys.modules]}))"
    )
    result = run_module(cwd=tmp_path, code=code)
    *text, facts = result.stdout.splitlines()
    facts = json.loads(facts)
    assert facts["code"] == 0
    assert facts["torch"] == []
    assert facts["s"] < 3
    text = "\n".join(text)
    for expected in ("+experiment=gpt2_zero3", "zero: stage0, stage1", "optimizer.lr=", "peak learning rate"):
        assert expected in text
    assert list(tmp_path.iterdir()) == []


def test_a_persons_own_models_and_kernels_folders_do_no_harm(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('the wrong models')")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "yaml.py").write_text("raise RuntimeError('the wrong yaml')")
    result = run_module("optimizer.lrr=1", cwd=tmp_path)
    assert result.returncode == 2
    assert "optimizer.lr=1" in result.stderr
    assert "Traceback" not in result.stderr


def test_packages_that_are_not_ours_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "models", type(sys)("models"))
    monkeypatch.setattr(guard, "_installed", lambda distribution: distribution == "kernels")
    first, second = guard.environment_problems()
    assert "package models" in first
    assert "pip uninstall kernels" in second


def test_this_environment_passes_the_guard():
    assert guard.environment_problems() == []
