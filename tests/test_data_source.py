"""`prepare`: each dataset from its settings to samples, and what is said against wrong settings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

import framework
from framework.config import AUTO, VARIANTS, StdlibDataset, SyntheticDataset, TextDataset, TokensDataset
from framework.data.checks import find_dataset_problems
from framework.data.source import prepare

TEXT = "the quick brown fox jumps over the lazy dog; then the dog sleeps.\n" * 60


def text_settings(**changes) -> TextDataset:
    return TextDataset(**{"name": "text", "files": ["*.txt"], "seq_len": AUTO, "validation_fraction": 0.2, **changes})


def token_settings(**changes) -> TokensDataset:
    return TokensDataset(**{"name": "tokens", "path": "ids.bin", "dtype": "uint16", "seq_len": AUTO,
                            "validation_fraction": 0.2, **changes})


def synthetic_settings(**changes) -> SyntheticDataset:
    return SyntheticDataset(**{"name": "synthetic", "num_samples": 10, "num_validation_samples": 3, "seq_len": AUTO,
                               **changes})


@pytest.fixture
def call(tmp_path):
    """`call(config)` prepares with everything below tmp_path; `call.stages` collects the progress."""
    stages = []

    def prepare_here(config, **changes):
        settings = {"vocab_size": 300, "max_seq_len": 16, "seed": 1, "base": tmp_path, "scratch": tmp_path / "run",
                    "notify": lambda stage, done, total: stages.append(stage),
                    "environ": {"SHARDLIGHT_CACHE": str(tmp_path / "cache")}, **changes}
        return prepare(config, **settings)

    prepare_here.stages = stages
    return prepare_here


def test_text_becomes_samples_and_the_second_start_finds_them(call, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT.upper())
    first = call(text_settings())
    assert "tokenizing" in call.stages
    call.stages.clear()
    second = call(text_settings())
    assert set(call.stages) == {"reading text"}
    assert first.content_hash == second.content_hash
    assert first.notices == second.notices == ()
    assert torch.equal(first.train[3][0], second.train[3][0])
    tokens = torch.cat([first.train[i][0] for i in range(len(first.train))])
    assert (TEXT + TEXT.upper()).startswith(first.tokenizer.decode(tokens[:200].tolist()))
    assert first.train[0][0].shape == (16,)
    assert len(first.validation) > 0
    assert first.num_train_tokens // 16 - len(first.train) in (0, 1)
    assert not (tmp_path / "run").exists()


def test_seq_len_and_split_share_an_entry_and_vocabulary_and_content_do_not(call, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    call(text_settings())
    call(text_settings(seq_len=8, validation_fraction=0.0))
    assert len(list((tmp_path / "cache").glob("text-*/"))) == 1
    call(text_settings(), vocab_size=290)
    (tmp_path / "a.txt").write_text(TEXT + "more")
    call(text_settings())
    assert len(list((tmp_path / "cache").glob("text-*/"))) == 3


def test_text_too_small_for_the_vocabulary_is_said(call, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    source = call(text_settings(), vocab_size=5000)
    assert source.tokenizer.num_tokens < 5000
    assert "model.vocab_size=5000" in source.notices[0]
    assert call(text_settings(), vocab_size=5000).notices == source.notices


def test_empty_text_is_refused(call, tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="dataset=text: there is no text in it"):
        call(text_settings())


def test_a_cache_folder_that_cannot_be_used_falls_back_to_the_runs_folder(call, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "file").write_text("")
    source = call(text_settings(), environ={"SHARDLIGHT_CACHE": "file/cache"})
    assert len(source.train) > 0
    assert "file/cache cannot be used" in source.notices[0]
    assert (tmp_path / "run" / "cache").is_dir()


def test_a_token_file_becomes_samples(call, tmp_path):
    np.arange(200, dtype="<u2").tofile(tmp_path / "ids.bin")
    source = call(token_settings())
    assert source.train[1][0].tolist() == list(range(16, 32))
    assert source.validation[0][0][0] == 160
    assert source.tokenizer is None
    assert source.num_train_tokens == 160
    assert source.content_hash == call(token_settings(seq_len=4)).content_hash
    assert source.content_hash != call(token_settings(dtype="int32"), vocab_size=1 << 31).content_hash
    with pytest.raises(ValueError, match=r"position 150 is 150"):
        call(token_settings(), vocab_size=150)


def test_synthetic_samples_follow_the_seed(call, tmp_path):
    source, again, other = call(synthetic_settings()), call(synthetic_settings()), call(synthetic_settings(), seed=2)
    assert torch.equal(source.train[3][0], again.train[3][0])
    assert not torch.equal(source.train[3][0], other.train[3][0])
    assert source.content_hash == again.content_hash != other.content_hash
    assert (len(source.train), len(source.validation), source.num_train_tokens) == (10, 3, 160)
    assert call(synthetic_settings(num_validation_samples=0)).validation is None
    assert not (tmp_path / "cache").exists()


def test_a_sample_longer_than_the_model_is_refused(call):
    with pytest.raises(ValueError, match=r"dataset\.seq_len=17: .*model\.max_seq_len=16"):
        call(synthetic_settings(seq_len=17))


def test_all_problems_of_the_settings_are_found_at_once_without_reading(tmp_path):
    def problems(config, **changes):
        return find_dataset_problems(config, **{"vocab_size": 300, "max_seq_len": 16, "base": tmp_path, **changes})

    stdlib = StdlibDataset(name="stdlib", seq_len=AUTO, validation_fraction=0.1)
    assert problems(stdlib) == []
    assert len(problems(text_settings(seq_len=99), vocab_size=100)) == 3
    assert problems(synthetic_settings(), vocab_size=2) == []
    (tmp_path / "ids.bin").write_bytes(b"\0" * 20)
    assert "held out" in problems(token_settings())[0]
    assert problems(token_settings(seq_len=1)) == []
    assert "not a whole number" in problems(token_settings(dtype="int64"))[0]
    assert "no such file" in problems(token_settings(path="nothing.bin"))[0]


@pytest.mark.parametrize("name", list(VARIANTS["dataset"]))
def test_each_yaml_has_exactly_the_keys_of_its_dataclass(name):
    folder = Path(framework.__file__).resolve().parent.parent / "conf"
    with initialize_config_dir(str(folder), version_base="1.3"):
        node = compose(overrides=[f"+dataset={name}"]).dataset
    assert set(node) == set(VARIANTS["dataset"][name].__dataclass_fields__)
    assert node.name == name
