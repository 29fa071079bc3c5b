"""The gradient ledger: every gradient of every stage, precision and schedule goes through it, once.

    OPEN     accept() sums each arriving gradient into its unit's flat buffer, in the gradient type.
             A unit is *flushed* - its buffer reduced over the data ranks, added to what was reduced before - when
             this backward is through with it (see below), and whatever is left at the end of backward.
             Stages 0 and 1 flush only in the window's last backward, or at close.
    CLOSED   close() has flushed the rest, agreed which parameters received a gradient anywhere, scaled the sums and
             handed each optimizer parameter a view of its gradient. Norm, clip and optimizer work on those.
    reset()  starts the next window.

Flushing adds, so it is right whenever it happens: a gradient that comes after its unit was flushed (a module used
again by reentrant recomputation) opens a new buffer and is flushed later. When to flush is a question of speed, and of
order: early flushes must come in the same order on all ranks, among themselves (NCCL matches collectives by order) and
among the gathers of the same backward.

- Where parameters rest sharded, a unit is flushed when backward leaves its last call (`left`), with zeros where this
  rank has no gradient.
- Elsewhere nothing is gathered in backward, and a unit is flushed as soon as it is complete, in one canonical order
  (reverse unit order).

A backward waits for its early flushes, so at its end every rank first flushes the units that are expected of it:
another rank may be waiting for one inside its backward. Then one vote agrees what is left, and which units to expect in
the next backward.

Gradients are taken from `param.grad` in a post-accumulate hook: the first arrival is copied (and widened) into the
buffer, later ones are added. Alternative considered: preset `param.grad` to a view, so that autograd adds in place. It
needs the buffer zeroed first and reads it once more than the copy, and under bf16 needs `grad_dtype`. Not timed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from strategies.collectives import Communicator
from strategies.transfer import Pending
from strategies.zero.buffer_pool import BufferPool
from strategies.zero.clip import all_finite
from strategies.zero.flat_group import FlatGroup
from strategies.zero.record import ParameterRecord
from strategies.zero.unit import Unit


class LedgerState(Enum):
    """Whether gradients still come or are final."""

    OPEN = auto()
    CLOSED = auto()


@dataclass
class _Flight:
    """A reduction under way and the buffers that go back to the pool when no rank reads them any more."""

    pending: Pending
    give_back: list[Tensor]


class _Account:
    """The gradient of one flat group in one window."""

    def __init__(self, group: FlatGroup, pool: BufferPool) -> None:
        self.group = group
        self.pool = pool
        self.local: Tensor | None = None  # [padded] this rank's unreduced sum
        self.arrived: set[int] = set()  # positions that `local` holds
        self.reduced: Tensor | None = None  # [shard] sum over the data_shard axis so far
        self.host: Tensor | None = None  # stages 0-1: the buffer `reduced` is a slice of
        self.total: Tensor | None = None  # [optimizer range] at close

    def accept(self, position: int, grad: Tensor) -> None:
        if self.local is None:
            self.local = self.pool.take(self.group.layout.padded_numel, self.group.gradient_dtype)
        view = self.local[self.group.layout.span(position)].view(self.group.records[position].shape)
        if grad.is_sparse:
            grad = grad.to_dense()
        if position in self.arrived:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.arrived.add(position)

    def flush(self, unit: Unit) -> _Flight:
        """Start summing `local` over data_shard into `reduced`. A rank without gradients adds zeros."""
        group = self.group
        local = self.local
        if local is None:
            local = self.pool.take(group.layout.padded_numel, group.gradient_dtype)
        self._zero_what_did_not_arrive(local)
        accumulate = self.reduced is not None
        give_back = [local]
        if self.reduced is None and group.shards_gradients:
            self.reduced = self.pool.take(group.layout.shard_numel, group.gradient_dtype)
        elif self.reduced is None:  # the sum stays in this rank's slice of the buffer
            self.host, self.reduced, give_back = local, group.axis.slice_of(local), []
        self.local, self.arrived = None, set()
        pending = group.axis.reduce_scatter(local, self.reduced, tag=unit.tag("reduce"), accumulate=accumulate)
        return _Flight(pending, give_back)

    def _zero_what_did_not_arrive(self, local: Tensor) -> None:
        layout = self.group.layout
        if len(self.arrived) == len(layout.shapes):
            return
        for position in range(len(layout.shapes)):
            if position not in self.arrived:
                local[layout.span(position)].zero_()

    def settle(self, unit: Unit, replicate: Communicator, scale: float) -> Pending:
        """After all flushes: sum over replicas, scale, and start to bring the sum to where the optimizer needs it."""
        if self.reduced is None:
            return Pending()
        group = self.group
        if replicate.size > 1:
            replicate.all_reduce(self.reduced, tag=unit.tag("replicate"))
        if scale != 1.0:
            self.reduced.mul_(scale)
        if group.shards_optimizer:
            self.total = self.reduced
            return Pending()
        assert self.host is not None
        self.total = self.host
        return group.axis.all_gather(self.host, self.reduced, tag=unit.tag("replicate"))

    def tested_pieces(self) -> dict[int, Tensor]:
        """Index of a record -> its elements in this rank's shard of the sums; the padding is left out."""
        group, found = self.group, {}
        if self.reduced is not None:
            mine = group.layout.shard_range(group.axis.index)
            for position, record in enumerate(group.records):
                overlap = group.layout.overlap(position, mine)
                if overlap is not None:
                    found[record.index] = self.reduced[overlap.in_range]
        return found

    def attach(self, touched: set[int]) -> None:
        """Give each optimizer parameter its gradient; None where no rank had any."""
        for position, piece in self.group.masters.items():
            overlap = self.group.layout.overlap(position, self.group.optimizer_range)
            assert overlap is not None
            if self.total is None or self.group.records[position].index not in touched:
                piece.grad = None
            else:
                grad = self.total[overlap.in_range]
                piece.grad = grad if grad.dtype == piece.dtype else grad.to(piece.dtype)

    def reset(self) -> None:
        for piece in self.group.masters.values():
            piece.grad = None
        for buffer in (self.local, self.host, self.reduced if self.host is None else None):
            if buffer is not None:
                self.pool.give(buffer)
        self.local = self.host = self.reduced = self.total = None
        self.arrived = set()


