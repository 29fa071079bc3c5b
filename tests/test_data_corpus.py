"""Text sources: what is in them, in which order, and their hash."""

import io
from pathlib import Path

import pytest

from framework.data.corpus import (
    Document,
    DocumentCorpus,
    find_text_files,
    read_pieces,
    stdlib_corpus,
    text_corpus,
)


def quiet(stage: str, done: float, total: float) -> None:
    pass


def texts(corpus) -> list[str]:
    return [piece.text for piece in corpus.pieces()]


def test_the_standard_library_is_megabytes_of_text_without_tests_and_hashes_the_same_twice():
    corpus = stdlib_corpus(notify=quiet)
    assert 8e6 < corpus.num_bytes < 20e6
    assert corpus.content_hash == stdlib_corpus(notify=quiet).content_hash
    assert list(corpus.names) == sorted(set(corpus.names))
    folders = {folder for name in corpus.names for folder in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
    assert "argparse.py" in corpus.names
    assert "pydoc_data/topics/lambda" in corpus.names
    assert "pydoc_data/topics.py" not in corpus.names


def test_globs_and_paths_start_at_the_given_folder_and_each_file_comes_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found, unmatched = find_text_files(["b.txt", "**/*.txt", "odd[1].txt"], base=tmp_path)
    names = [file.relative_to(tmp_path).as_posix() for file in found]
    assert names == ["b.txt", "a.txt", "deep/er/c.txt", "odd[1].txt"]
    assert unmatched == []


def test_relative_files_do_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    here = text_corpus(["a.txt"], base=tmp_path, notify=quiet).content_hash
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert text_corpus(["a.txt"], base=tmp_path, notify=quiet).content_hash == here
    assert text_corpus(["../a.txt"], base=elsewhere, notify=quiet).content_hash == here


def test_every_pattern_that_matches_nothing_is_listed(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"dataset\.files") as error:
        text_corpus(["a.txt", "nothing.txt", "*.md", "folder"], base=tmp_path, notify=quiet)
    message = str(error.value)
    assert "'nothing.txt'" in message
    assert "'*.md'" in message
    assert "'a.txt'" not in message
    assert "folder/**/*.txt" in message
    assert str(tmp_path) in message


def test_no_patterns_at_all_is_an_error_with_an_example(tmp_path):
    with pytest.raises(ValueError, match=r"dataset\.files=\[\].*'notes"):
        text_corpus([], base=tmp_path, notify=quiet)


@pytest.mark.parametrize("change", ["content", "name", "order"])
def test_the_hash_changes_with_content_name_and_order(change):
    def corpus(*documents: tuple[str, bytes]) -> DocumentCorpus:
        return DocumentCorpus(
            documents=[Document(name, lambda text=text: io.BytesIO(text)) for name, text in documents], notify=quiet
        )

    first = corpus(("a", b"one"), ("b", b"two"))
    other = {
        "content": corpus(("a", b"one"), ("b", b"twO")),
        "name": corpus(("a", b"one"), ("c", b"two")),
        "order": corpus(("b", b"two"), ("a", b"one")),
    }[change]
    assert first.content_hash != other.content_hash
    assert first.content_hash == corpus(("a", b"one"), ("b", b"two")).content_hash


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64, 4096])
def test_pieces_join_to_the_whole_text_wherever_blocks_cut_characters(piece_bytes):
    text = "é🙂\r\nplain line\n" * 20 + "no end of line ü"
    pieces = list(read_pieces(io.BytesIO(text.encode()), piece_bytes=piece_bytes))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_undecodable_bytes_are_replaced_and_empty_documents_give_no_piece(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"x\xff\xfey")
    corpus = text_corpus(["*.txt"], base=tmp_path, notify=quiet)
    assert texts(corpus) == ["x\ufffd\ufffdy"]
    assert corpus.num_bytes == 4
