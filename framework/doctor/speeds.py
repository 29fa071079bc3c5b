"""How fast memory and collectives are here: ours beside torch's own, at a few sizes. Collective over the world."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from framework.doctor.findings import Finding, ok, warning
from strategies.collectives import Communicator, Tag
from strategies.mesh import Mesh
from strategies.messages import all_gather_single, reduce_scatter_single

SIZES_MIB = (1, 16, 64)
MIB = 1 << 20
REPEATS, WARMUPS = 5, 2
VOTES = 200
SLOWER = 1.5  # times torch's own: worth a warning


def measure(mesh: Mesh) -> Iterator[Finding]:
    """Copy and collective speeds. With one rank there is nothing to send."""
    numbers = [_copy(mesh, size) for size in SIZES_MIB]
    yield ok("copy", _sizes(numbers), seconds=dict(zip(map(str, SIZES_MIB), numbers, strict=True)), sizes="MiB")
    if mesh.world_size == 1:
        return
    yield ok("algorithms", "; ".join(f"{axis.name} over {axis.size} ranks: {axis.algorithm()}"
                                     for axis in (mesh.data_shard, mesh.data_replicate, mesh.control)
                                     if axis.size > 1))
    axis = mesh.data_shard if mesh.data_shard.size > 1 else mesh.data
    for name, theirs, ours in (
        ("all-gather", _native_gather(axis), _gather(mesh, axis)),
        ("reduce-scatter", _native_reduce(axis), _reduce(mesh, axis)),
        ("all-reduce", _native_sum(axis), _sum(mesh, axis)),
    ):
        yield _compared(mesh, axis, name, theirs, ours)
    yield _vote(mesh)


def _compared(mesh: Mesh, axis: Communicator, name: str, theirs: Callable[[int], Callable[[], None]],
              ours: Callable[[int], Callable[[], None]]) -> Finding:
    native = [_median(mesh, theirs(size * MIB)) for size in SIZES_MIB]
    own = [_median(mesh, ours(size * MIB)) for size in SIZES_MIB]
    backend = "nccl" if mesh.device.type == "cuda" else "gloo"
    text = f"{_sizes(own)}; {backend}'s own {_sizes(native)}"
    values = {"seconds": dict(zip(map(str, SIZES_MIB), own, strict=True)),
              "native_seconds": dict(zip(map(str, SIZES_MIB), native, strict=True)), "sizes": "MiB"}
    if own[-1] > SLOWER * native[-1]:
        return warning(name, text, fix=f"{backend} is faster here: please report this output with the machine's name",
                       **values)
    return ok(name, text, **values)


def _sizes(seconds: list[float]) -> str:
    return ", ".join(f"{size} MiB {second * 1e3:.3g} ms ({size * MIB / second / 1e9:.2g} GB/s)"
                     for size, second in zip(SIZES_MIB, seconds, strict=True))


def _copy(mesh: Mesh, size_mib: int) -> float:
    source = torch.ones(size_mib * MIB // 4, device=mesh.device)
    target = torch.empty_like(source)
    return _median(mesh, lambda: target.copy_(source))


def _median(mesh: Mesh, call: Callable[[], object]) -> float:
    """Seconds of one call, the median of a few; the slowest rank counts."""
    times = []
    for number in range(WARMUPS + REPEATS):
        mesh.world.barrier(what="start of a measurement")
        start_s = time.perf_counter()
        call()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        if number >= WARMUPS:
            times.append(time.perf_counter() - start_s)
    slowest = mesh.world.maximum(torch.tensor([statistics.median(times)], dtype=torch.float64), what="measurement")
    return float(slowest[0])


def _full(axis: Communicator, numbytes: int) -> Tensor:
    """What is whole on every rank: `numbytes`, cut to a multiple of the ranks."""
    return torch.ones(numbytes // 4 // axis.size * axis.size, device=axis.device)


def _tag(mesh: Mesh, operation: str) -> Callable[[], Tag]:
    """Fresh tags, the same on every rank."""
    rounds, engine = iter(range(1 << 30)), mesh.next_engine()  # tags may not be used twice
    number = Tag.OPERATIONS.index(operation)
    return lambda: Tag(engine, 0, number, next(rounds), "doctor")


def _gather(mesh: Mesh, axis: Communicator) -> Callable[[int], Callable[[], None]]:
    tag = _tag(mesh, "gather")

    def at(numbytes: int) -> Callable[[], None]:
        full = _full(axis, numbytes)
        own = axis.slice_of(full).clone()
        return lambda: axis.all_gather(full, own, tag=tag()).complete()

    return at


def _reduce(mesh: Mesh, axis: Communicator) -> Callable[[int], Callable[[], None]]:
    tag = _tag(mesh, "reduce")

    def at(numbytes: int) -> Callable[[], None]:
        full = _full(axis, numbytes)
        out = torch.empty(full.numel() // axis.size, device=axis.device)
        return lambda: axis.reduce_scatter(full, out, tag=tag()).complete()

    return at


def _sum(mesh: Mesh, axis: Communicator) -> Callable[[int], Callable[[], None]]:
    tag = _tag(mesh, "replicate")

    def at(numbytes: int) -> Callable[[], None]:
        full = _full(axis, numbytes)
        return lambda: axis.all_reduce(full, tag=tag())

    return at


def _native_gather(axis: Communicator) -> Callable[[int], Callable[[], None]]:
    def at(numbytes: int) -> Callable[[], None]:
        full = _full(axis, numbytes)
        own = axis.slice_of(full).clone()
        return lambda: all_gather_single(full, own)

    return at


def _native_reduce(axis: Communicator) -> Callable[[int], Callable[[], None]]:
    def at(numbytes: int) -> Callable[[], None]:
        full = _full(axis, numbytes)
        out = torch.empty(full.numel() // axis.size, device=axis.device)
        return lambda: reduce_scatter_single(out, full)

    return at


def _native_sum(axis: Communicator) -> Callable[[int], Callable[[], None]]:
    def at(numbytes: int) -> Callable[[], None]:
        full = _full(axis, numbytes)
        return lambda: dist.all_reduce(full)

    return at


def _vote(mesh: Mesh) -> Finding:
    """A decision of all data ranks, as the engine takes them at the end of each backward."""
    ballot = torch.zeros(64, dtype=torch.int32)
    mesh.world.barrier(what="start of a measurement")
    start_s = time.perf_counter()
    for _ in range(VOTES):
        mesh.control.maximum(ballot, what="vote of the doctor")
    seconds = (time.perf_counter() - start_s) / VOTES
    return ok("vote", f"{seconds * 1e6:.0f} us over {mesh.control.size} ranks", seconds=seconds)
