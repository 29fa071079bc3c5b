"""Checks a composed tree of plain values against `framework/config.py`, and moves it to dataclasses, YAML and back.

Hydra and OmegaConf would stop at the first wrong value; this walk collects all of them. It needs neither of the two:
a worker reads its resolved config with it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from framework.config import AUTO, GROUPS, VARIANTS, RunConfig
from framework.problems import MISSING, ConfigError, Problem, listed, nearest, shown

# Names other trainers have for the same thing, where no likeness of spelling leads to ours.
SYNONYMS = {
    "learning_rate": "optimizer.lr", "batch_size": "batch.micro_size", "train_batch_size": "batch.global_size",
    "n_layer": "model.num_layers", "n_head": "model.num_heads", "n_embd": "model.hidden_size",
    "block_size": "dataset.seq_len", "n_positions": "model.max_seq_len", "grad_clip": "trainer.gradient_clip_val",
    "gpus": "trainer.devices", "output_dir": "run.dir", "log_interval": "log.every_steps",
}  # fmt: skip
PLAIN_SECTIONS = ("batch", "run", "log")  # they stand in conf/config.yaml itself; all others are groups
_UNSET = "???"  # OmegaConf's way to write "must be given"
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One settable key: where it is, its type and its bounds."""

    path: str
    type: Any
    metadata: Mapping[str, Any]

    @property
    def optional(self) -> bool:
        return type(None) in typing.get_args(self.type)

    @property
    def plain_type(self) -> Any:
        """The type without its `None`."""
        kinds = [kind for kind in typing.get_args(self.type) if kind is not type(None)]
        return kinds[0] if isinstance(self.type, types.UnionType) else self.type

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        if "choices" in self.metadata:
            words = [f"one of {listed(self.metadata['choices'])}"]
        elif typing.get_origin(self.plain_type) is list:
            words = [f"a list of {'numbers' if typing.get_args(self.plain_type)[0] is float else 'texts'}"]
        else:
            words = [" ".join([_NAMES[self.plain_type], *_bounds_in_words(self.metadata)])]
        says_auto = self.metadata.get("auto") and ("choices" in self.metadata or self.plain_type is not str)
        words += ["auto"] * bool(says_auto)
        words += ["null"] * self.optional
        return " or ".join(words)


def sections(tree: Mapping[str, Any]) -> dict[str, type | None]:
    """Dataclass of every section; None where the section's `name` picks no variant."""
    chosen: dict[str, type | None] = dict(GROUPS)
    for group, variants in VARIANTS.items():
        section = tree.get(group)
        name = section.get("name") if isinstance(section, Mapping) else None
        chosen[group] = variants.get(name) if isinstance(name, str) else None
    return chosen


def known_keys(tree: Mapping[str, Any]) -> dict[str, Key]:
    """Every key that can be set given the variants `tree` has chosen, by dotted path."""
    hints, chosen = typing.get_type_hints(RunConfig), sections(tree)
    found: dict[str, Key] = {}
    for field in dataclasses.fields(RunConfig):
        if field.metadata:
            found[field.name] = Key(field.name, hints[field.name], field.metadata)
        elif chosen[field.name]:
            found.update({key.path: key for key in keys_of(field.name, chosen[field.name])})
    return found


def keys_of(section: str, schema: type) -> Iterator[Key]:
    """The keys of one section under one of its dataclasses."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        yield Key(f"{section}.{field.name}", hints[field.name], field.metadata)


def check(tree: Mapping[str, Any]) -> list[Problem]:
    """Everything wrong with single values of a composed tree: unknown, missing, wrong type, out of bounds."""
    problems: list[Problem] = []
    keys = known_keys(tree)
    for section, schema in sections(tree).items():
        problems += _section_problems(section, schema, tree.get(section, MISSING))
    for path, key in keys.items():
        value = _at(tree, path)
        if "." not in path or isinstance(tree.get(path.split(".")[0]), Mapping):
            problem = _value_problem(key, value)
            problems += [problem] if problem else []
    for path in leaves(tree):
        section = path.split(".")[0]
        settled = section in GROUPS or section not in VARIANTS or sections(tree)[section] is not None
        if path not in keys and settled and path not in sections(tree):
            problems.append(unknown(path, _at(tree, path), keys))
    return problems


def load(tree: Mapping[str, Any]) -> RunConfig:
    """The tree as dataclasses. Raises ConfigError with every problem `check` finds."""
    problems = check(tree)
    if problems:
        raise ConfigError(problems)
    built: dict[str, Any] = {}
    for section, schema in sections(tree).items():
        values = {key.path.split(".")[1]: _fit(key, _at(tree, key.path)) for key in keys_of(section, schema)}
        built[section] = schema(**values)
    return RunConfig(**built, seed=tree["seed"])


def dump(config: RunConfig) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars."""
    return dataclasses.asdict(config)


def read(path: str | os.PathLike[str]) -> RunConfig:
    """A config that `write` saved. Raises ConfigError."""
    return load(yaml.load(Path(path).read_text(), Loader=yaml.CSafeLoader))


