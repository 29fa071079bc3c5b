"""What the engine is to reach beside its peers, as data: the one place these numbers stand.

A target belongs to a setting (model sizes, precision, ranks, accumulation); a benchmark of another setting has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from framework.config import RunConfig

SIZE_A = {"hidden_size": 320, "num_layers": 8, "vocab_size": 2048, "seq_len": 128, "micro_size": 4}
SIZE_B = {"hidden_size": 768, "num_layers": 12, "vocab_size": 50257, "seq_len": 256, "micro_size": 1}
FP32 = {"precision": "fp32", "accumulation": 1, "ranks": 2}
BF16 = {"precision": "bf16", "accumulation": 1, "ranks": 2}
ACCUMULATION = {"precision": "fp32", "accumulation": 4, "ranks": 2}
TUNED = "tuned"
"""Targets are for the allocator setting that the launcher gives its workers."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """`measure` of `system`, as a share of that of `against`, or of the fp32 parameters where that is None."""

    system: str
    measure: str  # step_s, tokens_per_s, peak_bytes or state_bytes
    against: str | None = None
    at_most: float | None = None
    at_least: float | None = None
    setting: Mapping[str, Any] = field(default_factory=dict)

    def met(self, value: float) -> bool:
        """Whether `value`, to the two digits the table shows, is inside the bound."""
        shown = round(value, 2)
        return shown <= self.at_most if self.at_most is not None else shown >= (self.at_least or 0.0)

    @property
    def bound(self) -> str:
        return f"<= {self.at_most:.2f}" if self.at_most is not None else f">= {self.at_least:.2f}"


def _targets() -> Iterator[Target]:
    for size, share in ((SIZE_A, 0.75), (SIZE_B, 0.60)):
        setting = {**size, **FP32}
        yield Target(system="zero3", measure="step_s", against="fsdp2", at_most=share, setting=setting)
        yield Target(system="zero3", measure="step_s", against="nocomm", at_most=1.15, setting=setting)
        yield Target(system="zero3", measure="peak_bytes", against="fsdp2", at_most=1.0, setting=setting)
        for system in ("zero0", "zero1", "zero2"):
            yield Target(system=system, measure="step_s", against="ddp", at_most=1.03, setting=setting)
        for system in ("zero1", "zero2"):
            yield Target(system=system, measure="peak_bytes", against="ddp", at_most=0.85, setting=setting)
        for system, multiple in (("zero1", 2.0), ("zero2", 2.0), ("zero3", 1.5)):
            yield Target(system=system, measure="state_bytes", at_most=multiple, setting=setting)
    yield Target(system="zero3", measure="step_s", against="fsdp2", at_most=0.70, setting={**SIZE_A, **BF16})
    yield Target(system="zero2", measure="tokens_per_s", against="ddp", at_least=0.98,
                 setting={**SIZE_A, **ACCUMULATION})


TARGETS = tuple(_targets())


def setting_of(config: RunConfig) -> dict[str, Any]:
    """What a target's setting is compared with. The config is resolved."""
    ranks = int(config.trainer.devices)
    return {
        "hidden_size": config.model.hidden_size, "num_layers": config.model.num_layers,
        "vocab_size": config.model.vocab_size, "seq_len": config.dataset.seq_len,
        "micro_size": config.batch.micro_size, "precision": config.precision.name, "ranks": ranks,
        "accumulation": int(config.batch.global_size) // (config.batch.micro_size * ranks),
    }


def targets_of(setting: Mapping[str, Any]) -> list[Target]:
    """The targets for one setting."""
    return [target for target in TARGETS if target.setting.items() <= setting.items()]
