"""Reuse of gradient and message buffers. On a CPU, freshly mapped pages cost as much as the copy into them."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """1-D buffers by (numel, dtype). Single-threaded use per engine; contents of a taken buffer are undefined."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of this size, recycled when one is free."""
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        return torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Hand back a buffer that `take` made; nobody may hold a view of it."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Return all free buffers to the allocator."""
        self._free.clear()
