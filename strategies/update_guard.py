"""Whether an update is applied: counts, the loss scale, and when too many skipped ones stop the run.

The ledger tests the final sums and votes, so that every rank comes here with the same answer and decides the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.loss_scale import LossScale
from strategies.precision import PrecisionPolicy

NAMES_SHOWN = 5
_log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """Gradients are infinite or NaN and the run must not go on."""


@dataclass(frozen=True)
class StepResult:
    """What one `engine.step()` did, the same on every rank.

    Attributes:
        applied: False: gradients were not finite; no weight, no moment and no schedule may move.
        gradient_norm: before clipping, if `clip_norm` is set; infinite or NaN as it was in a skipped step.
        loss_scale: the factor on the losses of this window; None without loss scaling.
        nonfinite: names of the parameters whose gradient was not finite, in the model's order.
    """

    applied: bool
    gradient_norm: float | None = None
    loss_scale: float | None = None
    nonfinite: tuple[str, ...] = ()


class UpdateGuard:
    """Counters of one engine: `attempted` updates, of which `applied` and `skipped`, `consecutive` skips at the end."""

    def __init__(self, policy: PrecisionPolicy, *, logs: bool) -> None:
        self._policy = policy
        self._logs = logs  # one rank says it
        self.scale = LossScale(policy.loss_scale) if policy.loss_scale is not None else None
        self.attempted = self.applied = self.skipped = self.consecutive = 0
        self.last: StepResult | None = None

    @property
    def loss_scale(self) -> float | None:
        """The factor on losses in this window."""
        return self.scale.value if self.scale is not None else None

    @property
    def counts(self) -> dict[str, int]:
        """Updates so far: attempted, applied, skipped."""
        return {"attempted": self.attempted, "applied": self.applied, "skipped": self.skipped}

    def record(self, nonfinite: Sequence[str], *, gradient_norm: float | None = None) -> StepResult:
        """Count one closed window and move the scale. Local, the same on every rank.

        Raises:
            NonFiniteError: `on_nonfinite` is "stop", the scale has collapsed, or too many were skipped in a row.
        """
        self.last = StepResult(not nonfinite, gradient_norm, self.loss_scale, tuple(nonfinite))
        self.attempted += 1
        kept = self.scale is None or self.scale.update(overflowed=bool(nonfinite))
        if not nonfinite:
            self.applied += 1
            self.consecutive = 0
            return self.last
        self.skipped += 1
        self.consecutive += 1
        self._stop_if_hopeless(nonfinite, kept)
        if self._logs and self.consecutive == 1:
            scale = "" if self.scale is None else f"; loss scale {self.last.loss_scale:g}, now {self.scale.value:g}"
            _log.warning("update %d skipped: gradients are not finite: %s%s", self.attempted, _shown(nonfinite), scale)
        return self.last

    def _stop_if_hopeless(self, nonfinite: Sequence[str], kept: bool) -> None:
        where = f"update {self.attempted}: gradients are not finite in {_shown(nonfinite)}"
        fix = "fix: a lower learning rate, gradient clipping, or look for a division or log of zero in the loss"
        scale = "" if self.scale is None else f" (loss scale {self.scale.value:g})"
        if self.scale is not None:
            fix += ", or precision='bf16', which needs no loss scale"
        if self._policy.on_nonfinite == "stop":
            raise NonFiniteError(f"{where}; on_nonfinite=stop; {fix}")
        if not kept:
            raise NonFiniteError(f"{where}{scale}; the loss scale is at its minimum and would fall under it; {fix}, "
                                 "or a lower minimum")
        if self.consecutive > self._policy.max_skipped_steps:
            raise NonFiniteError(f"{where}{scale}; {self.consecutive} updates in a row were skipped, allowed are "
                                 f"{self._policy.max_skipped_steps} (max_skipped_steps); {fix}")

    def state_dict(self) -> dict[str, Any]:
        """Counters and the scale's state, plain containers."""
        return {**self.counts, "consecutive": self.consecutive,
                "scale": None if self.scale is None else self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. A state of another precision has no scale, or one that is not needed."""
        for name in ("attempted", "applied", "skipped", "consecutive"):
            setattr(self, name, int(state[name]))
        if self.scale is not None and state["scale"] is not None:
            self.scale.load_state_dict(state["scale"])


def _shown(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(f"'{name}'" for name in names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
