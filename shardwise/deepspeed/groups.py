"""The ranks that ``mpu`` and ``zero.Init`` name: what the model is divided over, and those with its other parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules import module as module_hooks

from shardwise.core.comm import ranks_of
from shardwise.core.mesh import Mesh
from shardwise.deepspeed.collectives import (
    get_global_rank,
    get_rank,
    get_world_group,
    get_world_size,
)
from shardwise.plan import Plan
from shardwise.session import Session

__all__ = [
    "MARK",
    "data_parallel_group",
    "get_data_parallel_group",
    "get_model_parallel_group",
    "groups_of",
    "marking",
    "mesh_of",
    "remember_groups",
]


MARK = "ds_process_group"  # the published name
DATA = "get_data_parallel_group"
MODEL = ("get_model_parallel_group", "get_tensor_model_parallel_group")
OTHER_AXES = (
    "get_pipe_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_context_parallel_world_size",
)
"""Of an ``mpu``; more than 1 of any changes which gradients belong together."""


def data_parallel_group(mpu: Any) -> dist.ProcessGroup:
    """That of ``mpu``.

    Raises:
        ValueError: it has none, or this rank is no member.
        NotImplementedError: it has pipeline or sequence parallelism.
    """
    if not hasattr(mpu, DATA):
        raise ValueError(f"mpu={mpu!r:.80} has no {DATA}(): give an object that has, or leave it out")
    for name in OTHER_AXES:
        size = getattr(mpu, name)() if hasattr(mpu, name) else 1
        if size > 1:
            raise NotImplementedError(
                f"mpu.{name}()={size} is not available: of an mpu beside data only tensor parallelism is; give an mpu "
                "without it (sequence_parallel_size in the configuration needs none)"
            )
    group: dist.ProcessGroup = getattr(mpu, DATA)()
    ranks_of(f"mpu.{DATA}()", group)
    return group


def groups_of(mpu: Any, model: nn.Module) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The data-parallel group of ``mpu``, or of the ``zero.Init`` that the model was built in; ``None``: all ranks. And
    the model-parallel one of ``mpu``, where it has several ranks.

    Raises:
        ValueError: the two name different ranks; see also :func:`data_parallel_group`.
    """
    group = data_parallel_group(mpu) if mpu is not None else None
    origin = f"mpu.{DATA}()"
    for name, parameter in model.named_parameters():
        built: dist.ProcessGroup | None = getattr(parameter, MARK, None)
        if built is None:
            continue
        if group is None:
            group, origin = built, "zero.Init"
        if ranks_of("data_parallel_group", built) != ranks_of(origin, group):
            raise ValueError(
                f"{name} was built in a zero.Init for ranks {list(ranks_of('data_parallel_group', built))}, and "
                f"{origin} has ranks {list(ranks_of(origin, group))}: give the same group to both"
            )
    for asked in MODEL:
        if hasattr(mpu, asked):
            others: dist.ProcessGroup = getattr(mpu, asked)()
            return group, others if len(ranks_of(f"mpu.{asked}()", others)) > 1 else None
    return group, None


def mesh_of(
    plan: Plan, device: torch.device, group: dist.ProcessGroup | None, others: dist.ProcessGroup | None
) -> Mesh:
    """The mesh of these groups. Collective over both."""
    mesh = Mesh.create(plan.mesh, device, plan.comm, group)
    try:
        if others is not None:
            mesh.join_model_parallel(others, plan.comm.shared_memory)
    except BaseException:
        mesh.close()
        raise
    return mesh


@contextmanager
def marking(mark: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Parameters that modules get inside are given to ``mark``, each as often as it is registered."""

    def note(_: nn.Module, __: str, value: nn.Parameter | None) -> None:
        if value is not None:
            mark(value)

    handle = module_hooks.register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


# ---- ``deepspeed.utils.groups``: which ranks hold parts of the same model, and which see different data.


_last: list[tuple[weakref.ref[Session], Any]] = []


def remember_groups(session: Session, mpu: Any) -> None:
    """Those of ``session``, and of the ``mpu`` that it was made with, count from here on."""
    _last[:] = [(weakref.ref(session), mpu)]


def _mesh() -> Mesh | None:
    session = _last[0][0]() if _last else None
    return None if session is None else session.mesh


def _mpu() -> Any:
    return _last[0][1] if _last else None


def get_data_parallel_group() -> ProcessGroup:
    """The ranks that see different data, and share the shards of what this one has a part of."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None:
        return getattr(mpu, DATA)()  # type: ignore[no-any-return]
    if mesh is None or mesh.device_mesh is None or mesh.tensor.size == 1:
        return get_world_group() if mesh is None or mesh.members is None else mesh.members.process_group
    axis = "dp_shard" if mesh.replicate.size == 1 else "dp_replicate"
    if mesh.shard.size > 1 and mesh.replicate.size > 1:
        raise NotImplementedError(
            f"the data-parallel group of {mesh!r}: it is of two axes and torch has none; session.mesh has both"
        )
    return mesh.device_mesh.get_group(axis)


def get_data_parallel_world_size() -> int:
    """How many see different data, ranks that share sequences counted each by itself."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None or mesh is None:
        return get_world_size(get_data_parallel_group() if mpu is not None else None)
    return mesh.size


def get_data_parallel_rank() -> int:
    """This rank's number among them."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None or mesh is None:
        return get_rank(get_data_parallel_group() if mpu is not None else None)
    return mesh.rank


def get_model_parallel_group() -> ProcessGroup | None:
    """The ranks with other parts of the same layers; ``None`` where each has all of them."""
    mpu, mesh = _mpu(), _mesh()
    for name in MODEL if mpu is not None else ():
        if hasattr(mpu, name):
            return getattr(mpu, name)()  # type: ignore[no-any-return]
    if mesh is None or mesh.device_mesh is None or mesh.tensor.size == 1:
        return None
    return mesh.device_mesh.get_group("tp")


def get_model_parallel_world_size() -> int:
    """How many ranks hold one model together."""
    group = get_model_parallel_group()
    return 1 if group is None else get_world_size(group)


def get_model_parallel_rank() -> int:
    """This rank's number among them."""
    group = get_model_parallel_group()
    return 0 if group is None else get_rank(group)


def get_tensor_model_parallel_src_rank() -> int:
    """The first of them, among all processes."""
    group = get_model_parallel_group()
    return get_rank() if group is None else get_global_rank(group, 0)


def get_sequence_parallel_world_size() -> int:
    """How many ranks see parts of the same sequences."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.sequence.size


def get_sequence_parallel_rank() -> int:
    """This rank's number among them."""
    mesh = _mesh()
    return 0 if mesh is None else mesh.sequence.rank


def get_sequence_parallel_group() -> ProcessGroup | None:
    """``None`` where none share sequences.

    Raises:
        NotImplementedError: some do: the exchange is the engine's, and torch has no group of them.
    """
    if get_sequence_parallel_world_size() == 1:
        return None
    raise NotImplementedError(
        f"a torch group of the {get_sequence_parallel_world_size()} ranks that share sequences: the model exchanges by "
        "itself what they need; make one with torch.distributed.new_group for anything else"
    )
