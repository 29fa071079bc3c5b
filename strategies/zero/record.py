"""One record per parameter: the only answer to "which parameter is this, and where does it stand"."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from strategies.zero.torch_private import is_compiled_wrapper

if TYPE_CHECKING:
    from strategies.zero.flat_group import FlatGroup
    from strategies.zero.unit import Unit


@dataclass(eq=False)
class ParameterRecord:
    """Identity and place of one parameter object.

    Attributes:
        index: position among all records; equal on all ranks.
        name: its first qualified name in the model; `aliases` are the other names of the same object (tied weights).
        shape: global shape.
        dtype: type it had before the engine took it.
        trainable: requires_grad when the engine last looked.
        trained: has been trainable while the engine held it: gradients arrive here.
        position: its index in the layout of its flat group.
    """

    index: int
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()
    trained: bool = False
    unit_name: str = ""
    position: int = -1
    _unit: weakref.ref[Unit] | None = field(default=None, repr=False)
    _group: weakref.ref[FlatGroup] | None = field(default=None, repr=False)

    def place(self, unit: Unit, group: FlatGroup, position: int) -> None:
        """Called once, by the unit that takes the parameter."""
        self._unit, self._group = weakref.ref(unit), weakref.ref(group)
        self.unit_name, self.position = unit.name, position

    @property
    def unit(self) -> Unit:
        unit = self._unit() if self._unit is not None else None
        assert unit is not None, f"parameter {self.name} belongs to a closed engine"
        return unit

    @property
    def group(self) -> FlatGroup:
        group = self._group() if self._group is not None else None
        assert group is not None, f"parameter {self.name} belongs to a closed engine"
        return group


def make_records(model: nn.Module) -> list[ParameterRecord]:
    """One record per parameter object of `model`, in `named_parameters` order.

    Raises:
        ValueError: a parameter is uninitialised (lazy), of whole numbers, or on the meta device; a module is wrapped by
            torch.compile, which would put `_orig_mod.` into names.
    """
    for path, module in model.named_modules():
        if is_compiled_wrapper(module):
            where = f"module '{path}'" if path else "the model"
            raise ValueError(f"{where} is wrapped by torch.compile(), so '_orig_mod.' would be in the names of its "
                             "checkpoints; fix: compile in place, module.compile(), before or after the engine")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    records = []
    for index, (parameter, (name, *aliases)) in enumerate(names.items()):
        _refuse_unsupported(name, parameter)
        records.append(ParameterRecord(index, name, parameter, parameter.shape, parameter.dtype,
                                       parameter.requires_grad, tuple(aliases)))
    return records


def _refuse_unsupported(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{name}' is uninitialised (a lazy module); fix: run one forward before the engine")
    if parameter.is_meta:
        raise ValueError(f"parameter '{name}' is on the meta device; fix: model.to_empty(device=...) and initialise it "
                         "before the engine")
    if not parameter.is_floating_point() and not parameter.is_complex():
        raise ValueError(f"parameter '{name}' has dtype {parameter.dtype}; allowed are floating and complex types; "
                         "fix: make it a buffer")
