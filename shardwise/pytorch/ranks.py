"""Process groups, device meshes and devices, which torch's arguments name and a plan only counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.base.checked import refuse
from shardwise.core.base.remarks import warn_user
from shardwise.core.mesh.launch import read_variable
from shardwise.plan import MeshPlan

__all__ = ["all_ranks", "check_all_ranks", "mesh_of", "name_device", "nodes"]


def check_all_ranks(name: str, group: dist.ProcessGroup | None) -> None:
    """Raises:
    NotImplementedError: ``group`` has some ranks only.
    """
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        refuse(name, f"{dist.get_world_size(group)} of {dist.get_world_size()} ranks", "a plan is for all that run")


def mesh_of(mesh: DeviceMesh) -> MeshPlan:
    """One dimension shards; of two the first holds replicas.

    Raises:
        NotImplementedError: three dimensions, or not all ranks.
    """
    sizes = tuple(mesh.mesh.shape)
    if len(sizes) > 2:
        refuse("mesh", f"{sizes} ranks", "give (replicas, ranks that shard); tensor parallelism is the plan's tp")
    if mesh.size() != dist.get_world_size():
        refuse("mesh", f"{mesh.size()} of {dist.get_world_size()} ranks", "a plan is for all that run")
    return MeshPlan(dp_replicate=sizes[0] if len(sizes) == 2 else 1, dp_shard=sizes[-1])


def all_ranks() -> MeshPlan:
    """Every rank has a shard."""
    return MeshPlan(dp_shard=-1, dp_replicate=1)


def nodes(pair: tuple[dist.ProcessGroup, dist.ProcessGroup] | None) -> MeshPlan:
    """Shards within a group, replicas of it: of a pair (shard group, replicate group), or each node is one.

    Raises:
        ValueError: the launcher did not say how many ranks a node has.
    """
    if pair is not None:
        return MeshPlan(dp_shard=dist.get_world_size(pair[0]), dp_replicate=dist.get_world_size(pair[1]))
    local = read_variable("LOCAL_WORLD_SIZE")
    if local is None:
        raise ValueError(
            f"HYBRID_SHARD without groups, and LOCAL_WORLD_SIZE={local}: start the ranks with torchrun or `shardwise "
            "run`, or give a device_mesh of (nodes, ranks of a node)"
        )
    return MeshPlan(dp_shard=int(local), dp_replicate=-1)


def name_device(name: str, value: Any) -> None:
    """A plan names no device; warns where one was given that is not the current one.

    Raises:
        NotImplementedError: several devices in one process.
    """
    given = list(value) if isinstance(value, list | tuple) else [value] if value is not None else []
    if len(given) > 1:
        refuse(name, value, "start one process a GPU")
    if given and not _is_current(given[0]):
        warn_user(
            f"{name}={value!r} is not in the plan, which names no device: shard(..., device=...) takes it; by default "
            "that is this rank's GPU"
        )


def _is_current(device: Any) -> bool:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return not torch.cuda.is_available()
    return torch.cuda.is_available() and found.index in (None, int(read_variable("LOCAL_RANK") or 0))
