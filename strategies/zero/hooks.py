"""Hooks that move units through a forward and a backward.

    forward   pre-hook: gather, prefetch the next        post-hook: release (kept if backward wants it first)
    backward  gradient of an output: enter, gather       gradients of all inputs, or an earlier call entered: leave
              post-accumulate hook of each parameter: into the ledger
    end       release everything

Backward runs nodes in the reverse order of their creation. So when it enters a call it has left every call that began
after that one ended, whether or not all inputs of those get a gradient (one shared by all blocks gets its own at the
very end). Leaving a unit's last call releases it and starts its reduction. Entering and leaving are the same on every
rank whose units are called alike, whichever parameters inside them a rank uses.

A first unit, whose inputs need no gradient, is left at the end. Hooks sit on the unit's module and on the tensors that
cross its border; parameters outside any unit belong to the root, which is gathered for the whole forward and backward.
Recomputation (activation checkpointing) runs a unit's forward inside backward: then the post-hook releases nothing. A
backward that makes a graph itself (create_graph) leaves nothing either: that graph's own backward has no border with
hooks.

The gather hook comes before, and the release hook after, the hooks that are on the module already (weight_norm computes
the weight in one).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.zero.kept_state import keep_state
from strategies.zero.ledger import GradientLedger
from strategies.zero.order import UseOrder
from strategies.zero.record import ParameterRecord
from strategies.zero.torch_private import (
    after_this_backward,
    plain_tensor_functions,
    register_first_hook,
    running_backward,
)
from strategies.zero.unit import Unit

_NEVER_LEFT = -1  # the root's calls begin before all others: it stays to the end


class StaleForwardError(RuntimeError):
    """Backward through a forward whose parameters have been changed by an update since."""


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a unit's module in a forward. Times count the beginnings and ends of calls."""

    unit: weakref.ref[Unit]
    version: int  # of the unit's parameters
    began: int
    ended: int = -1


