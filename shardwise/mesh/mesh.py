"""The data-parallel ranks as a grid: shards along one axis, replicas of them along the other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm import Group, GroupMaker, LocalGroup
from shardwise.plan import CommPlan, MeshPlan

__all__ = ["REPLICATE_AXIS", "SHARD_AXIS", "Mesh"]

REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
DEFAULT_TIMEOUT_S = 300.0


class Mesh:
    """All data-parallel ranks and the groups among them. World rank = replica index * shard ranks + shard index.

    Attributes:
        device: where this rank computes.
        shard: the ranks that hold the parts of one copy of the model.
        replicate: the ranks that hold the same part of different copies.
        world: all of them. Where one axis has a single rank, this is the other axis' group itself.
        rank: this process among all.
        size: number of all.
        device_mesh: the torch mesh with axes ``("dp_replicate", "dp_shard")``; ``None`` without torch.distributed.
    """

    def __init__(
        self, shard: Group, replicate: Group, world: Group, maker: GroupMaker | None, device_mesh: DeviceMesh | None
    ) -> None:
        self.device = world.device
        self.shard = shard
        self.replicate = replicate
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.device_mesh = device_mesh
        self._maker = maker

    @classmethod
    def create(cls, plan: MeshPlan, device: torch.device, comm: CommPlan) -> Mesh:
        """Divide the ranks of the default process group by ``plan``. Collective.

        Without torch.distributed it is a mesh of one rank. Ranks wait for each other as long as the default process
        group's time-out says (300 s if it does not).

        Raises:
            ValueError: the plan does not fit the number of ranks, or ``comm.shared_memory`` is True where memory
                cannot be shared.
        """
        device = torch.device(device)
        if not (dist.is_available() and dist.is_initialized()):
            plan.resolve(1)
            if comm.shared_memory and device.type != "cpu":
                raise ValueError(f"shared_memory=True with device {device}: it serves CPU ranks; give None or False")
            one = LocalGroup("world", device)
            return cls(LocalGroup(SHARD_AXIS, device), LocalGroup(REPLICATE_AXIS, device), one, None, None)
        size = dist.get_world_size()
        plan = plan.resolve(size)
        if comm.shared_memory and device.type != "cpu":
            raise ValueError(f"shared_memory=True with device {device}: it serves CPU ranks; give None or False")
        device_mesh = init_device_mesh(
            device.type, (plan.dp_replicate, plan.dp_shard), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS)
        )
        grid: list[list[int]] = device_mesh.mesh.tolist()
        maker = GroupMaker(device, comm.shared_memory, _timeout_s())
        shard = maker.make(SHARD_AXIS, grid)
        replicate = maker.make(REPLICATE_AXIS, [list(column) for column in zip(*grid, strict=True)])
        if plan.dp_replicate == 1:
            world = shard
        elif plan.dp_shard == 1:
            world = replicate
        else:
            world = maker.make("world", [list(range(size))])
        return cls(shard, replicate, world, maker, device_mesh)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The different groups, each once (traffic is summed over these)."""
        found: list[Group] = []
        for group in (self.shard, self.replicate, self.world):
            if not any(group is other for other in found):
                found.append(group)
        return tuple(found)

    def traffic(self) -> dict[str, int]:
        """Bytes sent by this rank in all groups, by kind."""
        kinds = self.world.traffic.bytes
        return {kind: sum(group.traffic.bytes[kind] for group in self.groups) for kind in kinds}

    def reset_traffic(self) -> None:
        """Start counting from zero in all groups."""
        for group in self.groups:
            group.traffic.reset()

    def close(self) -> None:
        """Give back mapped memory and communicators. Calling it again does nothing."""
        for group in self.groups:
            group.close()
        if self._maker is not None:
            self._maker.close()
        if self.device_mesh is not None and dist.is_initialized():
            for axis in (REPLICATE_AXIS, SHARD_AXIS):
                process_group = self.device_mesh.get_group(axis)
                if process_group is not dist.group.WORLD:
                    dist.destroy_process_group(process_group)
        self._maker = self.device_mesh = None

    def __repr__(self) -> str:
        kinds = ", ".join(f"{group.name}: {type(group).__name__} of {group.size}" for group in self.groups)
        return f"Mesh(rank {self.rank} of {self.size} on {self.device}; {kinds})"


def _timeout_s() -> float:
    """The default process group's time-out, which torch keeps in the backend's options and shows nowhere else."""
    group = dist.group.WORLD
    for device_type in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device_type)).options  # type: ignore[union-attr]
            return float(options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return DEFAULT_TIMEOUT_S
