"""The choice of a backend for the ranks of a group and their device, and the registry of other backends."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.comm.activity import Activity
from shardwise.core.comm.control import Control
from shardwise.core.comm.gloo import GlooGroup
from shardwise.core.comm.group import Group
from shardwise.core.comm.link import P2PChannel
from shardwise.core.comm.local import LocalGroup
from shardwise.core.comm.mapped_memory import MappingError, Method, host_facts
from shardwise.core.comm.members import Members, check_equal, make_room, unbound
from shardwise.core.comm.native import NativeGroup
from shardwise.core.comm.release import destroy, let_go_with
from shardwise.core.comm.shared_memory import SharedGroup


@dataclass(frozen=True)
class GroupRequest:
    """A request for a group. Every rank in ``rank_lists`` requests its own list's group at the same time.

    Attributes:
        name: the mesh axis, for communicators.
        called: the name of the group, for messages.
        rank_lists: global ranks of all groups of the axis.
        control: small host-side messages among the ranks of the group; has rank and size.
    """

    name: str
    called: str
    rank_lists: list[list[int]]
    control: Control


MakeGroup = Callable[["GroupMaker", GroupRequest], Group]
"""Makes the requested group. Collective over all ranks of its lists."""
MakeLane = Callable[[dist.ProcessGroup], dist.ProcessGroup]
"""Makes a communicator for point-to-point messages from gloo's communicator of the same ranks."""
_BACKENDS: dict[str, tuple[MakeGroup, MakeLane | None]] = {}
"""Backends by type of device, without those of :mod:`shardwise` itself."""


def register_backend(device_type: str, make: MakeGroup, lane: MakeLane | None = None) -> Callable[[], None]:
    """Register ``make`` as the backend of ranks whose device is a ``device_type`` (such as ``"xpu"``).

    Every rank registers the same backend before a mesh is made. Groups of one rank do not use it.

    Args:
        device_type: type of the ranks' device.
        make: creates the groups.
        lane: creates communicators for point-to-point messages, which keep their order; ``None``: use torch's
            communicators for such devices.

    Returns:
        A function that restores the previous backend.

    Raises:
        TypeError: ``make`` is not callable.
    """
    if not callable(make):
        raise TypeError(f"make={make!r:.80} is not callable; give a function (GroupMaker, GroupRequest) -> Group")
    before = _BACKENDS.get(device_type)
    _BACKENDS[device_type] = make, lane

    def put_back() -> None:
        _BACKENDS.pop(device_type, None)
        if before is not None:
            _BACKENDS[device_type] = before

    return put_back


