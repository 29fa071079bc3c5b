"""A column of a Hugging Face dataset as a corpus: one document per row.

`datasets` is an extra and is imported only here, when a run asks for it. What is on this machine (a file, a folder of
files, a folder that `save_to_disk` wrote) is read without the network; anything else is a name on the hub.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from framework.config import HfDataset
from framework.data.corpus import Notify, Piece

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_READ = 1000
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".parquet": "parquet"}
COMPRESSIONS = frozenset({".gz", ".bz2", ".xz", ".zst"})


class HfCorpus:
    """The text column of a map-style dataset, in the order of its rows. Empty rows are no documents."""

    def __init__(self, *, dataset: Dataset, column: str, notify: Notify) -> None:
        """Reads the column once, for the hash. Raises ValueError for a column that is missing or holds no text."""
        if column not in dataset.column_names:
            raise ValueError(f"dataset.column={column}: the dataset has the columns {', '.join(dataset.column_names)}")
        self._dataset = dataset.select_columns([column])
        self._column = column
        self.num_bytes = 0
        digest = hashlib.sha256()
        for index, text in enumerate(self._texts()):
            if index % ROWS_PER_READ == 0:
                notify("reading text", index, len(dataset))
            content = text.encode("utf-8", "replace")
            self.num_bytes += len(content)
            digest.update(hashlib.sha256(content).digest())
        notify("reading text", len(dataset), len(dataset))
        self.content_hash = digest.hexdigest()

    def _texts(self) -> Iterator[str]:
        for rows in self._dataset.iter(batch_size=ROWS_PER_READ):
            for value in rows[self._column]:
                if value is not None and not isinstance(value, str):
                    raise ValueError(
                        f"dataset.column={self._column}: holds {type(value).__name__}, not text; name a text column"
                    )
                yield value or ""

    def pieces(self) -> Iterator[Piece]:
        for text in self._texts():
            if text:
                yield Piece(text=text, num_bytes=len(text.encode("utf-8", "replace")), ends_document=True)


def hf_problem(config: HfDataset, *, base: Path) -> str | None:
    """What can be said against the settings without loading anything; None when nothing can."""
    if importlib.util.find_spec("datasets") is None:
        return "dataset=hf: the package `datasets` is not installed; install it with: pip install 'shardlight[hf]'"
    path = Path(config.path).expanduser()
    looks_local = path.is_absolute() or config.path.startswith((".", "~")) or _file_format(path) is not None
    if looks_local and not (base / path).exists():
        return f"dataset.path={config.path}: there is no such file or folder (relative paths start at {base})"
    if (base / path).is_file() and _file_format(path) is None:
        return f"dataset.path={config.path}: the file's name must end in one of {', '.join(sorted(FILE_FORMATS))}"
    return None


def hf_corpus(config: HfDataset, *, base: Path, notify: Notify) -> HfCorpus:
    """Load the split. Raises ValueError naming the key when the extra, the path, the split or the column is missing."""
    if problem := hf_problem(config, base=base):
        raise ValueError(problem)
    notify("loading dataset", 0, 1)
    path = base / Path(config.path).expanduser()
    dataset = _load_local(path, config) if path.exists() else _load(config.path, config)
    notify("loading dataset", 1, 1)
    return HfCorpus(dataset=dataset, column=config.column, notify=notify)


def _load_local(path: Path, config: HfDataset) -> Dataset:
    import datasets

    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(path))
        if config.split not in splits:
            raise ValueError(f"dataset.split={config.split}: {path} has the splits {', '.join(splits)}")
        return splits[config.split]
    if (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))  # a single split: it has no name to check
    if path.is_dir():
        return _load(str(path), config)
    file_format = _file_format(path)
    # A text file is one document, as under dataset=text; the loader's default is a row per line.
    options = {"sample_by": "document"} if file_format == "text" else {}
    return _load(file_format, config, data_files=str(path), **options)


def _load(name: str, config: HfDataset, **options: str) -> Dataset:
    import datasets

    try:
        return datasets.load_dataset(name, config.subset, split=config.split, **options)
    except (ValueError, FileNotFoundError) as error:  # unknown name, split or configuration: the library says which
        raise ValueError(
            f"dataset.path={config.path}, dataset.subset={config.subset}, dataset.split={config.split}: {error}"
        ) from error


def _file_format(path: Path) -> str | None:
    """Loader for a file name, compression aside; None when no loader reads it."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return FILE_FORMATS.get(suffixes[-1]) if suffixes else None