class UnitHooks:
    """Installs and removes the hooks of one engine; holds no reference that keeps the engine alive.

    Args:
        root: the unit that is up for a whole forward and backward, or None if every parameter is in another unit.
        prefetch_units: how many units to gather ahead.
        look: called before a forward that makes a graph; a bound method, held weakly.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], records: Sequence[ParameterRecord], *,
                 root: Unit | None, ledger: GradientLedger, prefetch_units: int,
                 look: Callable[[], None]) -> None:
        self._root = root
        self._units = [unit for unit in units if unit is not root]
        self._ledger = ledger
        self._prefetch = prefetch_units
        self._order = UseOrder()
        self._in_backward = False
        self._clock = itertools.count()
        self._calls: dict[Unit, _Call] = {}  # of each unit, the call that is running or the last one
        self._entered: dict[Unit, _Call] = {}  # calls that backward is in
        self._open: Counter[Unit] = Counter()  # calls whose backward is still to come
        self._depth = 0
        self._leaf_handles: list[Any] = []
        self._handles: list[Any] = []
        self._look: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(look)
        for record in records:
            if record.trainable:
                self.take_gradients(record)
        self._handles.extend(keep_state(model, ModuleHook))  # before the units': those must be the first to run
        for unit in self._units:
            pre, post = _unit_hooks(self, unit)
            self._handles.append(unit.module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True))
            self._handles.append(unit.module.register_forward_hook(post, with_kwargs=True))
        pre, post = _root_hooks(self)
        self._handles.append(model.register_forward_pre_hook(pre, prepend=True))
        self._handles.append(model.register_forward_hook(post, always_call=True))

    def take_gradients(self, record: ParameterRecord) -> None:
        """The gradients of this trainable parameter go to the ledger from now on."""
        record.trained = True
        hook = _grad_hook(self._ledger, record)
        with plain_tensor_functions():
            self._handles.append(record.parameter.register_post_accumulate_grad_hook(hook))

    # -- forward --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Code inside may use root parameters. Ends properly on a KeyboardInterrupt too, which torch's hooks do not."""
        depth = self._depth
        self.enter_root()
        try:
            yield
        finally:
            self._depth = depth + 1
            self.leave_root()

    def enter_root(self) -> None:
        """A forward of the whole model starts. Re-entrant; an update inside an open scope may have freed the root."""
        self._depth += 1
        if self._depth == 1 and not self._in_backward:
            self._order.begin_pass()
            look = self._look()
            if look is not None and torch.is_grad_enabled():
                look()
        if self._root is not None:
            self._root.wait_ready()

    def leave_root(self) -> None:
        """The forward ends. Without gradients nothing comes after it, and everything rests."""
        self._depth -= 1
        if self._depth == 0 and not torch.is_grad_enabled() and not self._in_backward:
            self.release_all()

    def before_forward(self, unit: Unit, inputs: Any) -> None:
        """`unit`'s module is called."""
        unit.wait_ready()
        if not self._in_backward:
            self._order.used(unit)
            for ahead in self._order.after(unit, self._prefetch):
                ahead.begin_gather()
        if torch.is_grad_enabled():
            call = self._calls[unit] = _Call(weakref.ref(unit), unit.version, next(self._clock))
            self._leave_after_inputs(call, inputs)

    def _leave_after_inputs(self, call: _Call, inputs: Any) -> None:
        """Leave `call` in backward when the gradients of all tensors that entered it are known."""
        graded = {id(tensor): tensor for tensor in _tensors(inputs) if tensor.requires_grad}
        border = _InputBorder(self, call, graded)
        for key, tensor in graded.items():
            self._watch(tensor, border.hook(key, leaf=tensor.is_leaf))

    def _watch(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with the gradient of `tensor`, before the tensor's earlier hooks.

        A tensor may be the output of one call and the input of the next, or both of the same: backward meets the
        borders in the reverse order of forward.
        """
        handle = register_first_hook(tensor, hook)
        if tensor.is_leaf:  # outlives this pass: its hooks must not pile up
            self._leaf_handles.append(handle)

    def after_forward(self, unit: Unit, outputs: Any) -> None:
        """`unit`'s module has returned."""
        graded = False
        call = self._calls.get(unit)
        if torch.is_grad_enabled() and call is not None:
            call.ended = next(self._clock)
            graded = self._enter_before_outputs(call, outputs)
        if graded and not (self._in_backward and self._open[unit]):  # else recomputed: its backward is the first call's
            self._open[unit] += 1
        # Recomputation runs this inside backward, which needs the parameters next; and backward starts with the unit
        # that forward used last.
        if self._in_backward or unit in self._entered or (graded and self._order.is_last(unit)):
            return
        unit.release()

    def after_root_forward(self, outputs: Any) -> None:
        """The whole model has returned, or raised (`outputs` is None then)."""
        if self._root is not None and torch.is_grad_enabled():
            self._enter_before_outputs(_Call(weakref.ref(self._root), self._root.version, _NEVER_LEFT,
                                             next(self._clock)), outputs)
        self.leave_root()

    def _enter_before_outputs(self, call: _Call, outputs: Any) -> bool:
        """Enter `call` in backward as soon as the gradient of an output is known; whether any output has one."""
        graded = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        this = weakref.ref(self)

        def needed(_grad: Tensor) -> None:
            hooks = this()
            if hooks is not None:
                hooks._enter(call)

        for tensor in graded:
            self._watch(tensor, needed)
        return bool(graded)

    # -- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Before autograd runs. Collective over data_shard under stage 3 where the root rests."""
        if self._root is not None:  # an evaluation or another backward since the forward has let it rest
            self._root.wait_ready()
        self._in_backward = True

    def end_backward(self) -> None:
        """After autograd ran, or failed."""
        self._in_backward = False
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()
        self.release_all(keep_root=self._depth > 0)  # the code around this backward may use the root again

    def _enter(self, call: _Call) -> None:
        """Backward comes to `call`: gather its unit, and leave the calls that began after it."""
        unit = call.unit()
        if unit is None:
            return
        if unit.version != call.version:
            raise StaleForwardError(
                f"backward through unit '{unit.name}' after its parameters were updated: this loss was computed before "
                "the last engine.step(); fix: call backward before step, or compute the loss again")
        if not torch.is_grad_enabled():  # grad mode in a hook: this backward makes a graph
            behind = [other for other in self._entered.values() if other.began > call.ended]
            for other in sorted(behind, key=lambda other: other.began, reverse=True):
                self._leave(other, next_unit=unit)
        self._entered[unit] = call
        unit.wait_ready()
        for ahead in self._order.before(unit, self._prefetch):
            ahead.begin_gather()

    def _leave(self, call: _Call, *, next_unit: Unit | None = None) -> None:
        """Backward has left `call`. Nothing if it has before, or was never in it."""
        unit = call.unit()
        if unit is None or self._entered.get(unit) is not call:
            return
        del self._entered[unit]
        self._open[unit] -= 1
        if unit is not next_unit:
            unit.release()
        if self._open[unit] <= 0:
            self._ledger.left(unit)

    def release_all(self, *, keep_root: bool = False) -> None:
        """Let every unit rest."""
        self._entered.clear()
        self._open.clear()
        for unit in self._units:
            unit.release()
        if self._root is not None and not keep_root:
            self._root.release()

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _InputBorder:
    """The tensors that entered one call of a unit: when all their gradients are known, backward has left the call.

    Weak references throughout: the hooks live as long as the user's tensors.
    """

    def __init__(self, hooks: UnitHooks, call: _Call, keys: Iterable[int]) -> None:
        self._hooks, self._call = weakref.ref(hooks), call
        self._keys = frozenset(keys)
        self._waiting: set[int] = set()
        self._backward = -1  # autograd's number of the backward that `_waiting` belongs to: a graph may run twice

    def hook(self, key: int, *, leaf: bool) -> Callable[[Tensor], None]:
        """For the tensor called `key`."""

        def arrived(_grad: Tensor) -> None:
            backward = running_backward()
            if backward != self._backward:
                self._backward, self._waiting = backward, set(self._keys)
            self._waiting.discard(key)
            if self._waiting or torch.is_grad_enabled():  # grad mode in a hook: this backward makes a graph
                return
            if leaf:
                # Autograd serves leaves first: nodes of the unit that lead to parameters alone may be still to come.
                after_this_backward(self._leave)
            else:
                self._leave()

        return arrived

    def _leave(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks._leave(self._call)


def _grad_hook(ledger: GradientLedger, record: ParameterRecord) -> Callable[[Tensor], None]:
    ledger_ref, record_ref = weakref.ref(ledger), weakref.ref(record)

    def accept(_parameter: Tensor) -> None:
        ledger, record = ledger_ref(), record_ref()
        if ledger is not None and record is not None:
            ledger.accept(record)

    return accept


class ModuleHook:
    """A hook on the user's module. A copy of the module is plain torch: the copied hook does nothing.

    torch.compile does not look into it: a compiled module that holds units breaks its graph at their borders, where the
    hooks run as ever, and compiles what is between them.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = torch.compiler.disable(act)

    def __call__(self, *args: Any) -> None:
        self._act(*args)

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return ModuleHook(_nothing)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("pickling a model that an engine holds: its parameters are views of sharded buffers (stage "
                           "3: it rests sharded); fix: save engine.state_dict(), or engine.close() first")


def _nothing(*_args: Any) -> None:
    return None


def _unit_hooks(hooks: UnitHooks, unit: Unit) -> tuple[ModuleHook, ModuleHook]:
    """Before and after the forward of a unit's module. Weak: the user's modules may outlive the engine."""
    hooks_ref, unit_ref = weakref.ref(hooks), weakref.ref(unit)

    def pre(_module: nn.Module, args: Any, kwargs: Any) -> None:
        hooks, unit = hooks_ref(), unit_ref()
        if hooks is not None and unit is not None:
            hooks.before_forward(unit, (args, kwargs))

    def post(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        hooks, unit = hooks_ref(), unit_ref()
        if hooks is not None and unit is not None:
            hooks.after_forward(unit, output)

    return ModuleHook(pre), ModuleHook(post)


def _root_hooks(hooks: UnitHooks) -> tuple[ModuleHook, ModuleHook]:
    """Before and after the forward of the whole model. Weak, like the others."""
    hooks_ref = weakref.ref(hooks)

    def pre(_module: nn.Module, _args: Any) -> None:
        hooks = hooks_ref()
        if hooks is not None:
            hooks.enter_root()

    def post(_module: nn.Module, _args: Any, output: Any) -> None:
        hooks = hooks_ref()
        if hooks is not None:
            hooks.after_root_forward(output)

    return ModuleHook(pre), ModuleHook(post)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses (which covers Hugging Face outputs)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
