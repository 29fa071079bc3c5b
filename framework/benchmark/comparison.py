"""From samples to numbers: medians per system, ratios per round, and targets met or not. No torch, no files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.benchmark.catalog import BASELINES
from framework.benchmark.samples import Sample
from framework.benchmark.targets import TUNED, Target

BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Ratio:
    """Paired ratios, one per round that has both samples: the median, the range and how many."""

    median: float
    lowest: float
    highest: float
    pairs: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system under one allocator setting, over its samples. None where no sample succeeded."""

    system: str
    samples: int
    disturbed: int
    """Samples during which others used the machine. They are left out, unless all are."""
    errors: list[str]
    step_s: float | None
    ratios: Mapping[str, Ratio]
    """Step time against each baseline that was run."""
    peak_bytes: int | None
    whole_peak_bytes: int | None
    anonymous_peak_bytes: int | None
    live_bytes: int | None
    state_bytes: int | None
    parameters: int | None
    loss: float | None
    """Of the last timed update."""
    foreign_cpu: float | None
    """The most of any sample that counts."""

    @property
    def only_disturbed(self) -> bool:
        """Whether its numbers come from disturbed samples."""
        return self.samples > 0 and self.disturbed == self.samples

    @property
    def state_multiple(self) -> float | None:
        """State over the bytes of the parameters in fp32."""
        if self.state_bytes is None or self.parameters is None:
            return None
        return self.state_bytes / (BYTES_PER_PARAMETER * self.parameters)


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured."""

    target: Target
    measured: float | None
    disturbed: bool = False
    """Whether a system it is about has no undisturbed sample."""

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.target.met(self.measured)


def compare(samples: Iterable[Sample], systems: Sequence[str]) -> list[Row]:
    """Rows of the systems, in their order. All samples are of one allocator setting."""
    by_system: dict[str, list[Sample]] = {system: [] for system in systems}
    for sample in samples:
        by_system[sample.slot.system].append(sample)
    usable = {system: usable_samples(found) for system, found in by_system.items()}
    return [_row(system, by_system[system], usable) for system in systems]


def usable_samples(samples: Iterable[Sample]) -> list[Sample]:
    """The undisturbed ones that succeeded; all that succeeded if every one was disturbed."""
    succeeded = [sample for sample in samples if sample.error is None]
    return [sample for sample in succeeded if not sample.disturbed] or succeeded


def paired_ratio(samples: Sequence[Sample], base: Sequence[Sample]) -> Ratio | None:
    """Step time of `samples` over that of `base`, round by round; None when no round has both."""
    base_s = {sample.slot.round: sample.step_s for sample in base}
    ratios = sorted(sample.step_s / base_s[sample.slot.round] for sample in samples if sample.slot.round in base_s)
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), ratios[0], ratios[-1], len(ratios))


def judge(rows: Sequence[Row], targets: Iterable[Target], allocator: str) -> list[Verdict]:
    """Each target of the systems that were run. Targets are for the tuned allocator alone."""
    by_system = {row.system: row for row in rows}
    return [Verdict(target, _measured(target, by_system), _only_disturbed(target, by_system)) for target in targets
            if allocator == TUNED and target.system in by_system
            and (target.against is None or target.against in by_system)]


def _row(system: str, samples: Sequence[Sample], usable: Mapping[str, Sequence[Sample]]) -> Row:
    counted = usable[system]
    ratios = {base: paired_ratio(counted, usable[base]) for base in BASELINES if base in usable}

    def median(name: str) -> Any:
        values = [getattr(sample, name) for sample in counted]
        return statistics.median(values) if values and None not in values else None

    def whole(name: str) -> int | None:
        value = median(name)
        return None if value is None else int(value)

    return Row(
        system=system, samples=len(counted), disturbed=sum(sample.disturbed for sample in samples),
        errors=list(dict.fromkeys(sample.error for sample in samples if sample.error is not None)),
        step_s=median("step_s"), ratios={base: ratio for base, ratio in ratios.items() if ratio is not None},
        peak_bytes=whole("peak_bytes"), whole_peak_bytes=whole("whole_peak_bytes"),
        anonymous_peak_bytes=whole("anonymous_peak_bytes"), live_bytes=whole("live_bytes"),
        state_bytes=whole("state_bytes"),
        parameters=counted[0].parameters if counted else None,
        loss=counted[0].losses[-1] if counted and counted[0].losses else None,
        foreign_cpu=max((sample.foreign_cpu or 0.0 for sample in counted), default=None))


def _only_disturbed(target: Target, rows: Mapping[str, Row]) -> bool:
    return any(rows[name].only_disturbed for name in (target.system, target.against) if name is not None)


def _measured(target: Target, rows: Mapping[str, Row]) -> float | None:
    row = rows[target.system]
    if target.against is None:
        return row.state_multiple
    if target.measure == "peak_bytes":
        base = rows[target.against].peak_bytes
        return row.peak_bytes / base if row.peak_bytes is not None and base else None
    ratio = row.ratios.get(target.against)
    if ratio is None:
        return None
    return 1 / ratio.median if target.measure == "tokens_per_s" else ratio.median
