"""ZeRO engines for plain torch and Lightning.

    Engine      a model and its optimizer under a ZeRO stage, for a plain torch loop
    gathered    read and edit sharded parameters
    Mesh, MeshShape, StagePolicy, PrecisionPolicy    what an engine is made of
    ZeroStrategy    the Lightning strategy (imports Lightning when first asked for)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.engine import Engine
    from strategies.lightning.zero_strategy import ZeroStrategy
    from strategies.loss_scale import LossScaling
    from strategies.mesh import Mesh, MeshShape
    from strategies.precision import PrecisionPolicy
    from strategies.update_guard import NonFiniteError, StepResult
    from strategies.zero.gathered import gathered
    from strategies.zero.placement import StagePolicy

_HOMES = {
    "Engine": "strategies.engine",
    "LossScaling": "strategies.loss_scale",
    "Mesh": "strategies.mesh",
    "MeshShape": "strategies.mesh",
    "NonFiniteError": "strategies.update_guard",
    "PrecisionPolicy": "strategies.precision",
    "StagePolicy": "strategies.zero.placement",
    "StepResult": "strategies.update_guard",
    "ZeroStrategy": "strategies.lightning.zero_strategy",
    "gathered": "strategies.zero.gathered",
}

__all__ = ["Engine", "LossScaling", "Mesh", "MeshShape", "NonFiniteError", "PrecisionPolicy", "StagePolicy",
           "StepResult", "ZeroStrategy", "gathered"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


if "lightning.pytorch" in sys.modules:  # Lightning alone takes seconds to import: never pull it in from here
    importlib.import_module("strategies.lightning.zero_strategy")
