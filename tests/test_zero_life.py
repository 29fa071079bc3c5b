"""A unit's life, memory at rest, evaluation between steps, several engines, closing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import strategies
from strategies.precision import PrecisionPolicy
from strategies.zero.hooks import StaleForwardError
from strategies.zero.placement import StagePolicy
from strategies.zero.unit import ALLOWED, Phase, PhaseError
from support.oracle import batch, loss_of
from support.ranks import run_ranks
from support.small_models import MODELS, make


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def train_step(engine, step, rank, micro=0):
    engine.backward(loss_of(engine(batch(step, rank, micro))), last=True)
    return engine.step().gradient_norm


def every_illegal_transition(rank):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=3)
    unit = engine.units[0]
    assert unit.phase is Phase.RESTING
    for start in Phase:
        for to in Phase:
            unit._phase = start
            if (start, to) in ALLOWED:
                unit.phase = to
                assert unit.phase is to
            else:
                with pytest.raises(PhaseError, match=rf"'{unit.name}'.*{start.name} -> {to.name}"):
                    unit.phase = to
    unit._phase = Phase.RESTING


def test_every_transition_outside_the_table_is_refused_by_name():
    run_ranks(2, every_illegal_transition)


def memory_contract(rank, stage, precision, world):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=stage, precision=precision)
    train_step(engine, 0, rank)
    found, expected = engine.resting_bytes(), engine.expected_resting_bytes(states_per_element=2)
    groups = [group for unit in engine.units for group in unit.groups]
    padding = sum(group.layout.padded_numel - group.layout.numel for group in groups)
    for state in ("parameters", "gradients"):
        slack = padding * 4
        assert getattr(expected, state) <= getattr(found, state) <= getattr(expected, state) + slack, state
    # Moments exist for this rank's pieces: at most a shard with its padding, at least the shard without.
    assert abs(found.optimizer - expected.optimizer) <= padding * 12
    by_hand = StagePolicy.of(stage).resting_bytes(numel=engine.num_parameters, num_shards=world,
                                                  precision=PrecisionPolicy.of(precision))
    assert abs(by_hand.parameters - expected.parameters) <= 4 * len(groups)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bytes_at_rest_equal_the_formula_plus_padding(world, stage, precision):
    run_ranks(world, memory_contract, stage, precision, world)


def test_the_formula_is_the_papers():
    # ZeRO, arXiv:1910.02054: 16 bytes per parameter in mixed precision; 64-way, stages 1-3.
    numel, shards, bf16 = 7_500_000_000, 64, PrecisionPolicy.of("bf16", gradient="bf16")
    per_parameter = {}
    for stage in range(4):
        held = StagePolicy.of(stage).resting_bytes(numel=numel, num_shards=shards, precision=bf16)
        per_parameter[stage] = (held.parameters + held.gradients + held.optimizer) / numel
    assert per_parameter[0] == pytest.approx(16.0)
    assert per_parameter[1] == pytest.approx(4 + 12 / 64, rel=1e-6)
    assert per_parameter[2] == pytest.approx(2 + 14 / 64, rel=1e-6)
    assert per_parameter[3] == pytest.approx(16 / 64, rel=1e-6)


def masters_are_the_parameters(rank, stage):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=stage)
    for unit in engine.units:
        for group in unit.groups:
            home = group.resting if group.frees_parameters else group.full
            assert group.master.untyped_storage().data_ptr() == home.untyped_storage().data_ptr()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_fp32_the_masters_are_the_parameters(stage):
    run_ranks(2, masters_are_the_parameters, stage)


def storages_for_life(rank):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=3)
    before = [group.full.untyped_storage()._cdata for unit in engine.units for group in unit.groups]
    for step in range(3):
        train_step(engine, step, rank)
        assert all(g.full.untyped_storage().size() == 0 for u in engine.units for g in u.groups)
    assert before == [group.full.untyped_storage()._cdata for unit in engine.units for group in unit.groups]


def test_each_unit_keeps_one_storage_object_and_frees_it():
    run_ranks(2, storages_for_life)


def evaluation_leaves_no_trace(rank, stage):
    """C35: train and eval mode x no_grad, inference_mode and gradients."""
    def run(evaluate):
        engine = strategies.Engine(make("stack"), optimizer=adamw, zero=stage)
        train_step(engine, 0, rank)
        if evaluate:
            for mode in (True, False):
                engine.train(mode)
                with torch.no_grad():
                    engine(batch(7, rank, 0))
                with torch.inference_mode():
                    engine(batch(8, rank, 0))
                loss = loss_of(engine(batch(9, rank, 0)))  # with gradients
                engine.backward(loss)
                assert any(g is not None for g in engine.gradients().values())
                engine.zero_grad()
            engine.train()
        train_step(engine, 1, rank)
        gathers = [unit.num_gathers for unit in engine.units]
        train_step(engine, 2, rank)
        train_step(engine, 3, rank)
        rounds = [unit.num_gathers for unit in engine.units]
        return engine.state_dict(), [b - a for a, b in zip(gathers, rounds, strict=True)]

    (plain, per_step), (evaluated, per_step_after) = run(False), run(True)
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)
    assert per_step == per_step_after


@pytest.mark.parametrize("stage", [2, 3])
def test_all_ways_of_evaluating_between_steps_leave_no_trace(stage):
    run_ranks(2, evaluation_leaves_no_trace, stage)


def gathers_per_step(rank):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=3)
    train_step(engine, 0, rank)
    before = [unit.num_gathers for unit in engine.units]
    train_step(engine, 1, rank)
    counts = {u.name: u.num_gathers - b for u, b in zip(engine.units, before, strict=True)}
    # Forward and backward; the last block is kept for backward, the root for all.
    assert counts == {"blocks.0": 2, "blocks.1": 2, "blocks.2": 1, "root": 1}


def test_a_step_gathers_each_unit_as_often_as_it_must():
    run_ranks(2, gathers_per_step)


def one_reduction(rank, stage, reentrant):
    """C49: three uses under recomputation."""
    import functools

    model = functools.partial(MODELS["checkpointed"], use_reentrant=reentrant, repeats=3)
    torch.manual_seed(0)
    engine = strategies.Engine(model(), optimizer=adamw, zero=stage)
    torch.manual_seed(0)
    plain = model()
    inputs = batch(0, 0, 0).requires_grad_()
    loss_of(plain(inputs)).backward()
    engine.backward(loss_of(engine(batch(0, 0, 0).requires_grad_())), last=True)
    flushes = engine.ledger.num_flushes
    gradients = engine.gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-5)
    assert all(unit.phase is Phase.RESTING for unit in engine.units if unit.frees_parameters)
    if not reentrant:
        assert flushes == sum(len(unit.groups) for unit in engine.units)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_used_many_times_with_recomputation_has_the_right_gradient(stage, reentrant):
    run_ranks(2, one_reduction, stage, reentrant)


def frozen_with_recomputation(rank, reentrant):
    """C34: a frozen norm and a trainable layer in a recomputed block."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)
            self.norm.requires_grad_(False)

        def forward(self, x):
            return x + self.layer(self.norm(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    engine = strategies.Engine(Model(), optimizer=adamw, zero=3)
    loss_of(plain(batch(0, 0, 0).requires_grad_())).backward()
    engine.backward(loss_of(engine(batch(0, 0, 0).requires_grad_())))
    for name, gradient in engine.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
    assert all(unit.phase is Phase.RESTING for unit in engine.units)


@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_weights_stay_until_the_recomputed_backward_is_done(reentrant):
    run_ranks(2, frozen_with_recomputation, reentrant)


def stale_forward(rank, stage):
    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=stage)
    old = loss_of(engine(batch(0, rank, 0)))
    train_step(engine, 1, rank)
    with pytest.raises(StaleForwardError, match="before the last engine"):
        engine.backward(old)
    train_step(engine, 2, rank)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_backward_of_a_loss_from_before_the_update_is_refused(stage):
    run_ranks(2, stale_forward, stage)


def two_engines(rank):
    """C94: A at stage 3 and B at stage 1 with one loss through both, then alternating, then A alone after B closed."""
    a, b = strategies.Engine(make("stack"), optimizer=adamw, zero=3), strategies.Engine(
        make("tied", seed=1), optimizer=adamw, zero=1)
    one, two = make("stack"), make("tied", seed=1)
    opt_one, opt_two = adamw(one.parameters()), adamw(two.parameters())
    world = 2

    def plain_step(losses, optimizers):
        (sum(losses) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for step in range(2):
        loss = loss_of(b(a(batch(step, rank, 0))))
        with a.backward_scope(), b.backward_scope():
            loss.backward()
        a.step(), b.step()
        plain_step([loss_of(two(one(batch(step, r, 0)))) for r in range(world)], [opt_one, opt_two])
    train_step(a, 5, rank)
    plain_step([loss_of(one(batch(5, r, 0))) for r in range(world)], [opt_one])
    b.close()
    assert all(type(p) is nn.Parameter for p in b.module.parameters())
    b.module(batch(0, 0, 0)).sum().backward()  # plain torch again
    train_step(a, 6, rank)
    plain_step([loss_of(one(batch(6, r, 0))) for r in range(world)], [opt_one])
    for engine, plain in ((a, one), (b, two)):
        for name, value in (engine.state_dict() if engine is a else b.module.state_dict()).items():
            torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-5, rtol=1e-5)


def test_engines_are_independent_and_one_loss_may_run_through_several():
    run_ranks(2, two_engines)


def steady_state(rank, stage):
    """C67: tensors and hooks after five and after twenty steps; the engine dies with close()."""

    def census():
        gc.collect()
        return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor))

    engine = strategies.Engine(make("stack"), optimizer=adamw, zero=stage)
    leaf = batch(0, rank, 0).requires_grad_()  # a leaf input: hooks must not pile up on it
    for step in range(20):
        engine.backward(loss_of(engine(leaf)))
        engine.step()
        with torch.no_grad():
            engine(batch(step, rank, 1))
        if step == 5:
            first, hooks = census(), len(leaf._backward_hooks or ())
    assert census() == first
    assert len(leaf._backward_hooks or ()) == hooks
    dead = weakref.ref(engine)
    engine.close()
    del engine
    gc.collect()
    assert dead() is None, "a closed engine must not live on"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_grows_with_steps_and_a_closed_engine_dies(stage):
    run_ranks(2, steady_state, stage)