class GroupMaker:
    """Makes groups of ranks, and keeps their communicators until it is closed or garbage-collected.

    Attributes:
        device: device of the groups' buffers.
        shared_memory: use shared memory between CPU ranks of one host: ``None``: if possible, ``True``: required,
            ``False``: never.
        timeout_s: timeout for peers.
        members: the ranks; ``None``: those of the default process group.
        wait_timeout_s: a shorter timeout in training; see :class:`~shardwise.plan.CommPlan`.
        activity: activity of this rank, for messages of all groups created here.
    """

    def __init__(
        self,
        device: torch.device,
        shared_memory: bool | None,
        timeout_s: float,
        members: Members | None = None,
        wait_timeout_s: float | None = None,
    ) -> None:
        self.device = device
        self.shared_memory = shared_memory
        self.timeout_s = timeout_s
        self.members = members
        self.activity = Activity(None if wait_timeout_s is None else min(wait_timeout_s, timeout_s))
        self._process_groups: list[dist.ProcessGroup] = []
        let_go_with(self, self._process_groups)
        self._world: Control | None = None
        self._lent = False
        """Whether a group uses the communicator of :attr:`_world` for its own messages."""

    def make(self, name: str, rank_lists: list[list[int]]) -> Group:
        """Return the group of this rank. Collective over all ranks of the lists.

        Every rank passes the same lists of global ranks, which together have each rank of the default process group (or
        each member) once.

        Raises:
            ValueError: ``shared_memory`` is True and it cannot be used, or the ranks have other backends.
        """
        if all(len(ranks) == 1 for ranks in rank_lists):
            return LocalGroup(name, self.device, self.activity)
        # Messages name ranks of the group; if these are not all ranks, the name lists them.
        called = name if self.members is None else f"{name} of ranks {self._own(rank_lists)}"
        control = Control(called, self._for_messages(name, rank_lists), self.activity)
        request = GroupRequest(name, called, rank_lists, control)
        own = _on_cpu if self.device.type == "cpu" else _native
        make, _ = _BACKENDS.get(self.device.type, (own, None))
        # Compared first, since different makers would exchange different things, and deadlock.
        makers, _ = control.exchange_object(f"{make.__module__}.{make.__qualname__} for {self.device.type}")
        if any(maker != makers[0] for maker in makers):
            raise ValueError(
                f"the ranks of group {called!r} have different backends: {makers}; register the same on all ranks"
            )
        return make(self, request)

    # Exchanges over all ranks happen only while a mesh is created, by one thread, in the same order on all ranks, and
    # each blocks until all ranks have arrived. The groups have no other users before the mesh exists, and no exchange
    # over all ranks happens after that. Both therefore never use the communicator at the same time. There is no such
    # guarantee for two groups, nor for the default process group, which belongs to the program.
    def _for_messages(self, name: str, rank_lists: list[list[int]]) -> dist.ProcessGroup:
        """Return the communicator for a group's host-side messages: the one over all ranks if the group has all.

        Sharing it saves open files, one for each connection.
        """
        alone = self.members is not None or self._lent or self.backend == "gloo"
        if alone or rank_lists != [list(range(dist.get_world_size()))]:
            return self.process_group(name, rank_lists, "gloo")
        self._lent = True
        return self._world_control().process_group

    def make_wire(self, name: str, rank_lists: list[list[int]]) -> P2PChannel:
        """Return a point-to-point channel between the ranks of this rank's list. Collective as :meth:`make`."""
        _, made = _BACKENDS.get(self.device.type, (None, None))
        over_gloo = made is not None or self.backend == "gloo"
        backend = "gloo" if over_gloo else dist.get_default_backend_for_device(self.device)
        # gloo has tags; see [Note: Messages that do not wait for each other].
        ways = ("",) if over_gloo and made is None else ("_down", "_up")
        names = [f"{name}_{lane}{way}" for lane in ("forward", "backward") for way in ways]
        groups = [self.process_group(each, rank_lists, backend) for each in names]
        return P2PChannel(name, groups if made is None else [made(lane) for lane in groups], self.device)

    @property
    def backend(self) -> str:
        """The backend of the process group."""
        return str(dist.get_backend(self.members.process_group if self.members is not None else None))

    def tell(self, obj: object) -> list[Any]:
        """Return every rank's ``obj`` (JSON-able) by rank. Collective over the same ranks as :meth:`make`."""
        return self.members.exchange(obj) if self.members is not None else self._world_control().exchange_object(obj)[0]

    def agree(self, argument: str, value: object) -> None:
        """Check that ``value`` (JSON-compatible) is equal on all ranks of the run. Collective; not with ``members``.

        Raises:
            ValueError: the values differ (raised on every rank). The message has the value of each rank.
        """
        if dist.get_world_size() > 1:
            rows, _ = self._world_control().exchange_object(value)
            check_equal(argument, range(len(rows)), rows)

    def process_group(self, name: str, rank_lists: list[list[int]], backend: str) -> dist.ProcessGroup:
        """Make the communicator of this rank's list, kept until :meth:`close`. Collective as :meth:`make`."""
        own: dist.ProcessGroup
        if self.members is not None:
            own = self.members.new_group(name, self._own(rank_lists), backend)
        else:
            if backend == "gloo":
                make_room(len(self._own(rank_lists)))
            with unbound(dist.group.WORLD):  # a bound group sends messages of all its pairs one after the other
                own, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                    rank_lists,
                    backend=backend,
                    timeout=timedelta(seconds=self.timeout_s),  # torch's default differs from the ranks' own group
                    group_desc=f"shardwise_{name}",
                )
        self._process_groups.append(own)
        return own

    def close(self) -> None:
        """Destroy the communicators of all groups made here."""
        self._world = None
        destroy(self._process_groups)

    def keep(self, process_group: dist.ProcessGroup) -> None:
        """Destroy ``process_group``, which torch made for the mesh, with the others, unless it is the default group."""
        if process_group is not dist.group.WORLD:
            self._process_groups.append(process_group)

    def _own(self, rank_lists: list[list[int]]) -> list[int]:
        rank = dist.get_rank()
        return next(ranks for ranks in rank_lists if rank in ranks)

    def share(self, name: str, control: Control) -> tuple[SharedGroup | None, str]:
        """Return a group in shared memory, or the reason why shared memory cannot be used, equal on all ranks.
        Collective.

        Raises:
            ValueError: ``shared_memory`` differs between the ranks.
        """
        facts, _ = control.exchange_object([self.shared_memory, host_facts()])
        settings = [fact[0] for fact in facts]
        if any(setting != settings[0] for setting in settings):
            raise ValueError(f"shared_memory differs between the ranks of group {name!r}: {settings}; give one value")
        if self.shared_memory is False:
            return None, "it is switched off"
        hosts = [fact[1] for fact in facts]
        if not all(hosts):
            return None, f"ranks {[rank for rank, host in enumerate(hosts) if not host]} are not on Linux on x86-64"
        if any(host != hosts[0] for host in hosts):
            return None, f"they are not on one host, or not in one process namespace: {hosts}"
        reasons = []
        methods: tuple[Method, ...] = ("memfd", "file")
        for method in methods:
            try:
                return SharedGroup(name, control, method, self.timeout_s), ""
            except MappingError as error:
                reasons.append(str(error))
        return None, "; ".join(reasons)

    def hosts(self) -> dict[int, str]:
        """Return the host of each rank, by global rank. Collective over the same ranks as :meth:`make`."""
        names = self.tell(host_facts().get("host") or socket.gethostname())
        return dict(zip(range(len(names)) if self.members is None else self.members.ranks, names, strict=True))

    def any_rank(self, mine: bool, rank_lists: list[list[int]]) -> bool:
        """Return whether ``mine`` is True on any rank that takes part in the next communicator.

        Without ``members`` that is every rank of the run. The ranks of one list all have the same value.
        """
        if len(rank_lists) == 1 or self.members is not None:
            return mine
        return any(row[0] for row in self._world_control().exchange([float(mine)]))

    def _world_control(self) -> Control:
        if self._world is None:
            default = dist.group.WORLD
            if default is None or self.backend != "gloo":
                all_ranks = [list(range(dist.get_world_size()))]
                default = self.process_group("agree", all_ranks, "gloo")
            self._world = Control("world", default, self.activity)
        return self._world


