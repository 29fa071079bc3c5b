"""Checks the overrides typed on the command line before Hydra composes anything.

Hydra stops at the first override it cannot apply. Here every one is parsed and compared with the groups, options and
keys that exist; a sweep is expanded to its jobs, and each job is checked like a single run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_origin

from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from framework import schema
from framework.composition import Composer
from framework.problems import MISSING, ConfigError, Problem, listed, nearest, shown

# Hydra's folder settings, and what to set instead: all folders of a run are made by framework/run_folder.py.
FOLDER_SETTINGS = {"hydra.run.dir": "run.dir", "hydra.sweep.dir": "run.dir", "hydra.sweep.subdir": "run.dir"}
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_MULTIRUN_MODE = re.compile(r"\+*hydra\.mode=(RunMode\.)?MULTIRUN$")


@dataclass
class Checked:
    """What is wrong with the overrides of one job, and those that are right."""

    problems: list[Problem] = field(default_factory=list)
    good: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    """Keys and groups that refused overrides wanted to set: rules about them say nothing of use."""
    composable: bool = True
    """False when the config files are at fault, so that nothing more can be said."""

    def refuse(self, override: Override, problem: Problem) -> None:
        self.problems.append(problem)
        self.touched.add(override.key_or_group)


def asks_for_sweep(arguments: Any) -> bool:
    """Whether the command line starts several jobs (`--multirun`, or Hydra's mode set by an override)."""
    return arguments.multirun or any(_MULTIRUN_MODE.match(text) for text in arguments.overrides)


def is_sweep(text: str, composer: Composer) -> bool:
    """Whether an override gives several values. False for one that does not parse."""
    try:
        return composer.parse(text).is_sweep_override()
    except HydraException:
        return False


def expand(overrides: Sequence[str], composer: Composer) -> tuple[list[list[str]], list[Problem]]:
    """The overrides of every job of a sweep, in Hydra's order, and what keeps a sweep from being expanded.

    Texts that do not parse stay as they are: the check of each job reports them once.
    """
    problems: list[Problem] = []
    choices: dict[str, list[str]] = {}
    for number, text in enumerate(overrides):
        try:
            override = composer.parse(text)
            values, problem = _values(override)
        except HydraException:
            override, values, problem = None, [text], None
        problems += [problem] if problem else []
        choices[override.get_key_element() if override else f"unparsed {number}"] = values
    return [list(job) for job in itertools.product(*choices.values())], problems


def check(overrides: Sequence[str], composer: Composer) -> Checked:
    """Everything wrong with the overrides of one job that is not about a value's type or bounds."""
    checked = Checked()
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.append(composer.parse(text))
        except HydraException as error:
            checked.problems.append(_syntax_problem(text, error))
    search = [override.input_line for override in parsed if override.key_or_group == "hydra.searchpath"]
    groups, values = [], []
    for override in parsed:
        is_group = bool(composer.options(override.key_or_group, search)) and not isinstance(override.value(), dict)
        (groups if is_group else values).append(override)
    for override in groups:
        problem = _sweep_problem(override) or _group_problem(override, composer, search)
        checked.refuse(override, problem) if problem else checked.good.append(override.input_line)
    try:
        tree = composer.tree([*checked.good, *search])
    except ConfigError as error:
        checked.problems += error.problems
        checked.composable = False
        return checked
    keys = schema.known_keys(tree)
    for override in values:
        several = _sweep_problem(override, keys)
        problems = [several] if several else list(_key_problems(override, keys, tree, composer))
        for problem in problems:
            checked.refuse(override, problem)
        checked.good += [] if problems else [override.input_line]
    order = {text: number for number, text in enumerate(overrides)}
    checked.good.sort(key=order.__getitem__)
    return checked


def _values(override: Override) -> tuple[list[str], Problem | None]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [override.input_line], None
    if override.is_hydra_override():
        allowed = "Hydra's settings cannot be swept"
        return [], Problem(override.key_or_group, _typed_value(override), allowed, "give one value")
    if override.key_or_group == "run.dir":
        allowed = "one folder for the whole sweep; its jobs get numbered folders inside it"
        return [], Problem("run.dir", _typed_value(override), allowed, "run.dir=outputs/my_sweep")
    if override.is_interval_sweep():
        allowed = "an interval has no list of values; the basic sweeper needs one"
        value = override.value()
        fix = f"{key}=range({shown(value.start)},{shown(value.end)},<step>)"
        return [], Problem(override.key_or_group, _typed_value(override), allowed, fix)
    values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not values:
        return [], Problem(override.key_or_group, _typed_value(override), "no value at all", f"{key}=<value>,<value>")
    return values, None


def _syntax_problem(text: str, error: HydraException) -> Problem:
    reason = " ".join(str(error).split("\nSee ")[0].split())
    key, equals, value = text.partition("=")
    if not equals:
        fix = f"{text}=<value>"
    elif value[:1] not in "'\"" and not value.startswith(("[", "{")):
        fix = f"""{key}="'{value}'" (text with special characters needs quotes for Hydra, inside those for the shell)"""
    else:
        fix = "close every quote and bracket, and quote the whole override for the shell"
    return Problem(text, MISSING, f"not an override Hydra can read: {reason}", fix)


def _sweep_problem(override: Override, keys: Mapping[str, schema.Key] = MappingProxyType({})) -> Problem | None:
    if not override.is_sweep_override():
        return None
    key, value = override.key_or_group, _typed_value(override)
    fix = "add --multirun to run once per value, or give one value"
    if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and key in keys:
        if get_origin(keys[key].plain_type) is list:
            fix = f"{key}=[{value}]"
        elif keys[key].plain_type is str:
            fix = f"""add --multirun to run once per value, or quote it: {key}="'{value}'\""""
    return Problem(key, value, "several values, but this is a single run", fix)


def _group_problem(override: Override, composer: Composer, search: Sequence[str]) -> Problem | None:
    group, value = override.key_or_group, override.value()
    options = composer.options(group, search)
    chosen = composer.hydra(search)["runtime"]["choices"]
    if override.is_delete():
        fix = f"leave out ~{group}, or choose another option: {group}=<option>"
        return Problem(override.input_line, MISSING, "a group cannot be taken out", fix) if group in chosen else None
    if not isinstance(value, str) or value not in options:
        best = nearest(str(value), options, cutoff=0.3) or options[0]
        plus = "+" if group not in chosen else ""
        return Problem(group, value, f"one of {listed(options)}", f"{plus}{group}={best}")
    if override.is_force_add() or (override.is_add() and group in chosen and override.package is None):
        return Problem(override.input_line, MISSING, f"{group} is chosen by default already", f"{group}={value}")
    if not override.is_add() and group not in chosen:
        return Problem(group, value, "an optional group is added with a plus", f"+{group}={value}")
    return None


def _key_problems(
    override: Override, keys: Mapping[str, schema.Key], tree: Mapping[str, Any], composer: Composer
) -> Iterator[Problem]:
    path, value = override.key_or_group, override.value()
    if path.split(".")[0].split("/")[0] == "hydra":
        if path in FOLDER_SETTINGS:
            wanted = f"{FOLDER_SETTINGS[path]}={shown(value)}"
            yield Problem(path, value, "run folders are made by run.dir, not by Hydra", wanted)
        return
    if override.is_delete():
        allowed = "every key has a value; none can be taken out"
        yield Problem(override.input_line, MISSING, allowed, f"leave out ~{path}")
        return
    for leaf, item in _flat(path, value):
        section, _, name = leaf.partition(".")
        if leaf not in keys:
            yield _unknown(leaf, item, keys, composer)
        elif name == "name" and item in composer.options(section) and item != tree[section]["name"]:
            yield Problem(leaf, item, f"follows from the option of the group {section}", f"{section}={item}")
        elif override.is_add():
            yield Problem(override.input_line, MISSING, f"{leaf} exists already", f"{leaf}={shown(item)}")


def _unknown(path: str, value: Any, keys: Mapping[str, schema.Key], composer: Composer) -> Problem:
    sections = {key.partition(".")[0] for key in keys}
    if "." not in path and path not in sections:
        groups = composer.groups()
        best = nearest(path, [*groups, *sections], cutoff=0.7)
        if best in groups:
            options = composer.options(best)
            option = nearest(str(value), options, cutoff=0.5) or f"<{'|'.join(options)}>"
            plus = "+" if best == "experiment" else ""
            return Problem(path, value, f"no such group or key; groups are {listed(groups)}", f"{plus}{best}={option}")
    if path in sections:
        names = listed(key.partition(".")[2] for key in keys if key.startswith(f"{path}."))
        return Problem(path, value, f"a section, with the keys {names}", f"{path}.<key>={shown(value)}")
    return schema.unknown(path, value, keys)


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(f"{path}.{name}", item)
    else:
        yield path, value


def _typed_value(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]
