"""The ways to move large buffers: equal bits from each, and what direct reads of memory promise about lent buffers."""

import ctypes
import functools
import subprocess
import sys
import time

import pytest
import torch

from strategies.collectives import FEW_RANKS
from strategies.journal import CollectiveError
from strategies.mesh import Mesh
from strategies.peer_memory import Board, PeerGoneError, _Peer, connect
from strategies.transfer import Tag
from support.oracle import assert_same, train_engine, train_oracle
from support.ranks import run_ranks
from support.small_models import make

TRANSPORTS = ("peer_memory", "pairwise")
LONG = 3 * 2**17 + 48  # several chunks, the last one odd


def tag(sequence, operation=0):
    return Tag(0, 0, operation, sequence, "block")


def moved(rank, world, transport, dtype, numel):
    axis = Mesh(transport=transport).data_shard
    generator = torch.Generator().manual_seed(rank)
    full = torch.randn(numel * world, generator=generator).to(dtype)
    out = torch.ones(numel, dtype=dtype)
    one = axis.reduce_scatter(full.clone(), out, tag=tag(1, 1), accumulate=True)
    own = axis.slice_of(full).clone()
    gathered = torch.zeros_like(full)
    two = axis.all_gather(gathered, own, tag=tag(2))
    one.complete()
    two.complete()
    in_place = full.clone()
    axis.reduce_scatter(in_place, axis.slice_of(in_place), tag=tag(3, 1)).complete()
    odd = full[: numel * world - 5].clone()
    axis.all_reduce(odd, tag=tag(4, 2))
    return axis.algorithm(), out, gathered, axis.slice_of(in_place), odd


