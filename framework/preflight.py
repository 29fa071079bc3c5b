"""From overrides to a config that can run, or to every reason why not. Starts nothing and writes nothing.

The order: overrides (`framework/overrides.py`), single values (`schema`), `auto` values (`resolve`), rules on several
values (`validate`). Each stage goes on with what the one before found right: one wrong key hides no wrong value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from framework import overrides as override_checks
from framework import resolve as resolution
from framework import schema
from framework.composition import Composer
from framework.config import AUTO, RunConfig
from framework.machine import Machine
from framework.problems import ConfigError, Problem
from framework.resolve import Resolution
from framework.validate import validate, warnings


@dataclass(frozen=True)
class Prepared:
    """A config that can run: resolved, valid; what was filled in, and what the user should know."""

    config: RunConfig
    resolutions: list[Resolution]
    warnings: list[str]


def prepare(tree: Mapping[str, Any], *, machine: Machine, launch_dir: Path, job: int | None = None) -> Prepared:
    """Load, resolve and validate a composed tree. `job` is its number in a sweep. Raises ConfigError."""
    config = schema.load(tree)
    resolutions = resolution.resolve(config, machine=machine, launch_dir=launch_dir)
    problems = validate(_in_own_folder(config, job), machine)
    if problems:
        raise ConfigError(problems)
    return Prepared(config, resolutions, warnings(config))


def find_problems(
    overrides: Sequence[str], composer: Composer, *, machine: Machine, launch_dir: Path, job: int | None = None
) -> list[Problem]:
    """Everything wrong with one job."""
    checked = override_checks.check(overrides, composer)
    problems = list(checked.problems)
    if not checked.composable:
        return problems
    try:
        tree = composer.tree(checked.good)
    except ConfigError as error:
        return problems + error.problems
    wrong_values = schema.check(tree)
    problems += wrong_values
    repaired = _repaired(tree, wrong_values, composer, checked.good)
    if schema.check(repaired):
        return problems
    config = schema.load(repaired)
    resolution.resolve(config, machine=machine, launch_dir=launch_dir)
    touched = checked.touched | {problem.key for problem in wrong_values}
    return problems + validate(_in_own_folder(config, job), machine, skip=touched)


def find_sweep_problems(
    overrides: Sequence[str], composer: Composer, *, machine: Machine, launch_dir: Path
) -> list[Problem]:
    """Everything wrong with any job of a sweep, each problem once, with the jobs it concerns.

    A sweeper other than Hydra's basic one chooses values as it goes: then only what it does not choose is checked here.
    """
    jobs, problems = _jobs(overrides, composer)
    concerned: dict[str, tuple[Problem, list[int]]] = {}
    for number, job in enumerate(jobs):
        for problem in find_problems(job, composer, machine=machine, launch_dir=launch_dir, job=number):
            concerned.setdefault(str(problem), (problem, []))[1].append(number)
    for problem, numbers in concerned.values():
        every = len(numbers) == len(jobs)
        problems.append(problem if every else replace(problem, where=_in_words(numbers)))
    return problems


def _jobs(overrides: Sequence[str], composer: Composer) -> tuple[list[list[str]], list[Problem]]:
    fixed = [text for text in overrides if not override_checks.is_sweep(text, composer)]
    try:
        sweeper = composer.hydra(fixed)["sweeper"]
    except ConfigError:  # the check of the first job says why
        sweeper = {"_target_": override_checks.BASIC_SWEEPER}
    if sweeper["_target_"] != override_checks.BASIC_SWEEPER:
        return [fixed], []
    in_files = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    return override_checks.expand([*in_files, *overrides], composer)


def _repaired(
    tree: Mapping[str, Any], problems: Sequence[Problem], composer: Composer, overrides: Sequence[str]
) -> dict[str, Any]:
    """`tree` with the default in place of every wrong value, so that the rules can look at the rest."""
    if not problems:
        return dict(tree)
    groups = [text for text in overrides if composer.options(composer.parse(text).key_or_group)]
    defaults, repaired = composer.tree(groups), deepcopy(dict(tree))
    for problem in problems:
        *sections, name = problem.key.split(".")
        owner, default = repaired, defaults
        for section in sections:
            owner, default = owner.get(section), default.get(section, {}) if isinstance(default, Mapping) else {}
            if not isinstance(owner, dict):
                return repaired
        if isinstance(default, Mapping) and name in default:
            owner[name] = deepcopy(default[name])
        else:
            owner.pop(name, None)
    return repaired


def _in_own_folder(config: RunConfig, job: int | None) -> RunConfig:
    """The config as the rules see it: job `n` of a sweep with `run.dir` set writes to `run.dir/n`."""
    if job is None or config.run.dir == AUTO:
        return config
    return replace(config, run=replace(config.run, dir=str(Path(config.run.dir) / str(job))))


def _in_words(numbers: Sequence[int], most: int = 6) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"job{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:most]))}{more}"
