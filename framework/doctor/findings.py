"""One line of the doctor's report: what was looked at, what was found, whether that is well, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(Enum):
    """WARNING: runs, but slower or with less than it could. FAILED: results of a run here cannot be trusted."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """`values` are the numbers behind the text, for doctor.json."""

    item: str
    verdict: Verdict
    text: str
    fix: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"item": self.item, "verdict": self.verdict.value, "text": self.text, "fix": self.fix, **self.values}


def ok(item: str, text: str, **values: Any) -> Finding:
    """Nothing to do."""
    return Finding(item, Verdict.OK, text, values=values)


def warning(item: str, text: str, *, fix: str, **values: Any) -> Finding:
    """Something is worse than it need be."""
    return Finding(item, Verdict.WARNING, text, fix, values)


def failed(item: str, text: str, *, fix: str, **values: Any) -> Finding:
    """Something is wrong."""
    return Finding(item, Verdict.FAILED, text, fix, values)


def lines(findings: Sequence[Finding]) -> str:
    """The report as text: a line per finding, its fix below it."""
    width = max(len(finding.item) for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{finding.verdict.value:<8}{finding.item:<{width}}  {finding.text}")
        if finding.fix is not None:
            shown.append(f"{'':<8}{'':<{width}}  fix: {finding.fix}")
    return "\n".join(shown)
