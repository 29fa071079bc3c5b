"""The list of keys in `--help`, made from the schema so that it is never out of date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from framework import schema
from framework.problems import shown

HELP_COLUMN = 44


def describe_keys(tree: Mapping[str, Any]) -> str:
    """Every key of the composed tree with its value and its help, by section."""
    return "\n".join(_lines(tree))


def _lines(tree: Mapping[str, Any]) -> Iterator[str]:
    before = ""
    for path, key in schema.known_keys(tree).items():
        if path.endswith(".name"):  # follows from the option of the group
            continue
        section = path.partition(".")[0]
        if before and section != before:
            yield ""
        before = section
        owner = tree.get(section, {}) if "." in path else tree
        setting = f"  {path}={shown(owner.get(path.rpartition('.')[2]))}"
        choices = f" [{key.allowed}]" if "choices" in key.metadata else ""
        yield f"{setting:<{HELP_COLUMN}} {key.metadata['help']}{choices}"
