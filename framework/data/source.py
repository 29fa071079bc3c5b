"""From a dataset's settings to samples: the one door of the data path.

    stdlib, text, hf:  corpus -> (cache: tokenizer, token file) -> split -> TokenDataset
    tokens:            token file -> (cache: scan) -> split -> TokenDataset
    synthetic:         MarkovDataset

Every rank calls `prepare` for itself, with or without a process group: the cache's lock lets the first one work and
the others wait, and the result depends on the content and the settings alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from framework.config import HfDataset, StdlibDataset, SyntheticDataset, TextDataset, TokensDataset
from framework.data.cache import Cache, user_cache_root
from framework.data.checks import DatasetConfig, resolve_seq_len, token_path
from framework.data.corpus import PIECE_BYTES, Corpus, Notify, stdlib_corpus, text_corpus
from framework.data.hf_corpus import hf_corpus
from framework.data.synthetic import TRAIN, VALIDATION, MarkovDataset, synthetic_hash
from framework.data.token_dataset import TokenDataset
from framework.data.token_file import check_token_range, open_token_file, scan_token_file, split_tokens
from framework.data.tokenizer import TextTokenizer, encode_corpus, token_dtype, train_tokenizer, vocab_size_problem

# Raised by one when the bytes that `encode_corpus` or `train_tokenizer` would write for the same settings change.
TEXT_FORMAT = 1

Samples = Dataset[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DataSource:
    """What a run trains on. Samples are (inputs_T, labels_T), int64; both splits have `len`.

    `content_hash` says what was read; ranks that trained on different content differ in it. `notices` are for the
    user, once.
    """

    train: Samples
    validation: Samples | None
    tokenizer: TextTokenizer | None
    content_hash: str
    num_train_tokens: int
    notices: tuple[str, ...] = ()


def prepare(
    config: DatasetConfig,
    *,
    vocab_size: int,
    max_seq_len: int,
    seed: int,
    base: Path,
    scratch: Path,
    notify: Notify,
    environ: Mapping[str, str] = os.environ,
) -> DataSource:
    """Make the data ready. Not collective; any number of processes may call it at once.

    `base`: where relative paths start. `scratch`: where prepared data goes if the user's cache folder cannot be used.
    Raises ValueError naming the key for data that does not fit the settings, and OSError for files that cannot be read.
    """
    seq_len = resolve_seq_len(config.seq_len, max_seq_len)
    if isinstance(config, SyntheticDataset):
        return _synthetic(config, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    cache = Cache(root=user_cache_root(environ, base=base), fallback=scratch / "cache", notify=notify)
    if isinstance(config, TokensDataset):
        return _token_file(config, seq_len=seq_len, vocab_size=vocab_size, base=base, cache=cache)
    if problem := vocab_size_problem(vocab_size):
        raise ValueError(problem)
    corpus = _corpus(config, base=base, notify=notify)
    return _text(config, corpus, seq_len=seq_len, vocab_size=vocab_size, cache=cache)


def _corpus(config: StdlibDataset | TextDataset | HfDataset, *, base: Path, notify: Notify) -> Corpus:
    if isinstance(config, StdlibDataset):
        corpus: Corpus = stdlib_corpus(notify=notify)
    elif isinstance(config, TextDataset):
        corpus = text_corpus(config.files, base=base, notify=notify)
    else:
        corpus = hf_corpus(config, base=base, notify=notify)
    if corpus.num_bytes == 0:
        raise ValueError(f"dataset={config.name}: there is no text in it; every document is empty")
    return corpus


def _text(
    config: StdlibDataset | TextDataset | HfDataset, corpus: Corpus, *, seq_len: int, vocab_size: int, cache: Cache
) -> DataSource:
    dtype = token_dtype(vocab_size)
    settings = {"content": corpus.content_hash, "vocab_size": vocab_size, "piece_bytes": PIECE_BYTES,
                "dtype": dtype.name, "tokenizers": metadata.version("tokenizers"), "format": TEXT_FORMAT}

    def build(folder: Path, notify: Notify) -> None:
        tokenizer = train_tokenizer(corpus, vocab_size=vocab_size, notify=notify)
        encode_corpus(corpus, tokenizer=tokenizer, path=folder / "tokens.bin", dtype=dtype, notify=notify)
        tokenizer.save(folder / "tokenizer.json")

    entry = cache.get("text", settings, build)
    tokenizer = TextTokenizer.load(entry.path / "tokenizer.json")
    notices = entry.notices
    if tokenizer.num_tokens < vocab_size:
        notices += (f"the text is too small for a vocabulary of model.vocab_size={vocab_size}: the tokenizer has "
                    f"{tokenizer.num_tokens} tokens, and ids from {tokenizer.num_tokens} on are never used",)
    tokens = open_token_file(entry.path / "tokens.bin", dtype.name)
    train, validation = split_tokens(tokens, seq_len=seq_len, validation_fraction=config.validation_fraction)
    return DataSource(
        train=TokenDataset(tokens=train, seq_len=seq_len),
        validation=None if validation is None else TokenDataset(tokens=validation, seq_len=seq_len),
        tokenizer=tokenizer,
        content_hash=corpus.content_hash,
        num_train_tokens=len(train),
        notices=notices,
    )


def _token_file(config: TokensDataset, *, seq_len: int, vocab_size: int, base: Path, cache: Cache) -> DataSource:
    path = token_path(config, base=base)
    tokens = open_token_file(path, config.dtype)
    train, validation = split_tokens(tokens, seq_len=seq_len, validation_fraction=config.validation_fraction)
    scan, notices = scan_token_file(path, config.dtype, cache=cache)
    check_token_range(tokens, scan, vocab_size=vocab_size, path=path)
    return DataSource(
        train=TokenDataset(tokens=train, seq_len=seq_len),
        validation=None if validation is None else TokenDataset(tokens=validation, seq_len=seq_len),
        tokenizer=None,
        # The same bytes are other tokens under another type.
        content_hash=hashlib.sha256(f"{config.dtype} {scan.sha256}".encode()).hexdigest(),
        num_train_tokens=len(train),
        notices=notices,
    )


def _synthetic(config: SyntheticDataset, *, seq_len: int, vocab_size: int, seed: int) -> DataSource:
    def split(number: int, num_samples: int) -> MarkovDataset:
        return MarkovDataset(
            num_samples=num_samples, seq_len=seq_len, vocab_size=vocab_size, seed=seed, split=number
        )

    return DataSource(
        train=split(TRAIN, config.num_samples),
        validation=split(VALIDATION, config.num_validation_samples) if config.num_validation_samples else None,
        tokenizer=None,
        content_hash=synthetic_hash(
            seq_len=seq_len, vocab_size=vocab_size, seed=seed, num_samples=config.num_samples,
            num_validation_samples=config.num_validation_samples,
        ),
        num_train_tokens=config.num_samples * seq_len,
    )
