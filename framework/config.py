"""The schema of a run: every key a user can set, its type and what is allowed.

Defaults stand in `conf/*.yaml` and nowhere else; a field here has none, so a key that no YAML sets is an error. Rules
about one value stand beside it (`knob`); rules about several values stand in `framework/validate.py`. A group whose
options take different keys has one dataclass per option, chosen by its `name` (`VARIANTS`).

This module imports neither torch nor Hydra: `--help` reads it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

AUTO = "auto"


def knob(
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    auto: bool = False,
) -> Any:
    """A schema field: its one-line help and the bounds of its value.

    `auto=True` lets the text "auto" stand for a value that `framework/resolve.py` computes and prints.
    """
    bounds = {"choices": choices, "at_least": at_least, "above": above, "at_most": at_most, "below": below}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(metadata={"help": help, "auto": auto, **bounds})


@dataclass
class TrainTask:
    """Train, validate, save the weights, sample a continuation."""

    name: str = knob("which task", choices=("train",))
    save_weights: bool = knob("write the final weights to checkpoints/final (safetensors, Hugging Face layout)")
    sample_tokens: int = knob("length in tokens of the continuation sampled at the end; 0 for none", at_least=0)
    prompt: str | None = knob("text the sampled continuation starts from; null takes it from the validation data")
    temperature: float = knob("sampling temperature; 0 is greedy", at_least=0)
    top_k: int = knob("sample among the k most likely tokens; 0 for all", at_least=0)


@dataclass
class EvaluateTask:
    """Loss of the given weights on the validation split."""

    name: str = knob("which task", choices=("evaluate",))
    steps: int | None = knob("validation steps; null for the whole split once", at_least=1)


@dataclass
class GenerateTask:
    """Continue a prompt."""

    name: str = knob("which task", choices=("generate",))
    prompt: str | None = knob("text to continue; null takes it from the validation data")
    max_new_tokens: int = knob("tokens to generate", at_least=1)
    temperature: float = knob("sampling temperature; 0 is greedy", at_least=0)
    top_k: int = knob("sample among the k most likely tokens; 0 for all", at_least=0)


@dataclass
class BenchmarkTask:
    """Train the same model under several systems in turn; compare time, memory and loss."""

    name: str = knob("which task", choices=("benchmark",))
    systems: list[str] = knob("what to compare, in this order: nocomm, ddp, fsdp2, deepspeed_1 to _3, zero0 to zero3")
    allocators: list[str] = knob("memory allocator of all systems: tuned (the launcher's setting) or stock (none)")
    rounds: int = knob("samples of each system; odd rounds run in reverse order", at_least=1)
    warmup_steps: int = knob("first updates of a sample, of trainer.max_steps, that are not timed", at_least=0)
    memory_steps: int = knob("updates after the timed ones, in which anonymous memory is sampled", at_least=0)
    sample_timeout_s: float = knob("how long a sample may take before it is ended and reported", above=0)


@dataclass
class DoctorTask:
    """Look at this machine and environment, measure, and compare the engine with one process."""

    name: str = knob("which task", choices=("doctor",))


@dataclass
class GptModel:
    """A decoder-only transformer with the architecture and parameter layout of Hugging Face GPT2LMHeadModel."""

    name: str = knob("model family", choices=("gpt2",))
    vocab_size: int = knob("tokens in the vocabulary; the tokenizer is trained to it", at_least=1)
    max_seq_len: int = knob("positions the model has", at_least=1)
    hidden_size: int = knob("width of the residual stream", at_least=1)
    num_layers: int = knob("transformer blocks", at_least=1)
    num_heads: int = knob("attention heads per block; must divide hidden_size", at_least=1)
    dropout: float = knob("dropout after embeddings, attention and MLP", at_least=0, below=1)
    activation_checkpointing: str = knob(
        "what backward recomputes: nothing, whole blocks, or all but matrix products",
        choices=("none", "full", "selective"),
    )
    loss_chunk_tokens: int | None = knob(
        "tokens whose logits are held at once by the loss (recomputed in backward); null holds all", at_least=1
    )
    weights: str | None = knob("safetensors file or folder to start from; null draws from the seed")


@dataclass
class StdlibDataset:
    """The running interpreter's own standard library as text."""

    name: str = knob("which dataset", choices=("stdlib",))
    seq_len: int = knob("tokens per sample; auto is the model's max_seq_len", at_least=1, auto=True)
    validation_fraction: float = knob("share of the tokens held out, cut from the end", at_least=0, below=1)


@dataclass
class TextDataset:
    """Text files of one's own."""

    name: str = knob("which dataset", choices=("text",))
    files: list[str] = knob("paths or globs, relative to the directory the command was typed in")
    seq_len: int = knob("tokens per sample; auto is the model's max_seq_len", at_least=1, auto=True)
    validation_fraction: float = knob("share of the tokens held out, cut from the end", at_least=0, below=1)


