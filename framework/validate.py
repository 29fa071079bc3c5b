"""Rules about several values at once, or about a value and the machine. All are checked before any process starts.

One small function per rule; rules about files, packages and folders stand in `framework/surroundings.py`. The config
must be resolved: no `auto` but `run.dir`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from framework import surroundings  # noqa: F401 (registers its rules)
from framework.benchmark import rules as benchmark_rules  # noqa: F401 (registers its rules)
from framework.config import (
    AdamOptimizer,
    BenchmarkTask,
    EvaluateTask,
    Fp16Precision,
    GenerateTask,
    HfDataset,
    Precision,
    RunConfig,
    SgdOptimizer,
    StdlibDataset,
    TextDataset,
    TokensDataset,
    TrainTask,
)
from framework.machine import Machine
from framework.problems import Problem
from framework.resolve import data_size, processes
from framework.rules import RULES, rule

BYTE_VOCABULARY = 257
WITHOUT_TOKENIZER = ("synthetic", "tokens")
"""256 bytes and the end-of-text token: the least a trained byte-level BPE needs."""


def validate(config: RunConfig, machine: Machine, *, skip: Iterable[str] = ()) -> list[Problem]:
    """Problems of every rule, except of those that read a key or section in `skip`."""
    skipped = tuple(skip)
    found: list[Problem] = []
    for entry in RULES:
        if not any(_overlap(key, wrong) for key in entry.keys for wrong in skipped):
            found += entry.check(config, machine)
    return found


def warnings(config: RunConfig) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    if isinstance(config.task, (EvaluateTask, GenerateTask)) and config.model.weights is None:
        found.append(f"task={config.task.name} without model.weights: the weights are random, drawn from seed.")
    warmup, steps = config.schedule.warmup_steps, config.trainer.max_steps
    trains = isinstance(config.task, (TrainTask, BenchmarkTask))
    if warmup >= steps and trains:  # a run shortened on the command line is no error
        reached = "reached only at the last update" if warmup == steps else "never reached"
        found.append(f"schedule.warmup_steps={warmup}, trainer.max_steps={steps}: the peak rate is {reached} "
                     f"(schedule.warmup_steps={steps // 10} fits).")
    return found


@rule("model.num_heads", "model.hidden_size")
def heads_divide_width(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    width, heads = config.model.hidden_size, config.model.num_heads
    if width % heads:
        near = _around(heads, [count for count in range(1, width + 1) if width % count == 0])
        allowed = f"must divide model.hidden_size ({width})"
        yield Problem("model.num_heads", heads, allowed, _options("model.num_heads", near))


@rule("dataset.seq_len", "model.max_seq_len")
def sequence_fits_model(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    length, most = config.dataset.seq_len, config.model.max_seq_len
    if length > most:
        fix = f"dataset.seq_len={most}, or model.max_seq_len={length}"
        yield Problem("dataset.seq_len", length, f"at most model.max_seq_len ({most})", fix)


@rule("parallel.tensor", "parallel.sequence", "parallel.pipeline")
def unsplit_axes(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    for axis in ("pipeline", "sequence", "tensor"):
        size = getattr(config.parallel, axis)
        if size != 1:
            yield Problem(f"parallel.{axis}", size, "this version runs with size 1 only", f"parallel.{axis}=1")


@rule("parallel", "trainer.devices", "trainer.num_nodes")
def axes_make_up_the_processes(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    axes, world = config.parallel, processes(config)
    others = axes.pipeline * axes.sequence * axes.tensor
    product = axes.data * others
    if product == world:
        return
    devices, nodes = config.trainer.devices, config.trainer.num_nodes
    allowed = (
        f"data {axes.data} x pipeline {axes.pipeline} x sequence {axes.sequence} x tensor {axes.tensor} = {product} "
        f"must equal trainer.devices {devices} x trainer.num_nodes {nodes} = {world}"
    )
    fixes = [] if product % nodes else [f"trainer.devices={product // nodes}"]
    fixes += [] if world % others else [f"parallel.data={world // others} (or auto)"]
    fixes = fixes or [f"trainer.devices={max(1, world // others) * others} and trainer.num_nodes=1"]
    yield Problem("parallel.data", axes.data, allowed, ", or ".join(fixes))


@rule("parallel.data", "parallel.data_replicate")
def groups_divide_the_data_axis(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    groups, data = config.parallel.data_replicate, data_size(config)
    if data % groups:
        near = _around(groups, [count for count in range(1, data + 1) if data % count == 0])
        allowed = f"must divide parallel.data ({data})"
        yield Problem("parallel.data_replicate", groups, allowed, _options("parallel.data_replicate", near))


@rule("batch.global_size", "batch.micro_size", "parallel.data", "trainer.devices", "trainer.num_nodes")
def updates_are_whole_micro_batches(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    size, micro, data = config.batch.global_size, config.batch.micro_size, data_size(config)
    step = micro * data
    if size % step:
        allowed = (
            f"must be a multiple of batch.micro_size ({micro}) x data-parallel size ({data}) = {step}; "
            f"the quotient is the accumulation ({size / step:g})"
        )
        below = size // step * step
        near = [below, below + step] if below else [step]
        yield Problem("batch.global_size", size, allowed, _options("batch.global_size", near))


@rule("schedule.final_ratio", "schedule.name")
def shape_has_a_floor(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    fixed = {"constant": 1.0, "inverse_sqrt": 0.0}.get(config.schedule.name)
    ratio = config.schedule.final_ratio
    if fixed is not None and ratio != fixed:
        allowed = f"{fixed:g} with schedule={config.schedule.name}, whose shape leaves no choice"
        yield Problem("schedule.final_ratio", ratio, allowed, f"schedule.final_ratio={fixed:g}, or schedule=linear")


@rule("optimizer.betas", "optimizer.name")
def two_betas_below_one(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if isinstance(config.optimizer, AdamOptimizer):
        betas = config.optimizer.betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            allowed = "two numbers, each at least 0 and below 1"
            yield Problem("optimizer.betas", betas, allowed, "optimizer.betas=[0.9,0.95]")


@rule("optimizer.nesterov", "optimizer.momentum")
def nesterov_has_momentum(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if isinstance(config.optimizer, SgdOptimizer) and config.optimizer.nesterov and config.optimizer.momentum == 0:
        fix = "optimizer.momentum=0.9, or optimizer.nesterov=false"
        yield Problem("optimizer.nesterov", True, "needs optimizer.momentum above 0", fix)


@rule("precision")
def gradients_as_wide_as_compute(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    precision = config.precision
    if isinstance(precision, Precision) and precision.name == "fp32" and precision.gradient_dtype != "fp32":
        kind = precision.gradient_dtype
        fix = f"precision.gradient_dtype=fp32, or precision={kind}"
        yield Problem("precision.gradient_dtype", kind, "fp32 with precision=fp32", fix)


@rule("precision")
def loss_scale_starts_above_its_minimum(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    precision = config.precision
    if isinstance(precision, Fp16Precision) and precision.initial_scale < precision.min_scale:
        lowest = precision.min_scale
        fix = f"precision.initial_scale={max(lowest, 65536.0):g}, or precision.min_scale={precision.initial_scale:g}"
        yield Problem("precision.initial_scale", precision.initial_scale, f"at least precision.min_scale ({lowest:g})",
                      fix)


@rule("model.vocab_size", "dataset.name")
def vocabulary_holds_all_bytes(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    trained = isinstance(config.dataset, (StdlibDataset, TextDataset, HfDataset))
    if trained and config.model.vocab_size < BYTE_VOCABULARY:
        allowed = f"at least {BYTE_VOCABULARY} for dataset={config.dataset.name}: 256 bytes and the end-of-text token"
        yield Problem("model.vocab_size", config.model.vocab_size, allowed, f"model.vocab_size={BYTE_VOCABULARY}")


@rule("dataset.validation_fraction", "dataset.num_validation_samples", "trainer.val_steps", "task.prompt")
def something_is_held_out(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    held_out = "validation_fraction" if hasattr(config.dataset, "validation_fraction") else "num_validation_samples"
    if getattr(config.dataset, held_out) > 0:
        return
    key, task = f"dataset.{held_out}", config.task
    more = f"{key}={0.05 if held_out == 'validation_fraction' else 64}"
    if isinstance(task, TrainTask) and config.trainer.val_steps > 0:
        allowed = f"above 0 while trainer.val_steps is {config.trainer.val_steps}: validation needs held-out data"
        yield Problem(key, 0, allowed, f"{more}, or trainer.val_steps=0")
    if isinstance(task, EvaluateTask):
        yield Problem(key, 0, "above 0 for task=evaluate, which reads the held-out data", more)
    samples = isinstance(task, GenerateTask) or (isinstance(task, TrainTask) and task.sample_tokens > 0)
    if samples and task.prompt is None:
        allowed = "a text, because no data is held out to take it from"
        readable = config.dataset.name not in WITHOUT_TOKENIZER
        yield Problem("task.prompt", None, allowed, f"task.prompt='Once upon a time', or {more}" if readable else more)


@rule("task.prompt", "dataset.name", "model.weights")
def prompt_can_be_read(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if not isinstance(config.task, (TrainTask, GenerateTask)) or config.task.prompt is None:
        return
    prompt, dataset = config.task.prompt, config.dataset.name
    if not prompt:
        yield Problem("task.prompt", prompt, "must be a text of at least one token, or null", "task.prompt=null")
    elif dataset in WITHOUT_TOKENIZER and config.model.weights is None:  # weights may bring their tokenizer
        allowed = f"must be null with dataset={dataset}, which has no tokenizer to read it with"
        yield Problem("task.prompt", prompt, allowed, "task.prompt=null continues the data; or dataset=stdlib")


@rule("trainer.accelerator", "trainer.devices")
def devices_are_there(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if config.trainer.accelerator != "gpu":
        return
    count, devices = machine.gpu_count(), config.trainer.devices
    if count == 0:
        fix = "trainer.accelerator=cpu (or auto)"
        yield Problem("trainer.accelerator", "gpu", "torch finds no GPU on this machine", fix)
    elif devices > count:
        fix = f"trainer.devices={count} (or auto), or trainer.accelerator=cpu"
        yield Problem("trainer.devices", devices, f"at most the {count} GPUs of this machine", fix)


@rule("trainer.devices", "trainer.num_nodes")
def processes_are_the_launchers(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    launched, devices, nodes = machine.launched, config.trainer.devices, config.trainer.num_nodes
    if launched is None:
        if nodes > 1:
            allowed = "1, because this command starts processes on this machine only"
            fix = f"trainer.num_nodes=1, or start it with torchrun --nnodes {nodes} --nproc-per-node {devices} or srun"
            yield Problem("trainer.num_nodes", nodes, allowed, fix)
    elif devices * nodes != launched.processes:
        allowed = (
            f"x trainer.num_nodes ({nodes}) must equal the {launched.processes} processes that {launched.by} started"
        )
        yield Problem("trainer.devices", devices, allowed, "trainer.devices=auto and trainer.num_nodes=auto")


@rule("dataset.path", "dataset.dtype", "model.vocab_size", "dataset.seq_len")
def tokens_fill_one_sample(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if not isinstance(config.dataset, TokensDataset) or not Path(config.dataset.path).is_file():
        return
    width = 2 if config.dataset.dtype == "uint16" else 8 if config.dataset.dtype == "int64" else 4
    count, need = Path(config.dataset.path).stat().st_size // width, config.dataset.seq_len + 1
    if count < need:
        allowed = f"holds {count} tokens of {config.dataset.dtype}; one sample needs {need}"
        fix = f"a larger file, or dataset.seq_len={max(1, count - 1)}"
        yield Problem("dataset.path", config.dataset.path, allowed, fix)


def _overlap(key: str, other: str) -> bool:
    """Whether one of two dotted names is the other or holds it."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def _around(value: int, allowed: list[int]) -> list[int]:
    """The allowed values next to `value`, below and above."""
    below = [candidate for candidate in allowed if candidate < value][-1:]
    return below + [candidate for candidate in allowed if candidate > value][:1]


def _options(key: str, values: list[int]) -> str:
    return " or ".join(f"{key}={value}" for value in values)
