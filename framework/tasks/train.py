"""task=train: updates, validation, weights, a sampled continuation, the summary."""

from __future__ import annotations

import json
import logging
import signal
import time
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from framework import schema
from framework.build import build_strategy, optimizer_maker, training_loader, validation_loader
from framework.cluster import ConnectedProcesses
from framework.config import TrainTask
from framework.data.step_loader import StepLoader
from framework.evaluation import mean_loss
from framework.failure import failure_of
from framework.interrupt import StopRequest
from framework.module import StepModule
from framework.plan import render_plan
from framework.report import Measured, Reporter, StepReport, build_summary
from framework.tasks.sampling import Continuation, sample
from framework.tasks.session import Session
from framework.tracking import make_trackers
from framework.weights import write_weights
from strategies.lightning.held import held_by
from strategies.lightning.zero_strategy import ZeroStrategy


def train(session: Session, task: TrainTask) -> None:
    """Run the whole of a training job on this rank. Collective over the world."""
    _quiet_lightning()
    with StopRequest() as stop:
        _train(session, task, stop)


def _train(session: Session, task: TrainTask, stop: StopRequest) -> None:
    config = session.config
    strategy = build_strategy(config)
    strategy.use_mesh(session.mesh)
    module = StepModule(model=session.model, make_optimizer=optimizer_maker(config.optimizer),
                        schedule=config.schedule, max_steps=config.trainer.max_steps, asked_to_stop=lambda: bool(stop))
    reporter = None
    if session.is_first:
        trackers = make_trackers(config.logger, session.folder, schema.dump(config), warn=session.progress.say)
        reporter = Reporter(folder=session.folder, progress=session.progress, trackers=trackers)
    data_rank = session.mesh.data.index
    validation = None
    if config.trainer.val_steps:
        validation = validation_loader(config, session.source, data_rank=data_rank, steps=config.trainer.val_steps)
    trainer = pl.Trainer(
        strategy=strategy, accelerator=config.trainer.accelerator, devices=config.trainer.devices,
        plugins=[ConnectedProcesses(session.mesh, devices=config.trainer.devices)],
        num_nodes=config.trainer.num_nodes, max_steps=config.trainer.max_steps, max_epochs=-1,
        gradient_clip_val=config.trainer.gradient_clip_val,
        gradient_clip_algorithm=config.trainer.gradient_clip_algorithm,
        callbacks=[StepReporting(session, reporter, validation), KeepSigterm()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=session.folder.path)
    try:
        trainer.fit(module, training_loader(config, session.source, data_rank=data_rank))
        _finish(session, task, strategy, reporter, stopped=module.stopped)
    except Exception as error:
        if reporter is not None:
            _finish_failed(session, reporter, module, error)
        raise


def _finish_failed(session: Session, reporter: Reporter, module: StepModule, error: Exception) -> None:
    """Leave what is known of a run that fails here, and let the trackers finish. Not collective: peers may be gone."""
    known = Measured(world_size=session.mesh.world_size, layout=session.layout, data_hash=session.source.content_hash,
                     parameters=sum(parameter.numel() for parameter in session.model.parameters()))
    held = held_by(module)
    if held is not None:
        known = replace(known, updates=held.engine.guard.counts)
    summary = build_summary(session.config, status="failed", recorded=reporter.recorded, measured=known)
    path = session.folder.summary_path
    # A rank that failed before this one has told the cause; what is raised here may only follow from it.
    told = json.loads(path.read_text()) if path.exists() else {}
    reporter.finish(summary | (told if "error" in told else failure_of(error, rank=session.mesh.rank).complete({})))


def _finish(session: Session, task: TrainTask, strategy: ZeroStrategy, reporter: Reporter | None, *,
            stopped: bool) -> None:
    engine = strategy.engine
    if task.save_weights:
        state = engine.state_dict(only_rank=0)
        if session.is_first:
            plain = {name.removeprefix("model."): value for name, value in state.items()}
            write_weights(session.folder.checkpoints / "final", plain, config=session.config.model,
                          tokenizer=session.source.tokenizer)
    continuation = None
    if task.sample_tokens and not stopped:
        continuation = sample(session, engine, prompt=task.prompt, max_new_tokens=task.sample_tokens,
                              temperature=task.temperature, top_k=task.top_k)
    measured = session.measured(engine)
    if reporter is not None:
        status = "interrupted" if stopped else "completed"
        summary = build_summary(session.config, status=status, recorded=reporter.recorded, measured=measured)
        reporter.finish(summary)
        _show_end(session, summary, continuation)


def _show_end(session: Session, summary: dict[str, Any], continuation: Continuation | None) -> None:
    say = session.progress.say
    if continuation is not None:
        say(continuation.text())
    validation = "" if summary["val_loss"] is None else f", validation loss {summary['val_loss']:.4f}"
    say(f"{summary['status']}: {summary['steps']} steps, loss {summary['final_loss']:.4f}{validation}, "
        f"{summary['tokens_per_s']:.0f} tokens/s, median step {summary['median_step_time_s']:.3f} s, "
        f"{summary['wall_time_s']:.1f} s in all")
    say(f"results in {session.folder.path}")


class StepReporting(pl.Callback):
    """Turns updates into lines: on rank 0 into the reporter, everywhere into the collectives that feed it."""

    def __init__(self, session: Session, reporter: Reporter | None, validation: StepLoader | None) -> None:
        self._session = session
        self._reporter = reporter
        self._validation = validation
        self._started_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, StepModule)
        facts = self._session.plan_facts(pl_module.strategy.engine)
        if self._reporter is not None:
            plan = render_plan(self._session.config, facts, self._session.resolutions)
            self._reporter.start(total_steps=self._session.config.trainer.max_steps, plan=plan)
        self._started_s = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        assert isinstance(pl_module, StepModule)
        step, config = batch_idx + 1, self._session.config.trainer
        is_last = step == config.max_steps or pl_module.stopped
        due = is_last or bool(config.val_every_steps and step % config.val_every_steps == 0)
        validates = self._validation is not None and due and not pl_module.stopped
        if validates or is_last or step % self._session.config.log.every_steps == 0:
            self._log(pl_module, step, validates)
        elif self._reporter is not None:
            self._reporter.advance(step)
        self._started_s = time.perf_counter()  # of the next step, whose samples are loaded before Lightning says so

    def _log(self, module: StepModule, step: int, validates: bool) -> None:
        outcome, guard = module.outcome, module.strategy.engine.guard
        assert outcome is not None
        assert guard.last is not None
        loss = float(outcome.loss)  # waits for the device
        elapsed_s = time.perf_counter() - self._started_s
        peaks = self._session.peak_memory_bytes_per_rank()
        extra = {}
        if validates:
            assert self._validation is not None
            extra["val_loss"], _ = mean_loss(module.strategy.engine, module.model, self._validation)
        if self._reporter is not None:
            self._reporter.step(StepReport(
                step=step, loss=loss, lr=outcome.lr, grad_norm=outcome.grad_norm, tokens=outcome.tokens,
                step_time_s=elapsed_s, tokens_per_s=outcome.tokens / elapsed_s,
                peak_memory_bytes_per_rank=peaks, loss_scale=guard.last.loss_scale, skipped_steps=guard.skipped,
                extra=extra))


class KeepSigterm(pl.Callback):
    """Lets SIGTERM do what it did before Lightning came: the launcher ends ranks with it when a peer has failed.

    Lightning answers it with a collective, from a handler that does not run while the rank waits in another one.
    """

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGTERM, self._handler)


def _quiet_lightning() -> None:
    """Lightning's notices about hardware, workers and loggers say nothing about a run of ours."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