class GradientLedger:
    """Gradients of one engine. `end_backward` and `close` are collective over the data axes.

    Args:
        units: the engine's units.
        control: communicator for votes (CPU).
        replicate: the data_replicate axis.
        scale: factor on the sum over data ranks (1/ranks gives the mean).
        scaled_only: refuse gradients that come outside `backward`, since nothing has scaled their loss.
    """

    def __init__(self, units: Sequence[Unit], records: Sequence[ParameterRecord], *, control: Communicator,
                 replicate: Communicator, scale: float, device: torch.device, scaled_only: bool = False) -> None:
        self.state = LedgerState.OPEN
        self.num_flushes = 0  # groups reduced since construction; read by tests and reports
        self._units = list(units)
        self._records = list(records)
        self._control = control
        self._replicate = replicate
        self._scale = scale
        self._pool = BufferPool(device)
        self._accounts: dict[FlatGroup, _Account] = {}
        for group in (g for u in units for g in u.groups if g.trainable):
            self.open_account(group)
        self.nonfinite: tuple[str, ...] = ()  # at close: parameters with an infinite or NaN gradient on any rank
        self._scaled_only = scaled_only
        self._touched: set[int] = set()  # records with a gradient on this rank in this window
        self._agreed: set[int] = set()  # at close: with a gradient on any rank
        self._missing: dict[int, set[int]] = {}  # unit -> records whose gradient this backward has not brought yet
        self._brought: set[int] = set()  # units that have had a gradient on this rank since the last vote
        self._expected = self._canonical(u.index for u in units if any(g.trainable for g in u.groups))
        self._round = [0] * len(self._units)
        self._early = False
        self._in_backward = False
        self._in_flight: list[_Flight] = []
        self._landed: list[_Flight] = []  # summed here; other ranks may still read this rank's buffer

    def open_account(self, group: FlatGroup) -> None:
        """Take gradients of `group`, which is trainable now."""
        self._accounts[group] = _Account(group, self._pool)

    # -- arrival --------------------------------------------------------------------------------------------------

    def begin_backward(self, *, last: bool) -> None:
        """Called before each backward. `last`: nothing more will come in this window.

        Raises:
            RuntimeError: the window is closed and its update has not been applied.
        """
        self._require_open("backward")
        self._in_backward = True
        self._early = last
        self._missing = {u.index: {r.index for g in u.groups for r in g.records if r.trainable} for u in self._units}
        self._round = [0] * len(self._units)

    def accept(self, record: ParameterRecord) -> None:
        """Take the gradient that autograd has just put in `record.parameter.grad`."""
        grad = record.parameter.grad
        record.parameter.grad = None  # also when refused: the next backward would add to it
        self._require_open("a gradient arrived")
        if grad is None:
            return
        unit = record.unit
        self._accounts[record.group].accept(record.position, grad.detach())
        self._touched.add(record.index)
        self._brought.add(unit.index)
        if not self._in_backward and self._scaled_only:
            raise RuntimeError(f"a gradient of '{record.name}' arrived outside engine.backward(): its loss was not "
                               "scaled, which this precision needs; fix: engine.backward(loss)")
        if not self._in_backward:
            return  # loss.backward() outside engine.backward(): flushed at the next end_backward or close
        self._missing[unit.index].discard(record.index)
        if self._flushes_now(unit) and not unit.frees_parameters:
            self._flush_ready_in_order()

    def left(self, unit: Unit) -> None:
        """Backward has left the last call of `unit`, the same on every rank: reduce it if it is gathered for each use.

        Not when its gradients are complete: that differs between ranks that use different parameters of the unit, and
        a rank that waits for a reduction would keep the others waiting for its next gather.
        """
        if self._in_backward and unit.frees_parameters and not self._round[unit.index]:
            self._flush(unit)

    def end_backward(self) -> None:
        """Flush what is left, the same on every rank. Collective over the data axes where a unit flushes early."""
        self._in_backward = False
        early = [unit for unit in self._units if self._flushes_now(unit)]
        if early:
            for unit in (self._units[index] for index in self._expected):
                if not self._round[unit.index] and self._flushes_now(unit):
                    self._flush(unit)
            self._flush_remaining(only=early)
        self._settle_in_flight(keep=0)

    def _flushes_now(self, unit: Unit) -> bool:
        return self._early or any(g.trainable and g.shards_gradients for g in unit.groups)

    def _flush_ready_in_order(self) -> None:
        for index in self._expected:
            if self._round[index]:
                continue
            unit = self._units[index]
            if self._missing[index] or not self._holds(unit):
                return
            self._flush(unit)

    def _holds(self, unit: Unit) -> bool:
        return any(g.trainable and self._accounts[g].local is not None for g in unit.groups)

    def _flush(self, unit: Unit) -> None:
        self._round[unit.index] += 1
        for group in unit.groups:
            if group.trainable:
                self._in_flight.append(self._accounts[group].flush(unit))
                self.num_flushes += 1
        self._settle_in_flight(keep=unit.groups[0].axis.in_flight)

    def _flush_remaining(self, only: Sequence[Unit]) -> None:
        """Vote how often each unit is flushed in this round: the most any rank needs; the others add zeros."""
        mine = [[self._round[u.index] + self._holds(u) for u in only], [u.index in self._brought for u in only]]
        agreed = self._control.maximum(torch.tensor(mine, dtype=torch.int32), what="vote on units to reduce").tolist()
        target, brought = (dict(zip((u.index for u in only), row, strict=True)) for row in agreed)
        for index in self._canonical(target):
            while self._round[index] < target[index]:
                self._flush(self._units[index])
        self._brought.clear()
        if any(brought.values()):
            self._expected = self._canonical(index for index, any_rank in brought.items() if any_rank)

    def _settle_in_flight(self, *, keep: int) -> None:
        while len(self._in_flight) > keep:
            flight = self._in_flight.pop(0)
            flight.pending.wait()
            self._landed.append(flight)
        self._take_back(keep=1)

    def _take_back(self, *, keep: int) -> None:
        """Buffers that all ranks are done with go back to the pool; wait for all but the last `keep`."""
        while self._landed and self._landed[0].pending.released(block=len(self._landed) > keep):
            for buffer in self._landed.pop(0).give_back:
                self._pool.give(buffer)

    def _canonical(self, indices: Iterable[int]) -> list[int]:
        """Reverse unit order, the root last: its gradients (embeddings) arrive last."""
        return sorted(indices, key=lambda i: (self._units[i].is_root, -i))

    # -- closing --------------------------------------------------------------------------------------------------

    def close(self, *, loss_scale: float = 1.0) -> None:
        """Make the window's gradients final and test them. Idempotent; collective over the data axes.

        Args:
            loss_scale: the factor on all losses of this window; taken out here.
        """
        if self.state is LedgerState.CLOSED:
            return
        self._round = [0] * len(self._units)
        self._flush_remaining(only=self._units)
        self._settle_in_flight(keep=0)
        pending = [self._accounts[group].settle(unit, self._replicate, self._scale / loss_scale)
                   for unit in self._units for group in unit.groups if group.trainable]
        for one in pending:
            one.wait()
        for one in pending:
            one.complete()  # clipping writes what another rank may still be reading
        pieces = {index: piece for account in self._accounts.values()
                  for index, piece in account.tested_pieces().items()}
        self._agreed, finite = self._agree(finite=all_finite(list(pieces.values())))
        self._take_back(keep=0)  # whoever has voted has taken in all reductions
        self.nonfinite = () if finite else self._name_nonfinite(pieces)
        for account in self._accounts.values():
            account.attach(self._agreed)
        self.state = LedgerState.CLOSED

    def _agree(self, *, finite: bool) -> tuple[set[int], bool]:
        """One vote: records that have a gradient on any rank, and whether the sums are finite on all."""
        mine = torch.zeros(len(self._records) + 1, dtype=torch.uint8)
        mine[list(self._touched)] = 1
        mine[-1] = not finite
        agreed = self._control.maximum(mine, what="vote on parameters that have a gradient, and on finite sums")
        return set(agreed[:-1].nonzero().flatten().tolist()), not agreed[-1]

    def _name_nonfinite(self, pieces: dict[int, Tensor]) -> tuple[str, ...]:
        mine = torch.zeros(len(self._records), dtype=torch.uint8)
        mine[[index for index, piece in pieces.items() if not all_finite([piece])]] = 1
        agreed = self._control.maximum(mine, what="names of parameters whose gradient is not finite")
        return tuple(self._records[index].name for index in agreed.nonzero().flatten().tolist())

    def reset(self) -> None:
        """Forget the window's gradients and open the next one."""
        self._settle_in_flight(keep=0)
        self._take_back(keep=0)
        for axis in {account.group.axis for account in self._accounts.values()}:
            axis.drain()
        for account in self._accounts.values():
            account.reset()
        self._pool.clear()
        self._touched, self._brought, self.nonfinite = set(), set(), ()
        self.state = LedgerState.OPEN

    def _require_open(self, what: str) -> None:
        if self.state is LedgerState.CLOSED:
            raise RuntimeError(f"{what} after the gradients of this update were closed; fix: call engine.step() (or "
                               "engine.zero_grad() to drop them) before the next backward")

    # -- reading --------------------------------------------------------------------------------------------------

    def full_gradient(self, record: ParameterRecord) -> Tensor | None:
        """The final gradient of one parameter in its shape, in the gradient type, on every rank; None without one.

        Collective over the data_shard axis. The ledger must be closed.
        """
        assert self.state is LedgerState.CLOSED, "close() first"
        group = record.group
        account = self._accounts[group]
        if account.total is None or record.index not in self._agreed:
            return None
        if not group.shards_optimizer:
            flat = account.total
        else:
            flat = torch.empty(group.layout.padded_numel, dtype=group.gradient_dtype, device=account.total.device)
            group.axis.all_gather(flat, account.total, tag=record.unit.tag("replicate")).complete()
        return flat[group.layout.span(record.position)].view(record.shape).clone()

    def storages(self) -> list[torch.UntypedStorage]:
        """Storages that hold gradients now."""
        held = [t for a in self._accounts.values() for t in (a.local, a.host, a.reduced) if t is not None]
        return [t.untyped_storage() for t in held]

    @contextlib.contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """begin_backward ... end_backward; an exception in between leaves the ledger open without a collective."""
        self.begin_backward(last=last)
        try:
            yield
        except BaseException:
            self._in_backward = False
            raise
        self.end_backward()

