"""A Hugging Face dataset as a corpus: files and folders on this machine, read without the network."""

import importlib.util
import json

import pytest

from framework.config import HfDataset
from framework.data.checks import find_dataset_problems
from framework.data.hf_corpus import hf_corpus

ROWS = ["first text", "", "third\ntext"]


def quiet(stage: str, done: float, total: float) -> None:
    pass


def settings(path: str, *, split: str = "train", column: str = "text") -> HfDataset:
    return HfDataset(
        name="hf", path=path, subset=None, split=split, column=column, seq_len="auto", validation_fraction=0.0
    )


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    monkeypatch.setattr(module.config, "HF_DATASETS_OFFLINE", True)
    return module


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'shardlight\[hf\]'"):
        hf_corpus(settings("anything"), base=tmp_path, notify=quiet)


def write_jsonl(folder):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return "rows.jsonl"


def write_parquet(folder):
    import datasets

    datasets.Dataset.from_dict({"text": ROWS}).to_parquet(str(folder / "rows.parquet"))
    return "rows.parquet"


def write_saved(folder):
    import datasets

    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(str(folder / "saved"))
    return "saved"


def write_saved_splits(folder):
    import datasets

    splits = {"train": datasets.Dataset.from_dict({"text": ROWS}), "test": datasets.Dataset.from_dict({"text": ["t"]})}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "splits"))
    return "splits"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_saved, write_saved_splits])
def test_local_data_is_a_corpus_of_its_rows_with_one_hash_for_the_same_text(datasets, tmp_path, write):
    corpus = hf_corpus(settings(write(tmp_path)), base=tmp_path, notify=quiet)
    assert [piece.text for piece in corpus.pieces()] == ["first text", "third\ntext"]
    assert corpus.num_bytes == 20
    again = hf_corpus(settings(write_jsonl(tmp_path)), base=tmp_path, notify=quiet)
    assert corpus.content_hash == again.content_hash


def test_a_text_file_is_one_document(datasets, tmp_path):
    (tmp_path / "story.txt").write_text("line one\nline two\n")
    corpus = hf_corpus(settings("story.txt"), base=tmp_path, notify=quiet)
    assert [piece.text for piece in corpus.pieces()] == ["line one\nline two\n"]


def test_a_wrong_column_or_split_lists_those_there_are(datasets, tmp_path):
    path = write_saved_splits(tmp_path)
    with pytest.raises(ValueError, match=r"dataset\.column=body.*columns text"):
        hf_corpus(settings(path, column="body"), base=tmp_path, notify=quiet)
    with pytest.raises(ValueError, match=r"dataset\.split=dev.*train, test"):
        hf_corpus(settings(path, split="dev"), base=tmp_path, notify=quiet)
    with pytest.raises(ValueError, match=r"dataset\.split=dev"):
        hf_corpus(settings(write_jsonl(tmp_path), split="dev"), base=tmp_path, notify=quiet)


def test_a_column_of_numbers_is_refused(datasets, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match=r"dataset\.column=text.*int"):
        hf_corpus(settings("rows.jsonl"), base=tmp_path, notify=quiet)


@pytest.mark.parametrize("path", ["./nothing", "nothing.jsonl", "/nothing/at/all"])
def test_a_local_path_that_is_not_there_is_found_before_anything_is_loaded(datasets, tmp_path, path):
    problems = find_dataset_problems(settings(path), vocab_size=300, max_seq_len=8, base=tmp_path)
    assert len(problems) == 1
    assert problems[0].startswith(f"dataset.path={path}: there is no such file")