@pytest.mark.parametrize(("dtype", "numel"), [(torch.float32, LONG), (torch.bfloat16, 32), (torch.float64, 16)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_transport_gives_the_same_bits(world, dtype, numel):
    results = {name: run_ranks(world, moved, world, name, dtype, numel) for name in TRANSPORTS}
    names = {name: {answer[0] for answer in answers} for name, answers in results.items()}
    assert names == {"peer_memory": {"direct reads of the other ranks' memory"},
                     "pairwise": {"pairwise exchange over gloo"}}
    for one, other in zip(*results.values(), strict=True):
        for value, same in zip(one[1:], other[1:], strict=True):
            assert torch.equal(value, same)
    whole = [torch.randn(numel * world, generator=torch.Generator().manual_seed(rank)).to(dtype)
             for rank in range(world)]
    total = whole[0]
    for term in whole[1:]:
        total = total + term
    for rank, (_, _, gathered, reduced, odd) in enumerate(results["peer_memory"]):
        own = slice(rank * numel, (rank + 1) * numel)
        for member in range(world):
            part = slice(member * numel, (member + 1) * numel)
            assert torch.equal(gathered[part], whole[member][part])
        assert torch.equal(reduced, total[own])
        assert torch.equal(odd, total[:-5])


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def trained(rank, transport, stage):
    return train_engine(rank, functools.partial(make, "tied"), adamw, world_size=3, accumulate=2, steps=3, stage=stage,
                        clip_norm=0.5, mesh=Mesh(transport=transport))


@pytest.mark.parametrize("stage", [1, 3])
def test_training_over_messages_equals_one_process(stage):
    """Every other test of the engine moves its buffers by direct reads, which these machines allow."""
    expected = train_oracle(functools.partial(make, "tied"), adamw, world_size=3, accumulate=2, steps=3, clip_norm=0.5)
    for found in run_ranks(3, trained, "pairwise", stage):
        assert_same(found, expected, atol=1e-5)


def test_the_transport_is_chosen_by_name_and_a_wrong_one_is_refused():
    with pytest.raises(ValueError, match=r"transport='sockets': allowed are fastest, peer_memory, pairwise, nat"):
        Mesh(transport="sockets")


# -- lent memory -----------------------------------------------------------------------------------------------------


def lends_and_forgets(rank):
    mesh = Mesh(transport="peer_memory")
    axis, full = mesh.data_shard, torch.zeros(2 * 2**20)
    own = torch.full((2**20,), float(rank + 1))
    pending = axis.all_gather(full, own, tag=tag(1))
    if rank == 1:
        time.sleep(0.3)
        pending.wait()
        return full[0].item(), full[-1].item()
    pending.wait()
    del own, pending, mesh, axis  # an engine that is dropped while the other rank still reads
    torch.full((2**20,), -1.0)
    return full[0].item(), full[-1].item()


def test_memory_that_a_peer_still_reads_stays_though_its_owner_has_dropped_it():
    assert run_ranks(2, lends_and_forgets) == [(1.0, 2.0), (1.0, 2.0)]


def released_late(rank):
    axis = Mesh(transport="peer_memory").data_shard
    full, own = torch.zeros(32), torch.full((16,), float(rank))
    pending = axis.all_gather(full, own, tag=tag(1))
    if rank == 1:
        time.sleep(0.4)
        pending.wait()
        return full.tolist()
    pending.wait()
    assert not pending.released()  # rank 1 has posted and sleeps
    axis.drain()
    assert pending.released()
    own.fill_(7.0)
    return full.tolist()


def test_a_buffer_is_released_when_the_slowest_peer_has_read_it():
    assert run_ranks(2, released_late) == [[0.0] * 16 + [1.0] * 16] * 2


def offered(rank):
    axis = Mesh(transport="peer_memory", timeout_s=1.0 if rank == 0 else 20.0).data_shard
    own = torch.full((16,), float(rank))
    axis.offer(own, tag=tag(1))
    axis.barrier(what="offered")
    full, start = torch.zeros(32), time.perf_counter()
    if rank == 1:
        time.sleep(0.5)  # busy elsewhere
    axis.all_gather(full, own, tag=tag(1)).wait()
    waited_s = time.perf_counter() - start
    axis.offer(own, tag=tag(2))
    axis.withdraw()
    axis.barrier(what="withdrawn")
    failed = False
    if rank == 0:
        try:
            axis.all_gather(full, own, tag=tag(2)).wait()
        except CollectiveError:
            failed = True
    axis.barrier(what="end")
    return full.tolist(), waited_s, failed


def test_an_offer_is_read_while_its_owner_is_busy_and_not_after_it_was_withdrawn():
    (full, waited_s, failed), _ = run_ranks(2, offered)
    assert full == [0.0] * 16 + [1.0] * 16
    assert waited_s < 0.4
    assert failed


def other_sizes(rank):
    axis = Mesh(transport="peer_memory", timeout_s=5.0).data_shard
    with pytest.raises(CollectiveError, match=r"lends 6\d bytes|lends 1\d\d bytes") as caught:
        axis.all_gather(torch.zeros(32 * (rank + 1)), torch.zeros(16 * (rank + 1)), tag=tag(1)).wait()
    axis.barrier(what="end")
    return str(caught.value)


def test_ranks_that_lend_different_sizes_are_told():
    for text in run_ranks(2, other_sizes):
        assert "the ranks' models or precisions differ" in text


# -- choice ----------------------------------------------------------------------------------------------------------


def alone(places):
    return connect(rank=0, index=0, timeout_s=1.0, exchange=lambda mine: [mine, *places(mine)], agree=lambda yes: yes)


def test_ranks_of_another_host_are_not_read():
    assert alone(lambda mine: [{"host": ("another boot", ""), "peer": mine["peer"]}]) is None


LENDS = """
import ctypes
table = (ctypes.c_longlong * 8)()
table[3] = 2
print(ctypes.addressof(table), flush=True)
input()
"""


def test_a_process_that_has_ended_is_named():
    process = subprocess.Popen([sys.executable, "-c", LENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    place = _Peer(1, process.pid, int(process.stdout.readline()))
    board = Board([_Peer(0, 0, 0), place], index=0, table=(ctypes.c_longlong * 8)(), timeout_s=5.0)
    assert board.can_read(1)
    process.communicate("\n")
    start = time.perf_counter()
    with pytest.raises(PeerGoneError, match=rf"rank 1 \(process {process.pid}\) has ended"):
        board.find_lent(1, 0, tag(1), num_bytes=4)
    assert time.perf_counter() - start < 1.0


COUNT_CALLS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import strategies

count = 0

def called(frame, event, argument):
    global count
    count += event in ("call", "c_call")

def calls_of_an_update(stage, world):
    global count
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    engine = strategies.Engine(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), zero=stage, clip_norm=1.0)

    def update():
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()

    for _ in range(3):
        update()
    count = 0
    sys.setprofile(called)
    update()
    sys.setprofile(None)
    dist.destroy_process_group()
    return count

for stage in (1, 3):
    print(*(calls_of_an_update(stage, int(world)) for world in sys.argv[1:]))
"""


def test_python_work_per_step_does_not_grow_with_the_number_of_ranks():
    """One process stands for all: torch's fake process group. Imports take most of the time."""
    command = [sys.executable, "-W", "ignore", "-c", COUNT_CALLS, str(FEW_RANKS + 1), "512"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in printed.splitlines():
        few, many = map(int, line.split())
        assert 100 < many <= 1.02 * few
    assert len(printed.splitlines()) == 2
