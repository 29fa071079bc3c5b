"""The comparison as Markdown, aligned so that it reads as well on a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from framework.benchmark.catalog import BASELINES, SYSTEMS
from framework.benchmark.comparison import Ratio, Row, Verdict
from framework.benchmark.samples import FOREIGN_CPU_LIMIT

MIB = 2**20
NONE = "-"
MEASURES = {"step_s": "time", "tokens_per_s": "tokens/s", "peak_bytes": "peak memory", "state_bytes": "state"}


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a benchmark came to. `rows` and `verdicts` are by allocator setting."""

    title: str
    """Model, batch, precision, ranks: what all systems trained."""
    machine: str
    rounds: int
    steps: int
    tokens_per_update: int
    rows: Mapping[str, Sequence[Row]]
    verdicts: Mapping[str, Sequence[Verdict]]
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables of each allocator setting."""
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def markdown(results: Results) -> str:
    """The whole of benchmark.md."""
    parts = [f"# Benchmark: {results.title}", f"{results.machine}; torch {results.versions.get('torch', '?')}. "
             f"{results.rounds} rounds, in turn forward and reversed; each sample in fresh processes."]
    for allocator, rows in results.rows.items():
        variables = " ".join(f"`{name}={value}`" for name, value in results.variables.get(allocator, {}).items())
        parts += [f"## Allocator: {allocator}" + (f" ({variables})" if variables else ""), _system_table(results, rows)]
        if results.verdicts.get(allocator):
            parts.append(_target_table(results.verdicts[allocator]))
        parts += _remarks(rows)
    parts += [*results.notes, *_legend(results)]
    return "\n\n".join(parts) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    """The same numbers for programs: bytes and seconds, unrounded."""
    document = asdict(results)
    document["rows"] = {allocator: [asdict(row) | {"tokens_per_s": _tokens_per_s(results, row)} for row in rows]
                        for allocator, rows in results.rows.items()}
    document["verdicts"] = {
        allocator: [asdict(verdict.target) | {
            "measured": verdict.measured, "met": verdict.met, "disturbed": verdict.disturbed} for verdict in verdicts]
        for allocator, verdicts in results.verdicts.items()}
    return document


def _system_table(results: Results, rows: Sequence[Row]) -> str:
    bases = [base for base in BASELINES if any(base in row.ratios for row in rows)]
    head = ["system", "s/step", *(f"x {base} (range)" for base in bases), "peak MiB", "tensors MiB",
            "state MiB (x params)", f"loss after {results.steps}", "foreign CPU", "samples"]
    lines = [[row.system, _number(row.step_s, 4), *(_ratio(row.ratios.get(base)) for base in bases),
              _mib(row.peak_bytes), _mib(row.live_bytes), f"{_mib(row.state_bytes)} ({_number(row.state_multiple, 2)})",
              _number(row.loss, 6), _foreign(row), _count(row)] for row in rows]
    return aligned(head, lines)


def _target_table(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for verdict in verdicts:
        target = verdict.target
        against = "the fp32 parameters" if target.against is None else target.against
        outcome = {True: "met", False: "missed", None: "not measured"}[verdict.met]
        lines.append([target.system, f"{MEASURES[target.measure]} against {against}", _number(verdict.measured, 2),
                      target.bound, outcome + "*" * verdict.disturbed])
    return aligned(["system", "measure", "measured", "target", ""], lines)


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns have one width; all but the first are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) if place else cell.ljust(width)
                  for place, (cell, width) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (width - 1) + ":") if place else "-" * width for place, width in enumerate(widths)]
    return "\n".join([line(head), line(rule), *map(line, lines)])


def _remarks(rows: Sequence[Row]) -> list[str]:
    found = [f"`{row.system}` failed: {error}" for row in rows for error in row.errors]
    return ["\n".join(f"- {text}" for text in found)] if found else []


def _legend(results: Results) -> list[str]:
    ran = {row.system for rows in results.rows.values() for row in rows}
    systems = "; ".join(f"`{name}`: {system.does}" for name, system in SYSTEMS.items() if name in ran)
    return [
        f"{systems}.",
        "s/step: the slower rank's median update, median over samples. Ratios: step time over the baseline's of the "
        "same round, median and range over rounds. Memory: the larger rank's; peak is resident memory while updates "
        "are timed, above what the process held before the model was built; tensors are all distinct storages alive "
        "between two updates, state those of parameters, masters and optimizer. `nocomm` trains on its own rank's data "
        "alone, so its loss is another one.",
        f"foreign CPU: the most cores that anything else used during a sample's timed updates. Samples above "
        f"{FOREIGN_CPU_LIMIT:.2f} are left out; `*` marks numbers of a system that has only such samples.",
    ]


def _tokens_per_s(results: Results, row: Row) -> float | None:
    return None if row.step_s is None else results.tokens_per_update / row.step_s


def _ratio(ratio: Ratio | None) -> str:
    return NONE if ratio is None else f"{ratio.median:.3f} ({ratio.lowest:.2f}-{ratio.highest:.2f})"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _mib(size: int | None) -> str:
    return NONE if size is None else f"{size / MIB:.1f}"


def _foreign(row: Row) -> str:
    return NONE if row.foreign_cpu is None else f"{row.foreign_cpu:.2f}{'*' * row.only_disturbed}"


def _count(row: Row) -> str:
    left_out = 0 if row.only_disturbed else row.disturbed
    return f"{row.samples}" + (f" (-{left_out})" if left_out else "")
