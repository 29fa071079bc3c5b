"""Starting weights that depend on the seed and the parameter's name alone.

Not on the order of construction, number of ranks, precision or layout: each parameter has its own generator.
So a block can be filled alone, on whichever rank, and holds what it holds in the whole model.
Rules of GPT-2: normal with deviation 0.02, biases 0, norms 1, and projections back into the residual stream smaller by
the root of their number (Radford et al. 2019, section 2.3).
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from models.gpt2 import GPT2, INIT_STD


def initialise(model: GPT2, *, seed: int) -> None:
    """Fill every parameter in place; a tied one once, under its first name. Not collective.

    Parameters must have storage: call `to_empty` first on a model built on the meta device.
    """
    for name, parameter in model.named_parameters():
        initialise_parameter(name, parameter.data, seed=seed, num_layers=model.num_layers)


def initialise_parameter(name: str, tensor: Tensor, *, seed: int, num_layers: int) -> None:
    """Fill one whole parameter in place, of any floating dtype, device and strides.

    `name` is the qualified name in the whole model ("transformer.h.3.mlp.c_fc.weight"), `num_layers` the whole model's.
    Values are drawn in fp32 on the CPU, so that bf16 weights are the rounded fp32 ones and GPUs start as CPUs do.
    Raises ValueError for a name no rule covers and for a tensor without storage.
    """
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no storage; call model.to_empty(device=...) first")
    module, _, kind = name.rpartition(".")
    if kind == "bias":
        tensor.zero_()
    elif kind == "weight" and module.rpartition(".")[2].startswith("ln_"):
        tensor.fill_(1.0)
    elif kind == "weight":
        std = INIT_STD / math.sqrt(2 * num_layers) if module.endswith(".c_proj") else INIT_STD
        _fill_normal(tensor, std, generator_for(seed, name))
    else:
        raise ValueError(f"no rule for parameter {name!r}: known are '....bias', '...ln_*.weight' and '....weight'")


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose state is a hash of seed and name, the same on every machine and in every process."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _fill_normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    in_place = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
    # normal_ draws in another order into strided memory, hence the detour for everything but the plain case.
    drawn = tensor if in_place else torch.empty(tensor.shape, dtype=torch.float32)
    drawn.normal_(0.0, std, generator=generator)
    if not in_place:
        tensor.copy_(drawn)
