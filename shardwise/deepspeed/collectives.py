"""``deepspeed.comm``: ranks and collectives.

The collectives are those of ``torch.distributed``, except for three that name their tensors differently in DeepSpeed.
The arguments of DeepSpeed's communication log have no effect. Without a process group this process is rank 0 of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.comm.members import made_together
from shardwise.core.mesh import LaunchFacts
from shardwise.core.mesh import init_distributed as join
from shardwise.deepspeed.hardware import get_accelerator

DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=10)
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
    """Initialize the process group, unless that was done already or there is only one process.

    Args:
        dist_backend: backend of torch's process group; ``None``: NCCL if every rank has its own GPU, else gloo.
        auto_mpi_discovery: no effect; the launcher's variables (torchrun's, Slurm's) define the rendezvous.
        distributed_port: no effect, for the same reason.
        verbose: no effect.
        timeout: how long a rank waits for the others.
        init_method: rendezvous URL as for torch; most URLs need ``rank`` and ``world_size``.
        dist_init_required: ``False``: do nothing.
        config: no effect: there is no log of collectives.
        rank: rank of this process; -1: as ``init_method`` or the launcher says. With another rank than the launcher's,
            torch's own rendezvous at ``MASTER_ADDR`` is used.
        world_size: number of all ranks; -1 as for ``rank``.

    Raises:
        PeerError: not all ranks arrived in time.
        ValueError: as :func:`shardwise.init_distributed`, and torch's error about an incomplete rendezvous.
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
    """Return True if torch has ``distributed``."""
    return dist.is_available()


def is_initialized() -> bool:
    """Return True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Group = None) -> int:
    """Return the rank of this process in the group; 0 without a group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Group = None) -> int:
    """Return the number of processes in the group; 1 without a group."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Return the rank of this process on its host."""
    return LaunchFacts.read().local_rank


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Return the global rank of a rank in a group."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the global ranks of a group."""
    return dist.get_process_group_ranks(group or get_world_group())


def get_world_group() -> Any:
    """Return the group of all processes."""
    return dist.group.WORLD


def new_group(ranks: Sequence[int]) -> Any:
    """Create a group of some ranks. Every process calls it."""
    return made_together(ranks, None)


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: str | None = None,
) -> Any:
    """Concatenate the ``tensor`` of every rank."""
    source = tensor if tensor.dim() else tensor.reshape(1)  # gloo requires at least one dimension
    return dist.all_gather_into_tensor(output_tensor, source, group=group, async_op=async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> Any:
    """Sum ``tensor`` over the ranks, and return this rank's part of the sum."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: str | None = None,
) -> Any:
    """Send part ``i`` of ``tensor`` to rank ``i``."""
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)