def weights_outside_their_unit(rank):
    """C70: named, and right where a unit holds all users."""

    class Borrower(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.own = nn.Parameter(torch.ones(6))

        def forward(self, x, borrow=False):
            x = self.blocks[0](x) * self.own
            x = self.blocks[1](x)
            return nn.functional.linear(x, self.blocks[0].weight) if borrow else x

    engine = strategies.Engine(Borrower(), optimizer=adamw, zero=3)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.weight.*rests sharded"):
        engine(torch.ones(2, 6), borrow=True)
    engine.backward(loss_of(engine(torch.ones(2, 6))))
    engine.step()
    engine.close()
    whole = strategies.Engine(Borrower(), optimizer=adamw, zero=3, units=[])  # all in the root: up all the time
    whole.backward(loss_of(whole(torch.ones(2, 6), borrow=True)))
    whole.step()


def test_a_weight_used_outside_its_unit_is_named_and_units_can_be_chosen():
    run_ranks(2, weights_outside_their_unit)


def plain_backward(rank, stage):
    a, b = (strategies.Engine(make("checkpointed"), optimizer=adamw, zero=stage) for _ in range(2))
    for step in range(3):
        for micro in range(2):
            a.backward(loss_of(a(batch(step, rank, micro))))
            loss_of(b(batch(step, rank, micro))).backward()
        a.step(), b.step()
    left, right = a.state_dict(), b.state_dict()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_loss_backward_gives_the_same_numbers(stage):
    run_ranks(2, plain_backward, stage)


def misuse(rank):
    engine = strategies.Engine(make("stack"), zero=2)
    with pytest.raises(RuntimeError, match="without an optimizer"):
        engine.step()
    engine.add_optimizer(adamw(list(engine.module.parameters())))
    engine.backward(loss_of(engine(batch(0, rank, 0))))
    engine.close_gradients()
    late = loss_of(engine(batch(1, rank, 0)))
    with pytest.raises(RuntimeError, match="were closed"):
        engine.backward(late)
    engine.step()
    for wrong, key in (({"zero": 4}, "stage 4"), ({"zero": True}, "stage True"), ({"precision": "fp8"}, "fp8"),
                       ({"clip_norm": 0.0}, "clip_norm"), ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_value"),
                       ({"prefetch_units": -1}, "prefetch_units"), ({"units": ["nowhere"]}, "nowhere")):
        with pytest.raises(ValueError, match=key):
            strategies.Engine(make("stack"), optimizer=adamw, **wrong)


def test_misuse_is_refused_with_the_argument_and_its_value():
    run_ranks(2, misuse)


def wrong_optimizers(rank):
    def expect(make_optimizer, text):
        with pytest.raises(ValueError, match=text):
            strategies.Engine(make("stack"), optimizer=make_optimizer, zero=3)

    expect(lambda p: torch.optim.LBFGS(p), "LBFGS")
    expect(lambda p: torch.optim.Adafactor(p), "Adafactor")
    expect(lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]), "Muon")
    expect(lambda p: adamw([nn.Parameter(torch.ones(3))]), "not a parameter of the model")

    class RowNormalised(torch.optim.SGD):
        """Divides by the norm of the whole tensor."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])

    class SignDescent(torch.optim.SGD):
        """Element-wise: runs."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad.sign(), alpha=group["lr"])

    expect(lambda p: RowNormalised(p, lr=0.1), "looks at whole tensors")
    engine = strategies.Engine(make("stack"), optimizer=lambda p: SignDescent(p, lr=0.1), zero=3)
    train_step(engine, 0, rank)


