"""The data-parallel ranks as a grid: shards along one axis, replicas of them along the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm import Group, GroupMaker, LocalGroup, Members, Party, ranks_of, timeout_s
from shardwise.device import on_device
from shardwise.mesh.launch import check_joined, own_device, seat_on
from shardwise.mesh.seats import Seat, check_own_gpus
from shardwise.plan import CommPlan, MeshPlan

__all__ = ["CALLS", "PASSES", "REPLICATE_AXIS", "SHARD_AXIS", "Mesh"]

REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
MODEL_AXIS = "model_parallel"

# What is said to ranks that did not meet; the groups know nothing of passes.
CALLS = "every rank has to make such a call, at the same place among its forward and backward passes"
PASSES = (
    "did they leave out a forward or backward pass, or fail in one? Passes must be made on every rank, those of "
    "several models in the same order, also within one loss.backward(); use optimizer.backward(loss) for a loss that "
    "may not depend on the model"
)
T = TypeVar("T")


class Mesh:
    """Data-parallel ranks and the groups among them: all ranks, or those of one process group.

    Rank here = replica index * shard ranks + shard index. Meshes over disjoint process groups know nothing of each
    other: each trains a model of its own, or its part of one (tensor parallelism).

    Attributes:
        device: where this rank computes.
        shard: the ranks that hold the parts of one copy of the model.
        replicate: the ranks that hold the same part of different copies.
        world: all of the mesh. Where one axis has a single rank, this is the other axis' group itself.
        rank: this process in the mesh.
        size: number of ranks of the mesh.
        ranks: their ranks in ``torch.distributed``, by rank in the mesh.
        members: the process group that the mesh was made over; ``None``: all ranks.
        model_parallel: the ranks that hold other parts of the same model, see :meth:`join_model_parallel`.
        device_mesh: the torch mesh with axes ``("dp_replicate", "dp_shard")``; ``None`` without torch.distributed.
    """

    def __init__(
        self,
        shard: Group,
        replicate: Group,
        world: Group,
        maker: GroupMaker | None,
        device_mesh: DeviceMesh | None,
        ranks: tuple[int, ...],
    ) -> None:
        self.device = world.device
        self.shard = shard
        self.replicate = replicate
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.ranks = ranks
        self.members = maker.members if maker is not None else None
        self.model_parallel: Group | None = None
        self._parts: tuple[int, ...] | None = None
        self.device_mesh = device_mesh
        self._makers = [] if maker is None else [maker]
        self._parties = 0
        self._process = os.getpid()

    @classmethod
    def create(
        cls, plan: MeshPlan, device: torch.device, comm: CommPlan, group: dist.ProcessGroup | None = None
    ) -> Mesh:
        """Divide the ranks of a process group by ``plan``. Collective over that group alone.

        Without torch.distributed it is a mesh of one rank; under a launcher of several, only where the plan asks for
        one (``dp_shard=1, dp_replicate=1``). Ranks wait for each other as long as the group's time-out says (300 s if
        it does not).

        Args:
            plan: how.
            device: where this rank computes; ``"cuda"`` is the rank's own GPU.
            comm: how the ranks communicate.
            group: one that this rank belongs to, in the order of its ranks; other ranks may give others, which this one
                needs to know nothing of. ``None``: all ranks.

        Raises:
            ValueError: this rank is no member of ``group``; the plan does not fit the number of ranks, or differs
                between them; ``comm.shared_memory`` is True where memory cannot be shared; two ranks that have not met
                over gloo alone would compute on one GPU, which every rank is told.
            RuntimeError: a launcher started several processes, which have not met.
        """
        device = own_device(torch.device(device))
        with on_device(device):  # torch makes communicators, and talks through them, for the current GPU
            return cls._create(plan, device, comm, group)

    @classmethod
    def _create(cls, plan: MeshPlan, device: torch.device, comm: CommPlan, group: dist.ProcessGroup | None) -> Mesh:
        if not plan.dp_shard == plan.dp_replicate == 1:
            check_joined()
        ranks = ranks_of("group", group)
        sizes, refusal = _resolved(plan, device, comm, len(ranks))
        if not (dist.is_available() and dist.is_initialized()):
            if refusal is not None:
                raise refusal
            one = LocalGroup("world", device)
            return cls(LocalGroup(SHARD_AXIS, device), LocalGroup(REPLICATE_AXIS, device), one, None, None, ranks)
        # Told before it is raised: the others may want something that can be, and would wait.
        wanted = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "device": device.type}
        if refusal is not None:
            wanted["refused"] = str(refusal)
        some = group if group is not dist.group.WORLD else None
        members = _told(refusal, lambda: Members(some, "group", wanted)) if some is not None else None
        maker = GroupMaker(device, comm.shared_memory, timeout_s(group), members)
        try:
            if members is None:
                _told(refusal, lambda: maker.agree("this mesh", wanted))
            if device.type == "cuda" and len(ranks) > 1 and maker.backend != "gloo":
                rows = maker.tell(asdict(seat_on(device, dist.get_rank())))
                check_own_gpus([Seat(**row) for row in rows])
            wide = sizes.dp_shard
            grid = [list(ranks[start : start + wide]) for start in range(0, len(ranks), wide)]
            if members is not None:
                return cls(*_axes(maker, grid, ranks), maker, _device_mesh(maker, members, grid), ranks)
            names = (REPLICATE_AXIS, SHARD_AXIS)
            device_mesh = init_device_mesh(device.type, (sizes.dp_replicate, wide), mesh_dim_names=names)
            for axis in names:
                maker.keep(device_mesh.get_group(axis))
            return cls(*_axes(maker, grid, ranks), maker, device_mesh, ranks)
        except BaseException:
            maker.close()
            raise

    def join_model_parallel(self, group: dist.ProcessGroup, shared_memory: bool | None = None) -> None:
        """Name the ranks that hold the other parts of this rank's model, one of each of its data-parallel groups.

        Norms of gradients, and with them whether a step overflowed, are agreed with them from here on. Collective over
        ``group``; every rank of the mesh calls it, each with its own.

        Args:
            group: those ranks and this one.
            shared_memory: as in :class:`~shardwise.plan.CommPlan`.

        Raises:
            ValueError: this rank is no member, or another rank of this mesh is one: it would be counted twice.
            RuntimeError: it was called with other ranks before.
        """
        ranks = ranks_of("model-parallel group", group)
        if self._parts is not None:
            if self._parts == ranks:
                return
            raise RuntimeError(
                f"the mesh has the model-parallel group of ranks {list(self._parts)}, not {list(ranks)}: give that one"
            )
        shared = sorted({*ranks} & {*self.ranks} - {dist.get_rank()})
        if shared:
            raise ValueError(
                f"the model-parallel group of ranks {list(ranks)} and the data-parallel one of ranks "
                f"{list(self.ranks)} share ranks {shared} beside rank {dist.get_rank()}: give groups that cross"
            )
        with on_device(self.device):
            members = Members(group, "the model-parallel group", MODEL_AXIS)
            maker = GroupMaker(self.device, shared_memory, members.timeout_s, members)
            self._makers.append(maker)  # first: what it made is closed even if the rest fails
            self.model_parallel = maker.make(MODEL_AXIS, [list(ranks)])
        self._parts = ranks

    def enroll(self, name: str) -> Party:
        """A model that will use the groups. Every rank enrols the same ones in the same order."""
        self._parties += 1
        return Party(self._parties, f"model {self._parties} of the mesh ({name})", PASSES)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Around what all ranks have to call ("saving checkpoint 'x'"): errors of ranks that do not meet tell it."""
        return self.world.activity.doing(what, CALLS)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The different groups, each once (traffic is summed over these)."""
        found: list[Group] = []
        for group in (self.shard, self.replicate, self.world, self.model_parallel):
            if group is not None and not any(group is other for other in found):
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
        """Give back mapped memory and communicators, as a mesh does that is dropped. Calling it again does nothing, nor
        does a forked child's copy."""
        if os.getpid() != self._process:
            return  # what it would close is its parent's
        for group in self.groups:
            group.close()
        for maker in self._makers:
            maker.close()
        self._makers = []
        self.device_mesh = None

    def __repr__(self) -> str:
        kinds = ", ".join(f"{group.name}: {type(group).__name__} of {group.size}" for group in self.groups)
        return f"Mesh(rank {self.rank} of {self.size} on {self.device}; {kinds})"


