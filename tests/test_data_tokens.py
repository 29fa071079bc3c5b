"""Token files, the cut into training and validation, samples, and the synthetic chain."""

import numpy as np
import pytest
import torch

from framework.data.cache import Cache
from framework.data.synthetic import TRAIN, VALIDATION, MarkovDataset
from framework.data.token_dataset import TokenDataset
from framework.data.token_file import (
    DTYPES,
    check_token_range,
    open_token_file,
    scan_token_file,
    split_problem,
    split_tokens,
)


def quiet(stage: str, done: float, total: float) -> None:
    pass


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_file_of_each_type_is_read_as_written(tmp_path, dtype):
    ids = np.array([0, 7, 300, 32767], DTYPES[dtype])
    ids.tofile(tmp_path / "ids")
    tokens = open_token_file(tmp_path / "ids", dtype)
    assert tokens.tolist() == ids.tolist()
    assert not tokens.flags.writeable


@pytest.mark.parametrize(
    ("num_bytes", "dtype", "expected"),
    [
        (0, "uint16", "empty"),
        (7, "uint16", "cut off"),
        (6, "int32", "dataset.dtype=uint16"),
        (None, "uint16", "no such"),
    ],
)
def test_a_file_that_cannot_hold_the_tokens_is_refused(tmp_path, num_bytes, dtype, expected):
    path = tmp_path / "ids"
    if num_bytes is not None:
        path.write_bytes(b"\0" * num_bytes)
    with pytest.raises(ValueError, match=r"dataset\.path=.*ids") as error:
        open_token_file(path, dtype)
    assert expected in str(error.value)


@pytest.mark.parametrize("num_tokens", [5, 6, 7, 8, 9, 10, 13])
@pytest.mark.parametrize("seq_len", [1, 2, 4])
def test_samples_tile_the_tokens_and_labels_are_the_next_ones(num_tokens, seq_len):
    tokens = np.arange(num_tokens, dtype=np.uint16)
    dataset = TokenDataset(tokens=tokens, seq_len=seq_len)
    assert len(dataset) == (num_tokens - 1) // seq_len
    seen = []
    for index in range(len(dataset)):
        inputs, labels = dataset[index]
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.shape == labels.shape == (seq_len,)
        assert torch.equal(labels, inputs + 1)
        seen += labels.tolist()
    assert seen == list(range(1, len(seen) + 1))
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_less_than_one_sample_is_refused_with_what_would_fit():
    with pytest.raises(ValueError, match=r"seq_len=8: a sample takes 9 tokens and there are 8; seq_len=7 or less"):
        TokenDataset(tokens=np.zeros(8, np.uint16), seq_len=8)
    assert len(TokenDataset(tokens=np.zeros(8, np.uint16), seq_len=7)) == 1


def test_validation_is_cut_from_the_end():
    train, validation = split_tokens(np.arange(100), seq_len=4, validation_fraction=0.2)
    assert (train[0], train[-1], validation[0], validation[-1]) == (0, 79, 80, 99)
    assert split_tokens(np.arange(100), seq_len=4, validation_fraction=0)[1] is None


@pytest.mark.parametrize(("num_tokens", "seq_len"), [(1000, 99), (1000, 300), (23, 4), (1001, 7)])
def test_the_fractions_and_lengths_that_the_error_offers_do_fit(num_tokens, seq_len):
    problem = split_problem(num_tokens, seq_len=seq_len, validation_fraction=0.004)
    fraction = float(problem.split("set dataset.validation_fraction=")[1].split(" ")[0])
    assert split_problem(num_tokens, seq_len=seq_len, validation_fraction=fraction) is None
    assert split_problem(num_tokens, seq_len=seq_len, validation_fraction=0) is None
    if "or dataset.seq_len=" in problem:
        offered = int(problem.split("or dataset.seq_len=")[1].split(" ")[0])
        assert split_problem(num_tokens, seq_len=offered, validation_fraction=0.004) is None


