"""The part of the Lightning strategy that is about processes: starting, connecting, and talking between them.

Private names used, for want of public ones: `_SubprocessScriptLauncher` (what every Lightning strategy launches with).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor

from strategies.in_step import kept_in_step
from strategies.mesh import Mesh, MeshShape


class MeshStrategy(ParallelStrategy):
    """Processes on a mesh. Abstract: it knows no model.

    Args:
        mesh: axis sizes; None puts all processes on data_shard.
        timeout_s: how long a process waits in a collective.
        options: what ParallelStrategy takes.
    """

    is_distributed = True  # read by the Trainer when it injects samplers; without it every rank sees all data

    def __init__(self, *, mesh: MeshShape | None, timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.num_nodes = 1
        self._shape = mesh
        self._timeout_s = timeout_s
        self._mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of this job. Raises RuntimeError before the processes are connected."""
        if self._mesh is None:
            raise RuntimeError("ZeroStrategy has no mesh yet: it is made when the Trainer connects the processes")
        return self._mesh

    def use_mesh(self, mesh: Mesh) -> None:
        """Take a mesh made before the Trainer, instead of making one."""
        self._mesh = mesh

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are cut over data ranks, not over the world."""
        return {"num_replicas": self.mesh.data.size, "rank": self.mesh.data.index}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Called by the Trainer when processes are known, before they are connected."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    # -- starting and connecting ---------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connect the processes and make the mesh. Collective over the world; a second call changes nothing."""
        super().setup_environment()
        if self._mesh is not None:
            return
        self.set_world_ranks()
        reset_seed()
        if not dist.is_initialized() and self.world_size > 1:
            assert self.cluster_environment is not None
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            backend = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
            dist.init_process_group(backend, rank=self.global_rank, world_size=self.world_size,
                                    timeout=timedelta(seconds=self._timeout_s))
        self._mesh = Mesh(self._shape, device=self.root_device, timeout_s=self._timeout_s)

    def process_dataloader(self, dataloader: object) -> object:
        """All ranks stop at the same batch, whatever each has. Collective over the data axes."""
        return kept_in_step(dataloader, control=self.mesh.control)

    # -- talk between ranks ---------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if self._mesh is not None:
            self.mesh.world.barrier(what=name or "barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.mesh.world.broadcast_object(obj, what="broadcast", source=src) if self._mesh is not None else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the data ranks: "mean" (or "avg"), "sum", "max" or "min"."""
        if not isinstance(tensor, Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).rsplit(".", 1)[-1].lower()
        data = self.mesh.data
        if name == "max":
            return data.maximum(tensor, what="reduce")
        if name == "min":
            return -data.maximum(-tensor, what="reduce")
        if name not in ("mean", "avg", "sum"):
            raise ValueError(f"reduce_op={reduce_op!r}: allowed are mean, sum, max and min")
        total = data.sum(tensor, what="reduce")
        return total if name == "sum" else total / data.size
