"""Which engine holds a LightningModule. The module owns it, so a second Trainer, or a second fit, finds it there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import nn

from strategies.engine import Engine
from strategies.zero.hooks import ModuleHook

_ATTRIBUTE = "_zero_held"


@dataclass(eq=False)
class Held:
    """An engine, what it was made with, and the hooks this package put on the module."""

    engine: Engine
    settings: Any
    handles: list[Any] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the module is plain torch: no engine holds it."""
        return

    def fits(self, module: nn.Module, settings: Any) -> bool:
        """Whether the engine still describes `module`: same parameters under the same names, same ones frozen."""
        held = {name: record for record in self.engine.records for name in (record.name, *record.aliases)}
        now = dict(module.named_parameters(remove_duplicate=False))
        return self.settings == settings and held.keys() == now.keys() and all(
            held[name].parameter is parameter and held[name].trainable == parameter.requires_grad
            for name, parameter in now.items())


def held_by(module: nn.Module | None) -> Held | None:
    """What holds `module`, if anything does."""
    return vars(module).get(_ATTRIBUTE) if module is not None else None


def hold(module: nn.Module, *, settings: Any, make: Callable[[], Engine]) -> tuple[Held, bool]:
    """The engine of `module`, made anew if there is none or it no longer fits, and whether it was. Collective then."""
    held = held_by(module)
    if held is not None and held.fits(module, settings):
        return held, False
    del held  # the old engine must be gone before the new one takes its parameters
    let_go(module)
    held = Held(make(), settings)
    held.handles += _open_root_from_outside(held.engine)
    setattr(module, _ATTRIBUTE, held)
    for replaced in _REPLACED:
        setattr(module, replaced.name, replaced(module, held.engine))
    return held, True


def let_go(module: nn.Module) -> None:
    """Make `module` plain torch again, every parameter whole and in the type it came in; nothing if it is not held.

    Collective.
    """
    held = held_by(module)
    if held is None:
        return
    delattr(module, _ATTRIBUTE)
    for replaced in _REPLACED:
        delattr(module, replaced.name)
    for handle in held.handles:
        handle.remove()
    held.engine.close()


def _open_root_from_outside(engine: Engine) -> list[Any]:
    """Let hooks such as `on_validation_epoch_end`, and a step that runs on after a backward, call parts of the module
    that no unit covers. Inside a forward the root is up anyway and this changes nothing.
    """
    owned = {id(record.parameter) for unit in engine.units if unit.is_root and unit.frees_parameters
             for group in unit.groups for record in group.records}
    handles: list[Any] = []
    for module in engine.module.modules():
        child = any(module is one for one in engine.module.children())
        if module is engine.module or not any(id(p) in owned for p in module.parameters(recurse=child)):
            continue
        scope = _Scope(engine)
        handles.append(module.register_forward_pre_hook(ModuleHook(scope.open)))
        handles.append(module.register_forward_hook(ModuleHook(scope.close), always_call=True))
    return handles


class _Replaced:
    """A method of a held module that the engine has a say in; it stands on the instance, before the class's own."""

    name: ClassVar[str]

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self._module, self._engine = weakref.ref(module), weakref.ref(engine)
        self.__wrapped__ = getattr(type(module), self.name)  # Lightning asks whether the class overrides it

    def __deepcopy__(self, memo: Any) -> Any:
        module = self._module()
        copied = memo[id(module)]  # the copy is known before its attributes are filled in
        return MethodType(getattr(type(copied), self.name), copied)


class _ZeroGrad(_Replaced):
    """Empties the ledger too. Lightning calls it before validation in a fit."""

    name = "zero_grad"

    def __call__(self, set_to_none: bool = True) -> None:
        module, engine = self._module(), self._engine()
        if module is not None:
            self.__wrapped__(module, set_to_none)
        if engine is not None:
            engine.zero_grad()


class _LrSchedulerStep(_Replaced):
    """A skipped update does not move a schedule that counts updates. Lightning calls it after each."""

    name = "lr_scheduler_step"

    def __call__(self, scheduler: Any, metric: Any) -> None:
        module, engine = self._module(), self._engine()
        assert isinstance(module, pl.LightningModule)
        last = engine.guard.last if engine is not None else None
        per_update = any(config.scheduler is scheduler and config.interval == "step"
                         for config in module.trainer.lr_scheduler_configs)
        if last is None or last.applied or not per_update:
            self.__wrapped__(module, scheduler, metric)


_REPLACED: tuple[type[_Replaced], ...] = (_ZeroGrad, _LrSchedulerStep)


class _Scope:
    """The engine's forward scope around the calls of one module. Holds no reference that keeps the engine alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def open(self, *_args: Any) -> None:
        scope = self._engine.forward_scope()
        scope.__enter__()
        self._open.append(scope)

    def close(self, *_args: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
