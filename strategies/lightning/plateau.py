"""A schedule that follows a metric takes the same step on every rank.

Lightning gives ReduceLROnPlateau the number this rank has logged. Without `sync_dist=True` it is the rank's own: the
learning rates would part, and with them the pieces of one sharded model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from strategies.collectives import Communicator


def follow_the_mean(scheduler: Any, *, control: Communicator) -> None:
    """Let a ReduceLROnPlateau step on the metric's mean over `control`; others stay. Its `step` is collective then.

    Idempotent. The object gets a subclass of its class, so what it saves and loads stays as it is.
    """
    kind = type(scheduler)
    if not isinstance(scheduler, ReduceLROnPlateau) or control.size == 1:
        return
    if getattr(kind, "follows", None) is not None:
        kind = kind.__bases__[0]  # another fit, maybe on another mesh
    scheduler.__class__ = _following(kind, control)


def _following(kind: type, control: Communicator) -> type:
    @functools.wraps(kind.step)  # type: ignore[attr-defined]
    def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        own = torch.tensor([float(metrics)], dtype=torch.float64, device=control.device)
        mean = float(control.sum(own, what="metric of the schedule")[0]) / control.size
        kind.step(self, mean, *args, **kwargs)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"step": step, "follows": control, "__module__": kind.__module__,
                                         "__doc__": kind.__doc__})
