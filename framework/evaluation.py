"""Loss without training: one way for validation between updates and for task=evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from framework.data.step_loader import IGNORED_LABEL, MicroBatch
from strategies.engine import Engine


def count_labels(micro_batches: Iterable[MicroBatch]) -> int:
    """Labelled tokens on this rank."""
    return sum(int((batch.labels_BT != IGNORED_LABEL).sum()) for batch in micro_batches)


@torch.no_grad()
def mean_loss(engine: Engine, model: nn.Module, steps: Iterable[Sequence[MicroBatch]]) -> tuple[float, int]:
    """Token-mean loss of `model`, held by `engine`, and the number of labelled tokens. Collective over the data axes.

    The model is in evaluation mode meanwhile. NaN without a label.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with engine.forward_scope():
        for micro_batches in steps:
            for batch in micro_batches:
                device = engine.mesh.device
                loss = model(batch.tokens_BT.to(device), batch.labels_BT.to(device))
                total += torch.tensor([float(loss), count_labels([batch])], dtype=torch.float64)
    engine.rest()
    model.train(was_training)
    loss_sum, tokens = engine.mesh.control.sum(total, what="validation loss").tolist()
    return (loss_sum / tokens if tokens else math.nan), int(tokens)
