"""Byte-level BPE (the GPT-2 scheme), trained to the model's vocabulary size.

The model owns the vocabulary size; the tokenizer follows. The 256 bytes are always in it, so any text can be written
and read back exactly, and `<|endoftext|>` parts the documents. Text that happens to contain the characters
`<|endoftext|>` is encoded as those characters: only this module writes the special id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from framework.data.corpus import Corpus, Notify, Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and END_OF_TEXT
ENCODE_BATCH_BYTES = 4 << 20  # text encoded per call: spreads over the cores, and bounds the memory of the results


class TextTokenizer:
    """Text to ids and back."""

    def __init__(self, *, backend: Tokenizer) -> None:
        backend.encode_special_tokens = True  # the text "<|endoftext|>" is text; see above
        self._backend = backend
        self.end_of_text_id: int = backend.token_to_id(END_OF_TEXT)

    @classmethod
    def load(cls, path: Path) -> TextTokenizer:
        from tokenizers import Tokenizer

        return cls(backend=Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write the `tokenizers` JSON format, which Hugging Face's PreTrainedTokenizerFast reads."""
        self._backend.save(str(path))

    @property
    def num_tokens(self) -> int:
        """Ids in use; below the model's vocabulary size when the corpus was too small for more merges."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode on all cores; the result does not depend on how many there are."""
        return [encoded.ids for encoded in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_end_of_text: bool = False) -> str:
        """Ids to text. Ids the tokenizer does not use give nothing; half a character gives U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_end_of_text)


def vocab_size_problem(vocab_size: int) -> str | None:
    """What is wrong with training a tokenizer to this size, or None."""
    if vocab_size >= MIN_VOCAB_SIZE:
        return None
    return (
        f"model.vocab_size={vocab_size}: text needs at least {MIN_VOCAB_SIZE} (256 bytes and {END_OF_TEXT}); "
        f"set model.vocab_size={MIN_VOCAB_SIZE} or more, or use dataset=tokens or dataset=synthetic"
    )


def train_tokenizer(corpus: Corpus, *, vocab_size: int, notify: Notify) -> TextTokenizer:
    """Train on the whole corpus. Raises ValueError when `vocab_size` cannot hold the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if problem := vocab_size_problem(vocab_size):
        raise ValueError(problem)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for piece in with_progress(corpus, stage="counting words", notify=notify):
            yield piece.text
        notify("training tokenizer", 0, 0)  # the merges follow inside the library, which does not report them

    backend.train_from_iterator(texts(), trainer=trainer)
    notify("training tokenizer", 1, 1)
    return TextTokenizer(backend=backend)


def encode_corpus(
    corpus: Corpus, *, tokenizer: TextTokenizer, path: Path, dtype: np.dtype, notify: Notify
) -> int:
    """Write the ids of all documents, END_OF_TEXT after each, as a flat file of `dtype`. Returns how many."""
    end_of_text = np.array([tokenizer.end_of_text_id], dtype)
    num_tokens = 0
    with open(path, "wb") as file:
        for batch in _batches(with_progress(corpus, stage="tokenizing", notify=notify)):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                file.write(np.array(ids, dtype).data)
                num_tokens += len(ids)
                if piece.ends_document:
                    file.write(end_of_text.data)
                    num_tokens += 1
    return num_tokens


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that a flat file of ids below `vocab_size` needs."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def with_progress(corpus: Corpus, *, stage: str, notify: Notify) -> Iterator[Piece]:
    """The corpus's pieces, reporting the bytes that the consumer has taken."""
    done = 0
    for piece in corpus.pieces():
        notify(stage, done, corpus.num_bytes)
        yield piece
        done += piece.num_bytes
    notify(stage, corpus.num_bytes, corpus.num_bytes)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.num_bytes
        if num_bytes >= ENCODE_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
