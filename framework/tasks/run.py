"""The entry of a rank: from a resolved config to the task it names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from framework.config import BenchmarkTask, DoctorTask, EvaluateTask, GenerateTask, RunConfig
from framework.resolve import Resolution
from framework.run_folder import RunFolder
from framework.tasks.session import open_session


def run_task(config: RunConfig, *, folder: RunFolder, launch_dir: Path, resolutions: Sequence[Resolution] = ()
             ) -> None:
    """Run `config.task` on this rank. Collective over the world: every rank calls it with the same config.

    Rank 0 leaves summary.json in `folder`. Errors are raised; the launcher turns them into the run's record.
    """
    if isinstance(config.task, BenchmarkTask):
        from framework.tasks.benchmark import benchmark

        benchmark(config, config.task, folder=folder, launch_dir=launch_dir)
        return
    if isinstance(config.task, DoctorTask):
        from framework.tasks.doctor import examine

        examine(config, folder=folder)
        return
    with open_session(config, folder=folder, launch_dir=launch_dir, resolutions=resolutions) as session:
        if isinstance(config.task, EvaluateTask):
            from framework.tasks.evaluate import evaluate

            evaluate(session, config.task)
        elif isinstance(config.task, GenerateTask):
            from framework.tasks.generate import generate_text

            generate_text(session, config.task)
        else:
            from framework.tasks.train import train  # imports Lightning, which takes seconds

            train(session, config.task)
