"""The model while an engine holds it: which of its parameters train now, and changes that would be lost.

An engine trains the parameters that it took. A module that is replaced, a parameter that is added, or a value that is
assigned or moved would live beside them unseen, so it is refused, by name. Which parameters require a gradient may
change at any time.

Alternative considered: torch's global hooks on registering parameters and modules. They point at the line, but miss
deletions, and are state of the whole process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from strategies.zero.record import ParameterRecord
from strategies.zero.torch_private import identities, plain_tensor_functions
from strategies.zero.unit import Phase, Unit

_FIX = "fix: engine.close(), change the model, then a new Engine"


class HeldModel:
    """What the engine took, to compare the model with. Local."""

    def __init__(self, model: nn.Module, records: Sequence[ParameterRecord], units: Iterable[Unit]) -> None:
        self._model = model
        self._records = list(records)
        self._units = list(units)
        self._named = {name: record.parameter for record in records for name in (record.name, *record.aliases)}
        self._remember()

    def _remember(self) -> None:
        self._modules = list(self._model.modules())
        self._identities = identities(self._modules)

    def refuse_changes(self) -> None:
        """Raise RuntimeError if parameters were added, removed, replaced, moved, or edited where that would be lost."""
        if identities(self._modules) != self._identities:
            self._refuse_other_parameters()
            self._remember()
        for unit in self._units:
            if unit.phase is Phase.READY:
                for group in unit.groups:
                    group.refuse_lost_edits()

    def _refuse_other_parameters(self) -> None:
        now = dict(self._model.named_parameters(remove_duplicate=False))
        if len(now) != len(self._named) or any(now.get(name) is not p for name, p in self._named.items()):
            added = [name for name in now if name not in self._named]
            removed = [name for name in self._named if name not in now]
            replaced = [name for name, p in self._named.items() if name in now and now[name] is not p]
            told = [f"{what} {names}" for what, names in
                    (("added", added), ("removed", removed), ("replaced", replaced)) if names]
            raise RuntimeError(f"parameters of the model changed while the engine holds it: {', '.join(told)}; {_FIX}")

    def changed_training(self) -> list[ParameterRecord]:
        """Records whose `trainable` was not what their parameter says; now it is."""
        with plain_tensor_functions():
            changed = [record for record in self._records if record.parameter.requires_grad is not record.trainable]
        for record in changed:
            record.trainable = not record.trainable
        return changed
