"""The engine: one model and its optimizer under a ZeRO stage, for a plain torch loop and for the Lightning strategy.

    engine = strategies.Engine(model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), zero=3)
    for batch in batches:
        loss = engine(*batch)
        engine.backward(loss)     # as often as wanted; gradients add up
        engine.step()             # one update

An update runs: backward* -> close (gradients final) -> clip -> optimizer -> publish (new values where parameters rest).
`step` does the last four; the Lightning strategy calls them one by one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from strategies.in_step import Batch, in_step
from strategies.mesh import Mesh, default_device, ensure_process_group, share_buffers
from strategies.precision import PrecisionPolicy, place_inputs
from strategies.update_guard import StepResult, UpdateGuard
from strategies.zero.accounting import expected_resting_bytes, live_bytes, resting_bytes
from strategies.zero.clip import clip_by_norm, clip_by_value, global_norm
from strategies.zero.discover import assign, find_units
from strategies.zero.held_model import HeldModel
from strategies.zero.hooks import UnitHooks
from strategies.zero.ledger import GradientLedger, LedgerState
from strategies.zero.model_state import StateFit, whole_parameters, whole_state
from strategies.zero.optimizer_state import full_state, load_full_state
from strategies.zero.placement import RestingBytes, StagePolicy
from strategies.zero.record import ParameterRecord, make_records
from strategies.zero.resting import forget, record_of, remember
from strategies.zero.sharded_optimizer import (
    check_optimizer,
    list_pieces,
    refuse_edited_groups,
    shard_new_groups,
    shard_optimizer,
)
from strategies.zero.unit import Unit

OptimizerArgument = Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None


class Engine:
    """Holds `model` sharded and trains it. Constructing is collective over the world.

    The model is changed in place: its parameters become views of flat buffers, and under stage 3 they rest as
    placeholders outside their unit's turn. All ranks start from the first rank's parameters and buffers, without
    gradients (those that the parameters have are dropped).

    Parameters may be frozen and unfrozen at any time, alike on all ranks; one that unfreezes starts from the value it
    computes with. Other changes of the model (a parameter added, replaced, moved, given other data) are refused at the
    next forward, backward or step. `parameter.grad` is None after a backward, on which torch's own clipping does
    nothing: use `clip_norm`, or `gradients()` to look.

    Args:
        model: on any device but meta; moved to the mesh's device.
        optimizer: an element-wise torch optimizer built on the model's parameters, or a callable that builds one from
            the list of trainable parameters; None for evaluation, or to add optimizers later (`add_optimizer`).
        zero: ZeRO stage 0-3, or a StagePolicy.
        precision: "fp32", "bf16", "fp16" (with a dynamic loss scale) or a PrecisionPolicy.
        mesh: axes and groups; None puts all ranks on data_shard (initialising the process group from RANK and
            WORLD_SIZE where a launcher set them).
        units: modules (or their names) to gather together; None finds them.
        clip_norm, clip_value: largest gradient norm, or absolute value, applied by `step`.
        average_gradients: gradients are the mean over data ranks; False gives the sum.
        prefetch_units: units gathered ahead of their use at stage 3.
        timeout_s: for the mesh made here when none is given.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """

    def __init__(self, model: nn.Module, *, optimizer: OptimizerArgument = None, zero: int | StagePolicy = 3,
                 precision: str | PrecisionPolicy = "fp32", mesh: Mesh | None = None,
                 units: Sequence[str | nn.Module] | None = None, clip_norm: float | None = None,
                 clip_value: float | None = None, average_gradients: bool = True, prefetch_units: int = 1,
                 timeout_s: float = 600.0) -> None:
        self.policy = zero if isinstance(zero, StagePolicy) else StagePolicy.of(zero)
        self.precision = precision if isinstance(precision, PrecisionPolicy) else PrecisionPolicy.of(precision)
        _require_limit("clip_norm", clip_norm)
        _require_limit("clip_value", clip_value)
        if clip_norm is not None and clip_value is not None:
            raise ValueError(f"clip_norm={clip_norm} and clip_value={clip_value}: allowed is one of them; "
                             "fix: leave the other None")
        if isinstance(prefetch_units, bool) or not isinstance(prefetch_units, int) or prefetch_units < 0:
            raise ValueError(f"prefetch_units={prefetch_units!r}: allowed is a whole number from 0")
        self.clip_norm, self.clip_value = clip_norm, clip_value
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if record_of(parameter) is not None:
                    raise ValueError("model: it is already held by an engine; fix: close() that one, or build another "
                                     "model")
        self._own_mesh = False
        if mesh is None:
            device = default_device()
            ensure_process_group(device=device, timeout_s=timeout_s)
            mesh = Mesh(device=device, timeout_s=timeout_s)
            self._own_mesh = True
        self.mesh = mesh
        self.module = model
        self.optimizers: list[Optimizer] = []
        built = optimizer if isinstance(optimizer, Optimizer) or optimizer is None else optimizer(
            [parameter for parameter in model.parameters() if parameter.requires_grad])

        self.records = make_records(model)
        if built is not None:  # before the model is changed
            check_optimizer(built, self.records)
        self._number = mesh.next_engine()
        self.units, self._root = self._make_units(model, units)
        for record in self.records:
            remember(record.parameter, record)
            record.parameter.grad = None  # autograd would add to it
        self._closed = False
        share_buffers(model, mesh)
        self.ledger = GradientLedger(
            self.units, self.records, control=mesh.control, replicate=mesh.data_replicate,
            scale=1.0 / mesh.data.size if average_gradients else 1.0, device=mesh.device,
            scaled_only=self.precision.loss_scale is not None)
        self.guard = UpdateGuard(self.precision, logs=mesh.rank == 0)
        self._loss_scaled = False
        self._hooks = UnitHooks(model, self.units, self.records, root=self._root, ledger=self.ledger,
                                prefetch_units=prefetch_units, look=self._look)
        self._held = HeldModel(model, self.records, self.units)
        weakref.finalize(self, mesh.data_shard.withdraw)  # a mesh may outlive an engine that nobody closes
        self._stepped: list[list[list[ParameterRecord]]] = []  # of each optimizer: the records of its groups
        self._before_steps: list[RemovableHandle] = []
        self.gradient_bytes_at_step = 0
        if built is not None:
            self.add_optimizer(built)

    def _make_units(self, model: nn.Module,
                    named: Sequence[str | nn.Module] | None) -> tuple[list[Unit], Unit | None]:
        found = find_units(model, named)
        owned, rest = assign(self.records, model, found)
        units: list[Unit] = []

        def add(name: str, module: nn.Module, records: list[ParameterRecord]) -> None:
            if records:
                unit = Unit(name, module, index=len(units), engine=self._number, records=records, policy=self.policy,
                            precision=self.precision, axis=self.mesh.data_shard, device=self.mesh.device)
                unit.adopt(self.mesh.data)
                units.append(unit)

        for (name, module), records in zip(found, owned, strict=True):
            add(name, module, records)
        add("root", model, rest)
        root = units[-1] if rest else None
        if root is not None:
            root.is_root = True
        return units, root

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take over an optimizer built on the model's parameters (trainable ones may be in one optimizer only)."""
        taken = {id(record.parameter): record.name for earlier in self._stepped for group in earlier
                 for record in group if record.trainable}
        twice = [taken[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in taken]
        if twice:
            raise ValueError(f"optimizer: parameters {twice} are in an earlier optimizer too; fix: one optimizer each")
        self._stepped.append(shard_optimizer(optimizer, self.records))
        self.optimizers.append(optimizer)
        axis = self.mesh.data_shard
        # An update writes where other ranks may still be reading the parameters of the last gather.
        self._before_steps.append(optimizer.register_step_pre_hook(lambda *_: axis.drain()))

    def remove_optimizers(self) -> None:
        """Forget the optimizers and this window's gradients (a new fit brings new ones)."""
        self.optimizers, self._stepped = [], []
        for handle in self._before_steps:
            handle.remove()
        self._before_steps = []
        self.ledger.reset()

    def rest(self) -> None:
        """Free whatever is gathered: between training and evaluation, before a long pause."""
        self._hooks.release_all()

    @property
    def optimizer(self) -> Optimizer | None:
        """The first optimizer, if any."""
        return self.optimizers[0] if self.optimizers else None

    # -- the loop -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the model. Collective over data_shard under stage 3. Floating inputs get the compute type."""
        with self._hooks.forward_scope():
            to = (self.mesh.device, self.precision.compute)
            return self.module(*place_inputs(args, *to), **place_inputs(kwargs, *to))

    def forward_scope(self) -> contextlib.AbstractContextManager[None]:
        """Code inside may use root parameters and call sub-modules, as inside the model's own forward."""
        return self._hooks.forward_scope()

    def backward(self, loss: Tensor, *, last: bool = False, **options: Any) -> None:
        """Add the gradients of `loss` to this window's. Collective over the data axes.

        Args:
            loss: a scalar (or give `gradient=` in options, which go to Tensor.backward).
            last: no other backward comes before `step`; stages 0 and 1 then reduce during backward, not after it.
        """
        with self.backward_scope(last=last):
            self.scale_loss(loss).backward(**options)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, as `backward` does it; `loss` itself without one. For code that calls
        loss.backward() in a `backward_scope`. Local.
        """
        scale = self.guard.loss_scale
        self._loss_scaled = True
        return loss if scale is None else loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale

    @contextlib.contextmanager
    def backward_scope(self, *, last: bool = False) -> Iterator[None]:
        """Around any code that runs autograd on this model. Collective over the data axes at the end.

        Raises:
            RuntimeError: the model was changed (parameters added, removed, replaced, moved); a saved parameter is at
                rest or updated ("modified by an inplace operation": the note says what to do).
        """
        self._require_ready()
        self._hooks.begin_backward()
        self._loss_scaled = False
        try:
            with self.ledger.backward(last=last):
                yield
                if self.guard.loss_scale is not None and not self._loss_scaled:
                    raise RuntimeError(f"precision={self.precision.name!r} scales losses, and this one was not; fix: "
                                       "engine.backward(loss), or engine.scale_loss(loss).backward() in the scope")
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                error.add_note(_SAVED_PARAMETER)
            raise
        finally:
            self._hooks.end_backward()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed: the model is plain torch again, to be read as such; fix: read "
                               "optimizer state before close(), train with a new Engine")

    def _require_ready(self) -> None:
        self._require_open()
        self._look()

    def _look(self) -> None:
        """Refuse what changed in the model and would be lost; train what is trainable now. Local."""
        self._held.refuse_changes()
        for record in self._held.changed_training():
            if not record.trainable or record.trained:
                continue  # a frozen one brings no gradients; one that was trained before brings them again
            if not record.group.trainable:
                record.group.train()
                self.ledger.open_account(record.group)
                for optimizer, stepped in zip(self.optimizers, self._stepped, strict=True):
                    list_pieces(optimizer, stepped)
            self._hooks.take_gradients(record)
        for optimizer, stepped in zip(self.optimizers, self._stepped, strict=True):
            shard_new_groups(optimizer, stepped, self.records)

    def step(self) -> StepResult:
        """Apply one update, or skip it where a gradient is not finite, and start the next window.

        Collective over the data axes. Step schedulers only when `applied` is true.

        Raises:
            RuntimeError: there is no optimizer.
            NonFiniteError: on every rank: gradients are not finite and the policy says to stop (see PrecisionPolicy).
        """
        if not self.optimizers:
            raise RuntimeError("engine.step() without an optimizer; fix: Engine(..., optimizer=...)")
        self.close_gradients()
        norm = None
        if self.clip_norm is not None:
            norm = self.clip_by_norm(self.clip_norm)
        elif self.clip_value is not None:
            self.clip_by_value(self.clip_value)
        if self.is_finite:
            for optimizer in self.optimizers:
                optimizer.step()
        return self.publish(gradient_norm=norm)

    def close_gradients(self) -> None:
        """Make this window's gradients final and give them to the optimizers. Idempotent; collective."""
        self._require_ready()
        if self.ledger.state is LedgerState.OPEN:
            for optimizer, stepped in zip(self.optimizers, self._stepped, strict=True):
                refuse_edited_groups(optimizer, stepped)
            self._hooks.release_all()
            self._withdraw()  # the ledger's vote is the collective after it
            self.ledger.close(loss_scale=self.guard.loss_scale or 1.0)
            self.gradient_bytes_at_step = live_bytes(self.ledger.storages())

    @property
    def is_finite(self) -> bool:
        """Whether the closed gradients may be applied; agreed over the data axes."""
        return not self.ledger.nonfinite

    def withhold(self) -> None:
        """Take gradients that are not finite away from the optimizers, which then leave everything as it is. Local."""
        if not self.is_finite:
            for piece in self._pieces(None):
                piece.grad = None

    def _withdraw(self) -> None:
        """Parameters are about to change: other ranks must not read them. A collective of all ranks has to follow."""
        for unit in self.units:
            unit.withdraw()

    def gradient_norm(self, norm_type: float = 2.0, optimizer: Optimizer | None = None) -> float:
        """Norm of the closed gradients over all unique elements the optimizers step. Collective over data_shard."""
        return float(self._norm(norm_type, optimizer))

    def _norm(self, norm_type: float, optimizer: Optimizer | None) -> Tensor:
        assert self.ledger.state is LedgerState.CLOSED, "close_gradients() first"
        sharded = any(group.shards_optimizer for unit in self.units for group in unit.groups)
        return global_norm(self._pieces(optimizer), norm_type=norm_type, axis=self.mesh.data_shard, sharded=sharded,
                           device=self.mesh.device)

    def clip_by_norm(self, max_norm: float, norm_type: float = 2.0, optimizer: Optimizer | None = None) -> float:
        """Scale closed gradients to a global norm of at most `max_norm`; returns the norm before. Collective."""
        norm = self._norm(norm_type, optimizer)
        clip_by_norm(self._pieces(optimizer), norm, max_norm)
        return float(norm)

    def clip_by_value(self, limit: float, optimizer: Optimizer | None = None) -> None:
        """Bound each element of the closed gradients. Local."""
        clip_by_value(self._pieces(optimizer), limit)

    def _pieces(self, optimizer: Optimizer | None) -> list[nn.Parameter]:
        chosen = self.optimizers if optimizer is None else [optimizer]
        return [piece for each in chosen for group in each.param_groups for piece in group["params"]]

    def publish(self, *, gradient_norm: float | None = None) -> StepResult:
        """After the optimizers stepped: new values where parameters rest; next window. Collective.

        Counts the update. Where gradients were not finite the optimizers must not have stepped, and nothing is moved.

        Raises:
            NonFiniteError: see `step`.
        """
        nonfinite = self.ledger.nonfinite
        pending = [] if nonfinite else [one for unit in self.units for one in unit.publish()]
        for one in pending:
            one.wait()
        self.ledger.reset()
        return self.guard.record(nonfinite, gradient_norm=gradient_norm)

    def zero_grad(self) -> None:
        """Drop this window's gradients."""
        self.ledger.reset()

    def train(self, mode: bool = True) -> Engine:
        """Set the model's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set evaluation mode."""
        return self.train(False)

    def agree(self, flag: bool) -> bool:
        """Whether every data rank says True: for what all must do alike (stop, save, skip). Collective."""
        return self.mesh.control.agree(flag, what="agreed decision")

    def in_step(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's batches for as long as every data rank has one; the rest is not used. Collective at each."""
        return in_step(batches, control=self.mesh.control)

    # -- reading and writing --------------------------------------------------------------------------------------

    def gradients(self) -> dict[str, Tensor | None]:
        """The final gradient of each parameter that is or was trainable, full, on every rank; None without one.

        Collective; closes the window.
        """
        self.close_gradients()
        return {record.name: self.ledger.full_gradient(record) for record in self.records if record.trained}

    def state_dict(self, *, only_rank: int | None = None) -> dict[str, Tensor]:
        """Parameters and persistent buffers, full, on the CPU, under the plain model's names. Collective.

        Trained parameters come from the masters, in the type the model came in. Tied names share one tensor. With
        `only_rank` the other ranks hold one unit at a time and get an empty dict.
        """
        self._require_open()
        wanted = only_rank is None or self.mesh.rank == only_rank
        return whole_state(self.module, self.units, wanted=wanted)

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Set parameters (masters in full precision) and buffers from a full state dict, the same on every rank.

        Collective over the data axes.

        Raises:
            ValueError: names are missing or unknown (`strict`), or a shape differs; nothing has been changed then.
        """
        fit = StateFit(self.module, self.records, state, strict=strict)
        if fit.problems:
            raise ValueError("state dict does not fit the model: " + "; ".join(fit.problems))
        self._withdraw()
        self.mesh.control.barrier(what="load_state_dict")
        fit.apply(self.mesh.device)
        for unit in self.units:
            unit.offer()

    def optimizer_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """Full state of an optimizer (default: the first) in torch's own form, on every rank. Collective."""
        self._require_open()
        chosen = optimizer if optimizer is not None else self.optimizers[0]
        return full_state(chosen, self._groups_of(chosen), control=self.mesh.control)

    def load_optimizer_state_dict(self, state: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
        """Take this rank's pieces of a full state, saved at any stage and rank count or by plain torch. Local."""
        chosen = optimizer if optimizer is not None else self.optimizers[0]
        load_full_state(chosen, self._groups_of(chosen), state)

    def _groups_of(self, optimizer: Optimizer) -> list[list[ParameterRecord]]:
        return next(groups for each, groups in zip(self.optimizers, self._stepped, strict=True) if each is optimizer)

    # -- accounting -----------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Elements of the model, tied parameters once."""
        return sum(record.shape.numel() for record in self.records)

    def resting_bytes(self) -> RestingBytes:
        """Bytes this rank holds between updates, summed over live storages (gradients: at the last step). Local."""
        self._hooks.release_all()
        return resting_bytes(self.units, self.optimizers, gradients=self.gradient_bytes_at_step)

    def expected_resting_bytes(self, *, states_per_element: int = 2) -> RestingBytes:
        """The published formula for this model and layout, without padding. Local."""
        return expected_resting_bytes(self.units, states_per_element=states_per_element)

    def close(self) -> None:
        """Give the model back as plain torch: hooks gone, every parameter whole and in its own type. Collective.

        Another engine may take the model then. A mesh that the engine made goes too.
        """
        if self._closed:
            return
        self._closed = True
        for unit in self.units:
            cast = any(group.compute_dtype != group.source_dtype for group in unit.groups)
            values = list(whole_parameters(unit)) if cast else []  # masters have more digits than what computed
            unit.keep()
            for record, value in values:
                if value.dtype != record.group.compute_dtype:
                    record.parameter.data = value
        for record in self.records:
            forget(record.parameter)
        self._hooks.remove()
        self._withdraw()
        if self._own_mesh:
            self.mesh.close()


_SAVED_PARAMETER = (
    "If it is a parameter: either engine.step() (or an edit) came between this loss's forward and its backward - then "
    "compute the loss again; or its unit rests sharded because no tensor among the unit's outputs led backward to it "
    "(outputs in an object of one's own, a view changed in place) - then return plain tensors, or name a unit around "
    "all users of the parameter (units=[...])")


def _require_limit(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{name}={value!r}: allowed is a number above 0, or None for no clipping")
