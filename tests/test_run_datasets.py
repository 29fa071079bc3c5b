"""Whole runs on each kind of data: equal to plain torch on the same tokens, the same for all ranks or refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from framework.config import HfDataset, TextDataset, TokensDataset
from framework.data.source import prepare
from support.run_jobs import changed, rank_environment, run_here, run_in_pool, training_config
from support.run_oracle import oracle_source, train_oracle

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def story(number, length=400):
    rng = np.random.default_rng(number)
    return " ".join(WORDS[index] for index in rng.zipf(1.5, size=length) % len(WORDS)) + ".\n"


def config_on(dataset, *, devices=2, **changes):
    return training_config(devices=devices, dataset=dataset, zero={"stage": 3}, model={"vocab_size": 300},
                           **{"trainer": {"max_steps": 8, "val_steps": 1}, "batch": {"micro_size": 3}, **changes})


def assert_like_the_oracle(run, config, folder):
    source = oracle_source(config, folder)
    expected = train_oracle(config, source)
    assert run.column("loss") == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert run.summary["val_loss"] == pytest.approx(oracle_validation(config, source, expected), abs=1e-6)
    assert run.summary["data_hash"] == source.content_hash
    return source


def oracle_validation(config, source, expected):
    from support.run_oracle import oracle_val_loss

    return oracle_val_loss(expected.model, source, config)


def test_own_text_files(tmp_path):
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    for number, name in enumerate(("notes/a.md", "notes/deep/b.md", "c.txt")):
        (tmp_path / name).write_text(story(number))
    files = TextDataset(name="text", files=["notes/**/*.md", "c.txt"], seq_len=16, validation_fraction=0.1)
    config = config_on(files, task={"sample_tokens": 4, "prompt": "alpha beta", "temperature": 0.0})
    run = run_in_pool(config, tmp_path)
    source = assert_like_the_oracle(run, config, tmp_path)
    assert source.tokenizer.num_tokens <= 300
    assert "prompt: 'alpha beta'" in run.terminal
    for stage in ("counting words", "training tokenizer", "tokenizing"):
        assert stage in run.terminal, "whichever rank might come first, the one that shows progress prepares"
    again = run_in_pool(config, tmp_path)
    assert again.column("loss")[-8:] == run.column("loss")
    assert "training tokenizer" not in again.terminal, "it is done once"


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_a_file_of_tokens(tmp_path, dtype):
    tokens = np.random.default_rng(0).zipf(1.3, size=1500) % 300
    tokens.astype(f"<{np.dtype(dtype).str[1:]}").tofile(tmp_path / "own.bin")
    own = TokensDataset(name="tokens", path="own.bin", dtype=dtype, seq_len=16, validation_fraction=0.2)
    config = config_on(own, devices=3, batch={"micro_size": 2})
    run = run_in_pool(config, tmp_path)
    assert_like_the_oracle(run, config, tmp_path)
    assert run.column("loss")[-1] < run.column("loss")[0]


def test_a_local_hugging_face_dataset(tmp_path):
    pytest.importorskip("datasets")
    rows = "".join(json.dumps({"body": story(number)}) + "\n" for number in range(3))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = config_on(HfDataset(name="hf", path="rows.jsonl", subset=None, split="train", column="body", seq_len=16,
                                 validation_fraction=0.1))
    run = run_in_pool(config, tmp_path, worker=offline)
    assert run.summary["status"] == "completed"
    assert run.column("loss")[-1] < run.column("loss")[0]
    assert len(run.summary["data_hash"]) == 64


def offline(rank, config, path):
    import datasets.config

    datasets.config.HF_DATASETS_CACHE, datasets.config.HF_DATASETS_OFFLINE = path / "hf_cache", True
    run_here(rank, config, path)


def test_synthetic_data_repeats_and_is_learnt(tmp_path):
    config = training_config(devices=2, batch={"micro_size": 6}, dataset={"num_samples": 8},
                             trainer={"max_steps": 60, "val_steps": 0}, optimizer={"lr": 2e-2},
                             log={"every_steps": 60})
    run = run_in_pool(config, tmp_path)
    assert run.metrics[-1]["step"] == 60
    assert run.metrics[-1]["loss"] < 2.0, "8 samples, seen 90 times each, from ln(64) = 4.2"


def reads_its_own_data(rank, config, path):
    """Each rank reads a file of its own under the same name."""
    own = path / f"rank_{rank}"
    own.mkdir()
    (np.arange(900) % (50 + rank)).astype("<u2").tofile(own / "own.bin")

    def prepare_own(dataset, **settings):
        return prepare(dataset, **{**settings, "base": own})

    from unittest import mock

    with mock.patch("framework.tasks.session.prepare", prepare_own), pytest.raises(ValueError, match="dataset") as said:
        run_here(rank, config, path)
    return str(said.value)


def test_ranks_that_read_different_data_are_refused_on_all_of_them(tmp_path):
    own = TokensDataset(name="tokens", path="own.bin", dtype="uint16", seq_len=16, validation_fraction=0.2)
    said = run_in_pool(config_on(own, devices=3, batch={"micro_size": 2}), tmp_path, worker=reads_its_own_data).returned
    assert said[0] == said[1] == said[2]
    assert "ranks read different content" in said[0]
    assert all(f"rank {rank}: " in said[0] for rank in range(3))


def refused(rank, config, path):
    with pytest.raises(ValueError, match=r"dataset\.|model\.") as said:
        run_here(rank, config, path)
    return str(said.value)


def test_ids_beyond_the_vocabulary_are_refused_with_their_place(tmp_path):
    tokens = np.zeros(900, "<u2")
    tokens[123] = 300
    tokens.tofile(tmp_path / "own.bin")
    own = TokensDataset(name="tokens", path="own.bin", dtype="uint16", seq_len=16, validation_fraction=0.2)
    said = run_in_pool(config_on(own), tmp_path, worker=refused).returned
    assert said[0] == said[1]
    assert "position 123 is 300" in said[0]
    assert "model.vocab_size above the largest id, 300" in said[0]


def test_a_rank_finds_what_the_first_one_has_prepared(tmp_path):
    """Ranks that start together prepare text once; what they get is equal."""
    (tmp_path / "own.txt").write_text(story(0))
    files = TextDataset(name="text", files=["own.txt"], seq_len=16, validation_fraction=0.1)
    run = run_in_pool(config_on(files, devices=4), tmp_path, worker=run_and_look)
    assert run.returned == [run.returned[0]] * 4
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def run_and_look(rank, config, path):
    run_here(rank, config, path)
    with rank_environment(rank, 4, cache=path / "cache"):
        source = oracle_source(changed(config), path)
    return source.content_hash, source.train[0][0].tolist(), replace(config).seed
