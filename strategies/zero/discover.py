"""Which modules are units: what is gathered, used and freed together.

In this order: what the caller names; what a model declares (`zero_units()`, or Hugging Face's `_no_split_modules`);
children of ModuleList and Sequential of which there are at least two (through lists and dicts of modules inside them);
direct children that are large. What no unit
holds belongs to the root. A parameter reached from several units (tied weights) belongs to the root, which is up
whenever any of them is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from strategies.zero.record import ParameterRecord

LARGE_NUMEL = 1_000_000
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_units(model: nn.Module, named: Sequence[str | nn.Module] | None = None) -> list[tuple[str, nn.Module]]:
    """Qualified name and module of each unit but the root, in module order.

    Raises:
        ValueError: a named unit is not a module of the model, has no parameters, or is a list of modules.
    """
    names = {module: name for name, module in model.named_modules()}
    if named is not None:
        return [_resolve(entry, model, names) for entry in named]
    for find in (_declared, _no_split, _repeated, _large_children):
        found = [m for m in find(model) if m is not model and any(True for _ in m.parameters())]
        if found:
            order = {module: place for place, module in enumerate(names)}
            unique = sorted(dict.fromkeys(found), key=order.__getitem__)
            return [(names[module], module) for module in unique]
    return []


def assign(records: Sequence[ParameterRecord], model: nn.Module,
           units: Sequence[tuple[str, nn.Module]]) -> tuple[list[list[ParameterRecord]], list[ParameterRecord]]:
    """Each unit's records (the innermost unit wins) and the root's."""
    by_parameter = {id(record.parameter): record for record in records}
    modules = {module: place for place, (_, module) in enumerate(units)}
    owners: dict[int, set[int | None]] = {}

    def walk(module: nn.Module, owner: int | None) -> None:
        owner = modules.get(module, owner)
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner)
        for child in module.children():
            walk(child, owner)

    walk(model, None)
    owned: list[list[ParameterRecord]] = [[] for _ in units]
    root: list[ParameterRecord] = []
    for key, record in by_parameter.items():
        (owner, *others) = owners[key]
        (root if owner is None or others else owned[owner]).append(record)
    return owned, root


def _resolve(entry: str | nn.Module, model: nn.Module, names: dict[nn.Module, str]) -> tuple[str, nn.Module]:
    module = model.get_submodule(entry) if isinstance(entry, str) and entry in names.values() else entry
    if not isinstance(module, nn.Module) or module not in names:
        raise ValueError(f"units: {entry!r} is not a module of the model; allowed are names from "
                         "model.named_modules(), or the modules themselves")
    if not any(True for _ in module.parameters()):
        raise ValueError(f"units: module '{names[module]}' has no parameters; fix: leave it out")
    if isinstance(module, _CONTAINERS):
        raise ValueError(f"units: '{names[module]}' is a {type(module).__name__}, which is never called and so never "
                         "gathered; fix: name the modules inside it")
    return names[module], module


def _declared(model: nn.Module) -> Iterable[nn.Module]:
    for module in model.modules():
        if callable(getattr(module, "zero_units", None)):
            yield from (unit for _, unit in module.zero_units())


def _no_split(model: nn.Module) -> Iterable[nn.Module]:
    classes = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    return [module for module in model.modules() if type(module).__name__ in classes]


def _repeated(model: nn.Module) -> Iterable[nn.Module]:
    """Children of the outermost lists of at least two."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        children = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1:
            found.extend(_called(children))
            return
        for child in children:
            walk(child)

    walk(model)
    return found


def _called(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """The modules themselves, and in place of a container, which nobody calls, what it holds."""
    for module in modules:
        if isinstance(module, _CONTAINERS):
            yield from _called(module.children())
        else:
            yield module


def _large_children(model: nn.Module) -> Iterable[nn.Module]:
    return [child for child in model.children() if not isinstance(child, _CONTAINERS)
            and sum(parameter.numel() for parameter in child.parameters()) >= LARGE_NUMEL]
