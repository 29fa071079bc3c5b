"""Data for runs that the datasets of the framework do not give: labels left out, samples all alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from framework.config import RunConfig
from framework.data.source import DataSource, Samples
from framework.data.step_loader import IGNORED_LABEL, StepLoader
from support.run_oracle import oracle_source


@dataclass(frozen=True)
class Masked:
    """The samples of `base`; sample i keeps its first `kept[i]` labels."""

    base: Samples
    kept: list[int]

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens_T, labels_T = self.base[index]
        labels_T = labels_T.clone()
        labels_T[self.kept[index] :] = IGNORED_LABEL
        return tokens_T, labels_T


@dataclass(frozen=True)
class Alike:
    """The first sample of `base`, as often as `base` has samples."""

    base: Samples

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.base[0]


def uneven_labels(config: RunConfig, path: Path) -> DataSource:
    """Every sample has another number of labels, some have one and some none."""
    source = oracle_source(config, path)
    generator = torch.Generator().manual_seed(7)
    kept = torch.randint(0, config.dataset.seq_len + 1, (len(source.train),), generator=generator).tolist()
    return replace(source, train=Masked(source.train, kept))


UNLABELLED_STEP = 2  # from 0
UNLABELLED_MICRO_BATCH = 1  # step whose second half begins with a sample without labels


def unlabelled(config: RunConfig, path: Path) -> DataSource:
    """One update has no labels at all; in the one before, the first micro-batch of the second half has none."""
    source = oracle_source(config, path)
    loader = StepLoader(source.train, global_size=config.batch.global_size, micro_size=1, data_rank=0, data_size=1,
                        seed=config.seed)
    kept = [config.dataset.seq_len] * len(source.train)
    for sample in loader.sample_ids(UNLABELLED_STEP):
        kept[sample] = 0
    kept[loader.sample_ids(UNLABELLED_MICRO_BATCH)[config.batch.global_size // 2]] = 0
    return replace(source, train=Masked(source.train, kept))


def alike(config: RunConfig, path: Path) -> DataSource:
    """All samples are the same: what differs between ranks then does not come from the data."""
    source = oracle_source(config, path)
    return replace(source, train=Alike(source.train))
