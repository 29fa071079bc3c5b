"""A small resolved `RunConfig` for tests that need one and do not test the config files."""

from __future__ import annotations

from framework import config as schema
from framework.config import RunConfig


def run_config(*, devices: int = 2, seed: int = 0, threads: int = 1, run_dir: str = "run") -> RunConfig:
    """A nano training run on the CPU, every value settled."""
    return RunConfig(
        task=schema.TrainTask(
            name="train", save_weights=False, sample_tokens=0, prompt=None, temperature=1.0, top_k=0
        ),
        model=schema.GptModel(
            name="gpt2", vocab_size=64, max_seq_len=16, hidden_size=16, num_layers=2, num_heads=2, dropout=0.0,
            activation_checkpointing="none", loss_chunk_tokens=None, weights=None,
        ),
        dataset=schema.SyntheticDataset(name="synthetic", num_samples=8, num_validation_samples=0, seq_len=16),
        parallel=schema.Parallel(pipeline=1, data=devices, data_replicate=1, sequence=1, tensor=1, transport="fastest"),
        zero=schema.Zero(stage=3, prefetch_units=1),
        precision=schema.Precision(name="fp32", gradient_dtype="fp32", on_nonfinite="skip", max_skipped_steps=20),
        optimizer=schema.SgdOptimizer(name="sgd", lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0),
        schedule=schema.Schedule(name="constant", warmup_steps=0, final_ratio=1.0),
        trainer=schema.Trainer(
            accelerator="cpu", devices=devices, num_nodes=1, threads=threads, max_steps=2, gradient_clip_val=None,
            gradient_clip_algorithm="norm", val_every_steps=None, val_steps=0, timeout_s=60.0,
        ),
        logger=schema.NoLogger(name="none"),
        batch=schema.Batch(global_size=devices, micro_size=1),
        run=schema.Run(dir=run_dir),
        log=schema.Log(every_steps=1),
        seed=seed,
    )  # fmt: skip
