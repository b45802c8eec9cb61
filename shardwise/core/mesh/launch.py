"""Launch information of this process. Except for the command line, only this module reads the environment."""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwise.core.base.device import gpu_identity, gpus_of_host, make_current, numbered, visible_gpus
from shardwise.core.base.validate import check_type, short_repr
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import UNREACHED, PeerError
from shardwise.core.mesh.device_assignment import RankDevice, decide, own_index
from shardwise.core.mesh.gloo_addresses import INTERFACE, Listener, check_listeners, own_listener

# Long enough for a slow checkpoint, short enough to not keep ranks waiting half an hour (torch's timeout) for a lost
# one.
TIMEOUT = timedelta(seconds=300)
VISIBLE = "CUDA_VISIBLE_DEVICES"
START = "start with torchrun or 'shardwise run'"
BINDINGS = (VISIBLE, "SLURM_GPUS_PER_TASK", "SLURM_STEP_GPUS", "SLURM_GPU_BIND")
"""If one of these variables is set, the visible GPUs may belong to this process alone."""
TASKS = {"SLURM_STEP_NUM_TASKS": "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}
"""Variables of ``srun`` and ``mpirun``: the number of tasks, and the number of this one."""

_meetings = itertools.count()


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """The environment variables of torchrun.

    Attributes:
        launched: whether a launcher started this process.
        rank: rank among all processes.
        world_size: number of all processes.
        local_rank: rank among the processes of this host.
        local_world_size: number of processes of this host.
        restart_count: how often the launcher has restarted the processes.
        run_id: the launcher's name of the run.
    """

    launched: bool
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    run_id: str = "none"

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> LaunchFacts:
        """Read torchrun's variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` ...).

        If ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` are not set, Slurm's are used, if they are of the same rank.

        Raises:
            ValueError: some variables are missing, not numbers, or out of range.
        """
        variables = os.environ if environment is None else environment
        if "RANK" not in variables and "WORLD_SIZE" not in variables:
            return cls(launched=False)
        rank, world_size = _number(variables, "RANK", None), _number(variables, "WORLD_SIZE", None)
        own, together = _from_slurm(variables, rank) or (rank, world_size)
        local_rank = _number(variables, "LOCAL_RANK", own)
        local_world_size = _number(variables, "LOCAL_WORLD_SIZE", together)
        for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_world_size)):
            if not 0 <= value < limit:
                bounds = f"[0, {name.replace('RANK', 'WORLD_SIZE')}={limit})"
                raise ValueError(f"{name}={value} in the environment is not in {bounds}; {START}")
        return cls(
            launched=True,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            restart_count=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
            run_id=variables.get("TORCHELASTIC_RUN_ID", "none"),
        )


def _number(variables: Mapping[str, str], name: str, default: int | None) -> int:
    text = variables.get(name)
    if text is None:
        if default is None:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise ValueError(f"{other} is set in the environment, but {name} is not; {START}, or unset {other}")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment is not an integer; {START}") from None


def _from_slurm(variables: Mapping[str, str], rank: int) -> tuple[int, int] | None:
    """Return this task's local rank and local world size, if ``srun`` started it as ``rank``."""
    if "LOCAL_RANK" in variables or "LOCAL_WORLD_SIZE" in variables or variables.get("SLURM_PROCID") != str(rank):
        return None
    own, host = variables.get("SLURM_LOCALID", ""), variables.get("SLURM_NODEID", "0")
    counts: list[int] = []
    for part in (variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or "").split(","):
        tasks, _, times = part.rstrip(")").partition("(x")  # such as 8(x2),4
        if not tasks.isdecimal() or not (times or "1").isdecimal():
            return None
        counts += [int(tasks)] * int(times or "1")
    if not (own.isdecimal() and host.isdecimal()) or int(host) >= len(counts) or int(own) >= counts[int(host)]:
        return None
    return int(own), counts[int(host)]


