"""Dynamic loss scale: a factor on the loss that lifts small fp16 gradients off zero, and how it follows overflows.

An overflow uses up one unit of hysteresis; with one unit left it halves the scale. `growth_interval` updates in a row
without overflow double the scale and fill the hysteresis up again (DeepSpeed's meaning of the same words, with
`consecutive_hysteresis` false). At the minimum the scale cannot be halved: it has collapsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Settings of a dynamic loss scale. Raises ValueError naming the one that is wrong."""

    initial: float = 2.0**16
    growth_interval: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minimum) and self.minimum > 0):
            raise ValueError(f"loss scale minimum={self.minimum!r}: allowed is a finite number above 0")
        if not (math.isfinite(self.initial) and self.initial >= self.minimum):
            raise ValueError(f"loss scale initial={self.initial!r}: allowed is a finite number from the minimum "
                             f"({self.minimum})")
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"loss scale {name}={value!r}: allowed is a whole number from 1")


class LossScale:
    """The scale and its counters. Every rank feeds it the same agreed decisions, so it is equal on all; local."""

    def __init__(self, settings: LossScaling) -> None:
        self.settings = settings
        self.value = settings.initial
        self.clean = 0  # updates without overflow since the last overflow or growth
        self.hysteresis = settings.hysteresis

    def update(self, *, overflowed: bool) -> bool:
        """After each window; returns False if the scale has collapsed: it would have to fall under the minimum."""
        if not overflowed:
            self.clean += 1
            if self.clean == self.settings.growth_interval:
                self.value *= FACTOR
                self.clean, self.hysteresis = 0, self.settings.hysteresis
            return True
        self.clean = 0
        if self.hysteresis > 1:
            self.hysteresis -= 1
            return True
        if self.value <= self.settings.minimum:
            return False
        self.value = max(self.value / FACTOR, self.settings.minimum)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"value": self.value, "clean": self.clean, "hysteresis": self.hysteresis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken."""
        self.value, self.clean = float(state["value"]), int(state["clean"])
        self.hysteresis = int(state["hysteresis"])
