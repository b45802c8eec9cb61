"""How this process was launched. The only module of the library that reads the environment, beside the commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.device import make_current

__all__ = ["LaunchFacts", "check_joined", "default_device", "init_distributed", "read_variable", "shutdown"]

# Long enough for a slow checkpoint, short enough that a lost rank does not hold the others for torch's half hour.
TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What torchrun tells a process.

    Attributes:
        launched: whether there was a launcher; otherwise this is one process by itself.
        rank: among all processes.
        world_size: number of all processes.
        local_rank: among those of this host.
        local_world_size: number of processes of this host.
        restart_count: how often the launcher has started the processes anew.
        run_id: the launcher's name for the run.
    """

    launched: bool
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restart_count: int
    run_id: str

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> LaunchFacts:
        """From torchrun's variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` ...).

        Raises:
            ValueError: a variable is missing beside others, is no number, or is out of range.
        """
        found = os.environ if environment is None else environment
        if "RANK" not in found and "WORLD_SIZE" not in found:
            return cls(
                launched=False, rank=0, world_size=1, local_rank=0, local_world_size=1, restart_count=0, run_id="none"
            )
        rank, world_size = _number(found, "RANK", None), _number(found, "WORLD_SIZE", None)
        local_rank = _number(found, "LOCAL_RANK", rank)
        local_world_size = _number(found, "LOCAL_WORLD_SIZE", world_size)
        for name, value, limit in (
            ("RANK", rank, world_size),
            ("LOCAL_RANK", local_rank, local_world_size),
        ):
            if not 0 <= value < limit:
                raise ValueError(f"{name}={value} with a size of {limit}: start this program with torchrun")
        return cls(
            launched=True,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            restart_count=_number(found, "TORCHELASTIC_RESTART_COUNT", 0),
            run_id=found.get("TORCHELASTIC_RUN_ID", "none"),
        )


def _number(found: Mapping[str, str], name: str, default: int | None) -> int:
    text = found.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"the environment has no {name}, but others of torchrun's variables: start with torchrun")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment is not a whole number: start with torchrun") from None


def init_distributed(
    device: torch.device | str | None = None, backend: str | None = None, timeout: timedelta = TIMEOUT
) -> torch.device:
    """Join the other processes, if a launcher started several, and say which device is this process'.

    Calling it again, or after ``torch.distributed`` was initialised elsewhere, only returns the device.

    Args:
        device: by default the GPU with the local rank's number where every local rank has one, else the CPU. A CUDA
            device without a number gets the local rank's.
        backend: of the default process group; ``None``: ``"gloo"`` on CPU, ``"nccl"`` on CUDA.
        timeout: how long a rank waits for the others before it gives up.

    Raises:
        ValueError: the device does not exist here.
    """
    facts = LaunchFacts.read()
    chosen = _device(facts, device)
    make_current(chosen)
    if facts.launched and not dist.is_initialized():
        backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
        dist.init_process_group(backend, rank=facts.rank, world_size=facts.world_size, timeout=timeout)
    return chosen


def check_joined() -> None:
    """Where a launcher started several processes, they must have met before a mesh of all of them is made.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, so each process would train alone.
    """
    if dist.is_available() and dist.is_initialized():
        return  # whatever the launcher left in the environment: Lightning's own has WORLD_SIZE and no RANK
    facts = LaunchFacts.read()
    if facts.world_size > 1:
        raise RuntimeError(
            f"WORLD_SIZE={facts.world_size} in the environment, but torch.distributed is not initialised, so rank "
            f"{facts.rank} would train alone: first call shardwise.mesh.init_distributed(), or "
            "torch.distributed.init_process_group(); where one process alone is meant, give a mesh of one rank, "
            "Mesh.create(MeshPlan(dp_shard=1, dp_replicate=1), device, plan.comm), or unset WORLD_SIZE"
        )


def _device(facts: LaunchFacts, device: torch.device | str | None) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if count >= facts.local_world_size and _group_takes_cuda() else "cpu"
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return chosen
    index = facts.local_rank if chosen.index is None else chosen.index
    if index >= count:
        raise ValueError(f"device cuda:{index} was asked for, but {count} are visible; start fewer ranks or use cpu")
    return torch.device("cuda", index)


def _group_takes_cuda() -> bool:
    """False where the processes have already met over gloo alone: then they mean to compute on the CPU."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_backend() != "gloo"


def default_device() -> torch.device:
    """The device that :func:`init_distributed` chooses by itself."""
    return _device(LaunchFacts.read(), None)


def read_variable(name: str) -> str | None:
    """A variable of the environment that a published interface reads; ``None`` where it is not set, or empty."""
    return os.environ.get(name) or None


def shutdown() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
