"""Bytes that an engine holds on one rank, measured over live storages, and what the published formula expects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.zero.placement import RestingBytes
from strategies.zero.unit import Unit


def live_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    """Bytes of the storages, each one once. Local."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def resting_bytes(units: Sequence[Unit], optimizers: Sequence[Optimizer], *, gradients: int) -> RestingBytes:
    """What `units` at rest and their optimizers hold; `gradients` bytes as measured at the last step. Local."""
    groups = [group for unit in units for group in unit.groups]
    parameters = [storage for group in groups for storage in group.parameter_storages()]
    masters = [group.master.untyped_storage() for group in groups if group.master is not None]
    states = [value.untyped_storage() for optimizer in optimizers for state in optimizer.state.values()
              for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    held = live_bytes(parameters)
    return RestingBytes(held, gradients, live_bytes([*parameters, *masters, *states]) - held)


def expected_resting_bytes(units: Sequence[Unit], *, states_per_element: int) -> RestingBytes:
    """The published formula for `units`, without padding. Local."""
    total = RestingBytes(0, 0, 0)
    for unit in units:
        for group in unit.groups:
            total = total + group.expected_bytes(states_per_element=states_per_element)
    return total
