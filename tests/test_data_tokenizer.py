"""The tokenizer: exact vocabulary sizes, exact round trips, the same result everywhere."""

import hashlib
import io
import os
import subprocess
import sys

import numpy as np
import pytest

from framework.data.corpus import Document, DocumentCorpus
from framework.data.tokenizer import END_OF_TEXT, TextTokenizer, encode_corpus, token_dtype, train_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog; then the dog sleeps. " * 40


def quiet(stage: str, done: float, total: float) -> None:
    pass


def corpus_of(*documents: str) -> DocumentCorpus:
    return DocumentCorpus(
        documents=[Document(f"{i}", lambda text=text: io.BytesIO(text.encode())) for i, text in enumerate(documents)],
        notify=quiet,
    )


@pytest.mark.parametrize("vocab_size", [257, 258, 290])
def test_the_vocabulary_has_exactly_the_models_size(vocab_size):
    tokenizer = train_tokenizer(corpus_of(TEXT), vocab_size=vocab_size, notify=quiet)
    assert tokenizer.num_tokens == vocab_size
    assert max(tokenizer.encode(TEXT)) < vocab_size


def test_a_vocabulary_without_room_for_the_bytes_is_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"model\.vocab_size=256.*model\.vocab_size=257.*dataset=tokens"):
        train_tokenizer(corpus_of(TEXT), vocab_size=256, notify=quiet)


def test_a_small_corpus_gives_fewer_tokens_than_asked_for():
    assert 257 < train_tokenizer(corpus_of("abab"), vocab_size=5000, notify=quiet).num_tokens < 5000


@pytest.mark.parametrize("text", ["", " ", "héllo 🙂\r\n\tx", f"a{END_OF_TEXT}b", "".join(map(chr, range(256)))])
def test_any_text_comes_back_exactly_and_never_holds_the_special_id(text, tmp_path):
    trained = train_tokenizer(corpus_of(TEXT), vocab_size=270, notify=quiet)
    trained.save(tmp_path / "tokenizer.json")
    for tokenizer in (trained, TextTokenizer.load(tmp_path / "tokenizer.json")):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text_id not in ids


def test_documents_are_parted_by_the_special_id(tmp_path):
    corpus = corpus_of("one", "", f"two {END_OF_TEXT}")
    tokenizer = train_tokenizer(corpus, vocab_size=257, notify=quiet)
    count = encode_corpus(
        corpus, tokenizer=tokenizer, path=tmp_path / "ids", dtype=token_dtype(257), notify=quiet
    )
    ids = np.fromfile(tmp_path / "ids", token_dtype(257)).tolist()
    end = tokenizer.end_of_text_id
    assert ids == [*tokenizer.encode("one"), end, *tokenizer.encode(f"two {END_OF_TEXT}"), end]
    assert count == len(ids)
    assert tokenizer.decode(ids, skip_end_of_text=True) == f"onetwo {END_OF_TEXT}"


def test_ids_are_stored_in_the_narrowest_type():
    assert [token_dtype(size).name for size in (257, 65536, 65537, 250000)] == ["uint16", "uint16", "uint32", "uint32"]


def test_progress_ends_at_the_total_of_every_stage(tmp_path):
    calls = []
    corpus = corpus_of(TEXT, TEXT)
    tokenizer = train_tokenizer(corpus, vocab_size=257, notify=lambda *call: calls.append(call))
    encode_corpus(
        corpus, tokenizer=tokenizer, path=tmp_path / "ids", dtype=token_dtype(257),
        notify=lambda *call: calls.append(call),
    )
    last = {stage: (done, total) for stage, done, total in calls}
    assert list(last) == ["counting words", "training tokenizer", "tokenizing"]
    assert all(done == total > 0 for done, total in last.values())


SCRIPT = """
import sys, pathlib
from framework.data.corpus import text_corpus
from framework.data.tokenizer import train_tokenizer
quiet = lambda *call: None
corpus = text_corpus(["*.txt"], base=pathlib.Path(sys.argv[1]), notify=quiet)
train_tokenizer(corpus, vocab_size=400, notify=quiet).save(pathlib.Path(sys.argv[2]))
"""


def test_the_tokenizer_is_the_same_in_every_process_and_with_any_number_of_threads(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(TEXT + str(i))
    hashes = set()
    for threads in ("1", "2", "3"):
        path = tmp_path / f"{threads}.json"
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(path)], check=True,
            env={**os.environ, "RAYON_NUM_THREADS": threads},
        )
        hashes.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(hashes) == 1