@dataclass
class TokensDataset:
    """A flat binary file of token ids, memory-mapped."""

    name: str = knob("which dataset", choices=("tokens",))
    path: str = knob("file of token ids, relative to the directory the command was typed in")
    dtype: str = knob("integer type in the file, little-endian", choices=("uint16", "uint32", "int32", "int64"))
    seq_len: int = knob("tokens per sample; auto is the model's max_seq_len", at_least=1, auto=True)
    validation_fraction: float = knob("share of the tokens held out, cut from the end", at_least=0, below=1)


@dataclass
class HfDataset:
    """A Hugging Face `datasets` name or local path (needs the `hf` extra)."""

    name: str = knob("which dataset", choices=("hf",))
    path: str = knob("dataset name on the hub, or a local folder or file")
    subset: str | None = knob("configuration name of the dataset")
    split: str = knob("split to read")
    column: str = knob("column that holds the text")
    seq_len: int = knob("tokens per sample; auto is the model's max_seq_len", at_least=1, auto=True)
    validation_fraction: float = knob("share of the tokens held out, cut from the end", at_least=0, below=1)


@dataclass
class SyntheticDataset:
    """Random tokens that follow a learnable rule; depends on the seed alone."""

    name: str = knob("which dataset", choices=("synthetic",))
    num_samples: int = knob("training samples before the data repeats", at_least=1)
    num_validation_samples: int = knob("samples held out", at_least=0)
    seq_len: int = knob("tokens per sample; auto is the model's max_seq_len", at_least=1, auto=True)


@dataclass
class Parallel:
    """Sizes of the mesh axes, outermost to innermost."""

    pipeline: int = knob("pipeline stages", at_least=1)
    data: int = knob("data-parallel size; auto is what the other axes leave of the processes", at_least=1, auto=True)
    data_replicate: int = knob("groups the data axis is split into; state is sharded inside a group", at_least=1)
    sequence: int = knob("ranks that share one sequence", at_least=1)
    tensor: int = knob("ranks that share one layer", at_least=1)
    transport: str = knob("how large buffers move between data ranks: reads of each other's memory on one host, "
                          "pairwise messages, the backend's own collectives, or the fastest of these that works",
                          choices=("fastest", "peer_memory", "pairwise", "native"))


@dataclass
class Zero:
    """Where parameters, gradients and optimizer state rest between uses (arXiv:1910.02054)."""

    stage: int = knob("0 replicates all; 1 shards optimizer state; 2 also gradients; 3 also parameters",
                      choices=(0, 1, 2, 3))
    prefetch_units: int = knob("units gathered ahead of their use at stage 3", at_least=0)


@dataclass
class Precision:
    """fp32 or bf16. Masters and optimizer state are always fp32."""

    name: str = knob("type of parameters and activations in compute", choices=("fp32", "bf16"))
    gradient_dtype: str = knob("type gradients are summed and reduced in", choices=("fp32", "bf16"))
    on_nonfinite: str = knob("what gradients that are infinite or NaN do: skip the update, or stop the run",
                             choices=("skip", "stop"))
    max_skipped_steps: int = knob("updates that may be skipped in a row; one more stops the run", at_least=0)


@dataclass
class Fp16Precision:
    """fp16 with a dynamic loss scale. Masters, optimizer state and gradient sums are fp32.

    An update that overflows is skipped: that is how the scale finds its value.
    """

    name: str = knob("type of parameters and activations in compute", choices=("fp16",))
    initial_scale: float = knob("factor on the loss at the start", above=0)
    growth_interval: int = knob("updates in a row without overflow that double the scale", at_least=1)
    hysteresis: int = knob("overflows until the scale is halved; growth fills them up again", at_least=1)
    min_scale: float = knob("lowest scale; an overflow at it stops the run", above=0)
    max_skipped_steps: int = knob("updates that may be skipped in a row; one more stops the run", at_least=0)


@dataclass
class AdamOptimizer:
    """Adam and AdamW (decoupled weight decay)."""

    name: str = knob("which optimizer", choices=("adam", "adamw"))
    lr: float = knob("peak learning rate", at_least=0)
    betas: list[float] = knob("decay rates of the two moments")
    eps: float = knob("added to the denominator", above=0)
    weight_decay: float = knob("decay of matrices; biases and norms have none", at_least=0)


@dataclass
class SgdOptimizer:
    """Stochastic gradient descent."""

    name: str = knob("which optimizer", choices=("sgd",))
    lr: float = knob("peak learning rate", at_least=0)
    momentum: float = knob("momentum", at_least=0, below=1)
    nesterov: bool = knob("Nesterov momentum")
    weight_decay: float = knob("decay of matrices; biases and norms have none", at_least=0)


@dataclass
class RmspropOptimizer:
    """RMSprop."""

    name: str = knob("which optimizer", choices=("rmsprop",))
    lr: float = knob("peak learning rate", at_least=0)
    alpha: float = knob("decay rate of the squared average", at_least=0, below=1)
    eps: float = knob("added to the denominator", above=0)
    momentum: float = knob("momentum", at_least=0, below=1)
    weight_decay: float = knob("decay of matrices; biases and norms have none", at_least=0)


