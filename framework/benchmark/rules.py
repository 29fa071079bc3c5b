"""Rules about task=benchmark: what it cannot honour is refused. Registered by `framework/validate.py`.

Not read by this task, because the systems or the measurement decide it: zero.stage, trainer.val_every_steps,
trainer.val_steps, log.every_steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from framework.benchmark.catalog import ALLOCATORS, SYSTEMS
from framework.config import BenchmarkTask, Precision, RunConfig
from framework.machine import Machine
from framework.problems import Problem, listed, nearest
from framework.rules import rule


@rule("task.systems", "task.allocators")
def names_are_known_and_once(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if not isinstance(config.task, BenchmarkTask):
        return
    yield from _choice_problems("task.systems", config.task.systems, tuple(SYSTEMS))
    yield from _choice_problems("task.allocators", config.task.allocators, ALLOCATORS)


@rule("task.warmup_steps", "trainer.max_steps")
def steps_are_left_to_time(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    task, steps = config.task, config.trainer.max_steps
    if isinstance(task, BenchmarkTask) and task.warmup_steps >= steps:
        allowed = f"below trainer.max_steps ({steps}), which counts warm-up and timed updates together"
        fix = f"task.warmup_steps={steps - 1}, or trainer.max_steps={task.warmup_steps + 10}"
        yield Problem("task.warmup_steps", task.warmup_steps, allowed, fix)


@rule("trainer.accelerator", "trainer.devices", "trainer.num_nodes")
def samples_are_processes_of_this_machines_cpu(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if not isinstance(config.task, BenchmarkTask):
        return
    if config.trainer.accelerator != "cpu":
        allowed = "cpu for task=benchmark, which measures memory and time of CPU processes"
        yield Problem("trainer.accelerator", config.trainer.accelerator, allowed, "trainer.accelerator=cpu")
    if machine.launched is not None:
        allowed = f"task=benchmark starts processes of its own, but {machine.launched.by} has already started this one"
        yield Problem("task", "benchmark", allowed, "run it without that launcher")


@rule("parallel.data_replicate")
def state_is_sharded_over_all_ranks(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    groups = config.parallel.data_replicate
    if isinstance(config.task, BenchmarkTask) and groups != 1:
        yield Problem("parallel.data_replicate", groups, "1 for task=benchmark: not every system has groups",
                      "parallel.data_replicate=1")


@rule("precision")
def every_system_has_the_precision(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if not isinstance(config.task, BenchmarkTask):
        return
    precision = config.precision
    if not isinstance(precision, Precision):
        allowed = "fp32 or bf16 for task=benchmark: not every system has a loss scale"
        yield Problem("precision", precision.name, allowed, "precision=bf16")
        return
    if precision.gradient_dtype != "fp32":
        allowed = "fp32 for task=benchmark: all systems sum gradients in the same type"
        yield Problem("precision.gradient_dtype", precision.gradient_dtype, allowed, "precision.gradient_dtype=fp32")
    if precision.on_nonfinite != "skip":
        allowed = "skip for task=benchmark: no other system stops at gradients that are not finite"
        yield Problem("precision.on_nonfinite", precision.on_nonfinite, allowed, "precision.on_nonfinite=skip")


@rule("model.dropout")
def losses_can_be_compared(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if isinstance(config.task, BenchmarkTask) and config.model.dropout > 0:
        allowed = "0 for task=benchmark: the systems are to show equal losses"
        yield Problem("model.dropout", config.model.dropout, allowed, "model.dropout=0")


@rule("trainer.gradient_clip_val", "trainer.gradient_clip_algorithm")
def every_system_clips_alike(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    trainer = config.trainer
    clips = trainer.gradient_clip_val is not None
    if isinstance(config.task, BenchmarkTask) and clips and trainer.gradient_clip_algorithm != "norm":
        yield Problem("trainer.gradient_clip_algorithm", trainer.gradient_clip_algorithm,
                      "norm for task=benchmark: not every system clips by value",
                      "trainer.gradient_clip_algorithm=norm, or trainer.gradient_clip_val=null")


@rule("logger.name")
def results_are_files(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if isinstance(config.task, BenchmarkTask) and config.logger.name != "none":
        allowed = "none for task=benchmark, which has no single run to track; it writes tables to the run folder"
        yield Problem("logger", config.logger.name, allowed, "logger=none")


def _choice_problems(key: str, chosen: Sequence[str], allowed: Sequence[str]) -> Iterator[Problem]:
    if not chosen:
        yield Problem(key, [], f"at least one of {listed(allowed)}", f"{key}=[{allowed[0]}]")
    for name in dict.fromkeys(chosen):
        if name not in allowed:
            best = nearest(name, allowed) or allowed[0]
            kept = [best if each == name else each for each in chosen]
            yield Problem(key, name, f"one of {listed(allowed)}", f"{key}=[{','.join(dict.fromkeys(kept))}]")
        elif chosen.count(name) > 1:
            yield Problem(key, name, "each at most once", f"{key}=[{','.join(dict.fromkeys(chosen))}]")
