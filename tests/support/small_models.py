"""Small models with the traits that break sharded engines. All map [rows, 6] to [rows, 6]."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """LayerNorm, two layers, a residual."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a ModuleList, an input layer and a norm at the root."""

    def __init__(self, num_blocks: int = 3, width: int = 6) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Tied(Stack):
    """The head's weight is the inlet's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.head.weight = self.inlet.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Frozen(Stack):
    """A frozen norm and layer in a trainable block, one block frozen altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].norm.requires_grad_(False)
        self.blocks[0].up.weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Unused(Stack):
    """A block and a root parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        x = self.blocks[0](x)
        return self.norm(self.blocks[2](x))


class Repeated(Stack):
    """Every block is called twice in one forward, in another order."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in (*self.blocks, *reversed(self.blocks)):
            x = block(x)
        return self.norm(x)


class Tiny(nn.Module):
    """Parameters with fewer elements than ranks, of no dimension and of size zero."""

    def __init__(self) -> None:
        super().__init__()
        self.none_first = nn.Parameter(torch.empty(0, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.three = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
        self.none_middle = nn.Parameter(torch.empty(0))
        self.layer = nn.Linear(6, 6)
        self.turned = nn.Parameter(torch.randn(6, 4).t())  # non-contiguous
        self.none_last = nn.Parameter(torch.empty(4, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale + self.shift + self.three.repeat(2)
        x = x + (x @ self.turned.t()) @ self.turned
        return x + self.none_first.sum() + self.none_middle.sum() + self.none_last.sum()


class Checkpointed(Stack):
    """Blocks recomputed in backward."""

    def __init__(self, use_reentrant: bool = False, repeats: int = 1) -> None:
        super().__init__()
        self.use_reentrant, self.repeats = use_reentrant, repeats

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.inlet(x)
        for _ in range(self.repeats):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.norm(x)


class Structured(Stack):
    """Blocks take a keyword and return a dict; a side input is shared by all of them."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.side = Block(), nn.Linear(6, 6)

        def forward(self, x: Tensor, *, side: Tensor) -> dict[str, list[Tensor]]:
            return {"out": [self.block(x) + self.side(side)]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured.Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = side = self.inlet(x)
        for block in self.blocks:
            x = block(x, side=side)["out"][0]
        return self.norm(x)


MODELS = {cls.__name__.lower(): cls for cls in (Stack, Tied, Frozen, Unused, Repeated, Tiny, Checkpointed, Structured)}


def make(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The named model, the same weights for the same seed."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    return model.to(dtype)
