"""task=evaluate: token-mean loss of the given weights on the held-out data."""

from __future__ import annotations

import math
from dataclasses import replace

from framework.build import build_engine, validation_loader
from framework.config import EvaluateTask
from framework.evaluation import mean_loss
from framework.report import Recorded, build_summary
from framework.tasks.session import Session


def evaluate(session: Session, task: EvaluateTask) -> None:
    """Print the loss and leave it in the summary. Collective over the world.

    Raises:
        ValueError: the dataset holds nothing out.
    """
    engine = build_engine(session.config, session.model, session.mesh)
    loader = validation_loader(session.config, session.source, data_rank=session.mesh.data.index, steps=task.steps)
    if loader is None:
        raise ValueError(f"task=evaluate: dataset {session.config.dataset.name} holds nothing out; "
                         "fix: a share above 0 (dataset.validation_fraction, dataset.num_validation_samples)")
    loss, tokens = mean_loss(engine, session.model, loader)
    measured = replace(session.measured(engine, val_loss=loss),
                       peak_memory_bytes_per_rank=session.peak_memory_bytes_per_rank())
    if session.is_first:
        session.progress.say(f"validation loss {loss:.4f}, perplexity {perplexity(loss):.1f}, {tokens} tokens")
        summary = build_summary(session.config, status="completed", recorded=Recorded(), measured=measured)
        session.folder.write_json(session.folder.summary_path, summary)
        session.progress.say(f"results in {session.folder.path}")


def perplexity(loss: float) -> float:
    """exp of the loss; infinite where that is no float any more, as for weights that have diverged."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
