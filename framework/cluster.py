"""What Lightning asks about the processes of a job: answered by the mesh, which has connected them already.

Left to guess from the environment, Lightning takes a rank of a launcher it does not know for a lonely process and
starts the command again from it, and under SLURM it answers signals with checkpoints of its own.
"""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from strategies.mesh import Mesh


class ConnectedProcesses(ClusterEnvironment):
    """Processes that someone has started and `mesh` has connected.

    Args:
        devices: processes per node.
    """

    def __init__(self, mesh: Mesh, *, devices: int) -> None:
        super().__init__()
        self._mesh = mesh
        self._devices = devices

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "localhost")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return False  # never found by search: it needs the mesh

    def world_size(self) -> int:
        return self._mesh.world_size

    def set_world_size(self, size: int) -> None:
        """Nothing: the mesh knows."""

    def global_rank(self) -> int:
        return self._mesh.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the mesh knows."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self._mesh.rank % self._devices))

    def node_rank(self) -> int:
        return self._mesh.rank // self._devices
