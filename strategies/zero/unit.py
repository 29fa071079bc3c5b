"""A unit: the parameters that are gathered, used and freed together (a transformer block; the root holds the rest).

    RESTING --begin_gather--> GATHERING --wait_ready--> READY --release--> RESTING

Where parameters rest replicated a unit is READY for ever, and gathering and releasing do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum, auto

import torch
from torch import nn

from strategies.collectives import Communicator
from strategies.precision import PrecisionPolicy
from strategies.transfer import Pending, Tag
from strategies.zero.flat_group import FlatGroup
from strategies.zero.placement import StagePolicy
from strategies.zero.record import ParameterRecord


class Phase(Enum):
    """Where a unit's parameters are in their life."""

    RESTING = auto()
    GATHERING = auto()
    READY = auto()


ALLOWED = frozenset({
    (Phase.RESTING, Phase.GATHERING),
    (Phase.GATHERING, Phase.READY),
    (Phase.READY, Phase.RESTING),
})


class PhaseError(RuntimeError):
    """An illegal transition: an error of the engine, or a module used from two threads."""


class Unit:
    """Parameters of one module that live together. Gathering is collective over the data_shard axis.

    Args:
        name: qualified name of the module; "root" for what no other unit holds.
        index: position among the engine's units, equal on all ranks.
        records: the parameters it owns, in model order.
        engine: the engine's number, part of message tags.
    """

    def __init__(self, name: str, module: nn.Module, *, index: int, engine: int, records: Sequence[ParameterRecord],
                 policy: StagePolicy, precision: PrecisionPolicy, axis: Communicator, device: torch.device) -> None:
        self.name = name
        self.module = module
        self.index = index
        self.is_root = False
        self._engine = engine
        self._rounds = [0] * len(Tag.OPERATIONS)
        kinds: dict[tuple[torch.dtype, bool], list[ParameterRecord]] = {}
        for record in records:
            kinds.setdefault((record.dtype, record.trainable), []).append(record)
        self.groups: list[FlatGroup] = []
        for kind in kinds.values():
            group = FlatGroup(kind, policy=policy, precision=precision, axis=axis, device=device)
            for position, record in enumerate(kind):
                record.place(self, group, position)
            self.groups.append(group)
        self.frees_parameters = any(group.frees_parameters for group in self.groups)
        self.num_gathers = 0  # since construction; read by tests and reports
        self.version = 0  # grows when parameters change; a backward of an older forward is refused
        self._phase = Phase.READY
        self._pending: list[Pending] = []
        self._offered: list[Tag] = []  # of the next gather, by group; empty: not offered
        self._pins = 0

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, to: Phase) -> None:
        if (self._phase, to) not in ALLOWED:
            allowed = ", ".join(f"{a.name} -> {b.name}" for a, b in sorted(ALLOWED, key=lambda p: p[0].value))
            raise PhaseError(f"unit '{self.name}': {self._phase.name} -> {to.name} is not a step of its life "
                             f"({allowed})")
        self._phase = to

    def tag(self, operation: str) -> Tag:
        """The identity of this unit's next collective of that kind."""
        kind = Tag.OPERATIONS.index(operation)
        self._rounds[kind] += 1
        return Tag(self._engine, self.index, kind, self._rounds[kind], self.name)

    def adopt(self, data: Communicator) -> None:
        """Take values from the first data rank, then rest. Collective over `data` (all data axes); once."""
        self.data = data
        for group in self.groups:
            group.adopt(data, tag=self.tag("start"))
        self.release()

    def keep(self) -> None:
        """Gather and stay gathered: the unit becomes a plain module again. Collective over the axis."""
        self.wait_ready("read")
        self._pins += 1

    def begin_gather(self, operation: str = "gather") -> None:
        """Start the gather of a resting unit; otherwise nothing (prefetch and demand may both ask).

        `operation` names what for in the tags: a "read" outside the model's passes never meets another rank's "gather".
        """
        if self.phase is not Phase.RESTING:
            return
        self.phase = Phase.GATHERING
        self.num_gathers += 1
        offered, self._offered = (self._offered, []) if operation == "gather" else ([], self._offered)
        tags = offered or self._gather_tags(operation)
        self._pending = [group.begin_gather(tag=tag) for group, tag in zip(self.groups, tags, strict=True)]

    def _gather_tags(self, operation: str) -> list[Tag]:
        # One tag, hence one round, per group: groups of a unit must not be told apart by size alone.
        return [self.tag(operation) for _ in self.groups]

    def offer(self) -> None:
        """Let other ranks read this rank's shards for the next gather whenever they come to it. Local."""
        if self.phase is not Phase.RESTING or self._offered:
            return
        self._offered = self._gather_tags("gather")
        for group, tag in zip(self.groups, self._offered, strict=True):
            group.axis.offer(group.resting, tag=tag)

    def withdraw(self) -> None:
        """Take the offer back (with it every offer on the axis): the parameters are about to change.

        Local; a collective of all ranks has to follow before they do.
        """
        self._offered = []
        for group in self.groups:
            group.axis.withdraw()

    def wait_ready(self, operation: str = "gather") -> None:
        """Gather if needed and return with the parameters attached."""
        self.begin_gather(operation)
        if self.phase is Phase.READY:
            return
        for pending in self._pending:
            pending.wait()
        self._pending = []
        for group in self.groups:
            group.wake()
        self.phase = Phase.READY

    def release(self) -> None:
        """Free the parameters unless they rest replicated, rest already, or are pinned."""
        if not self.frees_parameters or self._pins or self.phase is Phase.RESTING:
            return
        if self.phase is Phase.GATHERING:  # prefetched in vain; the messages must still be taken in
            self.wait_ready()
        for group in self.groups:
            group.free()
        self.phase = Phase.RESTING
        self.offer()

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep the unit READY inside the block. Collective over the axis when it rests."""
        self._pins += 1
        try:
            self.wait_ready("read")
            yield
        finally:
            self._pins -= 1
            self.release()

    def changed(self) -> None:
        """The parameters have other values now: no backward of an earlier forward may use them."""
        self.version += 1
        for group in self.groups:
            group.changed()

    def publish(self) -> list[Pending]:
        """After the optimizer's step: start making the new values the ones that rest. Collective over the axis."""
        self.changed()
        pending = [group.publish(tag=self.tag("publish")) for group in self.groups]
        self.offer()
        return pending
