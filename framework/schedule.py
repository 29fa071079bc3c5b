"""The learning rate over updates."""

from __future__ import annotations

import math
from collections.abc import Callable

from framework.config import Schedule


def schedule_factor(schedule: Schedule, max_steps: int) -> Callable[[int], float]:
    """Updates already done -> share of the peak learning rate for the next one.

    Warm-up is linear and reaches the peak with its last step; linear and cosine reach `final_ratio` with the last
    update; inverse_sqrt falls as sqrt(warm-up / step).
    """
    warmup, final = schedule.warmup_steps, schedule.final_ratio
    decay_steps = max(max_steps - 1 - warmup, 1)

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        progress = min((done - warmup) / decay_steps, 1.0)
        if schedule.name == "linear":
            return 1.0 - (1.0 - final) * progress
        if schedule.name == "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        if schedule.name == "inverse_sqrt":
            return math.sqrt(max(warmup, 1) / max(done + 1, warmup, 1))
        return 1.0

    return factor
