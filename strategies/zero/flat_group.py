"""A flat group: the parameters of one unit that share dtype and start trainable or frozen, in one buffer.

    full    [padded]   compute type. Each parameter is a view of it. ONE storage object for life: freed by resizing to 0
                       and refilled in place, because autograd's saved tensors alias it.
    resting [shard]    compute type, this rank's slice. Its own storage where parameters rest sharded, else a view of
                       `full`.
    master  [range]    what the optimizer steps: the shard, or everything where optimizer state is replicated. In the
                       compute type it is a view of `resting` / `full` (no second copy); otherwise a tensor of its own.

With one shard, "sharded" and "replicated" are the same thing, and this file is where that is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from strategies.collectives import Communicator
from strategies.precision import PrecisionPolicy
from strategies.transfer import Pending, Tag
from strategies.zero.layout import FlatLayout
from strategies.zero.placement import Placement, RestingBytes, StagePolicy
from strategies.zero.record import ParameterRecord
from strategies.zero.resting import Placeholder


class FlatGroup:
    """Buffers of one group. Not collective to construct; every rank of `axis` constructs the same groups in order.

    Args:
        records: parameters of one dtype and trainability, in layout order.
        axis: communicator over which `policy` shards.
        device: where the buffers live.
    """

    def __init__(self, records: Sequence[ParameterRecord], *, policy: StagePolicy, precision: PrecisionPolicy,
                 axis: Communicator, device: torch.device) -> None:
        self.records = tuple(records)
        self.axis = axis
        self.policy = policy
        self.precision = precision
        self.device = device
        self.source_dtype = records[0].dtype
        self.trainable = records[0].trainable
        self.layout = FlatLayout.pack([record.shape for record in records], num_shards=axis.size)
        self.compute_dtype = precision.compute_dtype(self.source_dtype)
        self.master_dtype = precision.master_dtype(self.source_dtype)
        self.gradient_dtype = precision.gradient_dtype(self.source_dtype)
        self.frees_parameters = policy.parameters is Placement.SHARDED and axis.size > 1
        self.shards_optimizer = policy.optimizer is Placement.SHARDED and axis.size > 1
        self.shards_gradients = policy.gradients is Placement.SHARDED and axis.size > 1

        self.full = torch.zeros(self.layout.padded_numel, dtype=self.compute_dtype, device=device)
        self.views = [self.full[self.layout.span(i)].view(record.shape) for i, record in enumerate(records)]
        self._placeholders = [
            Placeholder(record.parameter, view) for record, view in zip(records, self.views, strict=True)
        ]
        self.optimizer_range = (self.layout.shard_range(axis.index) if self.shards_optimizer
                                else range(self.layout.padded_numel))
        self.resting = axis.slice_of(self.full)
        self.master: Tensor | None = None
        self.masters: dict[int, nn.Parameter] = {}

    def adopt(self, data: Communicator, *, tag: Tag) -> None:
        """Take the parameters' values from the first data rank and make every parameter a view of the buffer.

        Collective over `data`. Replicas end equal to the first rank, whatever the others held. Masters are taken
        before values are rounded to the compute type.
        """
        same = self.master_dtype == self.compute_dtype
        whole = self.full if same else self.full.new_zeros(self.layout.padded_numel, dtype=self.master_dtype)
        for position, record in enumerate(self.records):
            whole[self.layout.span(position)].copy_(record.parameter.detach().reshape(-1))
        data.broadcast(whole, what=tag)
        if not same:
            self.full.copy_(whole)
        if self.frees_parameters:
            self.resting = self.axis.slice_of(self.full).clone()
        if self.trainable:
            self._take_masters(whole[self._own])
        for placeholder in self._placeholders:
            placeholder.wake()

    @property
    def _own(self) -> slice:
        return slice(self.optimizer_range.start, self.optimizer_range.stop)

    def train(self) -> None:
        """A frozen group gets masters, from the values it computes with: a parameter of it is trainable now. Local."""
        self.trainable = True
        self._take_masters(self.resting if self.shards_optimizer else self.full)

    def _take_masters(self, own: Tensor) -> None:
        """`own`: the values of this rank's optimizer range, in any type."""
        if self.master_dtype != self.compute_dtype:
            self.master = own.to(self.master_dtype, copy=True)
        else:
            self.master = self.resting if self.shards_optimizer else self.full
        self.masters = self._make_master_parameters(self.master)

    def _make_master_parameters(self, master: Tensor) -> dict[int, nn.Parameter]:
        """Position in the layout -> the 1-D piece of it that this rank's optimizer steps (an alias of `master`)."""
        pieces = {}
        for position in range(len(self.records)):
            overlap = self.layout.overlap(position, self.optimizer_range)
            if overlap is not None:
                pieces[position] = nn.Parameter(master[overlap.in_range])
        return pieces

    # -- parameters -----------------------------------------------------------------------------------------------

    def begin_gather(self, *, tag: Tag) -> Pending:
        """Fill `full` from the ranks' shards. Collective over the axis. The views are not attached yet."""
        return self.axis.all_gather(self.full, self.resting, tag=tag, prepare=self._allocate)

    def _allocate(self) -> None:
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())

    def wake(self) -> None:
        """Attach the views; `full` must hold the values."""
        for placeholder in self._placeholders:
            placeholder.wake()

    def free(self) -> None:
        """Let the parameters rest: placeholders first, then the storage."""
        self.refuse_lost_edits()
        for placeholder in self._placeholders:
            placeholder.rest()
        self.full.untyped_storage().resize_(0)

    def refuse_lost_edits(self, *, in_place: bool = True) -> None:
        """Raise RuntimeError if a parameter was edited where the next release or update overwrites it. Awake only."""
        apart = self.master is not None and self.master_dtype != self.compute_dtype
        in_place = in_place and (self.frees_parameters or apart)
        buffer = self.full.data_ptr()
        for placeholder in self._placeholders:
            placeholder.refuse_lost_edits(buffer, in_place=in_place)

    def changed(self) -> None:
        """The values are other ones now."""
        for placeholder in self._placeholders:
            placeholder.changed()

    def publish(self, *, tag: Tag) -> Pending:
        """After the optimizer: masters -> parameters as they rest. Collective over the axis where those differ."""
        if self.master is None:
            return Pending()
        self.axis.drain()
        with torch.no_grad():
            if self.master_dtype != self.compute_dtype:
                (self.resting if self.shards_optimizer else self.full).copy_(self.master)
        if self.shards_optimizer and not self.frees_parameters:
            return self.axis.all_gather(self.full, self.resting, tag=tag)
        return Pending()

    def whole_master(self, *, tag: Tag) -> Tensor:
        """A copy of all masters [padded], in the master type. Collective over the axis where they are sharded."""
        assert self.master is not None
        if not self.shards_optimizer:
            return self.master.clone()
        flat = torch.empty(self.layout.padded_numel, dtype=self.master_dtype, device=self.device)
        self.axis.all_gather(flat, self.master, tag=tag).complete()
        return flat

    def absorb_edit(self, before: Tensor) -> None:
        """Write an edit of `full` back to where parameters rest, and to the masters of the elements that changed.

        `before`: `full` [padded] as it was. Only changed elements touch the masters, so that reading under bf16 does
        not round them.
        """
        self.axis.drain()
        with torch.no_grad():
            if self.frees_parameters:
                self.resting.copy_(self.axis.slice_of(self.full))
            if self.master is None or self.master_dtype == self.compute_dtype:
                return
            after = self.full[self._own]
            changed = after != before[self._own]
            self.master[changed] = after[changed].to(self.master_dtype)

    def load(self, position: int, value: Tensor) -> None:
        """Set one parameter from a full tensor of its shape, masters in full precision. Local; need not be gathered."""
        flat = value.detach().reshape(-1)
        self.axis.drain()
        with torch.no_grad():
            if self.full.untyped_storage().size() > 0:
                self.full[self.layout.span(position)].copy_(flat)
            if self.frees_parameters:
                overlap = self.layout.overlap(position, self.layout.shard_range(self.axis.index))
                if overlap is not None:
                    self.resting[overlap.in_range].copy_(flat[overlap.in_parameter])
            if self.master is not None:
                overlap = self.layout.overlap(position, self.optimizer_range)
                if overlap is not None:
                    self.master[overlap.in_range].copy_(flat[overlap.in_parameter])

    # -- accounting -----------------------------------------------------------------------------------------------

    def parameter_storages(self) -> list[torch.UntypedStorage]:
        """Storages that hold parameters now (distinct objects may be the same memory: compare data_ptr)."""
        return [self.full.untyped_storage(), self.resting.untyped_storage()]

    def expected_bytes(self, *, states_per_element: int) -> RestingBytes:
        """The published formula for this group's parameters, without padding."""
        return self.policy.resting_bytes(
            numel=self.layout.numel, num_shards=self.axis.size, precision=self.precision, dtype=self.source_dtype,
            trainable=self.trainable, states_per_element=states_per_element)
