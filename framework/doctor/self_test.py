"""A tiny model under every ZeRO stage against the same computation in one process: gradients and weights equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from framework.doctor.findings import Finding, failed, ok
from strategies.engine import Engine
from strategies.mesh import Mesh

STAGES = (0, 1, 2, 3)
UPDATES = 2
WIDTH, ROWS = 32, 4
TOLERANCE = 1e-5  # of values around 1; the order of sums differs
LEARNING_RATE = 0.1


def self_test(mesh: Mesh) -> Iterator[Finding]:
    """One finding per stage. Collective over the world; every rank computes all ranks' samples for comparison."""
    for stage in STAGES:
        gradient, weight = _largest_differences(mesh, stage)
        values = {"gradient_difference": gradient, "weight_difference": weight}
        item = f"stage {stage}"
        text = (f"{mesh.world_size} ranks against one process, {UPDATES} updates: gradients differ by at most "
                f"{gradient:.1g}, weights by {weight:.1g}")
        if max(gradient, weight) <= TOLERANCE:  # False for a number that is none
            yield ok(item, text, **values)
        else:
            yield failed(item, f"{text}; allowed is {TOLERANCE:g}", **values,
                         fix="do not train on this machine; report this output with the versions above")


def _largest_differences(mesh: Mesh, stage: int) -> tuple[float, float]:
    """Over all updates, parameters and ranks: of gradients, and of weights after the update."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(),
                          nn.Linear(WIDTH, 3)).to(mesh.device)
    engine = Engine(copy.deepcopy(plain), optimizer=lambda params: torch.optim.SGD(params, lr=LEARNING_RATE),
                    zero=stage, mesh=mesh)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    gradient = weight = 0.0
    for update in range(UPDATES):
        samples = torch.randn(mesh.data.size, ROWS, WIDTH, generator=torch.Generator().manual_seed(update))
        samples = samples.to(mesh.device)
        engine.backward(engine(samples[mesh.data.index]).pow(2).mean())
        optimizer.zero_grad()
        plain(samples.flatten(0, 1)).pow(2).mean().backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        gradient = max(gradient, _difference(engine.gradients(), expected))
        engine.step()
        optimizer.step()
        weight = max(weight, _difference(engine.state_dict(), plain.state_dict()))
    engine.close()
    worst = mesh.world.gather_list(torch.tensor([gradient, weight], dtype=torch.float64), what="result of a self-test")
    return max(float(each[0]) for each in worst), max(float(each[1]) for each in worst)


def _difference(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """The largest of any element; infinite where one is missing or no number."""
    largest = 0.0
    for name, value in expected.items():
        other = found.get(name)
        if other is None or value is None:
            return float("inf")
        difference = float((other.to(value.device) - value).abs().max())
        largest = max(largest, difference if difference == difference else float("inf"))
    return largest
