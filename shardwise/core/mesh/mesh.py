"""The ranks as a grid: parts of layers along one axis, shards along another, replicas of them along the third."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.base.device import on_device
from shardwise.core.comm import (
    FORMATS,
    Group,
    GroupMaker,
    LocalGroup,
    Members,
    Party,
    Wire,
    compressed,
    ranks_of,
    timeout_s,
)
from shardwise.core.mesh.launch import check_joined, own_device, seat_on
from shardwise.core.mesh.seats import Seat, check_own_gpus
from shardwise.plan import CommPlan, MeshPlan

__all__ = ["CALLS", "PASSES", "REPLICATE_AXIS", "SHARD_AXIS", "TENSOR_AXIS", "Mesh"]

REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
SECONDARY_AXIS = "secondary"
TENSOR_AXIS, PIPELINE_AXIS, SEQUENCE_AXIS = "tp", "pp", "sp"
MODEL_AXIS = "model_parallel"

# What is said to ranks that did not meet; the groups know nothing of passes.
CALLS = "every rank has to make such a call, at the same place among its forward and backward passes"
PASSES = (
    "did they leave out a forward or backward pass, or fail in one? Passes must be made on every rank, those of "
    "several models in the same order, also within one loss.backward(); use optimizer.backward(loss) for a loss that "
    "may not depend on the model"
)
T = TypeVar("T")


@dataclass(frozen=True)
class _Axes:
    """This rank's groups; see the attributes of :class:`Mesh`."""

    shard: Group
    replicate: Group
    world: Group
    tensor: Group
    pipeline: Group
    model: Group
    everyone: Group
    stage: Group
    sequence: Group
    wire: Wire | None = None
    ring: Wire | None = None
    secondary: Group | None = None


