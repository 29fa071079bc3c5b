"""Recomputation (activation checkpointing) runs a forward again in backward; what it does to buffers is undone.

Running statistics and counters have been updated by the first forward. Losses and gradients show no second update, so
torch's checkpoint lets it happen: three steps count as six batches. Here a module with buffers of its own that runs
inside a backward gets them back as they were. It makes no difference who recomputes, or whether the module is a unit,
lies in one, or around some.

Not undone: buffers that code outside their own module's forward changes, state that is no buffer, changes that a
backward makes itself (a hook, an autograd.Function), and what a module held by no engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from strategies.zero.torch_private import outside_dispatch_modes, running_backward


class KeptState:
    """The buffers of one module over the forwards that a backward runs."""

    def __init__(self) -> None:
        self._before: list[dict[str, tuple[Tensor, Tensor]]] = []  # a module may call itself

    def remember(self, module: nn.Module, _args: Any) -> None:
        """Before a forward."""
        if running_backward() >= 0:
            with outside_dispatch_modes():
                self._before.append({name: (buffer, buffer.clone()) for name, buffer
                                     in module.named_buffers(recurse=False)})

    def restore(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """After it, or after what it raised: torch ends a recomputation by an exception."""
        if running_backward() < 0 or not self._before:
            return
        with outside_dispatch_modes():
            for name, (buffer, value) in self._before.pop().items():
                # Through `data`: autograd's saved tensors need not take notice of a value they were saved with.
                buffer.data.copy_(value)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)


def keep_state(model: nn.Module, make_hook: Callable[[Callable[..., None]], Any]) -> list[Any]:
    """Watch every module of `model` that has buffers of its own; handles to remove the hooks.

    Args:
        make_hook: wraps a function for `register_forward_hook`.
    """
    handles = []
    for module in model.modules():
        if next(iter(module.named_buffers(recurse=False)), None) is not None:
            kept = KeptState()
            handles.append(module.register_forward_pre_hook(make_hook(kept.remember), prepend=True))
            handles.append(module.register_forward_hook(make_hook(kept.restore), always_call=True))
    return handles
