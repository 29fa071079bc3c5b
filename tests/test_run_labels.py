"""Loss, gradient, norm and schedule of an update are those of one token mean over all its samples (C01, C13, C25, C89).

However it is cut: into micro-batches, over ranks, with labels left out.
"""

import math

import pytest
import torch

from support.run_jobs import run_in_pool, training_config
from support.run_oracle import oracle_source, share_of_peak, train_oracle
from support.run_probes import run_watched
from support.run_sources import UNLABELLED_STEP, uneven_labels, unlabelled

CUTS = [(1, 4), (2, 1), (3, 2)]  # devices, micro size


def config_of(devices, micro_size, stage, **changes):
    return training_config(devices=devices, zero={"stage": stage}, batch={"micro_size": micro_size},
                           trainer={"max_steps": 6, "gradient_clip_val": 0.3},
                           schedule={"warmup_steps": 3}, **changes)


def watch(config, path, source=None):
    return run_in_pool(config, path, worker=run_watched, arguments=(source,))


@pytest.mark.parametrize(("devices", "micro_size", "stage"), [(*cut, stage) for stage in (0, 3) for cut in CUTS]
                         + [(2, 3, 1), (4, 3, 2)])
def test_uneven_labels_count_equally_however_the_batch_is_cut(tmp_path, devices, micro_size, stage):
    config = config_of(devices, micro_size, stage)
    run = watch(config, tmp_path, uneven_labels)
    expected = train_oracle(config, uneven_labels(config, tmp_path))
    assert run.column("tokens") == expected.tokens
    assert len(set(expected.tokens)) > 1
    assert run.column("loss") == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert run.column("grad_norm") == pytest.approx(expected.grad_norms, rel=3e-6)
    for name, value in expected.model.named_parameters():
        torch.testing.assert_close(run.returned[0].states[-1][0][name], value.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("devices", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_an_update_without_labels_is_counted_and_moves_nothing(tmp_path, devices, stage):
    config = config_of(devices, 3, stage)
    run = watch(config, tmp_path, unlabelled)
    expected = train_oracle(config, unlabelled(config, tmp_path))
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert run.column("tokens") == expected.tokens
    assert run.metrics[UNLABELLED_STEP]["tokens"] == 0
    assert run.metrics[UNLABELLED_STEP]["loss"] == run.metrics[UNLABELLED_STEP]["grad_norm"] == 0
    assert all(math.isfinite(value) for value in run.column("loss") + run.column("grad_norm"))
    assert run.column("loss") == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert run.column("lr") == pytest.approx(expected.lrs, rel=1e-12)
    assert run.metrics[UNLABELLED_STEP]["lr"] == run.metrics[UNLABELLED_STEP + 1]["lr"], "the schedule has waited"
    for seen in run.returned:
        assert_same_state(seen.states[UNLABELLED_STEP - 1], seen.states[UNLABELLED_STEP])


def assert_same_state(before, after):
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name]), name
    moments, later = before[1]["state"], after[1]["state"]
    assert moments.keys() == later.keys()
    assert moments, "there are moments that could have moved"
    for key, state in moments.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(later[key][name])), (key, name)


@pytest.mark.parametrize(("devices", "micro_size"), CUTS)
def test_the_rate_inside_the_step_is_the_schedules_and_moves_once_per_update(tmp_path, devices, micro_size):
    config = config_of(devices, micro_size, 3)
    run = watch(config, tmp_path)
    wanted = [config.optimizer.lr * share_of_peak(config, update) for update in range(1, 7)]
    assert run.column("lr") == pytest.approx(wanted, rel=1e-12)
    for seen in run.returned:
        assert seen.lrs == [[pytest.approx(lr, rel=1e-12)] * 2 for lr in wanted], "in optimizer.step itself"


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_every_schedule_warms_up_to_the_peak_and_ends_where_it_says(tmp_path, name):
    config = training_config(devices=1, schedule={"name": name, "warmup_steps": 3, "final_ratio": 0.2},
                             trainer={"max_steps": 9}, batch={"micro_size": 12})
    shares = [lr / config.optimizer.lr for lr in run_in_pool(config, tmp_path).column("lr")]
    assert shares[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    last = {"constant": 1.0, "linear": 0.2, "cosine": 0.2, "inverse_sqrt": math.sqrt(3 / 9)}[name]
    assert shares[-1] == pytest.approx(last)
    assert shares[2:] == sorted(shares[2:], reverse=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradient_norm_is_the_whole_models_and_the_same_on_every_rank(tmp_path, stage):
    config = config_of(3, 4, stage)
    run = watch(config, tmp_path)
    expected = train_oracle(config, oracle_source(config, tmp_path))
    for seen in run.returned:
        assert seen.norms == run.column("grad_norm")
    assert run.column("grad_norm") == pytest.approx(expected.grad_norms, rel=3e-6)
    assert all(norm > config.trainer.gradient_clip_val for norm in expected.grad_norms), "every update is clipped"
