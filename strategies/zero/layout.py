"""Where parameters stand in a flat buffer. Pure integers: no tensors, no process group.

    offsets   0        a         b              used   padded
              |--p0----|pad|--p1--|pad|----p2----|..pad..|
              |<----- shard 0 ---->|<----- shard 1 ----->|

Every parameter starts on a multiple of `ALIGN` elements (vector loads; equal on all ranks) and the buffer ends on a
multiple of `num_shards * ALIGN`, so shards are equal and aligned. A parameter may lie in several shards, or in none of
this rank's. Padding belongs to no parameter: it is never handed to the optimizer, a norm or a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 16


@dataclass(frozen=True)
class Overlap:
    """The part of one parameter that lies in one range of the buffer, in three coordinates (element counts)."""

    in_parameter: slice
    in_buffer: slice
    in_range: slice


@dataclass(frozen=True)
class FlatLayout:
    """Packing of tensors of the given shapes for `num_shards` equal shards."""

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    padded_numel: int
    num_shards: int

    @classmethod
    def pack(cls, shapes: Sequence[Sequence[int]], *, num_shards: int) -> FlatLayout:
        """Lay tensors out in order. Zero-size tensors keep their place and take no room."""
        offsets, numels, end = [], [], 0
        for shape in shapes:
            start = _round_up(end, ALIGN)
            numel = math.prod(shape)
            offsets.append(start)
            numels.append(numel)
            end = start + numel
        padded = max(_round_up(end, ALIGN * num_shards), ALIGN * num_shards)
        return cls(tuple(tuple(shape) for shape in shapes), tuple(offsets), tuple(numels), padded, num_shards)

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(self.numels)

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.num_shards

    def shard_range(self, shard: int) -> range:
        """Buffer elements of one shard."""
        return range(shard * self.shard_numel, (shard + 1) * self.shard_numel)

    def span(self, index: int) -> slice:
        """Buffer elements of one parameter."""
        return slice(self.offsets[index], self.offsets[index] + self.numels[index])

    def overlap(self, index: int, within: range) -> Overlap | None:
        """What part of parameter `index` lies in `within`; None when no element does."""
        start = max(self.offsets[index], within.start)
        stop = min(self.offsets[index] + self.numels[index], within.stop)
        if start >= stop:
            return None
        offset = self.offsets[index]
        return Overlap(slice(start - offset, stop - offset), slice(start, stop),
                       slice(start - within.start, stop - within.start))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