def _native(maker: GroupMaker, request: GroupRequest) -> Group:
    """Make a group of the backend's own collectives."""
    # NCCL requires a GPU for each rank; ranks that share one use gloo.
    backend = "gloo" if maker.backend == "gloo" else dist.get_default_backend_for_device(maker.device)
    gather = maker.process_group(f"{request.name}_gather", request.rank_lists, backend)
    reduce = maker.process_group(f"{request.name}_reduce", request.rank_lists, backend)
    return NativeGroup(request.called, maker.device, request.control, gather, reduce)


def _on_cpu(maker: GroupMaker, request: GroupRequest) -> Group:
    """Make a group over shared memory if its ranks are on one host, otherwise over gloo."""
    shared, refusal = maker.share(request.called, request.control)
    if maker.shared_memory and shared is None:
        raise ValueError(
            f"shared_memory=True, but ranks of group {request.called!r} cannot share memory ({refusal}); give None"
        )
    # torch's new groups are collective over all ranks of the run, including those whose own list needs none.
    if not maker.any_rank(shared is None, request.rank_lists):
        assert shared is not None
        return shared
    gather = maker.process_group(f"{request.name}_gather", request.rank_lists, "gloo")
    reduce = maker.process_group(f"{request.name}_reduce", request.rank_lists, "gloo")
    return shared or GlooGroup(request.called, request.control, gather, reduce)
