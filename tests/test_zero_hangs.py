"""Ranks that differ: the error names who waits in what for whom, what the others did last, and the user's lines.

The peer stays alive in all of these: a connection that breaks would end the wait by itself.
"""

import logging
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import strategies
from strategies.collectives import CollectiveError
from strategies.journal import Journal
from support.ranks import run_ranks

TIMEOUT_S = 1.5
FEATURES = 6


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def made(stage, timeout_s=TIMEOUT_S):
    torch.manual_seed(0)
    sgd([torch.zeros(1)])  # the first optimizer of a process imports for seconds
    dist.barrier()
    model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))
    return strategies.Engine(model, optimizer=sgd, zero=stage, mesh=strategies.Mesh(timeout_s=timeout_s))


def step(engine):
    engine.backward(engine(torch.ones(2, FEATURES)).pow(2).mean())
    engine.step()


def message_of(act, *args):
    """The text of the CollectiveError that `act` ends with, and the seconds until then. Lets the staying rank go."""
    start_s = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        act(*args)
    seconds = time.monotonic() - start_s
    dist.group.WORLD.get_group_store().add("done", 1)
    return str(caught.value), seconds


def others_wait():
    return dist.group.WORLD.get_group_store().add("done", 0) < dist.get_world_size() - 1


def stay():
    """Alive, in no collective, until all others have failed."""
    while others_wait():
        time.sleep(0.1)


def spin():
    while others_wait():
        pass


def one_saves_alone(rank, stage, call):
    engine = made(stage)
    step(engine)
    if rank == 1:
        return stay()
    return message_of(lambda: getattr(engine, call)())


@pytest.mark.parametrize(
    ("stage", "call", "operation"),
    [(3, "state_dict", r"read of unit '\w+' \(round \d+\)"),
     (1, "optimizer_state_dict", r"'optimizer state of '0\.weight''")])
def test_a_call_that_only_one_rank_makes_names_the_absent_rank_and_both_lines(stage, call, operation):
    """C05: saving inside `if rank == 0`."""
    (text, seconds), _ = run_ranks(2, one_saves_alone, stage, call)
    first, here, there, meaning = text.splitlines()
    assert re.fullmatch(
        rf"rank 0 in {operation}, call \d+ on axis \w+: waited 1\.\d s for rank 1 \(timeout_s=1\.5\)", first)
    assert re.search(r"rank 0 is at \S*test_zero_hangs\.py:\d+ in <lambda>: `return message_of\(", here)
    assert re.search(r"rank 1 is at \S*test_zero_hangs\.py:\d+ in (stay|others_wait): `.*`; in no collective; "
                     r"the last it finished is .*, call \d+ on axis (data_shard|control), \d\.\d s ago", there)
    assert "rank 1 did not come" in meaning
    assert "if rank == 0" in meaning
    assert seconds < TIMEOUT_S + 2


def one_is_busy(rank, world, stage, act):
    engine = made(stage)
    step(engine)
    if rank == world - 1:
        return act()
    return message_of(lambda: [step(engine) for _ in range(2)])


@pytest.mark.parametrize(("stage", "act"), [(0, stay), (1, stay), (2, spin), (3, stay), (3, spin)])
def test_a_rank_that_is_stuck_in_its_own_code_is_named_with_its_line(stage, act):
    """Asleep in its data loader, or in an endless loop: it answers all the same."""
    (text, seconds), _ = run_ranks(2, one_is_busy, 2, stage, act)
    assert "for rank 1 " in text
    assert re.search(rf"rank 1 is at \S+ in ({act.__name__}|others_wait): `", text)
    assert re.search(r"rank 0 is at \S+ in step: `engine\.", text)
    assert seconds < TIMEOUT_S + 2


def test_of_three_ranks_the_one_that_is_missing_is_waited_for():
    (text, _), (other, _), _ = run_ranks(3, one_is_busy, 3, 3, stay)
    for rank, said in ((0, text), (1, other)):
        assert said.startswith(f"rank {rank} in ")
        assert f"rank {1 - rank} is at " in said
        assert re.search(r"rank 2 is at \S+ in (stay|others_wait): .*in no collective", said)


def replicas(rank):
    """Rank 3 is asleep; rank 2 waits for it on data_shard; ranks 0 and 1 wait for those two on data_replicate."""
    dist.barrier()
    mesh = strategies.Mesh(strategies.MeshShape(data_replicate=2, data_shard=2), timeout_s=TIMEOUT_S)
    if rank == 3:
        return stay()

    def talk():
        mesh.data_shard.barrier(what="in the group")
        mesh.data_replicate.barrier(what="between groups")

    text, _ = message_of(talk)
    time.sleep(1.5)  # as long as the others may ask where this one is
    return text


def test_a_rank_that_waits_in_turn_is_not_the_cause():
    said = run_ranks(4, replicas)
    assert re.match(r"rank 0 in 'between groups', call \d+ on axis data_replicate: ", said[0])
    assert "for rank 2 " in said[0].splitlines()[0]
    assert re.search(r"rank 2 is at .*(waits in|given up on) 'in the group', call \d+ on axis data_shard", said[0])
    assert re.search(r"rank 2 waits in turn. rank 3 did not come", said[0])
    assert "for rank 3 " in said[2].splitlines()[0]
    assert "\n  rank 3 did not come" in said[2]


def one_skips_a_step(rank):
    engine = made(3)

    def loop():
        for number in range(3):
            if number != 1 or rank == 0:
                step(engine)

    return message_of(loop)[0] if rank == 0 else [loop(), stay()]


