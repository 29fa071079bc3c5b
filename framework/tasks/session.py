"""What every task starts with on a rank: processes connected, data ready, model built, a screen to write to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework.build import build_model, mesh_shape
from framework.config import RunConfig
from framework.data.source import DataSource, prepare
from framework.data.tokenizer import TextTokenizer
from framework.memory import peak_memory_bytes
from framework.plan import PlanFacts
from framework.progress import Progress
from framework.report import STATES, Measured
from framework.resolve import Resolution
from framework.run_folder import RunFolder
from framework.weights import tokenizer_beside
from models.gpt2 import GPT2
from strategies.engine import Engine
from strategies.mesh import AXES, Mesh, ensure_process_group
from strategies.zero.placement import Placement, RestingBytes

PREPARATION_LIMIT = timedelta(days=7)  # no collective's timeout: tokenizing a large corpus takes hours


@dataclass
class Session:
    """One rank's share of a run. `progress` writes to the terminal on rank 0 and nowhere on the others."""

    config: RunConfig
    folder: RunFolder
    resolutions: Sequence[Resolution]
    progress: Progress
    mesh: Mesh
    source: DataSource
    model: GPT2

    started_s: float

    @property
    def local_ranks(self) -> int:
        """Processes that share this machine's memory (or, on GPUs, none: each has its own)."""
        return 1 if self.mesh.device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's shared files."""
        return self.mesh.rank == 0

    @property
    def layout(self) -> dict[str, int]:
        """Sizes of the axes as the summary names them."""
        shape = self.mesh.shape
        return {"data": shape.data, "data_replicate": shape.data_replicate, "sequence": shape.sequence,
                "tensor": shape.tensor, "pipeline": shape.pipeline}

    def peak_memory_bytes_per_rank(self) -> list[int]:
        """The most each rank has held so far. Collective over the world."""
        peaks = self.mesh.world.gather_list(torch.tensor([peak_memory_bytes()]), what="peak memory")
        return [int(peak[0]) for peak in peaks]

    def measured(self, engine: Engine, *, val_loss: float | None = None) -> Measured:
        """What the summary needs from the engine. Collective over the world."""
        resting = gather_bytes(self.mesh, engine.resting_bytes())
        return Measured(
            world_size=self.mesh.world_size, layout=self.layout,
            parameters=engine.num_parameters, resting_bytes_per_rank=resting, val_loss=val_loss,
            updates=engine.guard.counts, data_hash=self.source.content_hash,
            wall_time_s=time.monotonic() - self.started_s)

    def plan_facts(self, engine: Engine) -> PlanFacts:
        """What the printed plan shows beside the config. Collective over the world."""
        config, mesh = self.config, self.mesh
        global_size = config.batch.global_size
        assert isinstance(global_size, int)
        shards = mesh.data_shard.size

        def where(placement: Placement, note: str = "") -> str:
            return f"sharded over {shards}{note}" if placement is Placement.SHARDED and shards > 1 else "replicated"

        policy = engine.policy
        return PlanFacts(
            model=f"{config.model.name}, {len(engine.units)} ZeRO units", parameters=engine.num_parameters,
            axes=dict(zip(AXES, mesh.shape.sizes, strict=True)),
            accumulation=global_size // (config.batch.micro_size * mesh.shape.data),
            rests={"parameters": where(policy.parameters), "gradients": where(policy.gradients, " as they arrive"),
                   "optimizer": where(policy.optimizer)},
            resting_bytes_per_rank=gather_bytes(mesh, engine.expected_resting_bytes()),
            training_tokens=self.source.num_train_tokens, data_hash=self.source.content_hash,
            run_dir=str(self.folder.path), collectives=mesh.data_shard.algorithm())


