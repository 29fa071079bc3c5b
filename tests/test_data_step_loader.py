"""The loader: the same samples in every step for any number of ranks, each once per epoch, exact from any step."""

import itertools

import numpy as np
import pytest
import torch

from framework.data.step_loader import IGNORED_LABEL, StepLoader, batch_problem, epoch_order
from framework.data.token_dataset import TokenDataset


def numbered(num_samples: int, seq_len: int = 4) -> TokenDataset:
    """Sample i starts with token i * seq_len."""
    return TokenDataset(tokens=np.arange(num_samples * seq_len + 1), seq_len=seq_len)


def loader(num_samples: int = 29, **changes) -> StepLoader:
    defaults = {"global_size": 12, "micro_size": 1, "data_rank": 0, "data_size": 1, "seed": 5, "num_steps": 7}
    return StepLoader(numbered(num_samples), **{**defaults, **changes})


def sample_ids(batches) -> list[int]:
    return [int(tokens[0]) // 4 for batch in batches for tokens in batch.tokens_BT]


def steps_over_ranks(*, data_size: int, **changes) -> list[list[int]]:
    """Sample ids of each step, the ranks' shares one after the other."""
    ranks = [list(loader(data_size=data_size, data_rank=rank, **changes)) for rank in range(data_size)]
    return [[i for batches in step for i in sample_ids(batches)] for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_size", [1, 2])
def test_a_steps_samples_do_not_depend_on_ranks_or_micro_batches(data_size, micro_size):
    settings = {"data_size": data_size, "micro_size": micro_size, "global_size": 24}
    steps = steps_over_ranks(**settings)
    assert steps == steps_over_ranks(data_size=1, micro_size=24, global_size=24)
    assert steps != steps_over_ranks(**settings, seed=6)


@pytest.mark.parametrize("num_samples", [1, 5, 12, 29, 36])
def test_every_epoch_has_each_sample_once_in_an_order_of_its_own(num_samples):
    num_epochs = 12  # a whole number of steps of 12
    steps = steps_over_ranks(data_size=2, num_samples=num_samples, num_steps=num_samples)
    stream = [i for step in steps for i in step]
    epochs = [tuple(stream[e * num_samples : (e + 1) * num_samples]) for e in range(num_epochs)]
    assert len(stream) == num_epochs * num_samples
    assert all(sorted(epoch) == list(range(num_samples)) for epoch in epochs)
    if num_samples > 4:
        assert len(set(epochs)) > num_epochs // 2


def test_batches_have_the_declared_shape_and_the_ranks_number_of_them():
    for batches in loader(micro_size=2, data_rank=1, data_size=3):
        assert len(batches) == 2
        for tokens, labels in batches:
            assert tokens.shape == labels.shape == (2, 4)
            assert tokens.dtype == labels.dtype == torch.int64
            assert torch.equal(labels, tokens + 1)


@pytest.mark.parametrize("start_step", [1, 3, 8])
def test_starting_at_a_step_gives_what_an_unbroken_run_gives_from_there(start_step):
    for rank in range(3):
        unbroken = [sample_ids(step) for step in loader(data_rank=rank, data_size=3, num_steps=14)]
        resumed = [
            sample_ids(step)
            for step in loader(data_rank=rank, data_size=3, start_step=start_step, num_steps=14 - start_step)
        ]
        assert resumed == unbroken[start_step:]


def test_eight_samples_stopped_after_three_and_resumed_are_the_unbroken_sequence():
    ids = [i for step in loader(8, global_size=1, num_steps=16) for i in sample_ids(step)]
    resumed = [i for step in loader(8, global_size=1, start_step=3, num_steps=13) for i in sample_ids(step)]
    assert sorted(ids[:8]) == sorted(ids[8:]) == list(range(8))
    assert ids[3:] == resumed


def test_a_loader_can_be_walked_again_from_its_beginning():
    again = loader(num_steps=3)
    assert [sample_ids(step) for step in again] == [sample_ids(step) for step in again]


def test_without_num_steps_it_goes_on_for_ever_and_has_no_length():
    endless = loader(3, num_steps=None)
    assert sum(1 for _ in itertools.islice(endless, 50)) == 50
    with pytest.raises(TypeError, match="no end"):
        len(endless)
    assert len(loader(num_steps=9)) == 9


@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [1, 2, 23, 24, 25, 53])
def test_walking_once_sees_each_sample_once_and_pads_with_ignored_labels(num_samples, data_size):
    settings = {"num_samples": num_samples, "shuffle": False, "once": True, "num_steps": None, "micro_size": 2,
                "global_size": 24}
    ranks = [list(loader(data_size=data_size, data_rank=rank, **settings)) for rank in range(data_size)]
    assert {len(steps) for steps in ranks} == {-(-num_samples // 24)}
    labels = [labels for step in zip(*ranks, strict=True) for batches in step for _, labels in batches]
    assert all(batch.shape == (2, 4) for batch in labels)
    real = torch.cat(labels).flatten()
    assert real[real != IGNORED_LABEL].tolist() == list(range(1, num_samples * 4 + 1))
    counts = {len(batches) for steps in ranks for batches in steps}
    assert counts == {24 // (2 * data_size)}


def test_walking_once_stops_early_when_asked_and_never_goes_past_the_end():
    assert len(loader(29, once=True, num_steps=2)) == 2
    assert len(loader(29, once=True, num_steps=100)) == 3
    assert len(loader(29, once=True, num_steps=None, start_step=2)) == 1
    assert list(loader(29, once=True, num_steps=None, start_step=5)) == []


def test_sizes_that_do_not_divide_are_refused_with_every_number_and_the_nearest_fit():
    with pytest.raises(ValueError, match=r"batch\.global_size=10: .*micro_size=2 x data-parallel size 3 = 6.*=6 or 12"):
        loader(global_size=10, micro_size=2, data_size=3)
    assert batch_problem(global_size=4, micro_size=8, data_size=2).endswith("batch.global_size=16")
    assert batch_problem(global_size=0, micro_size=1, data_size=1) is not None
    assert batch_problem(global_size=12, micro_size=2, data_size=3) is None


@pytest.mark.parametrize("changes", [{"data_rank": 2, "data_size": 2}, {"start_step": -1}, {"num_steps": -1}])
def test_impossible_positions_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        loader(**changes)


def test_the_order_of_an_epoch_is_pinned():
    """A change here changes every run's data order, and where a resumed run goes on."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 7, 1, 0, 6, 2, 5, 4]
    assert epoch_order(8, seed=0, epoch=1).tolist() == [1, 5, 7, 0, 4, 3, 2, 6]


def test_lightning_trains_on_it_directly():
    lightning = pytest.importorskip("lightning")

    class Recorder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(sample_ids(batch))
            return self.weight * 1.0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for num_steps in (None, 6):
        module = Recorder()
        trainer = lightning.Trainer(
            max_steps=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )
        trainer.fit(module, loader(num_steps=num_steps))
        assert module.seen == [sample_ids(step) for step in loader(num_steps=6)]