def write(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Save as plain YAML, whole or not at all."""
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            yaml.safe_dump(dump(config), file, sort_keys=False)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted path of every value that is not a mapping (an empty mapping counts as a value)."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path


def unknown(path: str, value: Any, keys: Mapping[str, Key]) -> Problem:
    """The problem of a key that nothing reads, with the known key most like it."""
    section, _, leaf = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if "." in key and key.rpartition(".")[0] == section}
    elsewhere = [key for key in keys if key.rpartition(".")[2] == leaf and leaf != "name"]
    names = listed(siblings) if siblings else f"the config has seed and the sections {listed(sections({}))}"
    allowed = f"no such key; {f'{section} has ' if siblings else ''}{names}"
    others = [name for name, schema in VARIANTS.get(section, {}).items() if leaf in schema.__dataclass_fields__]
    if others and siblings:
        allowed = f"no such key with the option chosen; {section}={' | '.join(others)} has it"
        return Problem(path, value, allowed, f"{section}={others[0]}")
    close = nearest(leaf, siblings)
    best = (
        (siblings[close] if close else None)
        or (elsewhere[0] if elsewhere else None)
        or SYNONYMS.get(leaf)
        or nearest(path, keys)
    )
    setting = "" if value is MISSING else f"={shown(value)}"
    return Problem(path, value, allowed, f"{best}{setting}" if best else f"remove {path}")


def _section_problems(section: str, schema: type | None, value: Any) -> list[Problem]:
    variants = VARIANTS.get(section)
    if not isinstance(value, Mapping):
        setting = f"{section}.<key>=<value>" if section in PLAIN_SECTIONS else f"{section}=<option>"
        return [Problem(section, value, "must be a section with keys", f"leave it out, or set {setting}")]
    if schema is None and variants:
        name = value.get("name", MISSING)
        best = nearest(str(name), variants) or next(iter(variants))
        return [Problem(f"{section}.name", name, f"one of {listed(variants)}", f"{section}.name={best}")]
    return []


def _value_problem(key: Key, value: Any) -> Problem | None:
    if value is MISSING or value == _UNSET:
        return Problem(key.path, MISSING, f"must be given: {key.metadata['help']}", f"{key.path}={_example(key)}")
    try:
        _fit(key, value)
    except ValueError:
        return Problem(key.path, value, f"must be {key.allowed} ({key.metadata['help']})", _fix(key, value))
    return None


def _fit(key: Key, value: Any) -> Any:
    """`value` as the key's type. Raises ValueError when it is not one of the allowed values."""
    if value is None:
        if key.optional:
            return None
        raise ValueError
    if value == AUTO and key.metadata.get("auto"):
        return AUTO
    kind = key.plain_type
    if typing.get_origin(kind) is list:
        if not isinstance(value, (list, tuple)):
            raise ValueError
        return [_scalar(typing.get_args(kind)[0], item) for item in value]
    fitted = _scalar(kind, value)
    if "choices" in key.metadata:
        if fitted not in key.metadata["choices"]:
            raise ValueError
    elif not _within(fitted, key.metadata):
        raise ValueError
    return fitted


def _scalar(kind: type, value: Any) -> Any:
    """`value` if it has the type; an integer, or text like 1e-3 that YAML does not read as a number, is a float too."""
    if kind is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        number = float(value)
        if math.isfinite(number):
            return number
    elif type(value) is kind:
        return value
    raise ValueError


def _within(value: Any, bounds: Mapping[str, Any]) -> bool:
    return (
        value >= bounds.get("at_least", value)
        and value <= bounds.get("at_most", value)
        and ("above" not in bounds or value > bounds["above"])
        and ("below" not in bounds or value < bounds["below"])
    )


def _bounds_in_words(bounds: Mapping[str, Any]) -> list[str]:
    words = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
    parts = [f"{text} {bounds[name]:g}" for name, text in words.items() if name in bounds]
    return [" and ".join(parts)] if parts else []


def _fix(key: Key, value: Any) -> str:
    """The override nearest to what was meant."""
    choices = key.metadata.get("choices")
    if choices:
        texts = {str(choice).lower(): choice for choice in choices}
        best = nearest(str(value), texts, cutoff=0.4) or str(choices[0]).lower()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and isinstance(choices[0], int):
            best = str(min(choices, key=lambda choice: abs(choice - value)))
        return f"{key.path}={texts[best]}"
    kind = key.plain_type
    if typing.get_origin(kind) is list:
        return f"{key.path}=[{shown(value)}]" if not isinstance(value, (list, tuple)) else f"{key.path}={_example(key)}"
    number = _number(value)
    if kind in (int, float) and number is not None:
        clamped = _clamped(number, key.metadata, kind)
        if clamped is None:
            return f"{key.path}=null" if key.optional else f"{key.path}=<{key.allowed}>"
        return f"{key.path}={clamped}"
    if kind is bool:
        return f"{key.path}={'false' if str(value).lower() in ('0', 'no', 'off', 'none', '0.0') else 'true'}"
    if kind is str and not isinstance(value, (dict, list)) and value is not None:
        return f"{key.path}=\"'{shown(value)}'\""
    return f"{key.path}={_example(key)}"


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _clamped(number: float, bounds: Mapping[str, Any], kind: type) -> Any:
    """The nearest number of the type inside closed bounds; None when only an open bound is near."""
    number = max(number, bounds.get("at_least", number))
    number = min(number, bounds.get("at_most", number))
    number = round(number) if kind is int else number
    return number if _within(number, bounds) else None


def _example(key: Key) -> str:
    if key.metadata.get("auto"):
        return AUTO
    if key.optional:
        return "null"
    if "choices" in key.metadata:
        return shown(key.metadata["choices"][0])
    if "at_least" in key.metadata:
        return f"{key.metadata['at_least']:g}"
    examples = {str: "<text>", float: "<number>", int: "<integer>", bool: "true"}
    if typing.get_origin(key.plain_type) is list:
        return f"[{examples[typing.get_args(key.plain_type)[0]]}]"
    return examples[key.plain_type]


def _at(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value
