"""The model changes while an engine holds it: frozen and unfrozen parameters, and changes that are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import strategies
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import make
from support.zero_pairs import assert_gradients, sgd

# -- freezing and unfreezing ----------------------------------------------------------------------------------------


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.1)


def freeze(model, step):
    """Which parameters train changes before every update; the model "frozen" starts with some frozen."""
    blocks = model.blocks
    match step:
        case 1:
            blocks[1].requires_grad_(True)  # a whole block, frozen so far
        case 2:
            blocks[0].norm.requires_grad_(True)  # part of what is frozen in a trainable block
            blocks[2].up.requires_grad_(False)  # trained until now
        case 3:
            blocks[2].requires_grad_(False)
        case 4:
            model.requires_grad_(True)
        case 5:
            blocks[1].requires_grad_(False)  # frozen again


def schedule(rank, world, stage, in_optimizer, by_engine):
    plain, held = (make("frozen", dtype=torch.float64) for _ in range(2))
    frozen = [name for name, p in plain.named_parameters() if not p.requires_grad]
    chosen = [[p for n, p in model.named_parameters() if in_optimizer or n not in frozen] for model in (plain, held)]
    optimizer, held_optimizer = adamw(chosen[0]), adamw(chosen[1])
    engine = strategies.Engine(held, optimizer=held_optimizer, zero=stage)
    for step in range(7):
        for model, each in ((plain, optimizer), (held, held_optimizer)):
            freeze(model, step)
            if not in_optimizer and step == 1:  # as Lightning's BaseFinetuning does
                each.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 0.1})
        for micro in range(2):
            inputs = [batch(step, r, micro, dtype=torch.float64) for r in range(world)]
            (sum(loss_of(plain(each)) for each in inputs) / world).backward()
            loss = loss_of(engine(inputs[rank]))
            engine.backward(loss, last=micro == 1) if by_engine else loss.backward()
        found = engine.gradients()
        for name, parameter in plain.named_parameters():
            assert (found.get(name) is None) == (parameter.grad is None), (step, name)
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, atol=1e-10, rtol=1e-9)
        engine.step(), optimizer.step(), plain.zero_grad()
        state = engine.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    found, expected = engine.optimizer_state_dict(), optimizer.state_dict()
    assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert found["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(found["state"][number][key], value, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("in_optimizer", [True, False], ids=["in the optimizer", "added to it"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_parameters_frozen_and_unfrozen_during_training_equal_one_process(world, stage, in_optimizer, by_engine):
    run_ranks(world, schedule, world, stage, in_optimizer, by_engine)


def unfrozen_in_bf16(rank, stage):
    engine = strategies.Engine(make("frozen"), optimizer=lambda p: adamw(p), zero=stage, precision="bf16")
    before = engine.state_dict()
    engine.module.requires_grad_(True)
    engine.optimizer.add_param_group({"params": engine.module.blocks[1].parameters(), "lr": 1e-5})
    for step in range(3):
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        engine.step()
    after = engine.state_dict()
    name = "blocks.1.up.weight"
    moved = (after[name] - before[name]).abs().max()
    assert 0 < moved < 1e-3, "steps smaller than a bf16 digit add up in an fp32 master"
    assert not torch.equal(after[name], after[name].bfloat16().float())
    assert engine.resting_bytes().parameters <= engine.expected_resting_bytes().parameters + 64 * 4 * 8


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_unfrozen_parameter_gets_an_fp32_master(stage):
    run_ranks(2, unfrozen_in_bf16, stage)


def state_from_before(rank, stage):
    """An optimizer that has stepped a parameter keeps its moments while it is frozen, as plain torch does."""
    plain, held = make("stack"), make("stack")
    pairs = []
    for model in (plain, held):
        optimizer = adamw(model.parameters())
        loss_of(model(batch(0, 0, 0))).backward()
        optimizer.step(), optimizer.zero_grad()
        model.blocks[1].requires_grad_(False)
        pairs.append(optimizer)
    engine = strategies.Engine(held, optimizer=pairs[1], zero=stage)
    for step in range(1, 4):
        if step == 2:
            plain.blocks[1].requires_grad_(True), held.blocks[1].requires_grad_(True)
        loss_of(plain(batch(step, 0, 0))).backward()
        engine.backward(loss_of(engine(batch(step, 0, 0))))
        engine.step(), pairs[0].step(), pairs[0].zero_grad()
    state = engine.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_moments_from_before_a_parameter_was_frozen_are_kept(stage):
    run_ranks(2, state_from_before, stage)


def groups_refused(rank):
    engine = strategies.Engine(make("frozen"), optimizer=sgd, zero=3)
    engine.optimizer.add_param_group({"params": [engine.module.inlet.weight]})
    with pytest.raises(ValueError, match=r"optimizer group 1: parameters \['inlet\.weight'\] are in an earlier group"):
        engine(batch(0, rank, 0))
    engine.optimizer.param_groups.pop()
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match=r"optimizer group 1, parameter 0 .* is not a parameter of the model"):
        engine.step()
    engine.optimizer.param_groups.pop()
    engine.optimizer.param_groups[0]["params"].append(engine.module.blocks[1].up.weight)
    with pytest.raises(ValueError, match=r"optimizer group 0 has .* was edited; fix: optimizer\.add_param_group"):
        engine.step()


def test_a_group_added_to_the_optimizer_is_checked():
    run_ranks(2, groups_refused)


# -- changes that would be lost -------------------------------------------------------------------------------------


def half(model):
    model.half()


def other_data(model):
    model.blocks[1].up.weight.data = torch.zeros(19, 6)


def replaced_parameter(model):
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(19, 6))


def replaced_module(model):
    model.blocks[1].up = nn.Linear(6, 19)


def removed_module(model):
    model.blocks[1].norm = nn.Identity()


def added_parameter(model):
    model.blocks[1].extra = nn.Parameter(torch.zeros(3))


def retied(model):
    model.blocks[1].up.weight = model.blocks[0].up.weight


def weight_normed(model):
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)


CHANGES = {
    half: r"'blocks\.0\.norm\.weight' was given other data",
    other_data: r"'blocks\.1\.up\.weight' was given other data",
    replaced_parameter: r"replaced \['blocks\.1\.up\.weight'\]",
    replaced_module: r"replaced \['blocks\.1\.up\.weight', 'blocks\.1\.up\.bias'\]",
    removed_module: r"removed \['blocks\.1\.norm\.weight', 'blocks\.1\.norm\.bias'\]",
    added_parameter: r"added \['blocks\.1\.extra'\]",
    retied: r"replaced \['blocks\.1\.up\.weight'\]",
    weight_normed: r"added \['blocks\.1\.up\.parametrizations.*removed \['blocks\.1\.up\.weight'\]",
}


def changed(rank, world, stage, name):
    change = next(one for one in CHANGES if one.__name__ == name)
    engine = strategies.Engine(make("stack"), optimizer=sgd, zero=stage)
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    engine.step()
    before = engine.state_dict()
    text = CHANGES[change]
    if stage == 3 and change in (half, other_data, weight_normed):
        with pytest.raises(RuntimeError, match="rests sharded"):  # at the line itself
            change(engine.module)
        if change is weight_normed:
            return
        engine.backward(loss_of(engine(batch(1, rank, 0))))
        engine.step()
        return
    loss = loss_of(engine(batch(1, rank, 0)))
    change(engine.module)
    for act in (lambda: engine.backward(loss), lambda: engine(batch(1, rank, 0)), engine.step, engine.gradients):
        with pytest.raises(RuntimeError, match=text):
            act()
    if change in (half, other_data):
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


@pytest.mark.parametrize("change", [each.__name__ for each in CHANGES])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_a_model_changed_or_moved_after_wrapping_is_refused_by_name(world, stage, change):
    run_ranks(world, changed, world, stage, change)


class Edits(nn.Module):
    """A unit that edits its own weight in its forward."""

    class Block(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.how, self.words = how, nn.Embedding(5, 6, max_norm=1e-3 if how == "max_norm" else None)

        def forward(self, x):
            if self.how == "clamp":
                with torch.no_grad():
                    self.words.weight.clamp_(-1e-3, 1e-3)
            if self.how == "data":
                self.words.weight.data = self.words.weight.data / 2
            return x + self.words(torch.arange(4))

    def __init__(self, how):
        super().__init__()
        self.blocks = nn.ModuleList(Edits.Block(how) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def edited(rank, how, stage, precision):
    engine = strategies.Engine(Edits(how), optimizer=sgd, zero=stage, precision=precision)
    text = "given other data" if how == "data" else "edited in place outside"
    with pytest.raises(RuntimeError, match=rf"'blocks\.[01]\.words\.weight' was {text}.*gathered"):
        engine.backward(loss_of(engine(batch(0, rank, 0))))


@pytest.mark.parametrize("how", ["clamp", "max_norm", "data"])
@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (3, "bf16"), (1, "bf16")])
def test_an_edit_in_a_forward_that_would_be_lost_is_refused_by_name(stage, precision, how):
    run_ranks(2, edited, how, stage, precision)


def in_a_gathered_block(rank, stage):
    engine = strategies.Engine(make("stack"), optimizer=sgd, zero=stage)
    weight = engine.module.norm.weight
    with pytest.raises(RuntimeError, match=r"'norm\.weight' was given other data"), strategies.gathered(weight):
        weight.data = torch.zeros(6)


@pytest.mark.parametrize("stage", [1, 3])
def test_assigning_data_in_a_gathered_block_is_refused(stage):
    run_ranks(2, in_a_gathered_block, stage)


def what_may_change(rank, world, stage):
    """Modes, flags, buffers, hooks, tied names taken away, and moves that move nothing."""
    plain, held = make("stack"), make("stack")
    engine, optimizer = strategies.Engine(held, optimizer=sgd, zero=stage), sgd(plain.parameters())
    for step in range(3):
        held.train(step == 1)
        held.note = "an attribute"
        if stage < 3:
            held.to("cpu"), held.float()
        held.blocks[1].register_forward_hook(lambda *_: None)
        (sum(loss_of(plain(batch(step, r, 0))) for r in range(world)) / world).backward()
        engine.backward(loss_of(engine(batch(step, rank, 0))))
        assert_gradients(engine, plain)
        engine.step(), optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_changes_that_touch_no_parameter_are_free(world, stage):
    run_ranks(world, what_may_change, world, stage)
