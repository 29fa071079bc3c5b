"""The names that `Trainer(strategy="...")` knows the strategy by."""

from __future__ import annotations

import sys

from lightning.pytorch.strategies import Strategy, StrategyRegistry

WRONG_TREE = "is for lightning.pytorch, not for pytorch_lightning; fix: from lightning.pytorch import Trainer"


def register(strategy: type[Strategy]) -> None:
    """Make "zero0" ... "zero3" known to `lightning.pytorch`. Idempotent.

    Where `pytorch_lightning` has been imported, the same names lead its Trainer to a sentence that says what is wrong:
    the two packages share no classes.
    """
    other = sys.modules.get("pytorch_lightning.strategies")
    for stage in range(4):  # the Trainer lower-cases what it looks up
        name, options = f"zero{stage}", {"description": f"ZeRO stage {stage}", "override": True, "stage": stage}
        StrategyRegistry.register(name, strategy, **options)
        if other is not None:
            other.StrategyRegistry.register(name, _refuse_other_tree, **options)


def _refuse_other_tree(stage: int) -> None:
    raise ValueError(f"strategy='zero{stage}' {WRONG_TREE}")
