"""The register of rules about a whole config: which keys a rule reads, and its check.

Knowing the keys, `validate` leaves out a rule about a value that was already found wrong, and still runs all others:
a person sees every independent problem at once and no consequence of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from framework.config import RunConfig
from framework.machine import Machine
from framework.problems import Problem

Check = Callable[[RunConfig, Machine], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """`keys` are dotted keys, or sections for all keys in them."""

    keys: tuple[str, ...]
    check: Check


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Check], Check]:
    """Register a rule that reads `keys`."""

    def register(check: Check) -> Check:
        RULES.append(Rule(keys, check))
        return check

    return register