def test_too_little_to_train_on_says_how_much_there_is_and_what_fits():
    problem = split_problem(100, seq_len=95, validation_fraction=0.1)
    assert "there are 90 to train on (100 in all, 10 held out); set dataset.seq_len=89 or less" in problem
    assert "dataset.seq_len=9 or less" in split_problem(100, seq_len=89, validation_fraction=0.1)


@pytest.mark.parametrize(("ids", "dtype", "position", "value"), [
    ([1, 2, 500, 3, 900], "uint16", 2, 500), ([1, -3, 900], "int32", 1, -3), ([100], "int64", 0, 100),
])
def test_an_id_outside_the_vocabulary_is_refused_with_its_position(tmp_path, ids, dtype, position, value):
    path = tmp_path / "ids"
    np.array(ids, DTYPES[dtype]).tofile(path)
    cache = Cache(root=tmp_path / "cache", fallback=tmp_path, notify=quiet)
    scan, _ = scan_token_file(path, dtype, cache=cache)
    with pytest.raises(ValueError, match=rf"position {position} is {value}, but ids must be from 0 to 99 \(model"):
        check_token_range(open_token_file(path, dtype), scan, vocab_size=100, path=path)


def test_a_token_file_is_scanned_once_and_again_after_it_changes(tmp_path):
    path = tmp_path / "ids"
    np.array([1, 2, 3], "<u2").tofile(path)
    stages = []
    cache = Cache(root=tmp_path / "cache", fallback=tmp_path, notify=lambda stage, *_: stages.append(stage))
    first, _ = scan_token_file(path, "uint16", cache=cache)
    assert stages
    stages.clear()
    assert scan_token_file(path, "uint16", cache=cache)[0] == first
    assert not stages
    np.array([1, 2, 9], "<u2").tofile(path)
    second, _ = scan_token_file(path, "uint16", cache=cache)
    assert (first.largest, second.largest) == (3, 9)
    assert first.sha256 != second.sha256


def chain(**changes) -> MarkovDataset:
    settings = {"num_samples": 20, "seq_len": 16, "vocab_size": 1000, "seed": 3, "split": TRAIN, **changes}
    return MarkovDataset(**settings)


def all_tokens(dataset: MarkovDataset) -> torch.Tensor:
    return torch.stack([dataset[index][0] for index in range(len(dataset))])


def test_a_synthetic_sample_depends_on_seed_split_and_index_alone():
    reference = all_tokens(chain())
    assert torch.equal(reference, all_tokens(chain()))
    assert torch.equal(reference, all_tokens(chain(num_samples=50))[:20])
    assert not torch.equal(reference, all_tokens(chain(seed=4)))
    assert not torch.equal(reference, all_tokens(chain(split=VALIDATION)))
    assert len({tuple(sample) for sample in reference.tolist()}) == 20


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 100, 50257])
def test_synthetic_tokens_stay_in_the_vocabulary(vocab_size):
    dataset = chain(vocab_size=vocab_size)
    inputs, labels = dataset[7]
    assert inputs.dtype == torch.int64
    assert inputs.shape == labels.shape == (16,)
    assert torch.equal(inputs[1:], labels[:-1])
    tokens = all_tokens(dataset)
    assert 0 <= tokens.min() <= tokens.max() < vocab_size


def test_the_synthetic_rule_can_be_learnt():
    train, validation = chain(num_samples=400, seq_len=256), chain(num_samples=40, seq_len=256, split=VALIDATION)
    counts = np.full((1000, 1000), 1e-4)
    for inputs, labels in (train[i] for i in range(len(train))):
        np.add.at(counts, (inputs.numpy(), labels.numpy()), 1)
    log_chances = np.log(counts / counts.sum(1, keepdims=True))
    pairs = [validation[i] for i in range(len(validation))]
    loss = -np.mean([log_chances[inputs.numpy(), labels.numpy()].mean() for inputs, labels in pairs])
    assert 0.9 < loss < 1.2  # the entropy of the four chances is 1.06 nats; ln(1000) is 6.9
