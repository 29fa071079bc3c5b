"""Random tokens that follow a learnable rule, for runs without data.

A Markov chain: from each token one of four successors follows, with unequal chances. Only the last token matters, so a
model learns the rule quickly, from ln(vocab_size) down to the chain's entropy (about 1.06 nats), and no further.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

SUCCESSOR_CHANCES = (0.6, 0.2, 0.15, 0.05)
# Tokens the chain visits, spread over the whole vocabulary: few, so that each is met often enough to be learnt.
NUM_ACTIVE_TOKENS = 256
# What a stream of random numbers is for: one seed gives independent ones (step_loader.py has the fourth).
RULE, TRAIN, VALIDATION = 0, 1, 2


class MarkovDataset(Dataset[tuple[Tensor, Tensor]]):
    """Sample i depends on (seed, split, i) and on the shape, never on ranks, order or num_samples."""

    def __init__(self, *, num_samples: int, seq_len: int, vocab_size: int, seed: int, split: int = TRAIN) -> None:
        self.seq_len = seq_len
        self._num_samples = num_samples
        self._seed = seed
        self._split = split
        self._tokens, self._successors = _chain(vocab_size=vocab_size, seed=seed)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs_T, labels_T), int64; labels are the inputs' next tokens."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        draws = _uniforms(self._seed, (self._split, index), self.seq_len + 1)
        choices = np.searchsorted(np.cumsum(SUCCESSOR_CHANCES[:-1]), draws[1:], side="right")
        state = int(draws[0] * len(self._tokens))
        states = [state]
        for choice in choices.tolist():
            state = self._successors[state][choice]
            states.append(state)
        window = torch.from_numpy(self._tokens[states])
        return window[:-1], window[1:]


def _chain(*, vocab_size: int, seed: int) -> tuple[NDArray[np.int64], list[list[int]]]:
    """The ids of the chain's states [num_states], and the states that follow each [num_states][4]."""
    num_states = min(vocab_size, NUM_ACTIVE_TOKENS)
    num_successors = len(SUCCESSOR_CHANCES)
    draws = _uniforms(seed, (RULE,), vocab_size + num_states * num_successors)
    tokens = np.sort(np.argsort(draws[:vocab_size], kind="stable")[:num_states])
    successors = (draws[vocab_size:] * num_states).astype(np.int64).reshape(num_states, num_successors)
    # The likeliest successor leads round all states: no chain is caught in a few of them.
    successors[:, 0] = (np.arange(num_states) + 1) % num_states
    return tokens, successors.tolist()


def _uniforms(seed: int, purpose: tuple[int, ...], count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1). Raw Philox output is the same in every numpy version; derived draws may change."""
    raw = np.random.Philox(np.random.SeedSequence(seed, spawn_key=purpose)).random_raw(count)
    return (raw >> np.uint64(11)) * 2.0**-53


def synthetic_hash(*, seq_len: int, vocab_size: int, seed: int, num_samples: int, num_validation_samples: int) -> str:
    """Stands for the content: equal exactly when the samples are."""
    settings = {"rule": "markov-1", "seq_len": seq_len, "vocab_size": vocab_size, "seed": seed,
                "num_samples": num_samples, "num_validation_samples": num_validation_samples}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
