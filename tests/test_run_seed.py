"""Weights at the start and the data depend on the seed alone; what is random is so in the same way every time."""

import pytest
import torch

from support.run_jobs import changed, run_here, run_in_pool, training_config
from support.run_oracle import oracle_model, oracle_source
from support.run_probes import run_watched
from support.run_sources import alike

LAYOUTS = [(1, 0, 12), (2, 3, 1), (2, 1, 2), (3, 3, 4)]  # devices, stage, micro size


def short(devices, stage, micro_size, **changes):
    config = training_config(devices=devices, zero={"stage": stage}, batch={"micro_size": micro_size},
                             trainer={"max_steps": 4})
    return changed(config, **changes)


def watch(config, path, *source):
    return run_in_pool(config, path, worker=run_watched, arguments=source)


def differently_seeded(rank, config, path):
    torch.manual_seed(1000 + rank)
    return run_watched(rank, config, path)


@pytest.mark.parametrize(("devices", "stage", "micro_size"), LAYOUTS)
def test_weights_at_the_start_and_the_samples_of_a_step_do_not_know_of_the_layout(tmp_path, devices, stage, micro_size):
    config = short(devices, stage, micro_size, seed=5)
    seen = run_in_pool(config, tmp_path, worker=differently_seeded).returned
    for name, value in oracle_model(config).named_parameters():
        for rank in seen:
            assert torch.equal(rank.start[name], value), name
    loader = oracle_loader(config, tmp_path)
    for step in range(4):
        for rank in seen:
            assert [tuple(tokens.shape) for tokens in rank.batches[step]] == (
                [(micro_size, 16)] * (12 // (micro_size * devices))), "what the config says is what the loader gives"
        together = torch.cat([tokens for rank in seen for tokens in rank.batches[step]])
        assert torch.equal(together, loader.step_batches(step)[0].tokens_BT)


def oracle_loader(config, path):
    from framework.data.step_loader import StepLoader

    return StepLoader(oracle_source(config, path).train, global_size=12, micro_size=12, data_rank=0, data_size=1,
                      seed=config.seed)


def test_another_seed_gives_other_weights_other_data_and_another_order(tmp_path):
    seen = [watch(short(1, 0, 12, seed=seed), tmp_path / str(seed)).returned[0] for seed in (5, 6)]
    for name, value in seen[0].start.items():
        if name.endswith("weight") and "ln_" not in name:
            assert not torch.equal(value, seen[1].start[name]), name
    assert not torch.equal(seen[0].batches[0][0], seen[1].batches[0][0])


@pytest.mark.parametrize(("devices", "stage", "model"), [(2, 3, {"dropout": 0.2}), (3, 2, {}), (2, 0, {})])
def test_the_same_run_again_is_equal_bit_by_bit(tmp_path, devices, stage, model):
    config = short(devices, stage, 1, model=model)
    first, second = (watch(config, tmp_path / name) for name in ("first", "second"))
    for name in ("loss", "grad_norm"):
        assert first.column(name) == second.column(name)
    for name, value in first.returned[0].states[-1][0].items():
        assert torch.equal(value, second.returned[0].states[-1][0][name]), name
    for one, two in zip(first.returned, second.returned, strict=True):
        assert one.local_losses == two.local_losses


@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_leaves_out_other_values_on_each_rank(tmp_path, stage):
    config = short(2, stage, 3)
    plain = watch(config, tmp_path / "plain", alike)
    dropped = watch(changed(config, model={"dropout": 0.2}), tmp_path / "dropped", alike)
    assert plain.returned[0].local_losses[0] == plain.returned[1].local_losses[0], "the ranks have the same samples"
    assert abs(dropped.returned[0].local_losses[0] - dropped.returned[1].local_losses[0]) > 1e-4
    assert dropped.column("loss") != plain.column("loss")


def test_recomputation_draws_the_dropout_of_the_first_time(tmp_path):
    config = short(2, 3, 3, model={"dropout": 0.2})
    kept = run_in_pool(config, tmp_path / "kept")
    for mode in ("full", "selective"):
        recomputed = run_in_pool(changed(config, model={"activation_checkpointing": mode}), tmp_path / mode)
        assert recomputed.column("loss") == pytest.approx(kept.column("loss"), abs=1e-6, rel=0)
        assert recomputed.column("grad_norm") == pytest.approx(kept.column("grad_norm"), rel=3e-6)


def test_validation_takes_no_part_in_the_randomness_of_training(tmp_path):
    config = short(2, 3, 3, model={"dropout": 0.2})
    alone = run_in_pool(config, tmp_path / "alone")
    validated = run_in_pool(changed(config, trainer={"val_steps": 1, "val_every_steps": 1}), tmp_path / "validated")
    assert validated.column("loss") == alone.column("loss")
    assert len(validated.column("val_loss")) == 4


def loses_its_seed(rank, config, path):
    """A run whose random state is disturbed from outside before it starts."""
    torch.manual_seed(rank)
    torch.rand(17)
    run_here(rank, config, path)


def test_what_was_drawn_before_a_run_does_not_change_it(tmp_path):
    config = short(2, 3, 3, model={"dropout": 0.2})
    runs = [run_in_pool(config, tmp_path / str(number), worker=worker)
            for number, worker in enumerate((None, loses_its_seed))]
    assert runs[0].column("loss") == runs[1].column("loss")
