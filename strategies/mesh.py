"""The mesh: which ranks form which axis, and the communicators over them.

Axes, outermost to innermost: pipeline, data_replicate, data_shard, sequence, tensor. Tensor is innermost because it
talks most and the links inside a node are fastest; pipeline is outermost because it talks least. Rank `r` has the
coordinates of `r` in a row-major array of these sizes, so neighbouring ranks differ in their tensor coordinate.

One `Mesh` makes the groups, names them and is passed down; nothing here is global.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from strategies.collectives import TRANSPORTS, Communicator
from strategies.journal import Journal

AXES = ("pipeline", "data_replicate", "data_shard", "sequence", "tensor")
DATA_AXES = ("data_replicate", "data_shard")


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the axes. Pure integers: usable without a process group."""

    pipeline: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {axis}={size!r}: allowed is a whole number from 1; "
                                 f"fix: {axis}=1 where the axis is not used")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """Ranks that hold different samples."""
        return self.data_replicate * self.data_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> coordinate of `rank`."""
        place = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The rank lists that partition the world into groups along `axes` (all other coordinates fixed)."""
        buckets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            fixed = tuple(place[axis] for axis in AXES if axis not in axes)
            buckets.setdefault(fixed, []).append(rank)
        return list(buckets.values())


class Mesh:
    """The communicators of this rank.

    Collective over the world: every rank constructs the mesh with the same shape. With one process no process group
    is needed.

    Args:
        shape: axis sizes; None puts all ranks on `data_shard`.
        device: where this rank computes; None takes the local GPU when there is one, else the CPU.
        timeout_s: how long a rank waits in a collective before it fails.
        transport: how large buffers move on the data axes: "peer_memory", "pairwise", "native" (collectives.py), or
            "fastest", the first of them that works here.

    Raises:
        ValueError: the shape does not cover the world, or the transport cannot be had.
    """

    def __init__(self, shape: MeshShape | None = None, *, device: torch.device | None = None,
                 timeout_s: float = 600.0, transport: str = "fastest") -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport={transport!r}: allowed are {', '.join(TRANSPORTS)}; fix: transport='fastest'")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.shape = shape if shape is not None else MeshShape(data_shard=world_size)
        if self.shape.world_size != world_size:
            sizes = ", ".join(f"{a}={s}" for a, s in zip(AXES, self.shape.sizes, strict=True))
            raise ValueError(f"mesh {sizes} covers {self.shape.world_size} ranks, the job has {world_size}; "
                             f"fix: sizes whose product is {world_size}")
        self.device = device if device is not None else default_device()
        self.timeout_s = timeout_s
        self.coordinates = self.shape.coordinates(self.rank)
        # torch's stand-in for ranks that are not there (backend "fake") has nobody to ask.
        self._is_fake = dist.is_initialized() and dist.get_backend() == "fake"
        self.journal = Journal(rank=self.rank, world_size=1 if self._is_fake else world_size, timeout_s=timeout_s)
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}
        self.data_shard = self._communicator("data_shard", ("data_shard",), transport=transport)
        self.data_replicate = self._communicator("data_replicate", ("data_replicate",), transport=transport)
        self.data = self._communicator("data", DATA_AXES)
        # Control traffic (votes, counts, short objects) has a CPU group of its own: it never orders device streams,
        # never waits behind a gather, and works the same where the device backend has no CPU tensors.
        self.control = self._communicator("control", DATA_AXES, backend="gloo", device=torch.device("cpu"), own=True)
        self.world = self._communicator("world", AXES, backend="gloo", device=torch.device("cpu"))
        self._engines = itertools.count()

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    def next_engine(self) -> int:
        """A number for one engine, equal on all ranks: part of its messages' tags."""
        return next(self._engines)

    def close(self) -> None:
        """Destroy the process groups made here, after which nothing moves. Collective over the world; idempotent."""
        made = [group for group in self._made.values() if group is not dist.GroupMember.NON_GROUP_MEMBER]
        self._made = {}
        if made:
            self.world.barrier(what="closing the mesh")  # nobody waits for a message of these groups any more
        for group in made:
            dist.destroy_process_group(group)
        self.journal.close()

    def _communicator(self, name: str, axes: tuple[str, ...], *, backend: str | None = None,
                      device: torch.device | None = None, own: bool = False,
                      transport: str = "native") -> Communicator:
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        if self._is_fake:
            backend = "fake"
        mine: dist.ProcessGroup | None = None
        members = [self.rank]
        # new_group is collective over the world: every rank walks every group, in the same order.
        for ranks in self.shape.groups(axes):
            key = (tuple(ranks), name if own else backend)
            if len(ranks) > 1 and key not in self._made:
                self._made[key] = self._new_group(ranks, name=name, backend=backend)
            if self.rank in ranks:
                members, mine = ranks, self._made.get(key)
        return Communicator(mine, members, rank=self.rank, name=name, device=device or self.device, backend=backend,
                            journal=self.journal, transport=transport, timeout_s=self.timeout_s)

    def _new_group(self, ranks: list[int], *, name: str, backend: str) -> dist.ProcessGroup:
        entry = self.journal.started("making the mesh", name, range(self.world_size))
        entry.waiting()
        try:
            group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise entry.error(error) from None
        entry.finished()
        return group


def default_device() -> torch.device:
    """The GPU of this process's LOCAL_RANK when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def ensure_process_group(*, device: torch.device, timeout_s: float) -> bool:
    """Initialise the default group from a launcher's variables when there are any and none is up yet.

    Returns whether this call initialised it. A process without RANK and WORLD_SIZE stays alone.
    """
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return True


def share_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Move the buffers of `model` to the mesh's device and make them equal to the first data rank's.

    Collective over the data axes.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            placed = buffer.to(mesh.device)
            if placed is not buffer:
                setattr(module, name, placed)
            dense = placed.contiguous()
            mesh.data.broadcast(dense, what=f"start value of buffer '{name}'")
            if dense is not placed:
                placed.copy_(dense)