def init_distributed(
    device: torch.device | str | None = None, backend: str | None = None, timeout: timedelta = TIMEOUT
) -> torch.device:
    """Initialize ``torch.distributed`` if a launcher started several processes, and return this rank's device.

    Calling it again, or after ``torch.distributed`` was initialized elsewhere, only returns the device.

    A rank uses the GPU with the index of its local rank or, if it sees fewer GPUs (as with Slurm's
    ``--gpus-per-task=1``), one of these. The ranks compare the identities of their GPUs first. Several ranks on one GPU
    are an error, unless the backend is gloo; if no device was given, all ranks then use the CPU, with a warning.

    Args:
        device: device of this rank. Default: a GPU if every rank has its own, otherwise the CPU. A CUDA device without
            an index means the rank's own GPU.
        backend: backend of the default process group. Default: ``"gloo"`` on CPU, ``"nccl"`` on CUDA.
        timeout: how long a rank waits for the other ranks; 5 minutes by default.

    Returns:
        This rank's device, for its batches and its model.

    Raises:
        ValueError: the device does not exist on this rank. On every rank: several ranks would share a GPU, some ranks
            would use GPUs and others the CPU, or hosts cannot reach each other at the addresses that they advertise.
        PeerError: not all ranks arrived in time, or some cannot be reached.

    Warns:
        UserWarning: no device was given and the CPU is used although there are GPUs; or a Slurm task would train alone.

    Examples:
        >>> device = shardwise.init_distributed()
        >>> batch = torch.randn(2, 8, device=device)
    """
    facts = LaunchFacts.read()
    if not facts.launched:
        _warn_of_tasks()
    joins = facts.launched and not dist.is_initialized()
    if joins and backend != "mpi":
        store = _store(facts, timeout)
        chosen = _agreed(facts, store, device, backend == "gloo")
        make_current(chosen)
        backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
        size, rank, bound = facts.world_size, facts.rank, chosen if "nccl" in backend else None
        try:
            # NCCL connects the ranks here, on this GPU, and not at the first collective on the one that torch guesses.
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
        except RuntimeError as error:
            raise PeerError(
                f"rank {rank} of {size} could not connect to all other ranks: {error}. {UNREACHED}"
            ) from error
        return chosen
    chosen = _device(facts, device)
    make_current(chosen)
    if joins:
        backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
        dist.init_process_group(backend, rank=facts.rank, world_size=facts.world_size, timeout=timeout)
    return chosen


def launched_as(rank: int, world_size: int, host: str, port: int, local_rank: int | None = None) -> None:
    """Set torchrun's environment variables for a process that no launcher started.

    Args:
        rank: rank of this process.
        world_size: number of all processes.
        host: host of rank 0: a name, or an IPv4 or IPv6 address.
        port: port at which rank 0 listens.
        local_rank: rank of this process on its host; ``None``: as in the environment.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of range.
        RuntimeError: ``torch.distributed`` is initialized with another rank or world size.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        check_type(name, value, Integral, "a whole number")
    check_type("host", host, str, "the name or address of rank 0's host")
    check_type("port", port, (Integral, str), "the number of the port at which rank 0 listens")
    if not 0 <= rank < world_size or not 0 < int(port) < 2**16:
        raise ValueError(
            f"rank={rank}, world_size={world_size}, host={host!r}, port={port!r}: give a rank from 0 to "
            "world_size - 1, and the port at which rank 0 listens"
        )
    if dist.is_available() and dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RuntimeError(
                f"rank={rank}, world_size={world_size}, but torch.distributed is initialized with rank "
                f"{dist.get_rank()} of {dist.get_world_size()}; call this once, or destroy that process group first"
            )
        return
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": host.strip("[]"), "MASTER_PORT": int(port)}
    if local_rank is not None:
        variables["LOCAL_RANK"] = local_rank
    os.environ.update({name: str(value) for name, value in variables.items()})


def _store(facts: LaunchFacts, timeout: timedelta) -> Store:
    """Return the rendezvous store of the launcher, which torch would use, too."""
    if "MASTER_ADDR" not in os.environ:
        raise ValueError(f"RANK and WORLD_SIZE are set in the environment, but MASTER_ADDR is not; {START}")
    with _all_started(facts):
        store, _, _ = next(rendezvous("env://", facts.rank, facts.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"shardwise/{next(_meetings)}", store)


def _agreed(facts: LaunchFacts, store: Store, device: torch.device | str | None, may_share: bool) -> torch.device:
    """Return this rank's device, after all ranks have exchanged their choices."""
    refusal: ValueError | None = None
    try:
        chosen = _device(facts, device)
        post = asdict(rank_device(chosen, facts.rank, None if device is None else str(device)))
        post["listener"] = asdict(own_listener(facts.rank, read_variable(INTERFACE)))
    except ValueError as error:
        refusal, post = error, {"refused": str(error)}
    devices, listeners = [], []
    for rank, row in enumerate(_exchange(facts, store, post)):
        if "refused" in row and refusal is None:
            raise ValueError(f"rank {rank} cannot use the device that it was given: {row['refused']}")
        if "refused" not in row:
            listeners.append(Listener(**row.pop("listener")))
            devices.append(RankDevice(**row))
    if refusal is not None:
        raise refusal
    check_listeners(listeners)
    stays, remark = decide(devices, may_share)
    if remark is not None and facts.rank == 0:
        warn_user(remark)
    return chosen if stays else torch.device("cpu")


