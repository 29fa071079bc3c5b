"""The command line: `python -m framework [group=option] [key=value] [+experiment=name] [--multirun] [--help] ...`.

Hydra parses, composes and sweeps; this module checks everything before Hydra runs, gives each job its folder and its
processes (`framework/launch.py`), and maps what happened to an exit code: 0 done, 1 a job failed, 2 the config cannot
run (nothing was started or written), 130 interrupted (143 by SIGTERM).

torch is not imported here: `--help` and a wrong config answer at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import CompactHydraException, HydraException
from omegaconf import DictConfig, OmegaConf

from framework import help_text, overrides
from framework.composition import CONFIG_NAME, HYDRA_VERSION_BASE, Composer, conf_dir, parse_arguments, plain_tree
from framework.config import AUTO, BenchmarkTask, DoctorTask, RunConfig
from framework.environment import worker_environment
from framework.failure import JobFailed
from framework.machine import Machine, launched_processes, this_machine
from framework.preflight import Prepared, find_problems, find_sweep_problems, prepare
from framework.problems import ConfigError, Problem
from framework.resolve import Resolution
from framework.run_folder import RunFolder, claim
from framework.sweep import JobRecord, Sweep, reserve

BAD_CONFIG, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        return _run(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_CONFIG
    except JobInterrupted as interruption:
        return interruption.exit_code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def compose_argv(argv: Sequence[str]) -> tuple[RunConfig, list[Resolution]]:
    """The checked and resolved config of a single run. For a process that torchrun, SLURM or MPI has started.

    `run.dir` may still be "auto". Warnings go to stderr. Raises ConfigError.
    """
    arguments, _ = parse_arguments(argv)
    if overrides.asks_for_sweep(arguments):
        raise ConfigError([_sweep_inside_a_worker()])
    launch_dir, machine = Path.cwd(), this_machine(launched_processes())
    composer = _composer(arguments)
    problems = find_problems(arguments.overrides, composer, machine=machine, launch_dir=launch_dir)
    if problems:
        raise ConfigError(problems)
    prepared = prepare(composer.tree(arguments.overrides), machine=machine, launch_dir=launch_dir)
    _print_warnings(prepared)
    return prepared.config, prepared.resolutions


def label(config: RunConfig, choices: Mapping[str, Any]) -> str:
    """What an automatically named run folder says beside the time: `gpt2_nano_stage3`, `gpt2_benchmark`, `doctor`."""
    if isinstance(config.task, DoctorTask):  # it reads neither model nor stage
        return config.task.name
    what = "benchmark" if isinstance(config.task, BenchmarkTask) else f"stage{config.zero.stage}"
    return f"{choices.get('model', config.model.name)}_{what}"


def _run(argv: Sequence[str]) -> int:
    arguments, flags = parse_arguments(argv)
    if arguments.shell_completion or arguments.hydra_help or arguments.help:
        return _hand_to_hydra(arguments, flags, lambda config: None)
    composer = _composer(arguments)
    if arguments.cfg or arguments.info:
        problems = overrides.check(arguments.overrides, composer).problems
        if problems:
            raise ConfigError(problems)
        return _hand_to_hydra(arguments, flags, lambda config: None)
    is_sweep = overrides.asks_for_sweep(arguments)
    if worker_environment():
        if is_sweep:
            raise ConfigError([_sweep_inside_a_worker()])
        from framework.worker import run_as_worker

        return run_as_worker(argv)
    launch_dir, machine = Path.cwd(), this_machine()
    find = find_sweep_problems if is_sweep else find_problems
    problems = find(arguments.overrides, composer, machine=machine, launch_dir=launch_dir)
    if problems:
        raise ConfigError(problems)
    session = _Session(launch_dir, machine)
    if not is_sweep:
        return _hand_to_hydra(arguments, flags, session.run_job)
    return _run_sweep(arguments, flags, session, composer)


def _run_sweep(arguments: Namespace, flags: Sequence[str], session: _Session, composer: Composer) -> int:
    fixed = [text for text in arguments.overrides if not overrides.is_sweep(text, composer)]
    session.sweep = reserve(session.launch_dir, composer.tree(fixed)["run"]["dir"])
    folder = QuotedString(str(session.sweep.folder), Quote.single).with_quotes()
    swept = Namespace(**{**vars(arguments), "overrides": [*arguments.overrides, f"hydra.sweep.dir={folder}"]})
    try:
        code = _hand_to_hydra(swept, flags, session.run_job)
    finally:
        print(f"\n{session.sweep.table(session.launch_dir)}", flush=True)
    return FAILED if session.sweep.failed else code


class ReportedFailure(CompactHydraException):
    """A job failed and the reason has been printed; Hydra and the exit code need to know, the person does not."""


class JobInterrupted(KeyboardInterrupt):
    """A job was told to stop, and has said so. Not an Exception: Hydra shall not go on to the next job of a sweep."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


