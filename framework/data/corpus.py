"""Text as a corpus: documents in a fixed order, read piece by piece, with a hash of everything in them.

A corpus is read twice: once for its hash (which says whether the cache already holds its tokens) and, only if it does
not, once more to train the tokenizer and to encode. Nothing is held whole in memory: a long document comes as several
pieces. Bytes that are not UTF-8 become U+FFFD; line ends stay as they are.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

PIECE_BYTES = 1 << 20  # a file up to this size is one piece, so its tokens do not depend on where it would be cut

# Folders of the standard library that are tests, caches or other people's packages.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib-dynload"}
)


class Notify(Protocol):
    """Receives progress: `done` of `total` of what `stage` names. A `total` of 0 means that the length is unknown."""

    def __call__(self, stage: str, done: float, total: float) -> None: ...


@dataclass(frozen=True)
class Piece:
    """Consecutive text of one document; `num_bytes` is its size before decoding."""

    text: str
    num_bytes: int
    ends_document: bool


class Corpus(Protocol):
    """What the tokenizer needs of a text source."""

    content_hash: str
    num_bytes: int

    def pieces(self) -> Iterator[Piece]:
        """Read the text from its beginning, in an order that depends on the content alone."""
        ...


@dataclass(frozen=True)
class Document:
    """A named stretch of bytes that can be opened again and again."""

    name: str
    open: Callable[[], BinaryIO]


class DocumentCorpus:
    """Documents in the given order. Empty ones are part of the hash and of nothing else."""

    def __init__(self, *, documents: Sequence[Document], notify: Notify) -> None:
        """Reads everything once, for the hash. Raises OSError for a file that cannot be read."""
        self._documents = tuple(documents)
        self.num_bytes = 0
        digest = hashlib.sha256()
        for index, document in enumerate(self._documents):
            notify("reading text", index, len(self._documents))
            with document.open() as file:
                content = hashlib.file_digest(file, "sha256")
                self.num_bytes += file.seek(0, os.SEEK_END)
            digest.update(hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest())
            digest.update(content.digest())
        notify("reading text", len(self._documents), len(self._documents))
        self.content_hash = digest.hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(document.name for document in self._documents)

    def pieces(self) -> Iterator[Piece]:
        for document in self._documents:
            with document.open() as file:
                yield from read_pieces(file)


def read_pieces(file: BinaryIO, *, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Decode a file in pieces of about `piece_bytes`, cut after a line end where there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps a character that a block cuts in two
    block = file.read(piece_bytes)
    kept = ""
    while block:
        following = file.read(piece_bytes)
        text = kept + decoder.decode(block, final=not following)
        cut = text.rfind("\n") + 1 if following else 0
        cut = cut or len(text)
        kept = text[cut:]
        if text:
            yield Piece(text=text[:cut], num_bytes=len(block), ends_document=not following)
        block = following


def stdlib_corpus(*, notify: Notify) -> DocumentCorpus:
    """The source of the running interpreter's standard library, and the topics of its help.

    `pydoc_data/topics.py` holds prose as escaped string literals; it is replaced by the prose itself.
    Raises ValueError where the library has no source files (an interpreter that keeps it in a zip file).
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = [Document(name, partial(open, root / name, "rb")) for name in _stdlib_source_names(root)]
    if not documents:
        raise ValueError(
            f"dataset=stdlib: {root} has no .py files, so this interpreter's standard library is no text to train on; "
            "use dataset=text with dataset.files=[...] or a Python that comes with its library's source"
        )
    documents += [Document(name, partial(io.BytesIO, text)) for name, text in _help_topics()]
    return DocumentCorpus(documents=sorted(documents, key=lambda document: document.name), notify=notify)


def _stdlib_source_names(root: Path) -> list[str]:
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]  # not dangling links
    return [name for name in names if name != "pydoc_data/topics.py"]


def _help_topics() -> list[tuple[str, bytes]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart; the source alone is corpus enough
        return []
    return [(f"pydoc_data/topics/{name}", text.encode("utf-8", "replace")) for name, text in topics.items()]


def find_text_files(patterns: Sequence[str], *, base: Path) -> tuple[list[Path], list[str]]:
    """Files that paths or globs name, relative ones taken from `base`.

    Returns the files (absolute; in the order of the patterns, sorted inside one, each once) and the patterns that
    name no file. A path that exists is never read as a glob, so a name may hold brackets.
    """
    found: dict[Path, None] = {}
    unmatched = []
    for pattern in patterns:
        path = base / Path(pattern).expanduser()
        if path.exists():
            matches = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [Path(os.path.abspath(match)) for match in matches if match.is_file()]
        found.update(dict.fromkeys(files))
        if not files:
            unmatched.append(pattern)
    return list(found), unmatched


def text_files_problem(patterns: Sequence[str], *, base: Path) -> str | None:
    """What is wrong with `dataset.files`, as one message; None when every pattern names a file."""
    if not patterns:
        return "dataset.files=[]: name at least one file or glob, such as dataset.files=['notes/**/*.md']"
    _, unmatched = find_text_files(patterns, base=base)
    if not unmatched:
        return None
    folders = [pattern for pattern in unmatched if (base / Path(pattern).expanduser()).is_dir()]
    hint = f"; for the files in a folder write dataset.files=['{folders[0].rstrip('/')}/**/*.txt']" if folders else ""
    listed = ", ".join(repr(pattern) for pattern in unmatched)
    return f"dataset.files: no file matches {listed} (relative paths start at {base}){hint}"


def text_corpus(patterns: Sequence[str], *, base: Path, notify: Notify) -> DocumentCorpus:
    """One document per file. Raises ValueError listing every pattern that names no file.

    Names in the hash are relative to the files' common folder: the same files give the same hash from any directory.
    """
    if problem := text_files_problem(patterns, base=base):
        raise ValueError(problem)
    files, _ = find_text_files(patterns, base=base)
    common = os.path.commonpath([file.parent for file in files])
    documents = [Document(os.path.relpath(file, common), partial(open, file, "rb")) for file in files]
    return DocumentCorpus(documents=documents, notify=notify)
