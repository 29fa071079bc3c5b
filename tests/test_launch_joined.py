"""Ranks that torchrun has started come to one config and one run folder, or all say no."""

import json
import sys
import uuid

import pytest

from support.jobs import StartedJob, marked

OVERRIDES = ["model=gpt2_nano", "dataset=synthetic", "trainer.accelerator=cpu"]


@pytest.fixture
def start(tmp_path):
    """Start a command that is, or starts, ranks of a stand-in task; what is left of it at the end is killed."""
    jobs = []

    def run(entry, overrides, *, before=(), **environ):
        module = ["-m", "support.launch_tasks", "--joined", entry, *overrides]
        command = [sys.executable, *before, *module]
        jobs.append(StartedJob(command, folder=tmp_path / "run", environ={"OMP_NUM_THREADS": "1", **environ}))
        return jobs[-1]

    yield run
    for job in jobs:
        for process in marked(job.mark):
            process.kill()
        job.process.wait()
        job.process.stdout.close()


@pytest.fixture
def torchrun(start):
    """Run a stand-in task on two ranks of torchrun's to its end: exit code and output."""

    def run(entry, overrides):
        job = start(entry, overrides, before=torchrun_options())
        job.process.wait(timeout=120)
        return job.end()[:2]

    return run


def torchrun_options():
    return [
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        "localhost:0", "--rdzv-id", uuid.uuid4().hex, "--local-addr", "localhost",
    ]  # fmt: skip


def test_all_ranks_get_the_config_and_the_folder_of_rank_0(torchrun, tmp_path):
    code, output = torchrun("succeeds", [*OVERRIDES, "seed=17"])
    assert code == 0, output
    folders = list((tmp_path / "outputs").glob("*/*"))
    assert len(folders) == 1, "one job, one folder, though its name has the time in it"
    assert (folders[0] / "config.yaml").is_file()
    seen = [json.loads((folders[0] / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert [rank["seed"] for rank in seen] == [17, 17]
    assert [rank["run_dir"] for rank in seen] == [str(folders[0])] * 2
    assert seen[0]["resolutions"] == seen[1]["resolutions"]
    assert any("trainer.devices = 2" in text for text in seen[0]["resolutions"])


def test_an_explicit_process_count_that_torchrun_contradicts_is_refused_by_all_ranks(torchrun, tmp_path):
    code, output = torchrun("succeeds", [*OVERRIDES, "trainer.devices=3"])
    assert code != 0
    assert output.count("trainer.devices=3") == 1
    assert "2 processes" in output
    assert "exitcode  : 2" in output, "torchrun says what the first rank to end has ended with"
    assert not (tmp_path / "outputs").exists()


def test_the_nodes_of_an_explicit_layout_must_be_torchruns_too(torchrun):
    code, output = torchrun("succeeds", [*OVERRIDES, "trainer.devices=1", "trainer.num_nodes=2"])
    assert code != 0
    assert "LOCAL_WORLD_SIZE=2" in output
    assert "trainer.devices=1" in output


def test_a_sweep_inside_a_rank_is_refused(torchrun):
    code, output = torchrun("succeeds", [*OVERRIDES, "--multirun", "seed=1,2"])
    assert code != 0
    assert output.count("a sweep starts processes of its own") == 1


def test_an_error_is_told_by_torchrun_and_stands_in_the_summary(torchrun, tmp_path):
    code, output = torchrun("raises_on_rank_1", [*OVERRIDES, f"run.dir={tmp_path / 'run'}"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert code != 0
    assert "ValueError: the data of rank 1 is bad" in output
    assert summary["status"] == "failed"
    assert summary["steps"] == 1
    assert (summary["error"]["rank"], summary["error"]["type"]) == (1, "ValueError")


def test_a_killed_torchrun_takes_everything_along(start, tmp_path):
    job = start("deaf_in_c", [*OVERRIDES, f"run.dir={tmp_path / 'run'}"], before=torchrun_options())
    job.wait_for_ranks()
    job.process.kill()
    _, _, seconds = job.end()
    assert seconds < 3


@pytest.mark.parametrize("entry", ["succeeds_together", "raises_on_rank_1"])
def test_tasks_that_srun_has_started_need_no_store_but_their_own(start, tmp_path, entry):
    environ = {
        "SLURM_JOB_ID": str(uuid.uuid4().int), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip
    ranks = [
        start(entry, [*OVERRIDES, f"run.dir={tmp_path / 'run'}"], SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank),
              **environ)
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        rank.process.wait(timeout=120)
    ends = [rank.end()[:2] for rank in ranks]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    if entry == "succeeds_together":
        assert [code for code, _ in ends] == [0, 0], ends
        assert summary["status"] == "completed"
    else:
        assert [code for code, _ in ends] == [1, 1]
        assert "Rank 1 failed.\nTraceback" in ends[1][1]
        assert summary["status"] == "failed"
        assert (summary["error"]["rank"], summary["error"]["type"]) == (1, "ValueError")
