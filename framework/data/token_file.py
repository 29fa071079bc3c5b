"""Flat binary files of token ids, read through a memory map.

A file is nothing but little-endian integers. It is scanned once for its hash and the range of its ids; the result is
remembered by the file's path, size and times, so a later start opens it at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from framework.data.cache import Cache
from framework.data.corpus import Notify

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "int32": np.dtype("<i4"), "int64": np.dtype("<i8")}
SCAN_TOKENS = 1 << 22  # ids looked at per read


@dataclass(frozen=True)
class TokenScan:
    """What one pass over a token file tells."""

    sha256: str
    smallest: int
    largest: int


def token_file_problem(path: Path, dtype: str) -> str | None:
    """Why `path` cannot hold tokens of `dtype`; None when it can. Looks at the size only."""
    if not path.is_file():
        return f"dataset.path={path}: there is no such file"
    num_bytes, item_bytes = path.stat().st_size, DTYPES[dtype].itemsize
    if num_bytes == 0:
        return f"dataset.path={path}: the file is empty"
    if num_bytes % item_bytes:
        fitting = [name for name, other in DTYPES.items() if num_bytes % other.itemsize == 0]
        hint = f"; its size fits dataset.dtype={' or '.join(fitting)}" if fitting else "; it may be cut off"
        return (f"dataset.path={path}: {num_bytes} bytes are not a whole number of {dtype} tokens "
                f"({item_bytes} bytes each){hint}")
    return None


def open_token_file(path: Path, dtype: str) -> NDArray:
    """Map the file's ids, read-only: [num_tokens] of `dtype`. Raises ValueError for a size that does not fit."""
    if problem := token_file_problem(path, dtype):
        raise ValueError(problem)
    return np.memmap(path, dtype=DTYPES[dtype], mode="r")


def scan_token_file(path: Path, dtype: str, *, cache: Cache) -> tuple[TokenScan, tuple[str, ...]]:
    """(hash and range of the ids, the cache's notices); from the cache when the file is unchanged."""
    stat = path.stat()
    settings = {"path": str(path.resolve()), "dtype": dtype, "bytes": stat.st_size, "inode": stat.st_ino,
                "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "format": 1}

    def build(folder: Path, notify: Notify) -> None:
        scan = scan_tokens(open_token_file(path, dtype), notify=notify)
        (folder / "scan.json").write_text(json.dumps(asdict(scan)), "utf-8")

    entry = cache.get("token-scan", settings, build)
    return TokenScan(**json.loads((entry.path / "scan.json").read_text("utf-8"))), entry.notices


def scan_tokens(tokens: NDArray, *, notify: Notify) -> TokenScan:
    """One chunked pass over the ids."""
    digest = hashlib.sha256()
    smallest, largest = int(tokens[0]), int(tokens[0])
    for start in range(0, len(tokens), SCAN_TOKENS):
        notify("checking tokens", start, len(tokens))
        chunk = np.ascontiguousarray(tokens[start : start + SCAN_TOKENS])
        digest.update(chunk.data)
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
    notify("checking tokens", len(tokens), len(tokens))
    return TokenScan(sha256=digest.hexdigest(), smallest=smallest, largest=largest)


def check_token_range(tokens: NDArray, scan: TokenScan, *, vocab_size: int, path: Path) -> None:
    """Raise ValueError naming the first id outside the model's vocabulary, and where it stands."""
    if scan.smallest >= 0 and scan.largest < vocab_size:
        return
    for start in range(0, len(tokens), SCAN_TOKENS):
        chunk = tokens[start : start + SCAN_TOKENS]
        outside = (chunk < 0) | (chunk >= vocab_size)
        if outside.any():
            position = int(outside.argmax())
            fix = ("set model.vocab_size above the largest id, " + str(scan.largest) if scan.smallest >= 0
                   else "check dataset.dtype: ids are never negative")
            raise ValueError(
                f"dataset.path={path}: the token at position {start + position} is {int(chunk[position])}, "
                f"but ids must be from 0 to {vocab_size - 1} (model.vocab_size={vocab_size}); {fix}"
            )


def split_tokens(tokens: NDArray, *, seq_len: int, validation_fraction: float) -> tuple[NDArray, NDArray | None]:
    """Cut the validation tokens from the end: (training, validation or None when the fraction is 0).

    Raises ValueError when a part holds less than one sample of `seq_len` tokens and the label after the last.
    """
    if problem := split_problem(len(tokens), seq_len=seq_len, validation_fraction=validation_fraction):
        raise ValueError(problem)
    num_train = len(tokens) - round(len(tokens) * validation_fraction)
    return tokens[:num_train], tokens[num_train:] if validation_fraction else None


def split_problem(num_tokens: int, *, seq_len: int, validation_fraction: float) -> str | None:
    """Which part of the split would hold less than one sample, and what would fit; None when both hold one."""
    num_validation = round(num_tokens * validation_fraction)
    num_train = num_tokens - num_validation
    if num_train <= seq_len:
        fits = f"set dataset.seq_len={num_train - 1} or less" if num_train > 1 else "no dataset.seq_len fits"
        return (f"dataset.seq_len={seq_len}: a sample takes {seq_len + 1} tokens, but there are {num_train} to train "
                f"on ({num_tokens} in all, {num_validation} held out); {fits}, or give more data")
    if validation_fraction == 0 or num_validation > seq_len:
        return None
    options = ["dataset.validation_fraction=0 to hold out nothing"]
    if num_tokens >= 2 * (seq_len + 2):
        options.insert(0, f"dataset.validation_fraction={math.ceil((seq_len + 2) / num_tokens * 1e4) / 1e4} or more")
    if num_validation > 1:
        options.append(f"dataset.seq_len={num_validation - 1} or less")
    return (f"dataset.validation_fraction={validation_fraction}: holds out {num_validation} of {num_tokens} tokens, "
            f"less than one sample ({seq_len + 1} tokens at dataset.seq_len={seq_len}); set {', or '.join(options)}")
