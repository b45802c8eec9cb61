"""Process groups: those of ``mpu`` and ``zero.Init``, and the names of ``deepspeed.utils.groups``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules import module as module_hooks

from shardwise.core.comm import ranks_of
from shardwise.core.deferred.replay import tape_of
from shardwise.core.mesh import Mesh
from shardwise.deepspeed.collectives import (
    get_global_rank,
    get_rank,
    get_world_group,
    get_world_size,
)
from shardwise.plan import Plan
from shardwise.session import Session

MARK = "ds_process_group"  # the published name
DATA = "get_data_parallel_group"
MODEL = ("get_model_parallel_group", "get_tensor_model_parallel_group")
OTHER_AXES = (
    "get_pipe_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_context_parallel_world_size",
)
"""Methods of an ``mpu`` whose size has to be 1."""


def data_parallel_group(mpu: Any) -> dist.ProcessGroup:
    """Return the data-parallel group of ``mpu``.

    Raises:
        ValueError: ``mpu`` has none, or this rank is not a member.
        NotImplementedError: ``mpu`` has pipeline or sequence parallelism.
    """
    if not hasattr(mpu, DATA):
        raise ValueError(f"mpu={mpu!r:.80} has no {DATA}(); give an object that has this method, or leave mpu out")
    for name in OTHER_AXES:
        size = getattr(mpu, name)() if hasattr(mpu, name) else 1
        if size > 1:
            raise NotImplementedError(
                f"mpu.{name}()={size} is not available: an mpu may have data and tensor parallelism only. For sequence "
                "parallelism give sequence_parallel_size in the configuration"
            )
    group: dist.ProcessGroup = getattr(mpu, DATA)()
    ranks_of(f"mpu.{DATA}()", group)
    return group


def groups_of(mpu: Any, model: nn.Module) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the data-parallel group of ``mpu`` or of the model's ``zero.Init`` (``None``: all ranks), and the
    model-parallel group of ``mpu`` if it has several ranks.

    Raises:
        ValueError: ``mpu`` and ``zero.Init`` have different ranks; see also :func:`data_parallel_group`.
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
    for method in MODEL:
        if hasattr(mpu, method):
            model_group: dist.ProcessGroup = getattr(mpu, method)()
            return group, model_group if len(ranks_of(f"mpu.{method}()", model_group)) > 1 else None
    return group, None


def mesh_of(
    plan: Plan, device: torch.device, group: dist.ProcessGroup | None, model_group: dist.ProcessGroup | None
) -> Mesh:
    """Return the mesh of these groups. Collective over both."""
    mesh = Mesh.create(plan.mesh, device, plan.comm, group)
    try:
        if model_group is not None:
            mesh.join_model_parallel(model_group, plan.comm.shared_memory)
    except BaseException:
        mesh.close()
        raise
    return mesh


@contextmanager
def marking(mark: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call ``mark`` with each parameter that is registered in a module inside, also by a copy of its module.

    Of a module that was built before, only parameters without values are marked: the others are not recorded.
    """

    def note(_: nn.Module, __: str, value: nn.Parameter | nn.Module | None) -> None:
        if isinstance(value, nn.Module):
            for param in value.parameters():
                if tape_of(param) is not None:
                    mark(param)
        elif value is not None:
            mark(value)

    with ExitStack() as stack:
        stack.callback(module_hooks.register_module_parameter_registration_hook(note).remove)
        stack.callback(module_hooks.register_module_module_registration_hook(note).remove)
        yield


# ---- ``deepspeed.utils.groups``: which ranks hold parts of the same model, and which see different data.


_last: list[tuple[weakref.ref[Session], Any]] = []


def remember_groups(session: Session, mpu: Any) -> None:
    """Make the functions below answer for ``session`` and its ``mpu``."""
    _last[:] = [(weakref.ref(session), mpu)]


def _mesh() -> Mesh | None:
    session = _last[0][0]() if _last else None
    return None if session is None else session.mesh


def _mpu() -> Any:
    return _last[0][1] if _last else None


def get_data_parallel_group() -> ProcessGroup:
    """Return the group of data-parallel ranks."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None:
        return getattr(mpu, DATA)()  # type: ignore[no-any-return]
    if mesh is None or mesh.device_mesh is None or mesh.tensor.size == 1:
        return get_world_group() if mesh is None or mesh.members is None else mesh.members.process_group
    axis = "dp_shard" if mesh.replicate.size == 1 else "dp_replicate"
    if mesh.shard.size > 1 and mesh.replicate.size > 1:
        raise NotImplementedError(
            f"the data-parallel group of {mesh!r} has two axes and is no process group; use the axes of session.mesh"
        )
    return mesh.device_mesh.get_group(axis)


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks, including sequence-parallel ones."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None or mesh is None:
        return get_world_size(get_data_parallel_group() if mpu is not None else None)
    return mesh.size


def get_data_parallel_rank() -> int:
    """Return this rank's index among the data-parallel ranks."""
    mpu, mesh = _mpu(), _mesh()
    if mpu is not None or mesh is None:
        return get_rank(get_data_parallel_group() if mpu is not None else None)
    return mesh.rank


def get_model_parallel_group() -> ProcessGroup | None:
    """Return the group of tensor-parallel ranks; ``None`` without tensor parallelism."""
    mpu, mesh = _mpu(), _mesh()
    for name in MODEL if mpu is not None else ():
        if hasattr(mpu, name):
            return getattr(mpu, name)()  # type: ignore[no-any-return]
    if mesh is None or mesh.device_mesh is None or mesh.tensor.size == 1:
        return None
    return mesh.device_mesh.get_group("tp")


def get_model_parallel_world_size() -> int:
    """Return the number of tensor-parallel ranks."""
    group = get_model_parallel_group()
    return 1 if group is None else get_world_size(group)


def get_model_parallel_rank() -> int:
    """Return this rank's index among the tensor-parallel ranks."""
    group = get_model_parallel_group()
    return 0 if group is None else get_rank(group)


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first tensor-parallel rank."""
    group = get_model_parallel_group()
    return get_rank() if group is None else get_global_rank(group, 0)


def get_sequence_parallel_world_size() -> int:
    """Return the number of sequence-parallel ranks."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.sequence.size


def get_sequence_parallel_rank() -> int:
    """Return this rank's index among the sequence-parallel ranks."""
    mesh = _mesh()
    return 0 if mesh is None else mesh.sequence.rank


def get_sequence_parallel_group() -> ProcessGroup | None:
    """Return ``None`` without sequence parallelism.

    Raises:
        NotImplementedError: there is sequence parallelism, for which torch has no process group.
    """
    if get_sequence_parallel_world_size() == 1:
        return None
    raise NotImplementedError(
        f"there is no process group of the {get_sequence_parallel_world_size()} sequence-parallel ranks: the engine "
        "exchanges their data itself. Create one with torch.distributed.new_group for other uses"
    )