class Mesh:
    """Ranks and the groups among them: all ranks, or those of one process group.

    Data-parallel ranks are counted here: rank = replica index * shard ranks + shard index. With tensor or pipeline
    parallelism each of these is one of a set of ranks that hold one model together, each a part of the layers of a
    stage; the ranks with other parts and stages count alike.
    Meshes over disjoint process groups know nothing of each other: each trains a model of its own, or its part of one.

    Attributes:
        device: where this rank computes.
        shard: the ranks that hold the shards of one copy of what this rank has a part of.
        secondary: neighbours among these, which keep a second copy together; ``None`` where none is kept.
        replicate: the ranks that hold the same shard of different copies.
        world: the data-parallel ranks. Where one axis has a single rank, this is the other axis' group itself.
        tensor: the ranks that hold parts of the same layers (tensor parallelism), which see the same data.
        pipeline: the ranks that hold the stages of one model, which see the same data.
        everyone: all of the mesh; ``world`` itself where each rank has the whole model.
        stage: those with layers of the same stage; ``everyone`` itself where there is one.
        rank: this process in ``world``.
        size: number of ranks in ``world``.
        ranks: their ranks in ``torch.distributed``, by rank in ``world``.
        members: the process group that the mesh was made over; ``None``: all ranks.
        wire: between the ranks of ``pipeline``; ``None`` where there is one.
        sequence: the data-parallel ranks that see parts of the same sequences; neighbours in ``world``.
        ring: between the ranks of ``sequence``; ``None`` where there is one.
        model_parallel: the ranks that hold other parts of the same model: those of ``tensor`` and ``pipeline``, or see
            :meth:`join_model_parallel`.
        joined: what was given to :meth:`join_model_parallel`; ``None``: nothing.
        device_mesh: the torch mesh with axes ``("dp_replicate", "dp_shard")``, ``"tp"`` where layers are cut and
            ``"pp"`` where there are stages; ``None`` without torch.distributed.
    """

    def __init__(
        self, axes: _Axes, maker: GroupMaker | None, device_mesh: DeviceMesh | None, ranks: tuple[int, ...]
    ) -> None:
        self.device = axes.world.device
        self.shard, self.replicate, self.world = axes.shard, axes.replicate, axes.world
        self.secondary = axes.secondary
        self.tensor, self.pipeline, self.everyone = axes.tensor, axes.pipeline, axes.everyone
        self.stage = axes.stage
        self.rank = axes.world.rank
        self.size = axes.world.size
        self.ranks = ranks
        self.members = maker.members if maker is not None else None
        self.model_parallel: Group | None = axes.model if axes.model.size > 1 else None
        self.joined: Group | None = None
        self._parts: tuple[int, ...] | None = None
        self.device_mesh = device_mesh
        self.wire = axes.wire
        self.sequence, self.ring = axes.sequence, axes.ring
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
        if not plan.dp_shard == plan.dp_replicate == plan.tp == plan.pp == plan.sp == 1:
            check_joined()
        ranks = ranks_of("group", group)
        sizes, refusal = _resolved(plan, device, comm, len(ranks))
        if not (dist.is_available() and dist.is_initialized()):
            if refusal is not None:
                raise refusal
            names = (SHARD_AXIS, REPLICATE_AXIS, "world", TENSOR_AXIS, PIPELINE_AXIS, SEQUENCE_AXIS)
            shard, replicate, one, tensor, pipeline, sequence = (LocalGroup(name, device) for name in names)
            return cls(_Axes(shard, replicate, one, tensor, pipeline, tensor, one, one, sequence), None, None, ranks)
        # Told before it is raised: the others may want something that can be, and would wait.
        wanted = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "device": device.type}
        wanted |= {name: size for name, size in (("tp", sizes.tp), ("pp", sizes.pp), ("sp", sizes.sp)) if size > 1}
        if sizes.dp_outside:
            wanted["dp_outside"] = True
        if sizes.secondary is not None:
            wanted["secondary"] = sizes.secondary
        if refusal is not None:
            wanted["refused"] = str(refusal)
        some = group if group is not dist.group.WORLD else None
        members = _told(refusal, lambda: Members(some, "group", wanted)) if some is not None else None
        maker = GroupMaker(device, comm.shared_memory, timeout_s(group), members, comm.wait_timeout_s)
        try:
            if members is None:
                _told(refusal, lambda: maker.agree("this mesh", wanted))
            if device.type == "cuda" and len(ranks) > 1 and maker.backend != "gloo":
                rows = maker.tell(asdict(seat_on(device, dist.get_rank())))
                check_own_gpus([Seat(**row) for row in rows])
            mesh = cls.among(ranks, sizes, maker)
            mesh.device_mesh = _device_mesh(maker, members, _grid(ranks, sizes))
            if len(ranks) > 1:
                maker.tell(None)  # who closes a group while a peer still connects to it fails the peer
            return mesh
        except BaseException:
            maker.close()
            raise

    @classmethod
    def among(cls, ranks: tuple[int, ...], sizes: MeshPlan, maker: GroupMaker) -> Mesh:
        """The groups that ``maker`` makes, without torch's mesh. Collective as :meth:`GroupMaker.make`.

        Args:
            ranks: world ranks.
            sizes: how they are divided; resolved.
            maker: closed with the mesh.
        """
        grid = _grid(ranks, sizes)
        axes = replace(_axes(maker, grid, sizes.sp), secondary=_secondary(maker, grid, sizes))
        own = tuple(grid[axes.pipeline.rank, :, :, axes.tensor.rank].flatten().tolist())
        return cls(axes, maker, None, own)

    def join_model_parallel(self, group: dist.ProcessGroup, shared_memory: bool | None = None) -> None:
        """Name the ranks that hold the other parts of this rank's model, one of each of its data-parallel groups.

        Norms of gradients, and with them whether a step overflowed, are agreed with them from here on. Collective over
        ``group``; every rank of the mesh calls it, each with its own.

        Args:
            group: those ranks and this one.
            shared_memory: as in :class:`~shardwise.plan.CommPlan`.

        Raises:
            ValueError: this rank is no member, or another rank of this mesh is one: it would be counted twice.
            RuntimeError: it was called with other ranks before, or the mesh divides models itself.
        """
        if self.tensor.size * self.pipeline.size > 1:
            raise RuntimeError(
                f"the mesh divides models itself (tp={self.tensor.size}, pp={self.pipeline.size}): leave that to it, "
                "or give the group with tp=1 and pp=1"
            )
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
            self.model_parallel = self.joined = maker.make(MODEL_AXIS, [list(ranks)])
        self._parts = ranks

    def enroll(self, name: str) -> Party:
        """A model that will use the groups. Every rank enrols the same ones in the same order."""
        self._parties += 1
        return Party(self._parties, f"model {self._parties} of the mesh ({name})", PASSES)

    def with_sums_in(self, numbers: str | None) -> Mesh:
        """As who moves gradients sees it: what goes over the axes of shards and replicas is in such ``numbers`` (of
        :data:`FORMATS`); ``None``: this one."""
        if numbers is None:
            return self
        twin, (_, format_) = copy.copy(self), FORMATS[numbers]
        twin.shard, twin.replicate = compressed(self.shard, format_), compressed(self.replicate, format_)
        return twin

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Around what all ranks have to call ("saving checkpoint 'x'"): errors of ranks that do not meet tell it."""
        return self.world.activity.doing(what, CALLS)

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints, and writes what is written once."""
        return self.everyone.rank == 0

    @property
    def data_ranks(self) -> int:
        """How many ranks, or sets of them, see different data."""
        return self.size // self.sequence.size

    @property
    def data_rank(self) -> int:
        """Which of them this rank is, or belongs to."""
        return self.rank // self.sequence.size

    @property
    def groups(self) -> tuple[Group, ...]:
        """The different groups, each once (traffic is summed over these)."""
        found: list[Group] = []
        every = [self.shard, self.replicate, self.world, self.everyone, self.stage, self.model_parallel, self.secondary]
        every += [group for group in (self.tensor, self.pipeline, self.sequence) if group.size > 1]
        for group in every:
            if group is not None and not any(group is other for other in found):
                found.append(group)
        return tuple(found)

    def traffic(self) -> dict[str, int]:
        """Bytes sent by this rank in all groups, by kind."""
        kinds = self.world.traffic.bytes
        counted = [group.traffic for group in self.groups]
        counted += [wire.traffic for wire in (self.wire, self.ring) if wire is not None]
        return {kind: sum(each.bytes[kind] for each in counted) for kind in kinds}

    def reset_traffic(self) -> None:
        """Start counting from zero in all groups."""
        for group in self.groups:
            group.reset_traffic()
        for wire in filter(None, (self.wire, self.ring)):
            wire.traffic.reset()

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


