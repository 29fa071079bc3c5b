"""The bar of a run on a terminal, and plain lines everywhere else.

Same information both ways. On a terminal one live line is redrawn in place and prints go above it; fields are left out
from the right as the window narrows. Into a file or pipe every logged update is a line, thinned to one every two
seconds when there are many. Whatever happens to the output (closed pipe, full disk, a terminal without Unicode), the
run goes on: showing progress is not worth a training run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from framework.report import StepReport

EVERY_LINE_UP_TO_STEPS = 200
PLAIN_INTERVAL_S = 2.0
LIVE_REDRAWS_PER_S = 4
PLAIN_WIDTH = 120
MOST_RANKS_LISTED = 4
LONGEST_BAR, SHORTEST_BAR = 30, 8


class Progress:
    """Shows data preparation and training on one stream. Rank 0 alone makes one. No method raises."""

    def __init__(self, *, stream: TextIO | None = None, live: bool | None = None) -> None:
        """`stream` None is standard output; `live` None asks it whether it is a terminal that can redraw."""
        self._stream = _GuardedStream(sys.stdout if stream is None else stream)
        self._is_live = self._stream.can_redraw() if live is None else live
        width = None if self._is_live or "COLUMNS" in os.environ else PLAIN_WIDTH
        self._console = Console(
            file=self._stream, force_terminal=self._is_live, force_jupyter=False, width=width, highlight=False
        )
        self._view: Live | None = None
        self._clock = _Clock()
        self._report: StepReport | None = None
        self._stage: tuple[str, float, float] | None = None
        self._printed_s = -PLAIN_INTERVAL_S

    def say(self, text: RenderableType) -> None:
        """Print a text or a rich renderable, above the bar when there is one. Brackets in a text are just brackets."""
        if isinstance(text, str):
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            self._console.print(text)

    def notify(self, stage: str, done: float, total: float) -> None:
        """Show how far a stage of preparing data is, in its own unit; `total` 0 when it is not known. Any thread.

        A stage ends with a call where `done` reaches `total`.
        """
        started = self._stage is None or self._stage[0] != stage
        ended = done >= total > 0
        self._stage = (stage, done, total)
        if started:
            self._clock = _Clock()
        if self._is_live:
            self._show()
        if ended:
            self._hide()
        if ended or (not self._is_live and (started or self._may_print())):
            self._print(self._stage_text(self._stage))
        if ended:
            self._stage = None

    def start(self, total_steps: int, *, done_steps: int = 0) -> None:
        """Training begins, or goes on after `done_steps`."""
        self._stage = None
        self._clock = _Clock(total=total_steps, step=done_steps)
        if self._is_live:
            self._show()

    def step(self, report: StepReport) -> None:
        """A logged update."""
        self._report = report
        self.advance(report.step)
        if self._is_live:
            return
        total = self._clock.total
        if total <= EVERY_LINE_UP_TO_STEPS or report.step >= total or self._may_print():
            self._print(" ".join(self._fields()))

    def advance(self, step: int) -> None:
        """An update is done, logged or not."""
        self._clock.advance(step)

    def close(self) -> None:
        """Leave the last state of the bar on the screen and give the terminal back. May be called twice."""
        if self._view is not None and self._report is not None:
            self._view.transient = False
        self._hide()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The live line, drawn by rich's own thread a few times a second."""
        stage = self._stage  # another thread may end it meanwhile
        if stage is not None:
            fields = [self._stage_text(stage)]
            share = min(stage[1] / stage[2], 1.0) if stage[2] else 0.0
        else:
            fields = self._fields()
            share = self._clock.share
        # One column stays free: a terminal that wraps after the last one would leave a copy of the line behind.
        room = options.max_width - 1
        while len(fields) > 1 and len(" ".join(fields)) > room - SHORTEST_BAR - 1:
            fields.pop()
        text = " ".join(fields)[:room]
        bar = min(LONGEST_BAR, room - len(text) - 1)
        if bar >= SHORTEST_BAR:
            text = f"{_bar(share, bar, ascii_only=options.ascii_only)} {text}"
        yield Text(text, no_wrap=True, overflow="crop")

    def _show(self) -> None:
        if self._view is None:
            self._view = Live(
                self, console=self._console, refresh_per_second=LIVE_REDRAWS_PER_S, transient=True
            )
            self._view.start(refresh=True)
            # Live hides the cursor; a killed run could not show it again.
            self._console.show_cursor(True)

    def _hide(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.stop()

    def _may_print(self) -> bool:
        return time.monotonic() - self._printed_s >= PLAIN_INTERVAL_S

    def _print(self, text: str) -> None:
        self._printed_s = time.monotonic()
        self.say(text)

    def _stage_text(self, stage: tuple[str, float, float]) -> str:
        name, done, total = stage
        if total > 0:
            name = f"{name} {min(done / total, 1):.0%}"
        elif done > 0:
            name = f"{name} {done:,.0f}"
        return f"{name} {duration(self._clock.elapsed_s)}"

    def _fields(self) -> list[str]:
        """From the most to the least important: the last ones are dropped when the line is short of room."""
        clock, report = self._clock, self._report
        fields = [f"step {clock.step}/{clock.total}"]
        if report is not None:
            fields.append(f"loss {report.loss:.4f}")
            if report.grad_norm is not None and not report.has_norm:
                fields.append("gradient norm not finite")
        fields.append(f"{duration(clock.elapsed_s)}<{duration(clock.left_s)}")
        if report is not None:
            fields.append(f"{report.tokens_per_s:,.0f} tok/s")
            fields.append(f"mem {memory_text(report.peak_memory_bytes_per_rank)}")
            fields.append(f"lr {report.lr:.2e}")
            if report.skipped_steps:
                fields.append(f"skipped {report.skipped_steps}")
            if report.loss_scale is not None:
                fields.append(f"loss scale {report.loss_scale:g}")
            fields.extend(f"{name} {value:.4g}" for name, value in report.extra.items())
        return fields


class _Clock:
    """Elapsed and remaining time of a count of steps. The first step seen, slower than the rest, sets no pace."""

    def __init__(self, *, total: int = 0, step: int = 0) -> None:
        self.total = total
        self.step = step
        now_s = time.monotonic()
        self._started_s = self._last_s = now_s
        self._paced_from = (step, now_s)
        self._ticks = 0

    def advance(self, step: int) -> None:
        before = (self.step, self._last_s)
        self._last_s = time.monotonic()
        self.step = max(self.step, step)
        self._ticks += 1
        if self._ticks == 2:
            self._paced_from = before

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def share(self) -> float:
        return min(self.step / self.total, 1.0) if self.total else 0.0

    @property
    def left_s(self) -> float | None:
        """None before the first step. After one step, that step is all there is to go by."""
        from_step, from_s = self._paced_from
        if self.step == from_step:
            return None
        pace_s = (self._last_s - from_s) / (self.step - from_step)
        return max(pace_s * (self.total - self.step) - (time.monotonic() - self._last_s), 0.0)


class _GuardedStream:
    """A text stream whose failures end the output instead of the run.

    After a broken pipe, standard output itself is pointed at the null device: the interpreter flushes it at exit and
    would turn a finished run into exit code 120.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def can_redraw(self) -> bool:
        return self.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:  # closed
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if not self._gone:
            self._guard(lambda: self._stream.write(self._encodable(text)))
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            self._guard(self._stream.flush)

    def _encodable(self, text: str) -> str:
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def _guard(self, act) -> None:
        try:
            act()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._gone = True
            if self._stream is sys.__stdout__ and not self._stream.closed:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


def memory_text(bytes_per_rank: Sequence[int]) -> str:
    """Memory per rank: each one's while they are few, else the range."""
    sizes = [size / 2**30 for size in bytes_per_rank]
    if len(sizes) <= MOST_RANKS_LISTED:
        return "|".join(f"{size:.2f}" for size in sizes) + " GiB"
    return f"{min(sizes):.2f}-{max(sizes):.2f} GiB on {len(sizes)} ranks"


def duration(seconds: float | None) -> str:
    """Seconds as m:ss or h:mm:ss; "?" when unknown."""
    if seconds is None:
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _bar(share: float, width: int, *, ascii_only: bool) -> str:
    full, empty = ("#", ".") if ascii_only else ("━", "─")
    filled = min(width, int(share * width))
    return full * filled + empty * (width - filled)
