"""What can be said against a dataset's settings before any process starts, and without reading the data.

Imports no torch: the launcher asks before it starts the workers.
"""

from __future__ import annotations

from pathlib import Path

from framework.config import AUTO, HfDataset, StdlibDataset, SyntheticDataset, TextDataset, TokensDataset
from framework.data.corpus import text_files_problem
from framework.data.hf_corpus import hf_problem
from framework.data.token_file import DTYPES, split_problem, token_file_problem
from framework.data.tokenizer import vocab_size_problem

DatasetConfig = StdlibDataset | TextDataset | TokensDataset | HfDataset | SyntheticDataset


def find_dataset_problems(
    config: DatasetConfig, *, vocab_size: int, max_seq_len: int, base: Path
) -> list[str]:
    """Every problem, each naming key, value, what is allowed and the fix. `base`: where relative paths start."""
    problems = [_seq_len_problem(config.seq_len, max_seq_len)]
    if isinstance(config, StdlibDataset | TextDataset | HfDataset):
        problems.append(vocab_size_problem(vocab_size))
    if isinstance(config, TextDataset):
        problems.append(text_files_problem(config.files, base=base))
    if isinstance(config, HfDataset):
        problems.append(hf_problem(config, base=base))
    if isinstance(config, TokensDataset):
        path = token_path(config, base=base)
        problems.append(token_file_problem(path, config.dtype))
        if problems[-1] is None and problems[0] is None:
            problems.append(_too_few_tokens(config, path, max_seq_len))
    return [problem for problem in problems if problem is not None]


def resolve_seq_len(seq_len: int | str, max_seq_len: int) -> int:
    """`auto` is the model's `max_seq_len`. Raises ValueError above it."""
    if problem := _seq_len_problem(seq_len, max_seq_len):
        raise ValueError(problem)
    return max_seq_len if seq_len == AUTO else int(seq_len)


def token_path(config: TokensDataset, *, base: Path) -> Path:
    return base / Path(config.path).expanduser()


def _seq_len_problem(seq_len: int | str, max_seq_len: int) -> str | None:
    if seq_len == AUTO or int(seq_len) <= max_seq_len:
        return None
    return (f"dataset.seq_len={seq_len}: the model has model.max_seq_len={max_seq_len} positions; "
            f"set dataset.seq_len=auto or at most {max_seq_len}, or raise model.max_seq_len")


def _too_few_tokens(config: TokensDataset, path: Path, max_seq_len: int) -> str | None:
    num_tokens = path.stat().st_size // DTYPES[config.dtype].itemsize
    return split_problem(
        num_tokens, seq_len=resolve_seq_len(config.seq_len, max_seq_len),
        validation_fraction=config.validation_fraction,
    )