def _resolved(plan: MeshPlan, device: torch.device, comm: CommPlan, size: int) -> tuple[MeshPlan, ValueError | None]:
    """The plan with its sizes, or as it is with what is wrong."""
    try:
        if comm.shared_memory and device.type != "cpu":
            raise ValueError(f"shared_memory=True with device {device}: it serves CPU ranks; give None or False")
        return plan.resolve(size), None
    except ValueError as error:
        return plan, error


def _told(refusal: ValueError | None, meet: Callable[[], T]) -> T:
    """What ``meet`` gives, which tells the other ranks; then this rank's own refusal is raised."""
    try:
        found = meet()
    except ValueError:
        if refusal is not None:
            raise refusal from None
        raise
    if refusal is not None:
        raise refusal
    return found


def _axes(maker: GroupMaker, grid: list[list[int]], ranks: tuple[int, ...]) -> tuple[Group, Group, Group]:
    """The groups of shards, of replicas, and of all."""
    shard = maker.make(SHARD_AXIS, grid)
    replicate = maker.make(REPLICATE_AXIS, _columns(grid))
    if len(grid) == 1:
        return shard, replicate, shard
    if len(grid[0]) == 1:
        return shard, replicate, replicate
    return shard, replicate, maker.make("world", [list(ranks)])


def _columns(grid: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*grid, strict=True)]


def _device_mesh(maker: GroupMaker, members: Members, grid: list[list[int]]) -> DeviceMesh:
    """As ``init_device_mesh`` makes it of all ranks: a group an axis, of the kind that the members' own is."""
    backend = dist.get_backend(members.process_group)
    shard = members.process_group if len(grid) == 1 else maker.process_group(f"mesh_{SHARD_AXIS}", grid, backend)
    replicate = maker.process_group(f"mesh_{REPLICATE_AXIS}", _columns(grid), backend)
    return DeviceMesh.from_group(
        [replicate, shard], maker.device.type, mesh=torch.tensor(grid), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS)
    )