@dataclass
class _Session:
    """What the jobs of one command share."""

    launch_dir: Path
    machine: Machine
    sweep: Sweep | None = None

    def run_job(self, composed: DictConfig) -> float | None:
        """One job, called by Hydra: prepare, claim a folder, launch. Returns the objective for a sweeper.

        Raises ReportedFailure when the job fails, KeyboardInterrupt when it is interrupted (which ends a sweep).
        """
        hydra_config = HydraConfig.get()
        number = hydra_config.job.num if self.sweep else 0
        job_overrides = list(hydra_config.overrides.task)
        if self.sweep:
            print(f"\njob {number}: {' '.join(job_overrides) or 'no overrides'}", flush=True)
        record = JobRecord(number, job_overrides, "failed")
        folder: RunFolder | None = None
        try:
            prepared = prepare(
                plain_tree(composed), machine=self.machine, launch_dir=self.launch_dir,
                job=number if self.sweep else None,
            )  # fmt: skip
            _print_warnings(prepared)
            folder = self._claim(prepared, dict(hydra_config.runtime.choices), number)
            record = replace(record, folder=folder.path)
            summary = self._launch(prepared, folder)
            record = replace(record, status=summary["status"], final_loss=summary.get("final_loss"))
            return summary["val_loss"] if summary.get("val_loss") is not None else summary.get("final_loss")
        except KeyboardInterrupt:
            record = replace(record, status="interrupted", reason="interrupted")
            raise
        except JobFailed as failure:
            record = replace(record, status=failure.summary["status"], reason=str(failure))
            if failure.interrupted:
                raise JobInterrupted(failure.exit_code) from None
            raise ReportedFailure(str(failure)) from None
        except (ConfigError, ValueError, OSError) as error:
            record = replace(record, reason=str(error))
            print(error, file=sys.stderr, flush=True)
            raise ReportedFailure(str(error)) from None
        except Exception as error:
            record = replace(record, reason=f"{type(error).__name__}: {error}")
            traceback.print_exc()
            raise ReportedFailure(record.reason) from None
        finally:
            if folder is not None:
                folder.release()
            if self.sweep:
                self.sweep.jobs.append(record)

    def _claim(self, prepared: Prepared, choices: Mapping[str, Any], number: int) -> RunFolder:
        config = prepared.config
        sweep = (self.sweep.stamp, number) if self.sweep else None
        folder = claim(config.run.dir, launch_dir=self.launch_dir, label=label(config, choices), sweep=sweep)
        if config.run.dir == AUTO:
            why = "a new folder for this job" if sweep is None else f"job {number} of the sweep"
            prepared.resolutions.append(Resolution("run.dir", str(folder.path), why))
        config.run.dir = str(folder.path)
        return folder

    def _launch(self, prepared: Prepared, folder: RunFolder) -> dict[str, Any]:
        from framework.launch import run_job

        return run_job(
            prepared.config, run_dir=folder.path, resolutions=prepared.resolutions, launch_dir=self.launch_dir
        )


def _hand_to_hydra(arguments: Namespace, flags: Sequence[str], job: Callable[[DictConfig], Any]) -> int:
    """Let Hydra do what the flags ask, calling `job` per job. Returns the exit code."""

    def task(config: DictConfig) -> Any:
        return job(config)

    OmegaConf.register_new_resolver("shardlight_keys", _describe_keys, replace=True)
    decorate = hydra.main(
        version_base=HYDRA_VERSION_BASE, config_path=_config_path(arguments), config_name=CONFIG_NAME
    )
    with _hydra_arguments([*arguments.overrides, *flags]):
        try:
            decorate(task)()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except ReportedFailure:
            return FAILED
        except HydraException as error:
            print(error, file=sys.stderr)
            return BAD_CONFIG
    return 0


@contextmanager
def _hydra_arguments(argv: Sequence[str]) -> Iterator[None]:
    """`sys.argv` as Hydra shall see it, and its errors as exceptions: it would print them and exit with 1."""
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["python -m framework", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv, full_error = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _describe_keys(*, _root_: DictConfig) -> str:
    """For `--help`. OmegaConf also calls this while it merges, when sections are still missing."""
    ours = OmegaConf.masked_copy(_root_, [key for key in _root_ if key != "hydra"])
    return help_text.describe_keys(OmegaConf.to_container(ours, resolve=False))


def _composer(arguments: Namespace) -> Composer:
    return Composer(
        config_path=arguments.config_path, config_name=arguments.config_name, config_dir=arguments.config_dir
    )


def _config_path(arguments: Namespace) -> str:
    return str(Path(arguments.config_path).absolute() if arguments.config_path else conf_dir())


def _print_warnings(prepared: Prepared) -> None:
    for text in prepared.warnings:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _sweep_inside_a_worker() -> Problem:
    allowed = "a sweep starts processes of its own, but torchrun, SLURM or MPI has already started this one"
    return Problem("--multirun", True, allowed, "run the sweep without that launcher, or one job per launch")
