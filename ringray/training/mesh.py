"""The ranks of a training in order: DP x PP x CP x TP, those of TP next to each other.

Ranks of one node follow each other, so TP lies in a node, then CP (the ring), PP and DP, as their
messages are ever larger in number and smaller in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.call import whole
from ringray.comm.ring import connect, timeout_of
from ringray.training.recipe import Degrees

_AXES = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The groups of this rank. ``shards``: DP x CP, over which FSDP shards weights and the loss is
    a mean; ``device``: its type; ``stage``: the ranks that run a forward at the same time, None:
    all."""

    degrees: Degrees
    device: str
    whole: DeviceMesh
    shards: DeviceMesh
    stage: dist.ProcessGroup | None = None

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the group of this rank along ``dp``, ``pp``, ``cp`` or ``tp``."""
        return self.whole[axis].get_group()

    def place(self, axis: str) -> int:
        """Returns this rank's place along an axis."""
        return self.whole[axis].get_local_rank()

    @property
    def ring(self) -> dist.ProcessGroup:
        """Returns the ranks that share a sequence."""
        return self.group("cp")


def make_mesh(
    degrees: Degrees | None = None, *, device: str = "cpu", dp: int = 1, tp: int = 1, pp: int = 1
) -> Mesh:
    """Forms the groups of the default process group's ranks; every rank calls it.

    Args:
        degrees: of each kind of parallelism. None: ``dp``, ``tp`` and ``pp``, and a ring of the
            ranks that they leave.
        device: type of the ranks' devices.

    Raises:
        ValueError: on every rank, degrees that are not those of so many ranks, or not the same.
    """
    comm = connect(None)
    with refusing(comm):
        ranks = dist.get_world_size()
        for axis, size in (("dp", dp), ("tp", tp), ("pp", pp)):
            if not whole(size, 1):
                raise ValueError(f"{axis}: got {size!r}, expected an integer of at least 1")
        if degrees is None:
            degrees = Degrees(dp, max(1, ranks // (dp * tp * pp)), tp, pp)
        if degrees.ranks != ranks:
            raise ValueError(
                f"{degrees} needs {degrees.ranks} ranks, but there are {ranks}: expected degrees "
                "whose product is the number of ranks"
            )
        sizes = tuple(getattr(degrees, axis) for axis in _AXES)
        agree(comm, AgreedCall("make_mesh", degrees=degrees, device=device))
    mesh = init_device_mesh(device, sizes, mesh_dim_names=_AXES)
    stage = None
    if degrees.pp > 1:
        stage = mesh["dp", "cp", "tp"]._flatten("stage").get_group()
    made = Mesh(degrees, device, mesh, mesh["dp", "cp"]._flatten("shards"), stage)
    for group in (*map(made.group, _AXES), made.shards.get_group(), *filter(None, [stage])):
        dist.distributed_c10d._set_pg_timeout(timeout_of(dist.group.WORLD), group)
    return made
