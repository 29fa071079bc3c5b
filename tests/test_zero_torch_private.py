"""What the engine relies on in torch's private API, one test a function."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.zero.torch_private import (
    after_this_backward,
    identities,
    is_compiled_wrapper,
    outside_dispatch_modes,
    plain_tensor_functions,
    register_first_hook,
    running_backward,
    set_version,
)


class Refusing(nn.Parameter):
    """Refuses every torch function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("refused")


def test_a_subclass_is_a_plain_tensor_inside():
    parameter = nn.Parameter(torch.ones(2))
    parameter.__class__ = Refusing
    with pytest.raises(RuntimeError, match="refused"):
        parameter.sum()
    with plain_tensor_functions():
        assert parameter.sum() == 2


def test_each_backward_has_a_number_of_its_own():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(running_backward()))
    assert running_backward() == -1
    y.backward(retain_graph=True)
    y.backward()
    assert len(set(seen)) == 2
    assert -1 not in seen


def test_a_callback_runs_when_the_backward_has_ended():
    order = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: after_this_backward(lambda: order.append("end")))
    x.register_post_accumulate_grad_hook(lambda p: order.append("leaf"))
    y.backward()
    assert order == ["leaf", "end"]


def test_a_first_hook_runs_before_earlier_ones():
    order = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: order.append("second"))
    handle = register_first_hook(y, lambda grad: order.append("first"))
    y.backward(retain_graph=True)
    assert order == ["first", "second"]
    handle.remove()
    y.backward()
    assert order == ["first", "second", "second"]


def test_a_changed_version_makes_backward_refuse():
    weight = nn.Parameter(torch.ones(2))
    loss = (weight * weight).sum()
    before = weight._version
    set_version(weight, before + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    set_version(weight, before)
    (weight * weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 2.0))


def test_identities_show_any_change_of_parameters_and_children():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    seen = [identities(model.modules())]
    keep = [*model.children(), *model.parameters()]  # an identity is one only while its object lives
    for change in (lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
                   lambda: setattr(model[0], "bias", None), lambda: setattr(model, "1", nn.Tanh()),
                   lambda: model.append(nn.Identity()), lambda: setattr(model, "extra", nn.Parameter(torch.ones(1))),
                   lambda: delattr(model, "extra")):
        change()
        keep += [*model.children(), *model.parameters()]
        assert identities(model.modules()) not in seen[-1:]
        seen.append(identities(model.modules()))
    assert identities(model.modules()) == seen[-1]


def test_no_dispatch_mode_sees_what_runs_outside_of_them():
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Seeing():
        x.clone()
        with outside_dispatch_modes():
            x.clone()
        x.clone()
    assert len(seen) == 2


def test_the_wrapper_that_torch_compile_makes_is_told_from_a_module():
    module = nn.Linear(2, 2)
    assert is_compiled_wrapper(torch.compile(module, backend="eager"))
    assert not is_compiled_wrapper(module)
    module.compile(backend="eager")
    assert not is_compiled_wrapper(module)