def test_optimizers_that_look_at_whole_tensors_are_refused_by_name():
    run_ranks(2, wrong_optimizers)


def prebuilt_with_groups_and_state(rank, stage):
    """C37: an optimizer object with three groups, one step old, keeps options, identity and state."""
    def build(model):
        named = list(model.named_parameters())
        return torch.optim.AdamW([
            {"params": [p for n, p in named if "norm" in n], "lr": 1e-2, "weight_decay": 0.0},
            {"params": [p for n, p in named if n.endswith("up.weight")], "betas": (0.5, 0.6)},
            {"params": [p for n, p in named if "norm" not in n and not n.endswith("up.weight")], "lr": 3e-2},
        ], lr=5e-3, eps=1e-4)

    def one_step(model, optimizer, step):
        (sum(loss_of(model(batch(step, r, 0))) for r in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, wrapped = make("stack"), make("stack")
    optimizers = build(plain), build(wrapped)
    for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
        one_step(model, optimizer, 0)
    groups = [id(group) for group in optimizers[1].param_groups]
    engine = strategies.Engine(wrapped, optimizer=optimizers[1], zero=stage)
    assert groups == [id(group) for group in optimizers[1].param_groups]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 1, gamma=0.5)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
    for step in range(1, 4):
        one_step(plain, optimizers[0], step)
        plain_scheduler.step()
        train_step(engine, step, rank)
        scheduler.step()
    state = engine.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)
    full, expected = engine.optimizer_state_dict(), optimizers[0].state_dict()
    assert [g["params"] for g in full["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(full["state"][number][key], value, atol=1e-5, rtol=1e-4)
    # Another stage takes over in mid-training, from full state alone.
    moved = make("stack", seed=5)
    moved_optimizer = build(moved)
    other = strategies.Engine(moved, optimizer=moved_optimizer, zero=3 - stage)
    other.load_state_dict(state)
    other.load_optimizer_state_dict(full)
    one_step(plain, optimizers[0], 9)
    train_step(other, 9, rank)
    found = other.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_built_optimizer_keeps_its_groups_options_and_state(stage):
    run_ranks(2, prebuilt_with_groups_and_state, stage)
