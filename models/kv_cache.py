"""Keys and values of positions already seen, so that a new token costs one position and not the whole context."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one block, [batch, heads, capacity, head width], allocated at the first `append`."""

    def __init__(self, *, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys_BHTd: Tensor, values_BHTd: Tensor) -> tuple[Tensor, Tensor]:
        """Write T more positions; return views of all positions so far, [B, H, length, d] each."""
        if self._keys is None:
            batch, heads, _, width = keys_BHTd.shape
            self._keys = keys_BHTd.new_empty(batch, heads, self.capacity, width)
            self._values = torch.empty_like(self._keys)
        end = self.length + keys_BHTd.shape[2]
        self._keys[:, :, self.length : end] = keys_BHTd
        self._values[:, :, self.length : end] = values_BHTd
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The caches of all blocks of a model, for one batch. Use under `no_grad`.

    `capacity` is in positions, padding included. `padding_B` [batch] int64 counts the padding tokens at the left of
    each row and holds for every later call; None means no row has any.
    """

    def __init__(self, *, num_layers: int, capacity: int, padding_B: Tensor | None = None) -> None:
        self.capacity = capacity
        self.padding_B = padding_B
        self.layers = [LayerCache(capacity=capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Positions seen by every block."""
        return self.layers[-1].length
