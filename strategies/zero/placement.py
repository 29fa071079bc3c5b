"""Stages as data: where parameters, gradients and optimizer state rest between uses.

    stage   parameters   gradients                          optimizer state, fp32 masters
    0       replicated   replicated                         replicated
    1       replicated   replicated until the step closes   sharded
    2       replicated   sharded as they arrive             sharded
    3       sharded      sharded as they arrive             sharded

Source: ZeRO, arXiv:1910.02054, section 5. Engine code reads the placements; nothing compares stage numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from strategies.precision import PrecisionPolicy


class Placement(Enum):
    """What one rank holds of a flat buffer."""

    REPLICATED = auto()
    SHARDED = auto()


@dataclass(frozen=True)
class RestingBytes:
    """Bytes one rank holds. `gradients`: just before the optimizer step (between updates they are freed)."""

    parameters: int
    gradients: int
    optimizer: int

    def __add__(self, other: RestingBytes) -> RestingBytes:
        return RestingBytes(self.parameters + other.parameters, self.gradients + other.gradients,
                            self.optimizer + other.optimizer)


@dataclass(frozen=True, kw_only=True)
class StagePolicy:
    """Placements of one ZeRO stage on the data_shard axis."""

    stage: int
    parameters: Placement
    gradients: Placement
    optimizer: Placement

    @classmethod
    def of(cls, stage: int) -> StagePolicy:
        """The policy of stage 0, 1, 2 or 3. Raises ValueError for anything else."""
        if isinstance(stage, bool) or stage not in _STAGES:
            raise ValueError(f"zero stage {stage!r}: allowed are {sorted(_STAGES)}; "
                             "fix: 3 shards all, 0 shards nothing")
        return _STAGES[stage]

    def resting_bytes(self, *, numel: int, num_shards: int, precision: PrecisionPolicy,
                      dtype: torch.dtype = torch.float32, trainable: bool = True,
                      states_per_element: int = 2) -> RestingBytes:
        """Bytes per rank for `numel` parameters of `dtype`, without padding.

        `states_per_element` counts the optimizer's tensors of the parameter's size (2 for Adam). Where the compute type
        is the master type the masters *are* the parameters and cost nothing.
        """

        def share(placement: Placement) -> int:
            return -(-numel // num_shards) if placement is Placement.SHARDED else numel

        compute, master = precision.compute_dtype(dtype), precision.master_dtype(dtype)
        parameters = share(self.parameters) * compute.itemsize
        if not trainable:
            return RestingBytes(parameters, 0, 0)
        copies = states_per_element + (compute != master)
        return RestingBytes(parameters, share(self.gradients) * precision.gradient_dtype(dtype).itemsize,
                            share(self.optimizer) * master.itemsize * copies)


_R, _S = Placement.REPLICATED, Placement.SHARDED
_STAGES = {
    0: StagePolicy(stage=0, parameters=_R, gradients=_R, optimizer=_R),
    1: StagePolicy(stage=1, parameters=_R, gradients=_R, optimizer=_S),
    2: StagePolicy(stage=2, parameters=_R, gradients=_S, optimizer=_S),
    3: StagePolicy(stage=3, parameters=_S, gradients=_S, optimizer=_S),
}
