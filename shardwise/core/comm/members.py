"""The ranks of an existing process group, which make communicators among themselves without other ranks.

``torch.distributed.new_group`` needs all ranks of the run. Its variant for members names the new group only by the
number of groups that each member has. That number differs between ranks if some of them belong to more groups, and then
they never connect. The number is also reused after a group is destroyed, and then they connect to the addresses of dead
ranks. This module therefore uses a unique name that one member generates.
"""

from __future__ import annotations

import os
import resource
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.base.torch_internals import new_group
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm.errors import UNREACHED, PeerError

MARGIN = 256
"""Open files for data loaders, checkpoints and libraries."""
GROUPS = 3
"""Communicators over all ranks that a run usually has at most: host exchanges, saves, and the program's own."""
_warned = threading.Event()


def make_room(ranks: int) -> None:
    """Raise the limit of open files (``ulimit -n``) for a gloo communicator, which connects all pairs of ranks.

    Warns:
        UserWarning: the hard limit is too low, once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there, endless = _open_files(), resource.RLIM_INFINITY
    needed = there + ranks + MARGIN
    if soft == endless or soft >= needed:
        return
    most = needed if hard == endless else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # the system has a lower limit of its own
        most = soft
    if most < needed and not _warned.is_set():
        _warned.set()
        warn_user(
            f"a communicator of {ranks} ranks needs as many open files on each; {there} are open, and at most {most} "
            f"are allowed (ulimit -Hn), so it may fail with 'Too many open files'. Allow "
            f"{there + GROUPS * ranks + MARGIN} on every host (ulimit -n, LimitNOFILE= of a service, --ulimit nofile= "
            "of a container), or divide the ranks into smaller groups"
        )


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # a process may not list them on every system
        return 0


DEFAULT_TIMEOUT_S = 300.0


def ranks_of(argument: str, group: object) -> tuple[int, ...]:
    """Return the global ranks of ``group`` by rank in it; ``None`` means all ranks.

    Raises:
        ValueError: this rank is not in ``group``, or it is not a process group of this run; names ``argument``.
    """
    several = dist.is_available() and dist.is_initialized()
    if group is None:
        return tuple(range(dist.get_world_size())) if several else (0,)
    if not several:
        raise ValueError(
            f"{argument}={group!r:.80} but torch.distributed is not initialized; start with torchrun, or give None"
        )
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{argument}={group!r} means that rank {dist.get_rank()} is not a member of the group; on every rank give "
            "the group that the rank belongs to"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{argument}={group!r:.80} is not a process group; give one of torch.distributed, or None")
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise ValueError(
            f"{argument}={group!r:.80} was destroyed, or is of another run; give an existing group"
        ) from None
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"{argument} has ranks {list(ranks)}, without rank {dist.get_rank()}; on every rank give the group that "
            "the rank belongs to"
        )
    return ranks


def timeout_s(group: dist.ProcessGroup | None = None) -> float:
    """Return a group's timeout (default: the default group's), from the backend's options; 300 s if it has none."""
    group = group or dist.group.WORLD
    for device_type in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device_type)).options  # type: ignore[union-attr]
            return float(options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return DEFAULT_TIMEOUT_S


def check_equal(argument: str, ranks: Sequence[int], values: Sequence[object]) -> None:
    """Check that ``values`` is the same on all ranks of ``argument``.

    Raises:
        ValueError: the values differ. The message has the value of each rank.
    """
    if any(value != values[0] for value in values):
        by_rank = "; ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, values, strict=True))
        raise ValueError(f"the ranks of {argument} want different things ({by_rank}); give the same on all of them")


@contextmanager
def unbound(default: Any) -> Iterator[None]:
    """Unbind the default group from its device inside the block: torch would have all ranks split off a new group, and
    connect it at once, also if it is never used."""
    bound = default.bound_device_id
    if bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def made_alone(
    name: str, ranks: Sequence[int], backend: str, token: str, times: int, timeout_s: float
) -> dist.ProcessGroup:
    """Create a process group of ``ranks`` (world ranks, including this one), in that order. Collective over these only.

    Args:
        name: name of its purpose.
        ranks: the members.
        backend: name of its backend.
        token: a value that is equal on all members, and unique among the sets of members of this run.
        times: number of groups with that token, name and ranks, including this one.
        timeout_s: timeout of its operations.
    """
    if backend == "gloo":
        make_room(len(ranks))
    # The ranks are a part of every key in the store: thousands of numbers would be kilobytes in each key.
    among = blake2b(" ".join(map(str, ranks)).encode(), digest_size=16).hexdigest()
    unique = f"shardwise/{token}/{name}/{among}/{times}"
    with unbound(dist.group.WORLD):
        return new_group(ranks, backend, unique, f"shardwise_{name}", timedelta(seconds=timeout_s))


def made_together(ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    """Create a process group of ``ranks`` that may be destroyed at once. Collective over all ranks.

    Over gloo, its members synchronize in it: destroying a group (or exiting) while a peer still connects fails the
        peer.

    Args:
        ranks: world ranks.
        backend: name of its backend; ``None``: that of the default group.
    """
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend)
    if dist.get_rank() in ranks and _on_host(group):
        dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
    return group


def _on_host(group: dist.ProcessGroup) -> bool:
    """Return True if the group supports CPU tensors. NCCL, which does not, connects at its first operation."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


class Members:
    """The members of a process group that this rank belongs to. The constructor is collective over them.

    Args:
        group: the process group.
        argument: name of the argument that it was passed as, for messages.
        agreed: a JSON-compatible value that has to be equal on all members.

    Attributes:
        process_group: the process group.
        ranks: world ranks, by rank in it.
        timeout_s: timeout of its operations, and of those of all groups that are created here.

    Raises:
        ValueError: this rank is not a member; on every member, if ``agreed`` differs.
        PeerError: a member died, or did not arrive in time.
    """

    def __init__(self, group: dist.ProcessGroup, argument: str = "group", agreed: object = None) -> None:
        self.ranks = ranks_of(argument, group)
        self.process_group = group
        self.timeout_s = timeout_s(group)
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        # Each member generates a token, and the first one's is used: no other group of this run has it.
        rows = self.exchange([uuid.uuid4().hex, agreed])
        check_equal(argument, self.ranks, [row[1] for row in rows])
        self._token = rows[0][0]

    def exchange(self, obj: object) -> list[Any]:
        """Return every member's ``obj``, by rank. Collective over them; on GPUs, it uses the current device.

        Raises:
            PeerError: a member died, or did not arrive in time.
        """
        rows: list[Any] = [None] * len(self.ranks)
        try:
            dist.all_gather_object(rows, obj, group=self.process_group)
        except RuntimeError as error:
            raise self._lost("agreeing", error) from error
        return rows

    def new_group(self, name: str, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        """Create a process group of ``ranks`` (world ranks of members, including this rank), in that order. Collective
        over these only.

        Raises:
            PeerError: a member died, or did not arrive in time.
        """
        ranks = list(ranks)
        self._made[name, tuple(ranks)] += 1
        try:
            return made_alone(name, ranks, backend, self._token, self._made[name, tuple(ranks)], self.timeout_s)
        except RuntimeError as error:
            raise self._lost(f"making group {name!r} of ranks {ranks}", error) from error

    def _lost(self, what: str, error: Exception) -> PeerError:
        connecting = f". {UNREACHED}" if "connect" in str(error).lower() else ""
        return PeerError(
            f"{what} among ranks {list(self.ranks)} failed on rank {dist.get_rank()}: {error}. A rank of the group "
            f"died, or did not come in time; look at the first error of the other ranks{connecting}"
        )
