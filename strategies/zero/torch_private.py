"""Private torch API of the ZeRO engine, all of it, each use with the reason why no public one does.

tests/test_zero_torch_private.py checks what each does here, so that a torch that changes one says so by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def plain_tensor_functions() -> contextlib.AbstractContextManager[None]:
    """Inside, a Tensor subclass is treated as a Tensor. torch's own documentation of __torch_function__ uses it."""
    return torch._C.DisableTorchFunctionSubclass()


def running_backward() -> int:
    """A number for the backward that runs now, -1 outside. Nothing else tells two backwards of one graph apart."""
    return torch._C._current_graph_task_id()


def after_this_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs now has ended. DDP and FSDP2 do the same."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def register_first_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """`tensor.register_hook(hook)`, called before the tensor's other hooks; registering can only append."""
    handle = tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    if len(hooks) > 1:  # autograd calls them in the dict's order of insertion; move_to_end is lost on it
        others = [item for item in hooks.items() if item[0] != handle.id]
        hooks.clear()
        hooks[handle.id] = hook
        hooks.update(others)
    return handle


def identities(modules: Iterable[nn.Module]) -> list[int]:
    """Of the parameters and children of each module, in order: any change of them shows. The public walk builds every
    name, ten times as long, and this is asked in each pass."""
    found: list[int] = []
    for module in modules:
        found.extend(map(id, module._parameters.values()))
        found.extend(map(id, module._modules.values()))
    return found


def set_version(tensor: Tensor, version: int) -> None:
    """Set the counter by which autograd notices that a saved tensor has changed; the public way only restores it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def outside_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no TorchDispatchMode sees what runs: selective checkpointing's takes every operation in a recomputation
    for one of the forward's and refuses those it does not know."""
    return _disable_current_modes()


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether `module` is what `torch.compile(module)` returns; nothing public tells without importing dynamo."""
    return isinstance(module._modules.get("_orig_mod"), nn.Module)
