"""The step times as a bar chart: SVG written by hand, which needs no plotting package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from framework.benchmark.comparison import Row

WIDTH, LABEL_WIDTH, NUMBER_WIDTH, MARGIN = 720, 110, 80, 16
BAR_HEIGHT, GROUP_GAP, HEADER = 16, 10, 56
COLOURS = ("#3b6ea5", "#c2a14d", "#7a7a7a", "#5d8f5b")


def bar_chart(title: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """An SVG document: a group of bars per system, a bar per allocator setting, as long as its median step time."""
    allocators = list(rows)
    systems = list(dict.fromkeys(row.system for each in rows.values() for row in each))
    times = {(allocator, row.system): row.step_s for allocator, each in rows.items() for row in each}
    longest = max((time for time in times.values() if time is not None), default=1.0)
    room = WIDTH - LABEL_WIDTH - NUMBER_WIDTH - 2 * MARGIN
    parts, top = [_text(MARGIN, 22, title, size=14)], HEADER
    for place, allocator in enumerate(allocators):
        left = MARGIN + place * 140
        parts += [_bar(left, 34, 12, 10, place), _text(left + 18, 44, f"{allocator}, s/step")]
    for system in systems:
        parts.append(_text(MARGIN, top + BAR_HEIGHT * len(allocators) / 2 + 4, system))
        for place, allocator in enumerate(allocators):
            time = times.get((allocator, system))
            length = 0.0 if time is None else room * time / longest
            left = MARGIN + LABEL_WIDTH
            parts.append(_bar(left, top, length, BAR_HEIGHT - 2, place))
            parts.append(_text(left + length + 6, top + BAR_HEIGHT - 5, "failed" if time is None else f"{time:.4f}"))
            top += BAR_HEIGHT
        top += GROUP_GAP
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + MARGIN}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{top + MARGIN}" fill="#ffffff"/>', *parts, "</svg>", ""])


def _bar(left: float, top: float, length: float, height: float, place: int) -> str:
    colour = COLOURS[place % len(COLOURS)]
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{length:.1f}" height="{height}" fill="{colour}"/>'


def _text(left: float, base: float, text: str, *, size: int = 12) -> str:
    return f'<text x="{left:.1f}" y="{base:.1f}" font-size="{size}" fill="#222222">{escape(text)}</text>'
