"""Which launcher started this process, and the rank variables torch needs, read from the environment alone.

torchrun sets torch's variables itself. SLURM and MPI set their own, which are translated here. Everything is a pure
function of a mapping, so that a table of environments tests it without a cluster.

Sources: sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI; MPICH's Hydra process manager.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
import zlib
from collections.abc import Mapping

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
                  "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
TORCH_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# (rank, world size, local rank, local world size) as Open MPI, MVAPICH and the Hydra process manager name them.
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
MPI_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PBS_JOBID", "LSB_JOBID")
INTERACTIVE_JOB_NAMES = ("bash", "sh", "zsh", "interactive")
# SLURM numbers the steps that are not srun's from the top of 32 bits: 0xfffffffa interactive, 0xfffffffb batch.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Below the ephemeral ports of Linux (from 32768), so that no client socket holds the port by chance.
PORTS = range(15000, 30000)


class Launcher(enum.Enum):
    """What started this process. NONE: a person or a script; the process starts its own workers."""

    NONE = "none"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    MPI = "mpi"


def detect(environ: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher whose worker this process is."""
    if "TORCHELASTIC_RUN_ID" in environ or all(name in environ for name in TORCH_REQUIRED):
        return Launcher.TORCHRUN
    if _is_slurm_task(environ):
        return Launcher.SLURM
    # One process alone has no others to agree with: it may start workers of its own.
    if any(int(environ.get(size, "1")) > 1 for rank, size, _, _ in MPI_VARIABLES if rank in environ):
        return Launcher.MPI
    return Launcher.NONE


def worker_environment(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is already one of several ranks, started by someone else."""
    return detect(environ) is not Launcher.NONE


def rank_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """torch's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) for this process.

    Variables that are set win over derived ones. LOCAL_* are left out where the launcher does not tell them. Raises
    ValueError when the first host cannot be known.
    """
    launcher = detect(environ)
    derived: dict[str, str] = {}
    if launcher is Launcher.SLURM:
        derived = _slurm_variables(environ)
    elif launcher is Launcher.MPI:
        derived = _mpi_variables(environ)
    given = {name: environ[name] for name in (*TORCH_REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in environ}
    if launcher in (Launcher.SLURM, Launcher.MPI):
        # A rank exported once by a script is the same in every task; only the address may come from outside.
        given = {name: value for name, value in given.items() if name.startswith("MASTER_")}
    return derived | given


def expand_node_list(text: str) -> list[str]:
    """The hosts of a SLURM node list: "node[01-03,7],login" is node01 node02 node03 node7 login."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)  # text and bracket contents in turn
        choices = [_expand_ranges(part) if index % 2 else [part] for index, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks on each node from SLURM's short form: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        count, _, repeat = item.partition("(x")
        counts += [int(count)] * int(repeat.rstrip(")") or 1)
    return counts


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks, and not a shell a person types into."""
    if "SLURM_PROCID" not in environ or "SLURM_PTY_PORT" in environ:
        return False
    if environ.get("SLURM_JOB_NAME") in INTERACTIVE_JOB_NAMES:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= FIRST_SPECIAL_STEP:
        return False
    return _slurm_tasks(environ) > 1


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    return int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))


def _slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    nodes = _first(environ, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if nodes is None and "MASTER_ADDR" not in environ:
        raise ValueError("SLURM_NODELIST is not set, so the first host of the job is unknown. Export MASTER_ADDR.")
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(_slurm_tasks(environ)),
        "MASTER_ADDR": expand_node_list(nodes)[0] if nodes else environ["MASTER_ADDR"],
        "MASTER_PORT": str(_port(f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}")),
    }
    if "SLURM_LOCALID" in environ:
        variables["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    per_node = _first(environ, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if per_node is not None and "SLURM_NODEID" in environ:
        variables["LOCAL_WORLD_SIZE"] = str(expand_tasks_per_node(per_node)[int(environ["SLURM_NODEID"])])
    return variables


def _mpi_variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = next(names for names in MPI_VARIABLES if names[0] in environ)
    variables = {
        name: environ[source]
        for name, source in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), names, strict=True)
        if source in environ
    }
    if "MASTER_ADDR" not in environ:
        if variables.get("LOCAL_WORLD_SIZE") != variables["WORLD_SIZE"]:
            raise ValueError(
                f"MPI started {variables['WORLD_SIZE']} processes on more than one host and does not tell the first "
                "one. Pass it on, e.g. mpirun -x MASTER_ADDR=<host of rank 0>."
            )
        variables["MASTER_ADDR"] = "127.0.0.1"
    variables["MASTER_PORT"] = str(_port(_first(environ, MPI_JOB_NAMES) or ""))
    return variables


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _port(job: str) -> int:
    """A port all ranks of `job` derive alike; two jobs on one host rarely share it."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def _expand_ranges(text: str) -> list[str]:
    names: list[str] = []
    for item in text.split(","):
        low, dash, high = item.partition("-")
        names += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)] if dash else [low]
    return names
