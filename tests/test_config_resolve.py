"""`auto` values: what they become on which machine, and why; relative paths mean the launch directory."""

import os
from pathlib import Path

import pytest

from framework import machine as machines
from framework.composition import Composer
from framework.config import AUTO
from framework.machine import Launched, Machine, available_cpus, launched_processes
from framework.preflight import prepare
from framework.resolve import logged_in_to_wandb
from framework.schema import dump

LAPTOP = Machine(cpu_count=5, gpu_count=lambda: 0)


@pytest.fixture(scope="module")
def composer():
    return Composer()


def prepared(composer, *overrides, machine=LAPTOP, launch_dir=Path("/")):
    return prepare(composer.tree(overrides), machine=machine, launch_dir=launch_dir)


def values(result):
    return {entry.key: entry.value for entry in result.resolutions}


def test_a_laptop_gets_two_cpu_processes_that_share_its_cores(composer):
    result = prepared(composer)
    assert values(result) == {
        "trainer.accelerator": "cpu", "trainer.devices": 2, "trainer.num_nodes": 1, "trainer.threads": 2,
        "parallel.data": 2, "batch.global_size": 16, "dataset.seq_len": 128, "accumulation": 1,
    }  # fmt: skip
    assert all(entry.why for entry in result.resolutions)


def test_a_gpu_machine_gets_one_process_per_gpu(composer):
    machine = Machine(cpu_count=64, gpu_count=lambda: 8)
    result = prepared(composer, "batch.micro_size=4", machine=machine)
    config = result.config
    assert (config.trainer.accelerator, config.trainer.devices, config.trainer.threads) == ("gpu", 8, 8)
    assert (config.parallel.data, config.batch.global_size) == (8, 32)
    assert "8 GPUs" in next(entry.why for entry in result.resolutions if entry.key == "trainer.accelerator")


def test_gpus_are_not_looked_for_when_a_cpu_is_asked_for(composer):
    def never():
        raise AssertionError("GPUs were counted")

    config = prepared(composer, "trainer.accelerator=cpu", machine=Machine(cpu_count=1, gpu_count=never)).config
    assert config.trainer.threads == 1


def test_another_launchers_processes_are_taken_as_they_are(composer):
    machine = Machine(cpu_count=8, gpu_count=lambda: 0, launched=Launched("torchrun", 8, 4))
    config = prepared(composer, machine=machine).config
    assert (config.trainer.devices, config.trainer.num_nodes, config.parallel.data) == (4, 2, 8)


def test_values_that_were_given_are_left_alone(composer):
    result = prepared(composer, "trainer.devices=4", "batch.global_size=64", "dataset.seq_len=32", "trainer.threads=1")
    assert not values(result).keys() & {"trainer.devices", "batch.global_size", "dataset.seq_len", "trainer.threads"}
    assert values(result)["accumulation"] == 2


def test_nothing_but_the_run_folder_stays_auto(composer):
    config = prepared(composer, "logger=wandb").config
    left = [
        f"{section}.{key}"
        for section, keys in dump(config).items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if value == AUTO
    ]
    assert left == ["run.dir"]


def test_relative_paths_mean_the_launch_directory(composer, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    overrides = ["dataset=text", "dataset.files=['data/*.txt']", "model.weights=weights.safetensors", "run.dir=out/run"]
    config = prepared(composer, *overrides, launch_dir=tmp_path).config
    assert config.dataset.files == [str(tmp_path / "data" / "*.txt")]
    assert config.model.weights == str(tmp_path / "weights.safetensors")
    assert config.run.dir == str(tmp_path / "out" / "run")


@pytest.mark.parametrize(
    ("environment", "mode"),
    [({}, "offline"), ({"WANDB_API_KEY": "k"}, "online"), ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline")],
)
def test_wandb_is_offline_unless_logged_in_or_asked(composer, monkeypatch, tmp_path, environment, mode):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert prepared(composer, "logger=wandb").config.logger.mode == mode


def test_a_netrc_entry_counts_as_logged_in(tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    os.chmod(tmp_path / "netrc", 0o600)
    assert logged_in_to_wandb({"NETRC": str(tmp_path / "netrc")})
    assert not logged_in_to_wandb({"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "https://wandb.example.org"})


def test_cpus_are_cut_to_the_containers_quota(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert available_cpus(quota) == 1
    quota.write_text("max 100000\n")
    assert available_cpus(quota) == len(os.sched_getaffinity(0))


def test_torch_is_not_asked_for_gpus_when_there_is_no_driver(monkeypatch):
    monkeypatch.setattr(machines, "GPU_FILES", ("/nowhere/*",))
    monkeypatch.setitem(__import__("sys").modules, "torch", None)  # importing it would raise
    assert machines.available_gpus() == 0


def test_torchruns_variables_give_processes_and_nodes():
    environment = {
        "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "host", "MASTER_PORT": "1",
    }  # fmt: skip
    launched = launched_processes(environment)
    assert (launched.processes, launched.processes_per_node, launched.nodes) == (8, 4, 2)
    assert launched_processes({}) is None


@pytest.mark.parametrize("task", ["evaluate", "generate"])
def test_random_weights_are_warned_about_and_not_refused(composer, task):
    (warning,) = prepared(composer, f"task={task}").warnings
    assert "model.weights" in warning
