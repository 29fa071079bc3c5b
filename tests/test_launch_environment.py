"""Which launcher started a process, for the environments that launchers and shells are known to make."""

import pytest

from framework.environment import (
    PORTS,
    Launcher,
    detect,
    expand_node_list,
    expand_tasks_per_node,
    rank_variables,
    worker_environment,
)

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
         "MASTER_PORT": "29500"}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_JOB_NODELIST": "node[01-10]", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}  # fmt: skip
SBATCH = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_NTASKS", "SLURM_JOB_NODELIST")}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "123@0"}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0",
           "MV2_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        pytest.param({}, Launcher.NONE, id="a terminal"),
        pytest.param(TORCH, Launcher.TORCHRUN, id="all of torch's variables"),
        pytest.param({"TORCHELASTIC_RUN_ID": "x", **TORCH}, Launcher.TORCHRUN, id="torchrun"),
        pytest.param({"TORCHELASTIC_RUN_ID": "x", **TORCH, **SRUN}, Launcher.TORCHRUN, id="torchrun inside srun"),
        pytest.param({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, Launcher.NONE, id="an address alone"),
        pytest.param({"LOCAL_RANK": "0"}, Launcher.NONE, id="a stray local rank"),
        pytest.param(SRUN, Launcher.SLURM, id="srun"),
        pytest.param(SBATCH, Launcher.NONE, id="an sbatch script, outside srun"),
        pytest.param({**SBATCH, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, Launcher.NONE, id="batch step"),
        pytest.param({**SBATCH, "SLURM_JOB_NAME": "interactive"}, Launcher.NONE, id="salloc"),
        pytest.param({**SRUN, "SLURM_STEP_ID": "4294967290"}, Launcher.NONE, id="salloc with an interactive step"),
        pytest.param({**SRUN, "SLURM_JOB_NAME": "bash"}, Launcher.NONE, id="srun --pty bash"),
        pytest.param({**SRUN, "SLURM_PTY_PORT": "40001"}, Launcher.NONE, id="srun --pty of a named job"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, Launcher.NONE, id="srun with one task"),
        pytest.param(OPEN_MPI, Launcher.MPI, id="Open MPI"),
        pytest.param(MPICH, Launcher.MPI, id="MPICH"),
        pytest.param(MVAPICH, Launcher.MPI, id="MVAPICH"),
        pytest.param({**SRUN, **MPICH}, Launcher.SLURM, id="srun --mpi=pmi2"),
        pytest.param({**MPICH, "PMI_SIZE": "1"}, Launcher.NONE, id="mpirun -n 1"),
    ],
)
def test_the_launcher_is_known_by_its_variables(environ, launcher):
    assert detect(environ) is launcher
    assert worker_environment(environ) is (launcher is not Launcher.NONE)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-04,7],login", ["node01", "node02", "node03", "node04", "node7", "login"]),
        ("a1,b[2-3]", ["a1", "b2", "b3"]),
        ("rack[1-2]-n[09-10]", ["rack1-n09", "rack1-n10", "rack2-n09", "rack2-n10"]),
        ("gpu[8-11].cluster.example", [f"gpu{number}.cluster.example" for number in (8, 9, 10, 11)]),
    ],
)
def test_a_node_list_expands_without_the_cluster(text, hosts):
    assert expand_node_list(text) == hosts


def test_tasks_per_node_expand():
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_slurm_gives_torchs_variables():
    variables = rank_variables(SRUN)
    port = variables.pop("MASTER_PORT")
    assert variables == {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                         "MASTER_ADDR": "node08"}  # fmt: skip
    assert int(port) in PORTS
    assert rank_variables({**SRUN, "SLURM_PROCID": "0"})["MASTER_PORT"] == port
    assert rank_variables({**SRUN, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != port


def test_an_address_from_outside_wins_and_a_rank_from_outside_does_not():
    variables = rank_variables({**SRUN, "MASTER_ADDR": "10.0.0.1", "RANK": "0"})
    assert variables["MASTER_ADDR"] == "10.0.0.1"
    assert variables["RANK"] == "5"


def test_mpi_on_one_host_needs_no_address_and_on_several_asks_for_it():
    assert rank_variables(OPEN_MPI)["MASTER_ADDR"] == "127.0.0.1"
    assert rank_variables(MPICH)["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        rank_variables({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_torchruns_variables_are_taken_as_they_are():
    assert rank_variables(TORCH) == TORCH
