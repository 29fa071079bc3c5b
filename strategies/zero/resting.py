"""The placeholder of a freed parameter.

A parameter whose storage is freed must not be read by accident: a view of a resized storage is a segmentation fault,
and a stale copy is a silent wrong number. While its unit rests, a parameter *object* stays where it is (Lightning, the
optimizer and the user's own references remain valid) and two things about it change:

- its class becomes `RestingParameter`, whose `__torch_function__` refuses everything but metadata, by name;
- its data becomes one NaN element expanded to the shape, so that shape, dtype and device still read right.

The real view is attached again when the unit is gathered. A swap costs about a microsecond each way.

A graph that saved a view of the parameter (`weight.t()`) aliases the freed storage past any placeholder. So while the
parameter rests its version counter, which all its views share, stands off the value it had: autograd then refuses the
saved view ("modified by an inplace operation") where reading it would be a segmentation fault. Updates move the counter
for good, as an optimizer's in-place step does in plain torch.

Alternatives considered: `data = empty(0)` loses the shape (`num_parameters` and state-dict checks go wrong); swapping
parameter objects breaks references taken earlier; meta tensors cannot be assigned to `.data` of a CPU parameter.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strategies.zero.torch_private import plain_tensor_functions, set_version

if TYPE_CHECKING:
    from strategies.zero.record import ParameterRecord

# Reading these touches no element. Getters appear in __torch_function__ as the `__get__` of a property.
_METADATA = frozenset({
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "names", "nbytes",
    "itemsize", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_mkldnn", "is_quantized", "is_mps", "is_xpu", "is_xla",
    "is_hpu", "is_maia", "is_mtia", "is_nested", "is_ipu", "is_vulkan", "is_sparse_csr", "grad_dtype", "retains_grad",
    "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_base",
    "size", "numel", "nelement", "dim", "ndimension", "stride", "is_contiguous", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_inference", "get_device", "__len__", "__hash__", "requires_grad_", "is_same_size",
    "register_hook", "register_post_accumulate_grad_hook", "has_names", "is_conj", "is_neg", "type",
})

# Weak both ways: a parameter that dies leaves no record, a closed engine leaves no unit alive.
_RECORDS: weakref.WeakValueDictionary[int, ParameterRecord] = weakref.WeakValueDictionary()


def remember(parameter: nn.Parameter, record: ParameterRecord) -> None:
    """Let `record_of(parameter)` find `record` for as long as the record lives."""
    _RECORDS[id(parameter)] = record


def forget(parameter: nn.Parameter) -> None:
    """Undo `remember`: the engine has given the parameter back."""
    _RECORDS.pop(id(parameter), None)


def record_of(parameter: Any) -> ParameterRecord | None:
    """The record of a parameter that an engine manages, or None."""
    record = _RECORDS.get(id(parameter))
    return record if record is not None and record.parameter is parameter else None


class RestingParameter(nn.Parameter):
    """A parameter whose unit rests sharded: metadata reads, everything else raises RuntimeError naming the unit."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            # Assigning `.data` would be lost at the next gather.
            if getattr(func, "__name__", "") == "__set__" and name == "data":
                raise RuntimeError(_refusal("assigning .data to", args))
        if name in _METADATA:
            with plain_tensor_functions():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(_refusal(name, (*args, *(kwargs or {}).values())))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        record = record_of(self)
        name = record.name if record else "?"
        return f"RestingParameter({name}, shape={tuple(self.shape)}, dtype={self.dtype}, sharded)"

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(_refusal("copy.deepcopy", (self,)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(_refusal("pickling", (self,)))


def _refusal(operation: str, args: Any) -> str:
    resting = [a for a in _flatten(args) if isinstance(a, RestingParameter)]
    record = record_of(resting[0]) if resting else None
    if record is None:
        return (f"{operation} on a parameter whose engine is gone: its value was sharded (ZeRO stage 3) and went with "
                "the engine. Fix: keep the engine for as long as the model is used, or engine.close() it first")
    name, unit = record.name, record.unit_name
    return (
        f"{operation} on parameter '{name}': its unit '{unit}' rests sharded (ZeRO stage 3), there is no value to use. "
        f"Fix: read or edit it inside `with strategies.gathered(parameter):`; take weights from engine.state_dict(); "
        f"in a forward, use it inside the forward of '{unit}', or name a unit that contains all its users (units=[...])"
    )


def _flatten(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(_flatten(value) if isinstance(value, list | tuple) else [value])
    return flat


class Placeholder:
    """Swaps one parameter between its real view and its resting form."""

    def __init__(self, parameter: nn.Parameter, view: Tensor) -> None:
        self._parameter = parameter
        self._class = type(parameter)
        self._view = view
        self._nothing = torch.full((), float("nan"), dtype=view.dtype, device=view.device).expand(view.shape)
        self._version: int | None = None  # the version of the value, while it rests
        self._offset = view.storage_offset() * view.element_size()  # bytes
        self._awake = -1  # the version it woke with

    def rest(self) -> None:
        """Take the value away."""
        self._version = self._parameter._version
        self._set_version(self._version + 1)
        self._parameter.data = self._nothing
        self._parameter.__class__ = RestingParameter

    def wake(self) -> None:
        """Attach the real view."""
        self._parameter.__class__ = self._class
        self._parameter.data = self._view
        if self._version is not None:
            self._set_version(self._version)
            self._version = None
        self._awake = self._parameter._version

    def refuse_lost_edits(self, buffer: int, *, in_place: bool) -> None:
        """Raise RuntimeError if the awake parameter has other data than the view, or (`in_place`) was edited.

        Args:
            buffer: address of the buffer that the view is of.
        """
        if self._parameter.data_ptr() != buffer + self._offset and self._parameter.numel():
            edit = "was given other data (by assigning .data, or by moving or converting the model)"
        elif in_place and self._parameter._version != self._awake:
            edit = "was edited in place outside `gathered`"
        else:
            return
        record = record_of(self._parameter)
        raise RuntimeError(
            f"parameter '{record.name if record else '?'}' {edit} while the engine holds it, which would be "
            "lost. Fix: edit in place inside `with strategies.gathered(parameter):`, load by engine.load_state_dict(), "
            "choose the type by Engine(precision=...); to move or convert the model, engine.close() first")

    def changed(self) -> None:
        """The value is another one now: graphs that saved the old one must not run backward."""
        if self._version is not None:
            self._version += 1
        else:
            self._awake = self._parameter._version + 1
            self._set_version(self._awake)

    def _set_version(self, version: int) -> None:
        set_version(self._parameter, version)
