"""Flat layouts: pure integers, every element of every parameter in exactly one shard."""

from __future__ import annotations

import math
import random

import pytest

from strategies.mesh import AXES, MeshShape
from strategies.zero.layout import ALIGN, FlatLayout


def random_shapes(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(10))
def test_shards_cover_each_parameter_exactly_once(seed, num_shards):
    shapes = random_shapes(seed)
    layout = FlatLayout.pack(shapes, num_shards=num_shards)
    for index, shape in enumerate(shapes):
        covered = []
        for shard in range(num_shards):
            overlap = layout.overlap(index, layout.shard_range(shard))
            if overlap is not None:
                assert overlap.in_parameter.stop > overlap.in_parameter.start
                assert overlap.in_buffer.start == layout.offsets[index] + overlap.in_parameter.start
                assert overlap.in_range.start == overlap.in_buffer.start - shard * layout.shard_numel
                covered.extend(range(overlap.in_parameter.start, overlap.in_parameter.stop))
        assert covered == list(range(math.prod(shape)))


@pytest.mark.parametrize("num_shards", [1, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_parameters_are_aligned_and_do_not_overlap(seed, num_shards):
    layout = FlatLayout.pack(random_shapes(seed), num_shards=num_shards)
    end = 0
    for offset, numel in zip(layout.offsets, layout.numels, strict=True):
        assert offset % ALIGN == 0
        assert offset >= end
        end = offset + numel
    assert layout.padded_numel >= end
    assert layout.shard_numel % ALIGN == 0
    assert layout.padded_numel - layout.numel < ALIGN * (len(layout.shapes) + num_shards)


def test_mesh_coordinates_run_through_all_ranks_once_with_tensor_fastest():
    shape = MeshShape(pipeline=2, data_replicate=2, data_shard=3, sequence=1, tensor=2)
    places = [shape.coordinates(rank) for rank in range(shape.world_size)]
    assert len({tuple(place.items()) for place in places}) == 24
    assert [place["tensor"] for place in places[:4]] == [0, 1, 0, 1]
    assert [place["pipeline"] for place in places] == [0] * 12 + [1] * 12
    assert list(places[0]) == list(AXES)


@pytest.mark.parametrize("axes", [("data_shard",), ("data_replicate", "data_shard"), ("tensor",), AXES])
def test_groups_partition_the_world(axes):
    shape = MeshShape(pipeline=2, data_replicate=2, data_shard=3, tensor=2)
    groups = shape.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(24))
    assert {len(group) for group in groups} == {math.prod(getattr(shape, axis) for axis in axes)}


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_a_wrong_axis_size_is_named(size):
    with pytest.raises(ValueError, match="tensor"):
        MeshShape(tensor=size)
