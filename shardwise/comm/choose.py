"""Which kind of group suits the ranks and the device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.control import Control
from shardwise.comm.gloo import GlooGroup
from shardwise.comm.group import Group, LocalGroup
from shardwise.comm.mapping import MappingError, Method, host_facts
from shardwise.comm.native import NativeGroup
from shardwise.comm.shared import SharedGroup

__all__ = ["GroupMaker"]


class GroupMaker:
    """Makes groups over parts of the default process group, and keeps the communicators that they use.

    Attributes:
        device: where the groups' buffers live.
        shared_memory: use it between CPU ranks of one host: ``None`` where possible, ``True`` must, ``False`` never.
        timeout_s: how long a rank waits for its peers before it gives up.
    """

    def __init__(self, device: torch.device, shared_memory: bool | None, timeout_s: float) -> None:
        self.device = device
        self.shared_memory = shared_memory
        self.timeout_s = timeout_s
        self._process_groups: list[dist.ProcessGroup] = []
        self._world: Control | None = None

    def make(self, name: str, rank_lists: list[list[int]]) -> Group:
        """The group of this rank. Collective over the default process group: every rank gives the same lists, which
        together hold every rank once.

        Raises:
            ValueError: ``shared_memory`` is True and it cannot be used.
        """
        if all(len(ranks) == 1 for ranks in rank_lists):
            return LocalGroup(name, self.device)
        control = Control(name, self._new(name, rank_lists, "gloo"))
        if self.device.type != "cpu":
            # NCCL wants a GPU for each rank; ranks that share one have met over gloo.
            met_over = dist.get_backend()
            backend = met_over if met_over == "gloo" else dist.get_default_backend_for_device(self.device)
            gather, reduce = (self._new(f"{name}_{part}", rank_lists, backend) for part in ("gather", "reduce"))
            return NativeGroup(name, self.device, control, gather, reduce)
        shared, refusal = self._shared(name, control)
        if self.shared_memory and shared is None:
            raise ValueError(
                f"shared_memory=True, but ranks of group {name!r} cannot share memory ({refusal}); give None"
            )
        # Making process groups takes all ranks of the world, those of the other groups of this axis too.
        if not self._any(shared is None, rank_lists):
            assert shared is not None
            return shared
        gather, reduce = (self._new(f"{name}_{part}", rank_lists, "gloo") for part in ("gather", "reduce"))
        return shared or GlooGroup(name, control, gather, reduce)

    def close(self) -> None:
        """Destroy the communicators of all groups made here."""
        process_groups, self._process_groups = self._process_groups, []
        self._world = None
        for process_group in process_groups:
            if dist.is_initialized():
                dist.destroy_process_group(process_group)

    def _shared(self, name: str, control: Control) -> tuple[SharedGroup | None, str]:
        facts, _ = control.exchange_object([self.shared_memory, host_facts()])
        wanted = [fact[0] for fact in facts]
        if any(want != wanted[0] for want in wanted):
            raise ValueError(f"shared_memory differs between the ranks of group {name!r}: {wanted}; give one value")
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

    def _any(self, mine: bool, rank_lists: list[list[int]]) -> bool:
        """Whether any rank of the world says so; the ranks of one list all say the same."""
        if len(rank_lists) == 1:
            return mine
        if self._world is None:
            self._world = Control("world", self._new("agree", [list(range(dist.get_world_size()))], "gloo"))
        return any(row[0] for row in self._world.exchange([float(mine)]))

    def _new(self, name: str, rank_lists: list[list[int]], backend: str) -> dist.ProcessGroup:
        own: dist.ProcessGroup
        own, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            rank_lists, backend=backend, group_desc=f"shardwise_{name}"
        )
        self._process_groups.append(own)
        return own
