"""C08: data that ends at different times on the ranks: all stop at the same step, plainly and under Lightning."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import strategies
from strategies.in_step import InStepLoader
from support.lightning_runs import launched, make_module, trainer
from support.ranks import run_ranks

BATCHES = (4, 2, 3)  # of each rank


class heard:  # noqa: N801 - reads as `with heard() as texts`
    """What the engine logs inside the block."""

    def __enter__(self):
        self.texts, self.handler = [], logging.Handler()
        self.handler.emit = lambda record: self.texts.append(record.getMessage())
        logging.getLogger("strategies").addHandler(self.handler)
        return self.texts

    def __exit__(self, *error):
        logging.getLogger("strategies").removeHandler(self.handler)


class Stream(IterableDataset):
    """`count` batches of two rows; no length."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(2 * self.count):
            x = torch.randn(6, generator=generator)
            yield x, torch.sin(x)


def plain_loop(rank, stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    engine = strategies.Engine(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), zero=stage)
    updates = 0
    with heard() as texts:
        for x, y in engine.in_step(DataLoader(Stream(BATCHES[rank], rank), batch_size=2)):
            engine.backward((engine(x) - y).pow(2).mean())
            engine.step()
            updates += 1
    late = engine.agree(rank == 0), not engine.agree(rank != 0), engine.agree(True)
    return updates, engine.state_dict(), texts, late


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_loop_stops_on_all_ranks_where_the_first_one_ends(stage):
    found = run_ranks(3, plain_loop, stage)
    assert [updates for updates, *_ in found] == [2, 2, 2]
    for _, state, _, decisions in found:
        assert all(torch.equal(value, found[0][1][name]) for name, value in state.items())
        assert decisions == (False, True, True)
    assert [texts for _, _, texts, _ in found] == [
        ["the data of ranks [1] ended after 2 batches: all ranks stop there; ranks [0, 2] had more, which is not used"],
        [], []]


def lightning(rank, stage, accumulate, sized):
    def loader(seed):
        if not sized:
            return DataLoader(Stream(BATCHES[rank], seed + rank), batch_size=2)
        rows = torch.randn(2 * BATCHES[rank], 6)
        return DataLoader(TensorDataset(rows, torch.sin(rows)), batch_size=2, shuffle=True)

    with launched(rank, 2), heard() as texts:
        module = make_module("Plain")
        one = trainer(strategies.ZeroStrategy(stage=stage, timeout_s=20.0), 2, max_epochs=2,
                      accumulate_grad_batches=accumulate, use_distributed_sampler=False)
        one.fit(module, loader(0), loader(10))
        (validated,) = one.validate(module, loader(10), verbose=False)
        return one.global_step, len(module.seen), one.strategy.lightning_module_state_dict(), texts, validated


@pytest.mark.parametrize(("stage", "accumulate", "sized"),
                         [(1, 1, False), (2, 3, False), (3, 1, False), (3, 3, False), (3, 1, True), (1, 3, True)])
def test_lightning_stops_every_rank_at_the_same_batch(stage, accumulate, sized):
    found = run_ranks(2, lightning, stage, accumulate, sized, timeout_s=60.0)
    (steps, batches, state, texts, _), (other_steps, other_batches, other_state, others, _) = found
    assert steps == other_steps == 2 * (2 if accumulate == 1 else 1)
    assert batches == other_batches == 4
    assert all(torch.equal(value, other_state[name]) for name, value in state.items())
    said = "ranks [0, 1] have [4, 2] batches: each takes 2" if sized else "the data of ranks [1] ended after 2 batches"
    assert any(text.startswith(said) for text in texts)
    assert others == []


def equal_lengths(rank):
    with launched(rank, 2):
        rows = torch.randn(8, 6)
        given = DataLoader(TensorDataset(rows, rows), batch_size=2)
        one = trainer(strategies.ZeroStrategy(stage=1), 2, max_epochs=1, use_distributed_sampler=False)
        one.fit(make_module("Plain"), given)
        return one.train_dataloader is given


def test_loaders_of_equal_length_are_left_alone():
    assert run_ranks(2, equal_lengths) == [True, True]


def wrapper(rank):
    mesh = strategies.Mesh()
    given = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=1)
    held = InStepLoader(given, length=3, control=mesh.control)
    held.worker_init_fn = print
    return len(held), held.batch_size, given.worker_init_fn is print, held.dataset is given.dataset, len(list(held))


def test_a_loader_kept_in_step_is_the_loader_in_all_else():
    assert run_ranks(2, wrapper) == [(3, 1, True, True, 3)] * 2
