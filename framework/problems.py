"""What is wrong with a config, in a form a person can act on: the key, its value, what is allowed, the nearest fix.

Every check of the command line, of the files and of the values returns these, so that all are printed at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING: Any = _Missing()
"""Stands for the value of a key that is not there."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong. `where` names the jobs of a sweep it concerns; empty for all."""

    key: str
    value: Any
    allowed: str
    fix: str
    where: str = ""

    def __str__(self) -> str:
        named = self.key if self.value is MISSING else f"{self.key}={shown(self.value)}"
        place = f" [{self.where}]" if self.where else ""
        return f"{named}{place}: {self.allowed}\n    fix: {self.fix}"


class ConfigError(ValueError):
    """A config that cannot run. `problems` holds every reason found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        title = f"{count} problem{'s' if count != 1 else ''} in the config; nothing was started."
        return "\n".join([title, *(f"  {problem}".replace("\n", "\n  ") for problem in self.problems)])


def shown(value: Any) -> str:
    """A value as one types it: null, true, [a,b]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or None when none is at least `cutoff` (0 to 1) alike."""
    lowered = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


def listed(names: Iterable[Any]) -> str:
    """`a, b, c` as one types them."""
    return ", ".join(shown(name) for name in names)
