"""Token ids as samples of one fixed length.

B: samples, T: tokens per sample (`seq_len`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is `tokens[i * T : i * T + T + 1]`: inputs are all but its last token, labels all but its first.

    Labels are shifted here, so a model compares position t with `labels[t]`. Every token but the very first is a label
    once, except those of an incomplete last sample.
    """

    def __init__(self, *, tokens: NDArray, seq_len: int) -> None:
        """`tokens`: [num_tokens] of any integer type, in memory or mapped. Raises ValueError below one sample."""
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len}: a sample has at least 1 token")
        self._tokens = tokens
        self.seq_len = seq_len
        self._num_samples = (len(tokens) - 1) // seq_len
        if self._num_samples < 1:
            fits = f"seq_len={len(tokens) - 1} or less would fit" if len(tokens) > 1 else "no seq_len fits"
            raise ValueError(
                f"seq_len={seq_len}: a sample takes {seq_len + 1} tokens and there are {len(tokens)}; {fits}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs_T, labels_T), int64."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        start = index * self.seq_len
        window = torch.from_numpy(self._tokens[start : start + self.seq_len + 1].astype(np.int64))
        return window[:-1], window[1:]
