"""The device mesh: pipeline stages, replicas, shards and tensor-parallel parts as axes of a grid of ranks."""

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
    ModelId,
    P2PChannel,
    compressed,
    ranks_of,
    timeout_s,
)
from shardwise.core.comm.members import unbound
from shardwise.core.mesh.device_assignment import RankDevice, check_own_gpus
from shardwise.core.mesh.launch import check_joined, own_device, rank_device
from shardwise.plan import CommPlan, MeshPlan

REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
SECONDARY_AXIS = "secondary"
TENSOR_AXIS, PIPELINE_AXIS, SEQUENCE_AXIS = "tp", "pp", "sp"
MODEL_AXIS = "model_parallel"

# Advice for ranks that are at different operations; the groups know nothing about passes.
CALLS = "make the same calls and passes on all ranks: has one fewer batches, or did it save, load or step alone?"
PASSES = (
    "do they have different numbers of batches, or did one leave out a forward or backward pass, or fail in one? All "
    "ranks have to make the same passes, those of several models in the same order, also within one loss.backward(). "
    "For a loss that may not depend on the model, call backward(loss) of the sharded optimizer"
)
T = TypeVar("T")


@dataclass(eq=False)
class _Axes:
    """The groups of a :class:`Mesh`, whose attributes say what they are.

    ``wire`` and ``ring`` are point-to-point channels between the ranks of ``pipeline`` and ``sequence``; ``None`` for
    one rank.
    """

    shard: Group
    replicate: Group
    world: Group
    tensor: Group
    pipeline: Group
    model: Group
    mesh_group: Group
    stage_group: Group
    sequence: Group
    wire: P2PChannel | None = None
    ring: P2PChannel | None = None
    secondary: Group | None = None