@dataclass
class AdagradOptimizer:
    """Adagrad."""

    name: str = knob("which optimizer", choices=("adagrad",))
    lr: float = knob("peak learning rate", at_least=0)
    eps: float = knob("added to the denominator", above=0)
    weight_decay: float = knob("decay of matrices; biases and norms have none", at_least=0)


@dataclass
class Schedule:
    """Learning rate over updates: linear warm-up, then the named shape down to `final_ratio` at the last step."""

    name: str = knob("shape after warm-up", choices=("constant", "linear", "cosine", "inverse_sqrt"))
    warmup_steps: int = knob("updates of linear warm-up", at_least=0)
    final_ratio: float = knob("share of the peak rate left at the last step (linear, cosine)", at_least=0, at_most=1)


@dataclass
class Trainer:
    """Processes and loop; Lightning's names where it has one."""

    accelerator: str = knob("where processes compute; auto takes GPUs when there are any",
                            choices=("cpu", "gpu"), auto=True)
    devices: int = knob("processes per node; auto is every GPU, or 2 on a CPU", at_least=1, auto=True)
    num_nodes: int = knob("nodes; auto is what torchrun, SLURM or MPI started, else 1", at_least=1, auto=True)
    threads: int = knob("CPU threads per process; auto shares the cores", at_least=1, auto=True)
    max_steps: int = knob("optimizer updates", at_least=1)
    gradient_clip_val: float | None = knob("largest gradient norm or value; null for no clipping", above=0)
    gradient_clip_algorithm: str = knob("what gradient_clip_val bounds", choices=("norm", "value"))
    val_every_steps: int | None = knob("updates between validations; null validates at the end only", at_least=1)
    val_steps: int = knob("validation steps each time; 0 for no validation", at_least=0)
    timeout_s: float = knob("how long a process waits in a collective before it fails", above=0)


@dataclass
class NoLogger:
    """No tracker; metrics.jsonl and summary.json are always written."""

    name: str = knob("which tracker", choices=("none",))


@dataclass
class FileLogger:
    """CSV or TensorBoard files in the run folder."""

    name: str = knob("which tracker", choices=("csv", "tensorboard"))


@dataclass
class WandbLogger:
    """Weights & Biases, one run per job, from rank 0."""

    name: str = knob("which tracker", choices=("wandb",))
    project: str = knob("project the run belongs to")
    entity: str | None = knob("account or team; null for the default")
    run_name: str | None = knob("display name; null lets the tracker choose")
    mode: str = knob("auto is offline unless the user is logged in", choices=("online", "offline"), auto=True)
    timeout_s: float = knob("longest the tracker may hold up the run, in total per call", above=0)


@dataclass
class Batch:
    """Samples per update; accumulation follows from these and the data-parallel size."""

    global_size: int = knob("samples per optimizer update over all processes; auto is one micro-batch per data rank",
                            at_least=1, auto=True)
    micro_size: int = knob("samples per forward on one process", at_least=1)


@dataclass
class Run:
    """The folder a run writes to."""

    dir: str = knob("run folder; auto makes a new one under outputs/", auto=True)


@dataclass
class Log:
    """How often metrics are written."""

    every_steps: int = knob("updates between lines of metrics.jsonl", at_least=1)


@dataclass
class RunConfig:
    """One run, whole. `load` in framework/schema.py makes it from a composed tree."""

    task: TrainTask | EvaluateTask | GenerateTask | BenchmarkTask | DoctorTask
    model: GptModel
    dataset: StdlibDataset | TextDataset | TokensDataset | HfDataset | SyntheticDataset
    parallel: Parallel
    zero: Zero
    precision: Precision | Fp16Precision
    optimizer: AdamOptimizer | SgdOptimizer | RmspropOptimizer | AdagradOptimizer
    schedule: Schedule
    trainer: Trainer
    logger: NoLogger | FileLogger | WandbLogger
    batch: Batch
    run: Run
    log: Log
    seed: int = knob("weights at the start, data order, dropout and synthetic data follow from it", at_least=0)


# Groups whose options take different keys: `name` in the YAML picks the dataclass.
VARIANTS: dict[str, dict[str, type]] = {
    "task": {"train": TrainTask, "evaluate": EvaluateTask, "generate": GenerateTask,
             "benchmark": BenchmarkTask, "doctor": DoctorTask},
    "model": {"gpt2": GptModel},
    "dataset": {"stdlib": StdlibDataset, "text": TextDataset, "tokens": TokensDataset, "hf": HfDataset,
                "synthetic": SyntheticDataset},
    "precision": {"fp32": Precision, "bf16": Precision, "fp16": Fp16Precision},
    "optimizer": {"adam": AdamOptimizer, "adamw": AdamOptimizer, "sgd": SgdOptimizer, "rmsprop": RmspropOptimizer,
                  "adagrad": AdagradOptimizer},
    "logger": {"none": NoLogger, "csv": FileLogger, "tensorboard": FileLogger, "wandb": WandbLogger},
}
GROUPS: dict[str, type] = {"parallel": Parallel, "zero": Zero, "schedule": Schedule, "trainer": Trainer,
                           "batch": Batch, "run": Run, "log": Log}