@contextlib.contextmanager
def open_session(config: RunConfig, *, folder: RunFolder, launch_dir: Path,
                 resolutions: Sequence[Resolution]) -> Iterator[Session]:
    """Connect the processes, prepare data, build the model. Collective over the world.

    Raises:
        ValueError: ranks read different data, or settings do not fit the data.
    """
    started_s = time.monotonic()
    with connected(config) as device, screen() as progress:
        with _first_rank_of_a_node_first():
            source = prepare(config.dataset, vocab_size=config.model.vocab_size,
                             max_seq_len=config.model.max_seq_len, seed=config.seed, base=launch_dir,
                             scratch=folder.path, notify=progress.notify)
        source = _with_tokenizer_of_weights(source, config, scratch=folder.path)
        for notice in source.notices:
            progress.say(notice)
        mesh = Mesh(mesh_shape(config.parallel), device=device, timeout_s=config.trainer.timeout_s,
                    transport=config.parallel.transport)
        _require_same_data(mesh, source)
        torch.manual_seed(config.seed * 1_000_003 + mesh.rank)  # dropout: another stream on every rank
        yield Session(config, folder, resolutions, progress, mesh, source,
                      build_model(config.model, seed=config.seed), started_s)


@contextlib.contextmanager
def connected(config: RunConfig) -> Iterator[torch.device]:
    """The process group, and the device this rank computes on. Collective over the world."""
    torch.set_num_threads(_resolved(config.trainer.threads))
    device = torch.device("cpu")
    if config.trainer.accelerator == "gpu":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    made_group = ensure_process_group(device=device, timeout_s=config.trainer.timeout_s)
    try:
        yield device
    finally:
        if made_group:
            dist.destroy_process_group()


def screen() -> Progress:
    """The terminal on rank 0, nowhere on the others."""
    first = int(os.environ.get("RANK", "0")) == 0
    return Progress() if first else Progress(stream=io.StringIO(), live=False)


@contextlib.contextmanager
def _first_rank_of_a_node_first() -> Iterator[None]:
    """The first rank of each node runs the block before the others do. Collective over the world.

    Data is prepared once per machine, by whichever rank comes first: it has to be the one that shows how far it is.
    An error lets the others run the block too, so that all ranks say the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    turns = dist.new_group(backend="gloo", timeout=PREPARATION_LIMIT)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first:
        dist.barrier(turns)
    try:
        yield
    finally:
        if is_first:
            dist.barrier(turns)


def _with_tokenizer_of_weights(source: DataSource, config: RunConfig, *, scratch: Path) -> DataSource:
    """Ids mean to the weights what their own tokenizer says: refuse text that is cut otherwise.

    Raises:
        ValueError: the dataset's tokenizer is another one than the weights were trained with.
    """
    stored = tokenizer_beside(Path(config.model.weights)) if config.model.weights is not None else None
    if stored is None:
        return source
    if source.tokenizer is not None and _content(source.tokenizer, scratch) != _content(stored, scratch):
        raise ValueError(f"model.weights={config.model.weights}: they were trained with the tokenizer.json beside "
                         f"them, and the text of dataset={config.dataset.name} gives another one; fix: the dataset "
                         "they were trained on, or dataset=tokens with ids of that tokenizer")
    return replace(source, tokenizer=stored)


def _content(tokenizer: TextTokenizer, scratch: Path) -> Any:
    with tempfile.NamedTemporaryFile(dir=scratch, suffix=".json") as file:
        tokenizer.save(Path(file.name))
        return json.loads(Path(file.name).read_text("utf-8"))


def gather_bytes(mesh: Mesh, held: RestingBytes) -> dict[str, list[int]]:
    """Each state's bytes on every rank. Collective over the world."""
    parts = mesh.world.gather_list(torch.tensor([getattr(held, state) for state in STATES]), what="resting bytes")
    return {state: [int(part[place]) for part in parts] for place, state in enumerate(STATES)}


def _require_same_data(mesh: Mesh, source: DataSource) -> None:
    hashes = mesh.world.gather_objects(source.content_hash, what="comparison of the data")
    if len(set(hashes)) > 1:
        found = ", ".join(f"rank {rank}: {value[:12]}" for rank, value in enumerate(hashes))
        raise ValueError(f"dataset: ranks read different content ({found}); "
                         "fix: the same files, and the same Python version, on every node")


def _resolved(value: int | str) -> int:
    assert isinstance(value, int), f"{value!r} is resolved before the run starts"
    return value
