"""``deepspeed.comm``: collectives over ``torch.distributed``, with DeepSpeed's names and arguments.

Where nothing was initialised this is one process: rank 0 of 1. Arguments for DeepSpeed's own log of collectives
(``prof``, ``log_name``, ``debug``) are accepted and have no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.members import made_together
from shardwise.deepspeed.hardware import get_accelerator
from shardwise.mesh import LaunchFacts
from shardwise.mesh import init_distributed as join

__all__ = ["ProcessGroup", "ReduceOp", "init_distributed"]

DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=10)
F = TypeVar("F", bound=Callable[..., Any])
Group = ProcessGroup | None


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the other processes, unless that was done already or there are none.

    Args:
        dist_backend: of torch's process group; ``None``: NCCL where every rank has a GPU of its own, else gloo.
        auto_mpi_discovery: no effect; the launcher's variables (torchrun's, Slurm's) say where ranks meet.
        distributed_port: no effect, for the same reason.
        verbose: no effect.
        timeout: how long a rank waits for the others.
        init_method: where to meet instead, a URL as torch takes it, most of which need ``rank`` and ``world_size``.
        dist_init_required: ``False``: do nothing.
        config: no effect: DeepSpeed's log of collectives is not kept.
        rank: of this process; -1: as ``init_method`` or the launcher says. Another one than the launcher's is torch's
            affair, which meets at ``MASTER_ADDR`` then.
        world_size: of all, likewise.

    Raises:
        PeerError: not all ranks came in time.
        ValueError: see :func:`shardwise.mesh.init_distributed`, and torch's of a place to meet that lacks something.
    """
    if dist_init_required is False or is_initialized():
        return
    facts = LaunchFacts.read()
    launchers = rank in (-1, facts.rank) and world_size in (-1, facts.world_size)
    if launchers and init_method in (None, "env://"):
        join(backend=dist_backend, timeout=timeout)
        return
    backend = dist_backend or get_accelerator().communication_backend_name()
    dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def is_available() -> bool:
    """Whether torch has ``distributed``."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Group = None) -> int:
    """Of this process in the group; 0 where there is none."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Group = None) -> int:
    """Processes of the group; 1 where there is none."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Of this process on its host."""
    return LaunchFacts.read().local_rank


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Among all processes, of one of a group."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Their numbers among all processes."""
    return dist.get_process_group_ranks(group or get_world_group())


def get_world_group() -> Any:
    """All processes."""
    return dist.group.WORLD


def new_group(ranks: Sequence[int]) -> Any:
    """A group of some. Every process calls it."""
    return made_together(ranks, None)


def destroy_process_group(group: Group = None) -> None:
    """Leave it."""
    dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """torch's device mesh of this shape."""
    return init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    """True."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


# ---- collectives


def _unlogged(function: F) -> F:
    """Without the arguments of DeepSpeed's log."""

    @functools.wraps(function)
    def called(*args: Any, prof: bool = False, log_name: str = "", debug: str | None = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


broadcast = _unlogged(dist.broadcast)
broadcast_object_list = _unlogged(dist.broadcast_object_list)
all_gather = _unlogged(dist.all_gather)
all_gather_object = _unlogged(dist.all_gather_object)
all_reduce = _unlogged(dist.all_reduce)
reduce = _unlogged(dist.reduce)
reduce_scatter = _unlogged(dist.reduce_scatter)
gather = _unlogged(dist.gather)
scatter = _unlogged(dist.scatter)
send = _unlogged(dist.send)
recv = _unlogged(dist.recv)
isend = _unlogged(dist.isend)
irecv = _unlogged(dist.irecv)
barrier = _unlogged(dist.barrier)
monitored_barrier = _unlogged(dist.monitored_barrier)
all_to_all = _unlogged(dist.all_to_all)


@_unlogged
def all_gather_into_tensor(output_tensor: Tensor, tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Every rank's ``tensor``, one behind the other; one without dimensions is one element."""
    given = tensor if tensor.dim() else tensor.reshape(1)  # gloo wants it so
    return dist.all_gather_into_tensor(output_tensor, given, group=group, async_op=async_op)


@_unlogged
def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """As :func:`all_gather_into_tensor`."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@_unlogged
def reduce_scatter_tensor(
    output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """The sum over the ranks of this rank's part of ``tensor``."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


reduce_scatter_fn = reduce_scatter_tensor


@_unlogged
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Part ``i`` of ``tensor`` goes to rank ``i``."""
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)


@_unlogged
def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None) -> Any:
    """As :func:`all_reduce`."""
    return dist.all_reduce(tensor, op=op, group=group)


@_unlogged
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Each of them. Asynchronous: what waits for all."""
    return _Several.of([dist.all_reduce(each, op=op, group=group, async_op=async_op) for each in tensors])


@_unlogged
def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Group = None, async_op: bool = False
) -> Any:
    """Each of them, see :func:`all_gather_into_tensor`. Asynchronous: what waits for all."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _Several.of([dist.all_gather_into_tensor(o, i, group=group, async_op=async_op) for o, i in pairs])


class _Several:
    """Collectives that run at the same time."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    @classmethod
    def of(cls, works: Sequence[Any]) -> _Several | None:
        """``None`` where they are over."""
        running = [each for each in works if each is not None]
        return cls(running) if running else None

    def wait(self) -> None:
        """For all of them."""
        for each in self._works:
            each.wait()

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(each.is_completed() for each in self._works)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Nothing was logged: ``session.traffic()`` of an engine counts the bytes that it has sent."""
    return {} if return_dict else None


def configure(*args: Any, **kwargs: Any) -> None:
    """No effect: DeepSpeed's log of collectives is not kept."""
