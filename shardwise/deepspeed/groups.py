"""The ranks that ``mpu`` and ``zero.Init`` name: what the model is divided over, and those with its other parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as module_hooks

from shardwise.core.comm import ranks_of
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan

__all__ = ["MARK", "data_parallel_group", "groups_of", "marking", "mesh_of"]

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