class Mesh(_Axes):
    """This rank's place and its groups along each axis, over all ranks or the ranks of one process group.

    ``rank`` and ``size`` count data-parallel ranks: rank = replica index * shard ranks + shard index. With tensor or
    pipeline parallelism, several ranks hold one model together; each group counts the ranks with the same part and
    stage. Meshes over disjoint process groups are independent of each other.

    A group has ``rank`` (this rank's index in it), ``size``, and its collectives.

    Attributes:
        device (torch.device): device of this rank.
        rank (int): this rank's index among the data-parallel ranks.
        size (int): number of data-parallel ranks.
        ranks (tuple[int, ...]): ranks in ``torch.distributed`` of the data-parallel ranks.
        device_mesh (DeviceMesh | None): torch's ``DeviceMesh`` with axes ``("dp_replicate", "dp_shard")``, ``"tp"`` if
            ``tp > 1`` and ``"pp"`` if ``pp > 1``; ``None`` without torch.distributed.
        world (Group): the data-parallel ranks. If one axis has a single rank, this is the group of the other axis
            itself.
        shard (Group): the ranks that hold the shards of one copy of the parameters.
        replicate (Group): the ranks that hold the same shard of different copies.
        secondary (Group | None): adjacent ranks of ``shard`` that keep a second copy together; ``None`` if there is no
            second copy.
        tensor (Group): the ranks that hold parts of the same layers (tensor parallelism); they see the same data.
        pipeline (Group): the ranks that hold the stages of one model; they see the same data.
        sequence (Group): the data-parallel ranks that see parts of the same sequences; adjacent in ``world``.
        stage_group (Group): the ranks of the same pipeline stage; ``mesh_group`` itself if there is one stage.
        mesh_group (Group): all ranks of the mesh; ``world`` itself without tensor and pipeline parallelism.
        model_parallel (Group | None): the ranks that hold the other parts of the same model: those of ``tensor`` and
            ``pipeline``, or DeepSpeed's ``mpu``; ``None`` otherwise.

    Examples:
        >>> rank, size = session.mesh.rank, session.mesh.size
    """

    def __init__(
        self, axes: _Axes, maker: GroupMaker | None, device_mesh: DeviceMesh | None, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(**vars(axes))
        self.device, self.rank, self.size = axes.world.device, axes.world.rank, axes.world.size
        self.ranks = ranks
        self.members = maker.members if maker is not None else None
        self.model_parallel: Group | None = axes.model if axes.model.size > 1 else None
        self.joined: Group | None = None  # given to join_model_parallel
        self._parts: tuple[int, ...] | None = None
        self.device_mesh = device_mesh
        self._makers = [] if maker is None else [maker]
        self._parties = 0
        self._process = os.getpid()

    @classmethod
    def create(
        cls, plan: MeshPlan, device: torch.device, comm: CommPlan, group: dist.ProcessGroup | None = None
    ) -> Mesh:
        """Divide the ranks of a process group by ``plan``. Collective over that group only.

        Without torch.distributed it is a mesh of one rank; if a launcher started several processes, only for a plan of
        one rank (``dp_shard=1, dp_replicate=1``). Ranks wait for each other as long as the group's timeout (300 s if
        it has none).

        Args:
            plan: the sizes of the axes.
            device: device of this rank; ``"cuda"`` is the rank's own GPU.
            comm: how the ranks communicate.
            group: a process group that this rank belongs to; other ranks may give other groups. ``None``: all ranks.

        Returns:
            The mesh, for ``build(model, optimizer, plan, mesh)``.

        Raises:
            ValueError: this rank is not in ``group``; the plan does not fit the number of ranks, or differs between
                them; ``comm.shared_memory`` is True and memory cannot be shared; or two ranks would share a GPU
                under a backend other than gloo. Every rank raises it.
            RuntimeError: a launcher started several processes, and there is no process group, or one of one rank.

        Examples:
            >>> from shardwise.plan import zero
            >>> plan, device = zero(2), shardwise.init_distributed()
            >>> mesh = shardwise.Mesh.create(plan.mesh, device, plan.comm)
            >>> session = shardwise.build(model, optimizer, plan, mesh)
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
        # Exchanged before it is raised, since the other ranks may have valid arguments, and would wait.
        settings = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "device": device.type}
        settings |= {name: size for name, size in (("tp", sizes.tp), ("pp", sizes.pp), ("sp", sizes.sp)) if size > 1}
        if sizes.dp_outside:
            settings["dp_outside"] = True
        if sizes.secondary is not None:
            settings["secondary"] = sizes.secondary
        if refusal is not None:
            settings["refused"] = str(refusal)
        some = group if group is not dist.group.WORLD else None
        members = _exchange(refusal, lambda: Members(some, "group", settings)) if some is not None else None
        maker = GroupMaker(device, comm.shared_memory, timeout_s(group), members, comm.wait_timeout_s)
        try:
            if members is None:
                _exchange(refusal, lambda: maker.agree("this mesh", settings))
            if device.type == "cuda" and len(ranks) > 1 and maker.backend != "gloo":
                rows = maker.tell(asdict(rank_device(device, dist.get_rank())))
                check_own_gpus([RankDevice(**row) for row in rows])
            mesh = cls.among(ranks, sizes, maker)
            mesh.device_mesh = _device_mesh(maker, members, rank_grid(ranks, sizes))
            if len(ranks) > 1:
                maker.tell(None)  # wait for all ranks: closing a group while a peer still connects to it fails the peer
            return mesh
        except BaseException:
            maker.close()
            raise

    @classmethod
    def among(cls, ranks: tuple[int, ...], sizes: MeshPlan, maker: GroupMaker) -> Mesh:
        """Make the groups with ``maker``, without torch's mesh. Collective as :meth:`GroupMaker.make`.

        Args:
            ranks: world ranks.
            sizes: the resolved sizes of the axes.
            maker: closed with the mesh.
        """
        grid = rank_grid(ranks, sizes)
        axes = replace(_axes(maker, grid, sizes.sp), secondary=_secondary(maker, grid, sizes))
        own = tuple(grid[axes.pipeline.rank, :, :, axes.tensor.rank].flatten().tolist())
        return cls(axes, maker, None, own)

    def join_model_parallel(self, group: dist.ProcessGroup, shared_memory: bool | None = None) -> None:
        """Register the ranks that hold the other parts of this rank's model, one of each data-parallel group.

        From here on gradient norms and overflows are agreed on with them. Collective over ``group``; every rank of the
        mesh calls it, each with its own group.

        Args:
            group: the group of those ranks and this one.
            shared_memory: see :class:`~shardwise.plan.CommPlan`.

        Raises:
            ValueError: this rank is not in ``group``, or another rank of this mesh is and would be counted twice.
            RuntimeError: the method was called with other ranks before, or the mesh has ``tp > 1`` or ``pp > 1``.
        """
        if self.tensor.size * self.pipeline.size > 1:
            raise RuntimeError(
                f"the mesh has model-parallel axes of its own (tp={self.tensor.size}, pp={self.pipeline.size}); leave "
                "this call out, or use tp=1 and pp=1"
            )
        ranks = ranks_of("model-parallel group", group)
        if self._parts is not None:
            if self._parts == ranks:
                return
            raise RuntimeError(
                f"the mesh already has the model-parallel group of ranks {list(self._parts)}, not {list(ranks)}; give "
                "the same group again, or make a new mesh"
            )
        shared = sorted({*ranks} & {*self.ranks} - {dist.get_rank()})
        if shared:
            raise ValueError(
                f"the model-parallel group of ranks {list(ranks)} and the data-parallel one of ranks "
                f"{list(self.ranks)} share ranks {shared} besides rank {dist.get_rank()}; give groups that cross"
            )
        with on_device(self.device):
            members = Members(group, "the model-parallel group", MODEL_AXIS)
            maker = GroupMaker(self.device, shared_memory, members.timeout_s, members)
            self._makers.append(maker)  # first, so that it is closed even after a later error
            self.model_parallel = self.joined = maker.make(MODEL_AXIS, [list(ranks)])
        self._parts = ranks

    def register_model(self, name: str) -> ModelId:
        """Return the id of a model that will use the groups. All ranks register the same models in the same order."""
        self._parties += 1
        return ModelId(self._parties, f"model {self._parties} of the mesh ({name})", PASSES)

    def with_sums_in(self, numbers: str | None) -> Mesh:
        """Return a copy whose shard and replicate groups send gradients in the format ``numbers`` (of :data:`FORMATS`).

        ``None`` returns this mesh.
        """
        if numbers is None:
            return self
        twin, (_, format_) = copy.copy(self), FORMATS[numbers]
        twin.shard, twin.replicate = compressed(self.shard, format_), compressed(self.replicate, format_)
        return twin

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Name a collective call ("saving checkpoint 'x'") inside the block, for errors of ranks out of sync."""
        return self.world.activity.doing(what, CALLS)

    @property
    def is_rank0(self) -> bool:
        """Whether this rank prints, and writes data that is written once (rank 0 of the mesh)."""
        return self.mesh_group.rank == 0

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or sets of ranks, that see different data."""
        return self.size // self.sequence.size

    @property
    def data_rank(self) -> int:
        """The index of this rank, or of its set, among those."""
        return self.rank // self.sequence.size

    @property
    def groups(self) -> tuple[Group, ...]:
        """The distinct groups, each once (traffic is summed over these)."""
        every = [
            self.shard,
            self.replicate,
            self.world,
            self.mesh_group,
            self.stage_group,
            self.model_parallel,
            self.secondary,
        ]
        every += [group for group in (self.tensor, self.pipeline, self.sequence) if group.size > 1]
        return tuple({id(group): group for group in every if group is not None}.values())

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent in all groups, by kind."""
        kinds = self.world.traffic.bytes
        counted = [group.traffic for group in self.groups]
        counted += [wire.traffic for wire in (self.wire, self.ring) if wire is not None]
        return {kind: sum(each.bytes[kind] for each in counted) for kind in kinds}

    def reset_traffic(self) -> None:
        """Reset the counts of all groups."""
        for group in self.groups:
            group.traffic.reset()
        for wire in filter(None, (self.wire, self.ring)):
            wire.traffic.reset()

    def close(self) -> None:
        """Release mapped memory and communicators, as when the mesh is garbage-collected. Idempotent; does nothing in a
        forked child."""
        if os.getpid() != self._process:
            return  # the groups are the parent's
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
    """Return the plan with all sizes, or the unchanged plan and its error."""
    try:
        if comm.shared_memory and device.type != "cpu":
            raise ValueError(
                f"shared_memory=True with device {device}: shared memory is for CPU ranks; give None or False"
            )
        return plan.resolve(size), None
    except ValueError as error:
        return plan, error


def _exchange(refusal: ValueError | None, meet: Callable[[], T]) -> T:
    """Return the result of ``meet``, which tells the other ranks; then raise this rank's own refusal."""
    try:
        result = meet()
    except ValueError:
        if refusal is not None:
            raise refusal from None
        raise
    if refusal is not None:
        raise refusal
    return result


def rank_grid(ranks: tuple[int, ...], sizes: MeshPlan) -> torch.Tensor:
    """Return the ranks as ``[stage, replica, shard, part]``."""
    if sizes.dp_outside:
        grid = torch.tensor(ranks, device="cpu").view(sizes.dp_replicate, sizes.dp_shard, sizes.pp, sizes.tp)
        return grid.permute(2, 0, 1, 3).contiguous()
    return torch.tensor(ranks, device="cpu").view(sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp)


def _axes(maker: GroupMaker, grid: torch.Tensor, sp: int) -> _Axes:
    """Make this rank's groups, from ranks as ``[stage, replica, shard, part]`` of which ``sp`` share sequences."""
    stages, replicas, shards, parts = grid.shape
    shard = maker.make(SHARD_AXIS, _along(grid, 2))
    replicate = maker.make(REPLICATE_AXIS, _along(grid, 1))
    tensor = maker.make(TENSOR_AXIS, _along(grid, 3))
    pipeline = maker.make(PIPELINE_AXIS, _along(grid, 0))

    def across(name: str, one: Group, other: Group, lines: list[list[int]]) -> Group:
        """Return the group over both axes. It is the group of one axis if the other axis has a single rank."""
        if other.size == 1:
            return one
        return other if one.size == 1 else maker.make(name, lines)

    world = across("world", shard, replicate, _along(grid, 1, 2))
    model = across(MODEL_AXIS, tensor, pipeline, _along(grid, 0, 3))
    model_group = across("everyone", world, model, [sorted(grid.flatten().tolist())])
    stage = model_group if stages == 1 else across("stage", world, tensor, _along(grid, 1, 2, 3))
    wire = maker.make_wire(PIPELINE_AXIS, _along(grid, 0)) if stages > 1 else None
    lines = _along(grid.reshape(stages, replicas * shards // sp, sp, parts), 2)
    sequence = maker.make(SEQUENCE_AXIS, lines)
    ring = maker.make_wire(SEQUENCE_AXIS, lines) if sp > 1 else None
    return _Axes(shard, replicate, world, tensor, pipeline, model, model_group, stage, sequence, wire, ring)


def _secondary(maker: GroupMaker, grid: torch.Tensor, sizes: MeshPlan) -> Group | None:
    """Make the group that keeps a second copy together; ``None`` if it would be one rank or the whole shard group."""
    if sizes.secondary is None or sizes.dp_shard == 1:
        return None
    number = _on_each_host(maker, _along(grid, 2)) if sizes.secondary == "host" else sizes.secondary
    if number is None or number == sizes.dp_shard:
        return None
    stages, replicas, shards, parts = grid.shape
    return maker.make(SECONDARY_AXIS, _along(grid.reshape(stages, replicas, shards // number, number, parts), 3))


def _on_each_host(maker: GroupMaker, lines: list[list[int]]) -> int | None:
    """Return the largest number of adjacent ranks in each line that are on one host; ``None`` for 1. Collective."""
    hosts, size = maker.hosts(), len(lines[0])

    def fits(number: int) -> bool:
        blocks = (line[at : at + number] for line in lines for at in range(0, size, number))
        return size % number == 0 and all(len({hosts[rank] for rank in block}) == 1 for block in blocks)

    number = next(number for number in range(size, 0, -1) if fits(number))
    return number if number > 1 else None


def _along(grid: torch.Tensor, *dims: int) -> list[list[int]]:
    """Return the lines of ranks along one dimension, or the planes of several."""
    ends = tuple(range(-len(dims), 0))
    lines: list[list[int]] = grid.movedim(dims, ends).flatten(-len(dims)).flatten(0, -2).tolist()
    return lines


def _device_mesh(maker: GroupMaker, members: Members | None, grid: torch.Tensor) -> DeviceMesh:
    """Return torch's mesh with a group per axis, with the backend of the members' own group."""
    every = (PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS)
    dims = [dim for dim, name in enumerate(every) if grid.shape[dim] > 1 or name in (REPLICATE_AXIS, SHARD_AXIS)]
    names = tuple(every[dim] for dim in dims)
    mesh = grid.view([grid.shape[dim] for dim in dims])
    if members is None:
        with unbound(dist.group.WORLD):
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
