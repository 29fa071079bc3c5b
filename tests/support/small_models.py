"""Small models with the traits that break sharded engines. All map [rows, 6] to [rows, 6]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class Complexed(Stack):
    """Complex weights in every block and at the root; a complex buffer."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.turn = Block(), nn.Parameter(torch.randn(6, 5, dtype=torch.complex64) / 3)
            self.phase = nn.Parameter(torch.randn(1, dtype=torch.complex64))
            self.register_buffer("grid", torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            turned = x.to(self.turn.dtype) @ self.turn * self.grid + self.phase
            return self.block(x) + (turned.real * turned.imag).sum(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Complexed.Inner() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([1.0 + 0.5j, 0.5 - 1.0j, 0.25j]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.abs().repeat(2)

    def to(self, dtype: torch.dtype) -> Complexed:
        """nn.Module.to would drop imaginary parts."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = tensor.data.to(dtype.to_complex() if tensor.is_complex() else dtype)
        return self


class Mixed(Stack):
    """Parameters of three types in a unit; buffers of whole numbers and truth values."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.wide = Block(), nn.Linear(6, 6, dtype=torch.float64)
            self.narrow = nn.Parameter(torch.randn(6))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.block(x) + self.wide(x.double()).to(x.dtype) * self.mask + self.narrow.to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed.Inner() for _ in range(2))

    def to(self, dtype: torch.dtype) -> Mixed:
        """Each keeps a type of its own: `narrow` fp32, `wide` fp64."""
        super().to(dtype)
        for inner in self.blocks:
            inner.wide.double()
            inner.narrow.data = inner.narrow.data.float()
        return self


class Nested(Stack):
    """Units in units, a unit that only holds others, modules without parameters among them."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.inner, self.free = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(2)), nn.Tanh()

        def zero_units(self) -> list[tuple[str, nn.Module]]:
            return [("", self), *((f"inner.{i}", block) for i, block in enumerate(self.inner))]

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner[0](x)
            x = self.free(self.own(x))
            return self.inner[1](x) + self.own(x)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.free = Nested.Outer(), nn.Identity()

        def zero_units(self) -> list[tuple[str, nn.Module]]:
            return [("", self), ("free", self.free)]

        def forward(self, x: Tensor) -> Tensor:
            return self.free(self.outer(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Nested.Holder() for _ in range(2))


class Outputs(Stack):
    """Blocks return a dataclass, a tuple with None and a tensor without gradient, or nothing that has one."""

    @dataclass
    class Pair:
        out: Tensor
        extra: dict[str, Any]

    class Inner(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.block, self.side = kind, Block(), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Any:
            if self.kind == "no gradient":
                return self.block(x).detach()
            out, side = self.block(x), torch.sigmoid(self.side(x))
            return Outputs.Pair(out, {"side": [side]}) if self.kind == "dataclass" else (out, None, side.detach(), side)

    def __init__(self) -> None:
        super().__init__()
        kinds = ("dataclass", "tuple", "no gradient", "dataclass")
        self.blocks = nn.ModuleList(Outputs.Inner(kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x, aside = self.inlet(x), torch.zeros(())
        for block in self.blocks:
            found = block(x)
            if block.kind == "no gradient":
                x = x + found
            elif block.kind == "tuple":
                x, aside = found[0] * found[2], found[3]
            else:
                x, aside = found.out, aside + found.extra["side"][0]
        return self.norm(x) + aside


class WeightNormed(Stack):
    """Weights computed from parameters of their own, by a parametrization and by the older hook."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.blocks[0].up)
        nn.utils.weight_norm(self.blocks[1].up)
        nn.utils.parametrizations.weight_norm(self.inlet)


MODELS = {cls.__name__.lower(): cls for cls in (Stack, Tied, Frozen, Unused, Repeated, Tiny, Checkpointed, Structured,
                                                Complexed, Mixed, Nested, Outputs, WeightNormed)}


def make(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The named model, the same weights for the same seed."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    return model.to(dtype)
