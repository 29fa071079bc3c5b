"""Stand-ins for the task of a job: what `framework.launch.run_job(entry="support.launch_tasks:...")` runs in each rank.

They import torch only where they need it, so that starting a rank costs little.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

STALL_TIMEOUT_S = 3.0
RANK_FILE = "rank_{}.json"


def rank() -> int:
    return int(os.environ["RANK"])


def succeeds(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """Leave what this rank sees; rank 0 writes the summary."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLIBC_TUNABLES",
             "THP_MEM_ALLOC_ENABLE")  # fmt: skip
    seen = {
        "environment": {name: os.environ.get(name) for name in names},
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "path": sys.path,
        "seed": config.seed,
        "run_dir": str(folder.path),
        "launch_dir": str(launch_dir),
        "resolutions": [str(item) for item in resolutions],
    }
    print(f"hello from rank {rank()}")
    folder.write_json(RANK_FILE.format(rank()), seen)
    if rank() == 0:
        folder.write_json("summary.json", {"status": "completed", "steps": 3, "final_loss": 1.5})


def succeeds_together(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """Form the process group, then as `succeeds`."""
    _join()
    _barrier()
    succeeds(config, folder=folder, launch_dir=launch_dir, resolutions=resolutions)


def raises_on_rank_1(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """Rank 1 raises in the middle of a collective of the others, after rank 0 has written part of the summary."""
    _join()
    if rank() == 0:
        folder.write_json("summary.json", {"status": "running", "steps": 1})
    _barrier()
    if rank() == 1:
        raise ValueError("the data of rank 1 is bad")
    _wait_for_peer()


def last_rank_waits_for_a_signal(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """All ranks start a child and wait in a collective, which the last one never joins."""
    _start_child()
    _join()
    folder.write_json(RANK_FILE.format(rank()), {"pid": os.getpid()})
    if rank() == int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(300)
    _wait_for_peer()


def deaf_in_c(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """Python signal handlers everywhere and a wait in C code with live peers: no rank answers SIGTERM or SIGINT."""
    _start_child()
    _join()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)
    folder.write_json(RANK_FILE.format(rank()), {"pid": os.getpid()})
    if rank() == 1 and "RANK_1_RAISES" in os.environ:
        while not (folder.path / RANK_FILE.format(0)).exists():
            time.sleep(0.05)
        os._exit(7)
    _wait_for_peer()


def stalls_in_its_data_on_rank_1(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """After one update, rank 1 never comes back from its data."""
    import torch

    import strategies

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports for seconds
    _join()
    _barrier()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mesh = strategies.Mesh(timeout_s=STALL_TIMEOUT_S)
    engine = strategies.Engine(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), zero=3, mesh=mesh)
    for step in range(2):
        if step == 1:
            folder.write_json(RANK_FILE.format(rank()), {"pid": os.getpid()})
        if step == 1 and rank() == 1:
            time.sleep(300)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()


def doctor_on_a_broken_engine(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """task=doctor where sums over ranks come out one and a half times too large."""
    from dataclasses import replace

    from framework.config import DoctorTask
    from framework.tasks.run import run_task
    from strategies.collectives import Communicator

    reduce = Communicator.reduce_scatter

    def wrong(self: Any, full: Any, out: Any, **options: Any) -> Any:
        pending = reduce(self, full, out, **options)
        pending.wait()
        out.mul_(1.5)
        return pending

    Communicator.reduce_scatter = wrong
    run_task(replace(config, task=DoctorTask(name="doctor")), folder=folder, launch_dir=launch_dir)


def light_wait(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """Wait without torch."""
    _start_child()
    folder.write_json(RANK_FILE.format(rank()), {"pid": os.getpid()})
    time.sleep(300)


def exits_without_a_word_on_rank_1(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    if rank() == 1:
        os._exit(7)
    time.sleep(300)


def leaves_a_child(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """Complete, but leave processes behind: one in the rank's group, one in a session of its own."""
    for separate in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=separate)


def stops_when_asked(config: Any, *, folder: Any, launch_dir: Path, resolutions: Any) -> None:
    """A loop that ends at its next boundary when asked to, and says so in the summary."""
    from framework.interrupt import StopRequest

    with StopRequest() as stop:
        folder.write_json(RANK_FILE.format(rank()), {"pid": os.getpid()})
        steps = 0
        while not stop:
            time.sleep(0.05)
            steps += 1
    if rank() == 0:
        folder.write_json("summary.json", {"status": "interrupted", "steps": steps})


def _start_child() -> None:
    """A process like those of a DataLoader, except that nothing makes it end by itself."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,)).start()


def _join() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _wait_for_peer() -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=(rank() + 1) % int(os.environ["WORLD_SIZE"]))


def main() -> int:
    """`RUN_DIR ENTRY` runs one job and returns its exit code; `--joined ENTRY OVERRIDES` is a rank of torchrun's."""
    from framework.failure import JobFailed
    from framework.launch import run_job
    from framework.worker import run_as_worker
    from support.run_configs import run_config

    if sys.argv[1] == "--joined":
        return run_as_worker(sys.argv[3:], entry=f"support.launch_tasks:{sys.argv[2]}")
    run_dir, entry = Path(sys.argv[1]), sys.argv[2]
    try:
        summary = run_job(
            run_config(), run_dir=run_dir, resolutions=[], launch_dir=Path.cwd(), entry=f"support.launch_tasks:{entry}"
        )
    except JobFailed as failed:
        return failed.exit_code
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
