"""The single-process oracle: plain torch, no engine code, against which every engine result is compared.

One "global batch" is `world_size x accumulate` micro-batches. The oracle runs them one after another in one process and
takes the mean over ranks of the sums over micro-batches, which is what `engine.backward` promises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Trace:
    """What a training run left after each update."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def batch(step: int, rank: int, micro: int, *, width: int = 6, rows: int = 4, dtype: torch.dtype = torch.float32
          ) -> Tensor:
    """The input of one micro-batch: a function of its place alone."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(rows, width, generator=generator, dtype=dtype)


def train_oracle(make_model: MakeModel, make_optimizer: MakeOptimizer, *, world_size: int, accumulate: int, steps: int,
                 clip_norm: float | None = None, clip_value: float | None = None, compute: torch.dtype | None = None,
                 loss_scale: float = 1.0,
                 dtype: torch.dtype = torch.float32) -> Trace:
    """Train in one process. `compute=bf16` or `fp16` computes on a rounded copy, sums gradients in fp32."""
    model = make_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trainable)
    trace = Trace()
    for step in range(steps):
        sums: dict[int, Tensor] = {}
        step_loss = 0.0
        for rank in range(world_size):
            for micro in range(accumulate):
                worker = model if compute is None else copy.deepcopy(model).to(compute)
                inputs = batch(step, rank, micro, dtype=dtype).to(compute or dtype)
                loss = loss_of(worker(inputs)) / accumulate
                (loss * loss_scale).backward()
                step_loss += loss.item() / world_size
                for place, parameter in enumerate(p for p in worker.parameters() if p.requires_grad):
                    if parameter.grad is not None:
                        wide = parameter.grad.to(trainable[place].dtype)
                        sums[place] = sums[place] + wide if place in sums else wide.clone()
                        parameter.grad = None
        for place, parameter in enumerate(trainable):
            parameter.grad = sums[place] / (world_size * loss_scale) if place in sums else None
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        trace.gradients.append({n: None if p.grad is None else p.grad.clone()
                                for n, p in zip(names, trainable, strict=True)})
        if clip_norm is not None:
            trace.norms.append(float(nn.utils.clip_grad_norm_(trainable, clip_norm)))
        if clip_value is not None:
            nn.utils.clip_grad_value_(trainable, clip_value)
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(step_loss)
        trace.parameters.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return trace


def train_engine(rank: int, make_model: MakeModel, make_optimizer: MakeOptimizer, *, world_size: int, accumulate: int,
                 steps: int, stage: int, precision: str = "fp32", clip_norm: float | None = None,
                 clip_value: float | None = None, mark_last: bool = True, dtype: torch.dtype = torch.float32,
                 **options: object) -> Trace:
    """The same through the engine, on one of `world_size` ranks."""
    import strategies

    engine = strategies.Engine(make_model(), optimizer=make_optimizer, zero=stage, precision=precision,
                               clip_norm=clip_norm, clip_value=clip_value, **options)
    trace = Trace()
    for step in range(steps):
        step_loss = 0.0
        for micro in range(accumulate):
            loss = loss_of(engine(batch(step, rank, micro, dtype=dtype))) / accumulate
            engine.backward(loss, last=mark_last and micro == accumulate - 1)
            step_loss += loss.item()
        trace.gradients.append(engine.gradients())
        norm = engine.step().gradient_norm
        if norm is not None:
            trace.norms.append(norm)
        mean = engine.mesh.data.sum(torch.tensor([step_loss], dtype=torch.float64), what="test loss") / world_size
        trace.losses.append(float(mean))
        state = engine.state_dict()
        trace.parameters.append({n: state[n] for n, _ in engine.module.named_parameters()})
    return trace


def loss_of(output: Tensor) -> Tensor:
    """A scalar that sends a different gradient to every output element."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float32).view(output.shape)
    return (output.float() if output.dtype != torch.float64 else output).pow(2).mul(weights).mean()


def assert_same(found: Trace, expected: Trace, *, atol: float, rtol: float = 0.0) -> None:
    """Losses, norms, every gradient and every parameter after each update."""
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), atol=atol, rtol=rtol)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(expected.norms), atol=atol, rtol=max(rtol, 1e-6))
    for what in ("gradients", "parameters"):
        for step, (one, two) in enumerate(zip(getattr(found, what), getattr(expected, what), strict=True)):
            assert one.keys() == two.keys()
            for name, value in one.items():
                other = two[name]
                if value is None or other is None:
                    assert value is None, f"step {step}: {name} has a gradient, the oracle has none"
                    assert other is None, f"step {step}: {name} has no gradient, the oracle has one"
                    continue
                torch.testing.assert_close(value.to(other.dtype), other, atol=atol, rtol=rtol,
                                           msg=lambda m, s=step, n=name, w=what: f"step {s}, {w} of {n}: {m}")
