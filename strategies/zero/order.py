"""The order in which units are used, recorded and followed: what to gather ahead of its use.

The forward order of the last pass predicts this one; backward is its reverse. A pass that leaves the prediction is
simply recorded anew. A prefetch is a guess about time, never about content: a unit gathered in vain is released.
"""

from __future__ import annotations

from strategies.zero.unit import Unit


class UseOrder:
    """Order of unit use within forward passes of one engine."""

    def __init__(self) -> None:
        self._predicted: list[Unit] = []
        self._recorded: list[Unit] = []

    def begin_pass(self) -> None:
        """A root forward starts: what was recorded last becomes the prediction."""
        if self._recorded:
            self._predicted, self._recorded = self._recorded, []

    def used(self, unit: Unit) -> None:
        """`unit` is used now."""
        self._recorded.append(unit)

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """The next `count` different units expected after this use of `unit` in forward."""
        place = len(self._recorded) - 1
        if place >= len(self._predicted) or self._predicted[place] is not unit:
            return []
        return _distinct(self._predicted[place + 1 :], unit, count)

    def is_last(self, unit: Unit) -> bool:
        """This use of `unit` is expected to be the last of the pass: backward will want it first."""
        return bool(self._predicted) and len(self._recorded) == len(self._predicted) and self._predicted[-1] is unit

    def before(self, unit: Unit, count: int) -> list[Unit]:
        """The `count` different units that backward is expected to use after `unit`."""
        order = self._recorded or self._predicted
        for place in range(len(order) - 1, -1, -1):
            if order[place] is unit:
                return _distinct(order[:place][::-1], unit, count)
        return []


def _distinct(units: list[Unit], current: Unit, count: int) -> list[Unit]:
    chosen: list[Unit] = []
    for unit in units:
        if len(chosen) == count:
            break
        if unit is not current and unit not in chosen:
            chosen.append(unit)
    return chosen