def _grid(ranks: tuple[int, ...], sizes: MeshPlan) -> torch.Tensor:
    """Ranks as ``[stage, replica, shard, part]``."""
    if sizes.dp_outside:
        grid = torch.tensor(ranks, device="cpu").view(sizes.dp_replicate, sizes.dp_shard, sizes.pp, sizes.tp)
        return grid.permute(2, 0, 1, 3).contiguous()
    return torch.tensor(ranks, device="cpu").view(sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp)


def _axes(maker: GroupMaker, grid: torch.Tensor, sp: int) -> _Axes:
    """This rank's groups, of ranks as ``[stage, replica, shard, part]``, of which ``sp`` share sequences."""
    stages, replicas, shards, parts = grid.shape
    shard = maker.make(SHARD_AXIS, _along(grid, 2))
    replicate = maker.make(REPLICATE_AXIS, _along(grid, 1))
    tensor = maker.make(TENSOR_AXIS, _along(grid, 3))
    pipeline = maker.make(PIPELINE_AXIS, _along(grid, 0))
    if replicas == 1:
        world = shard
    elif shards == 1:
        world = replicate
    else:
        world = maker.make("world", _along(grid, 1, 2))
    if stages == 1:
        model = tensor
    elif parts == 1:
        model = pipeline
    else:
        model = maker.make(MODEL_AXIS, _along(grid, 0, 3))
    if model.size == 1:
        everyone = world
    elif world.size == 1:
        everyone = model
    else:
        everyone = maker.make("everyone", [sorted(grid.flatten().tolist())])
    if stages == 1:
        stage = everyone
    elif parts == 1:
        stage = world
    elif world.size == 1:
        stage = tensor
    else:
        stage = maker.make("stage", _along(grid, 1, 2, 3))
    wire = maker.make_wire(PIPELINE_AXIS, _along(grid, 0)) if stages > 1 else None
    lines = _along(grid.reshape(stages, replicas * shards // sp, sp, parts), 2)
    sequence = maker.make(SEQUENCE_AXIS, lines)
    ring = maker.make_wire(SEQUENCE_AXIS, lines) if sp > 1 else None
    return _Axes(shard, replicate, world, tensor, pipeline, model, everyone, stage, sequence, wire, ring)


def _secondary(maker: GroupMaker, grid: torch.Tensor, sizes: MeshPlan) -> Group | None:
    """The ranks that keep a second copy together. With all that shard, the first one would be as good."""
    if sizes.secondary is None or sizes.dp_shard == 1:
        return None
    number = _on_each_host(maker, _along(grid, 2)) if sizes.secondary == "host" else sizes.secondary
    if number is None or number == sizes.dp_shard:
        return None
    stages, replicas, shards, parts = grid.shape
    neighbours = grid.reshape(stages, replicas, shards // number, number, parts)
    return maker.make(SECONDARY_AXIS, _along(neighbours, 3))


def _on_each_host(maker: GroupMaker, lines: list[list[int]]) -> int | None:
    """The most neighbours, of each line as many, that are on one host; ``None``: one. Collective."""
    hosts, size = maker.hosts(), len(lines[0])

    def fits(number: int) -> bool:
        blocks = (line[at : at + number] for line in lines for at in range(0, size, number))
        return size % number == 0 and all(len({hosts[rank] for rank in block}) == 1 for block in blocks)

    number = next(number for number in range(size, 0, -1) if fits(number))
    return number if number > 1 else None


def _along(grid: torch.Tensor, *dims: int) -> list[list[int]]:
    """The lines of ranks along one dimension, or the planes of several."""
    ends = tuple(range(-len(dims), 0))
    lines: list[list[int]] = grid.movedim(dims, ends).flatten(-len(dims)).flatten(0, -2).tolist()
    return lines


def _device_mesh(maker: GroupMaker, members: Members | None, grid: torch.Tensor) -> DeviceMesh:
    """torch's, with a group an axis; over members of the kind that their own is."""
    every = (PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS)
    dims = [dim for dim, name in enumerate(every) if grid.shape[dim] > 1 or name in (REPLICATE_AXIS, SHARD_AXIS)]
    names = tuple(every[dim] for dim in dims)
    mesh = grid.view([grid.shape[dim] for dim in dims])
    if members is None:
        device_mesh = DeviceMesh(maker.device.type, mesh, mesh_dim_names=names)
        for axis in names:
            maker.keep(device_mesh.get_group(axis))
        return device_mesh
    backend = dist.get_backend(members.process_group)
    own = members.process_group
    groups = [
        own
        if grid.shape[dim] == grid.numel()
        else maker.process_group(f"mesh_{every[dim]}", _along(grid, dim), backend)
        for dim in dims[::-1]
    ]
    return DeviceMesh.from_group(groups[::-1], maker.device.type, mesh=mesh, mesh_dim_names=names)
