"""``launch`` and related functions: the process group and random seeds."""

from __future__ import annotations

import random
from numbers import Integral

import numpy as np
import torch

from shardwise.colossalai.loggers import get_dist_logger
from shardwise.core.base.validate import check_type
from shardwise.core.mesh.launch import init_distributed, launched_as, read_variable


def set_seed(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch, including those of every GPU.

    Raises:
        TypeError: ``seed`` is not an integer.
    """
    check_type("seed", seed, Integral, "a whole number")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Create the process group with ``rank`` of ``world_size``.

    If torch.distributed is initialized already, only the seed is set.

    Args:
        rank: rank of this process.
        world_size: number of processes.
        host: host of rank 0.
        port: port on which rank 0 listens.
        backend: backend of the process group; the default is NCCL on GPUs and gloo on CPUs.
        local_rank: rank of this process on its host, which selects its GPU. ``None``: the environment's, or ``rank``.
        seed: seed of the random numbers of Python, NumPy and torch, the same on every rank.
        verbose: rank 0 prints the number of ranks.

    Raises:
        ValueError: a number out of range.
        RuntimeError: torch.distributed is initialized with other ranks.
        PeerError: not all ranks arrived in time.
    """
    launched_as(rank, world_size, host, port, local_rank)
    init_distributed(backend=None if backend == "nccl" else backend)
    set_seed(seed)
    if verbose:
        get_dist_logger().info(f"Distributed environment is initialized, world size: {world_size}", ranks=[0])


def launch_from_torch(backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    """Call :func:`launch` with torchrun's variables.

    Raises:
        RuntimeError: a variable is missing.
    """
    rank, local_rank, world_size = (_number(name, "torchrun") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    host, port = _text("MASTER_ADDR", "torchrun"), _number("MASTER_PORT", "torchrun")
    launch(rank, world_size, host, port, backend, local_rank, seed, verbose)


def launch_from_slurm(host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    """Call :func:`launch` with the variables of ``srun``.

    Raises:
        RuntimeError: a variable is missing.
    """
    rank, world_size = (_number(name, "srun") for name in ("SLURM_PROCID", "SLURM_NPROCS"))
    local = read_variable("SLURM_LOCALID")
    launch(rank, world_size, host, port, backend, None if local is None else int(local), seed, verbose)


def launch_from_openmpi(host: str, port: int, backend: str = "nccl", seed: int = 1024, verbose: bool = True) -> None:
    """Call :func:`launch` with the variables of OpenMPI's ``mpirun``.

    Raises:
        RuntimeError: a variable is missing.
    """
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
    rank, local_rank, world_size = (_number(name, "mpirun") for name in names)
    launch(rank, world_size, host, port, backend, local_rank, seed, verbose)


def _text(name: str, launcher: str) -> str:
    text = read_variable(name)
    if text is None:
        raise RuntimeError(f"the environment has no {name}: start this program with {launcher}")
    return text


def _number(name: str, launcher: str) -> int:
    text = _text(name, launcher)
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{name}={text!r} in the environment is not a whole number: start with {launcher}") from None