def test_a_rank_that_is_past_its_last_step_is_named():
    """C08 in a loop of one's own: rank 1 has one batch less."""
    said, _ = run_ranks(2, one_skips_a_step)
    assert "for rank 1 " in said
    assert re.search(r"rank 1 is at \S+ in (stay|others_wait): ", said)
    assert "as many steps on each" in said


def two_ways_part(rank):
    """Rank 0 saves between two steps; rank 1 is in its next forward."""
    engine = made(3)
    step(engine)

    def part():
        if rank == 0:
            engine.state_dict()
        step(engine)
        step(engine)

    text, _ = message_of(part)
    time.sleep(1.0)  # as long as the other may ask where this one is
    return text


def test_ranks_that_wait_in_different_collectives_are_told_that_they_diverged():
    saving, stepping = run_ranks(2, two_ways_part)
    for rank, said, mine, theirs in ((0, saving, "read", "gather"), (1, stepping, "gather", "read")):
        assert re.match(rf"rank {rank} in {mine} of unit '\w+' ", said)
        assert re.search(rf"rank {1 - rank} is at .*(waits in|given up on) {theirs} of unit '\w+' ", said)
        assert "The ranks have diverged" in said
    assert re.search(r"rank 0 is at \S+ in part: `engine\.state_dict\(\)`", saving)
    assert re.search(r"rank 1 is at \S+ in step: `engine\.backward\(engine\(", saving)


def gather_against_reduce(rank):
    """Rank 0 waits for the first unit's parameters, rank 1 for the sum of the second one's gradients."""
    engine = made(3)
    axis, (unit, other) = engine.mesh.data_shard, engine.units[:2]
    flat = torch.ones(4)
    if rank == 0:
        text, _ = message_of(lambda: axis.all_gather(flat, axis.slice_of(flat), tag=unit.tag("gather")).wait())
    else:
        text, _ = message_of(lambda: axis.reduce_scatter(flat, torch.empty(2), tag=other.tag("reduce")).wait())
    time.sleep(1.0)
    return text


def test_a_gather_never_mixes_with_a_reduction_of_the_same_size():
    gather, reduce = run_ranks(2, gather_against_reduce)
    assert gather.startswith("rank 0 in gather of unit '0'")
    assert re.search("(waits in|given up on) reduce of unit '1'", gather)
    assert reduce.startswith("rank 1 in reduce of unit '1'")
    assert re.search("(waits in|given up on) gather of unit '0'", reduce)


def one_raises(rank, stage, where):
    engine = made(stage)

    def fail(*_):
        raise ValueError("the data of rank 1 is bad")

    if rank == 1:
        module = engine.module[1]
        module.register_forward_hook(fail) if where == "forward" else module.register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="the data of rank 1 is bad"):
            step(engine)
        return stay()
    return message_of(step, engine)


@pytest.mark.parametrize(("stage", "where"), [(0, "forward"), (3, "forward"), (1, "backward"), (2, "backward"),
                                              (3, "backward")])
def test_the_peers_of_a_rank_that_raises_and_lives_on_end_in_time(stage, where):
    (text, seconds), _ = run_ranks(2, one_raises, stage, where)
    assert re.search(r"rank 1 is at \S+ in (stay|others_wait): ", text)
    assert seconds < TIMEOUT_S + 2


def one_is_late(rank):
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("strategies").addHandler(handler)
    try:
        engine = made(2, timeout_s=6.0)
        if rank == 1:
            time.sleep(4.5)
        step(engine)
    finally:
        logging.getLogger("strategies").removeHandler(handler)
    return heard


def test_half_the_timeout_is_a_warning_and_the_run_goes_on():
    (warning,), others = run_ranks(2, one_is_late)
    assert re.match(r"rank 0 in .*: waited [34]\.\d s for rank 1 \(timeout_s=6\)", warning)
    assert re.search(r"rank 1 is at \S+ in one_is_late: `time\.sleep\(4\.5\)`", warning)
    assert others == []


def one_makes_no_mesh(rank):
    dist.barrier()
    if rank == 0:
        return message_of(lambda: strategies.Mesh(timeout_s=TIMEOUT_S))
    return stay()


def test_a_mesh_that_only_one_rank_makes_is_an_error_in_time():
    (text, seconds), _ = run_ranks(2, one_makes_no_mesh)
    assert text.startswith("rank 0 in 'making the mesh', call 1 on axis data_shard: ")
    assert "rank 1 does not answer" in text
    assert seconds < TIMEOUT_S + 5


def watchers(rank):
    engine = made(3)
    names = [thread.name for thread in threading.enumerate()]
    engine.mesh.journal.close()
    return names.count("shardlight-peers"), [t.name for t in threading.enumerate()].count("shardlight-peers")


def test_one_thread_watches_and_ends_and_one_rank_alone_has_none():
    before = watchers_left()
    for during, after in run_ranks(2, watchers):
        assert during == after + 1
    strategies.Engine(nn.Linear(2, 2))
    assert watchers_left() == before


def watchers_left():
    return [thread.name for thread in threading.enumerate()].count("shardlight-peers")


def test_an_entry_costs_no_formatting_and_the_journal_keeps_the_last_ones():
    class Unshown:
        def __str__(self):
            raise AssertionError("shown before anybody asked")

    journal = Journal(rank=0, world_size=1, timeout_s=1.0)
    for _ in range(1000):
        entry = journal.started(Unshown(), "data_shard", (0, 1))
        entry.waiting()
        entry.finished()
    assert entry.number == 1000
    assert journal.blocked is None
    journal = Journal(rank=0, world_size=1, timeout_s=1.0)
    for number in range(1000):
        journal.started(f"vote {number}", "control", (0, 1))
    recent = journal.state()["recent"]["control"]
    assert recent[-1] == (1000, "vote 999")
    assert len(recent) < 100