def _exchange(facts: LaunchFacts, store: Store, mine: dict[str, object]) -> list[dict[str, Any]]:
    """Return every rank's message by rank. Rank 0 collects them, so that each rank reads from the store once."""
    with _all_started(facts):
        store.set(f"device/{facts.rank}", json.dumps(mine))
        if facts.rank == 0:
            everything = [json.loads(store.get(f"device/{rank}")) for rank in range(facts.world_size)]
            store.set("devices", json.dumps(everything))
        devices: list[dict[str, Any]] = json.loads(store.get("devices"))
        store.set(f"read/{facts.rank}", "")
        if facts.rank == 0:  # rank 0 may host the store, and must not end before all ranks have read it
            store.wait([f"read/{rank}" for rank in range(facts.world_size)])
        return devices


@contextmanager
def _all_started(facts: LaunchFacts) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        problem = f"not all ranks have started: {error}"
        advice = "Look at the first error of the other ranks, and check MASTER_ADDR and MASTER_PORT"
        if "EADDRINUSE" in str(error):
            problem = f"MASTER_PORT={os.environ.get('MASTER_PORT')} is in use by another program on this host"
            advice = "Set MASTER_PORT to a free port on every rank, or end that program"
        raise PeerError(f"rank {facts.rank} of {facts.world_size}: {problem}. {advice}") from error


def rank_device(device: torch.device, rank: int, chosen: str | None = None) -> RankDevice:
    """Return the description of ``device`` (with an index, if it is a GPU) that a rank sends to the others."""
    on_gpu = device.type == "cuda" and device.index is not None
    return RankDevice(
        rank=rank,
        host=socket.gethostname(),
        requested=chosen,
        device=str(device),
        gpu=gpu_identity(device.index, os.environ.get(VISIBLE)) if on_gpu else None,
        visible=visible_gpus(),
    )


@functools.cache
def _warn_of_tasks() -> None:
    """Warn if ``srun`` or ``mpirun`` started several tasks without a rendezvous."""
    for number, own in TASKS.items():
        tasks = os.environ.get(number, "")
        if tasks.isdecimal() and int(tasks) > 1 and own in os.environ and not dist.is_initialized():
            warn_user(
                f"{number}={tasks}, but RANK and WORLD_SIZE are not in the environment, so each task trains alone "
                f"(this is {own}={os.environ[own]}). Start torchrun or 'shardwise run' once per host, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each task"
            )


def check_joined(size: int | None = None) -> None:
    """Check that the processes that a launcher started train together.

    Args:
        size: number of processes that will train together; ``None``: as many as the default process group has.

    Raises:
        RuntimeError: the launcher started several, but there is no process group, or one of a single rank.
    """
    initialized = dist.is_available() and dist.is_initialized()
    if size is None and initialized:
        size = dist.get_world_size()
    if size is not None and (size > 1 or "RANK" not in os.environ):
        return  # WORLD_SIZE alone may be a leftover, or from a launcher that sets no RANK
    facts = LaunchFacts.read()
    if facts.world_size > 1:
        state = "torch.distributed is not initialized" if size is None else f"the process group has {size} rank"
        raise RuntimeError(
            f"WORLD_SIZE={facts.world_size} in the environment, but {state}, so rank {facts.rank} would train alone. "
            "Call shardwise.init_distributed() or torch.distributed.init_process_group() for all ranks first (or give "
            "a trainer its number of devices and nodes); to train in one process, unset RANK and WORLD_SIZE, or give "
            "Mesh.create(MeshPlan(dp_shard=1, dp_replicate=1), device, plan.comm)"
        )


def check_known_ranks(library: str, known: int, without_gpu: str) -> None:
    """Check that a library that divides batches knows of all ranks of the process group.

    Args:
        library: its name.
        known: number of ranks among which it divides batches.
        without_gpu: what to do on CPUs.

    Raises:
        RuntimeError: the process group has another number of ranks. Every rank raises it.
    """
    met = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if known != met:
        raise RuntimeError(
            f"torch.distributed has {met} ranks, but {library} knows of {known}, so each rank would get all batches. "
            f"Without a GPU, {without_gpu}. Otherwise set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT "
            f"before the first use of {library}, as torchrun and 'shardwise run' do"
        )


def forget_launcher() -> None:
    """Remove the variables of the launcher that started the parent process, which does not know this process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def _device(facts: LaunchFacts, device: torch.device | str | None) -> torch.device:
    """Return the device that this rank chooses without the other ranks."""
    count = visible_gpus()
    if device is None:
        reason = _why_no_gpu(facts, count)
        if reason is not None:
            if reason and facts.rank == 0:
                warn_user(f"no GPU is used: {reason}; give device='cpu' if that is intended")
            return torch.device("cpu")
        device = "cuda"
    chosen = _named(device)
    if chosen.type != "cuda":
        return chosen
    if count == 0 or (chosen.index or 0) >= count:
        raise ValueError(
            f"device={str(chosen)!r}, but the number of GPUs that are visible to rank {facts.rank} is {count} "
            f"({VISIBLE}={os.environ.get(VISIBLE)!r}); give 'cuda' for the rank's own, or 'cpu', or see 'shardwise env'"
        )
    return chosen if chosen.index is not None else torch.device("cuda", own_index(facts.local_rank, count))


def _named(device: torch.device | str) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        # Always a ValueError, which is sent to the other ranks.
        raise ValueError(
            f"device={short_repr(device)}: give 'cpu', 'cuda' for the rank's own GPU, or one such as 'cuda:0'"
        )
    return _without_number_of_cpu(chosen)


def _without_number_of_cpu(device: torch.device) -> torch.device:
    """Return ``"cpu"`` for ``"cpu:0"``, as accelerate names it: tensors on the CPU have no index."""
    return torch.device("cpu") if device.type == "cpu" else device


def _why_no_gpu(facts: LaunchFacts, count: int) -> str | None:
    """Return why a rank without a given device uses the CPU (``""`` if that is obvious), or ``None`` if it does not."""
    if count == 0:
        hidden = os.environ.get(VISIBLE) in ("", "-1", "NoDevFiles")
        there = 0 if hidden else gpus_of_host()
        return f"the host has {there}, but torch {torch.__version__} cannot use them" if there else ""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_backend() == "gloo":
        return f"the process group's backend is gloo, and {count} GPUs are visible"
    fewer = count < facts.local_world_size and not any(name in os.environ for name in BINDINGS)
    if fewer and dist.get_backend() != "nccl":
        return f"{facts.local_world_size} ranks of this host see {count} GPUs"
    return None


def default_device() -> torch.device:
    """Return the device that :func:`init_distributed` chooses, once ``torch.distributed`` is initialized."""
    return _device(LaunchFacts.read(), None)


def own_device(device: torch.device) -> torch.device:
    """Return ``device`` with its index.

    For ``"cuda"`` that is this thread's current GPU if the program has set one (any but the first), otherwise the
    rank's own. The CPU has no index.

    Raises:
        ValueError: there is no GPU.
    """
    if device.type != "cuda" or device.index is not None:
        return _without_number_of_cpu(device)
    if visible_gpus() and numbered(device).index:
        return numbered(device)
    return _device(LaunchFacts.read(), device)


def read_variable(name: str) -> str | None:
    """Return an environment variable that a published interface reads; ``None`` if it is unset or empty."""
    return os.environ.get(name) or None


def shutdown() -> None:
    """Destroy the default process group, if there is one. Call it on every rank at the end of the program."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
