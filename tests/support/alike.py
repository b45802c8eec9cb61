"""One rank of many without the other ranks: simulated peers do what this rank does, so real code runs at any world
size.

Only the transport is simulated. Groups, chunk tables, agreement, checkpoints and the engine are those of a real run;
torch's process groups below them answer in this process, and count the calls.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm import GroupMaker, GroupRequest, NativeGroup, register_backend
from shardwise.core.comm.control import Control
from shardwise.core.mesh.mesh import Mesh
from shardwise.plan import Plan

CPU = torch.device("cpu")
Transport = Literal["native", "queued", "gloo"]
# Their signatures differ between versions of torch.
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist.Work


@dataclass
class Asked:
    """Calls and bytes of the process groups, as this rank sees them.

    Attributes:
        calls: number of calls, by operation of torch.distributed.
        sent_bytes: bytes that this rank passes in, by operation (once, for any number of receivers).
        received_bytes: bytes that this rank gets from other ranks, by operation.
        log: every operation in order, as (operation, sent bytes, received bytes).
    """

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, int, int]] = field(default_factory=list)

    def add(self, operation: str, sent_bytes: int, received_bytes: int) -> None:
        """Count a call."""
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.sent_bytes[operation] = self.sent_bytes.get(operation, 0) + sent_bytes
        self.received_bytes[operation] = self.received_bytes.get(operation, 0) + received_bytes
        self.log.append((operation, sent_bytes, received_bytes))

    def reset(self) -> None:
        """Start counting from zero."""
        for each in (self.calls, self.sent_bytes, self.received_bytes):
            each.clear()
        self.log.clear()


class _Done(_Work):  # type: ignore[misc]
    """A work that is complete at once."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class _Arriving(_Done):
    """A message that arrives when it is waited for."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        super().__init__()
        self._arrive: Callable[[], object] | None = arrive

    def wait(self, timeout: object = None) -> bool:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
        return True

    def is_completed(self) -> bool:
        return self.wait()


# [Note: Peers that are alike]
# Every peer has, sends and requests what this rank does. So a gather returns copies of the own part, a broadcast leaves
# the own values, and a sum is the own value times the number of ranks. A message from a peer has the values that this
# rank sends at that time under the same tag (zeros, if it sends nothing of that length), and a slice for one rank is
# not that for another. Values therefore differ from those of a run; the calls of the transport are the same, call by
# call and byte by byte (tests/ranks/testing/test_pool.py compares).
class AlikeProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A torch process group of ``size`` ranks, of which only this one exists. See [Note: Peers that are alike].

    Args:
        rank: the rank of this process.
        size: number of ranks.
        asked: counts the calls.
    """

    def __init__(self, rank: int, size: int, asked: Asked) -> None:
        super().__init__(rank, size)
        self._ranks, self._own, self._asked = size, rank, asked
        self._sent: tuple[int, Tensor | None] = (-1, None)

    def getBackendName(self) -> str:
        """Return the name that torch asks for."""
        return "alike"

    def all_gather_single(self, out: Tensor, own: Tensor, _options: Any = None) -> Any:
        """Copy ``own`` for every peer."""
        self._asked.add("all_gather", own.nbytes, out.nbytes - own.nbytes)
        out.view(self._ranks, -1).copy_(own.view(1, -1).expand(self._ranks, -1))
        return _Done()

    def reduce_scatter_single(self, out: Tensor, full: Tensor, options: Any = None) -> Any:
        """Return the own slice times the number of ranks; the slice itself for an average."""
        self._asked.add("reduce_scatter", full.nbytes - out.nbytes, out.nbytes)
        part = full.view(self._ranks, -1)[self._own]
        if part.data_ptr() != out.data_ptr():
            out.copy_(part)
        self._sum(out, options)
        return _Done()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Do as :meth:`reduce_scatter_single`, for the full tensor."""
        for tensor in tensors:
            self._asked.add("all_reduce", tensor.nbytes, tensor.nbytes)
            self._sum(tensor, options)
        return _Done()

    def reduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Reduce to one rank."""
        for tensor in tensors:
            own = options is not None and options.rootRank == self._own
            self._asked.add("reduce", 0 if own else tensor.nbytes, tensor.nbytes if own else 0)
            self._sum(tensor, options)
        return _Done()

    def _sum(self, tensor: Tensor, options: Any) -> None:
        if options is not None and options.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self._ranks)

    def all_to_all_single(
        self, out: Tensor, full: Tensor, _out_sizes: Sequence[int], _sizes: Sequence[int], _options: Any = None
    ) -> Any:
        """Receive from every peer what this rank would send to itself."""
        self._asked.add("all_to_all", full.nbytes, out.nbytes)
        rows = out.view(self._ranks, -1)
        rows.copy_(full.view(self._ranks, -1)[self._own].clone().expand_as(rows))
        return _Done()

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Leave the values: the source has the same ones."""
        for tensor in tensors:
            own = options is not None and options.rootRank == self._own
            self._asked.add("broadcast", tensor.nbytes if own else 0, 0 if own else tensor.nbytes)
        return _Done()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Complete at once."""
        self._asked.add("send", tensors[0].nbytes, 0)
        self._sent = tag, tensors[0]
        return _Done()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Receive what this rank has sent by the time of the wait."""
        self._asked.add("receive", 0, tensors[0].nbytes)
        return _Arriving(partial(self._arrive, tensors[0], tag))

    def _arrive(self, out: Tensor, tag: int) -> None:
        sent_tag, sent = self._sent
        out.zero_()
        if sent is not None and sent_tag == tag and sent.dtype == out.dtype and sent.numel() <= out.numel():
            out[: sent.numel()].copy_(sent.view(-1))

    def barrier(self, _options: Any = None) -> Any:
        """Complete at once."""
        self._asked.add("barrier", 0, 0)
        return _Done()

    # Their names in versions of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


class _AlikeMaker(GroupMaker):
    """Creates the real groups over process groups with simulated peers."""

    def __init__(self, rank: int, size: int, asked: Asked) -> None:
        super().__init__(CPU, shared_memory=False, timeout_s=60.0)
        self._rank, self._size, self._asked = rank, size, asked

    @property
    def backend(self) -> str:
        return "gloo"

    def tell(self, obj: object) -> list[Any]:
        return self._world_control().exchange_object(obj)[0]

    def agree(self, argument: str, wanted: object) -> None:
        return

    def process_group(self, name: str, rank_lists: list[list[int]], backend: str) -> AlikeProcessGroup:
        own = next(ranks for ranks in rank_lists if self._rank in ranks)
        return AlikeProcessGroup(own.index(self._rank), len(own), self._asked)

    def _world_control(self) -> Control:
        if self._world is None:
            everyone = AlikeProcessGroup(self._rank, self._size, self._asked)
            self._world = Control("world", everyone, self.activity)
        return self._world


@contextmanager
def alike_mesh(plan: Plan, rank: int, ranks: int, transport: Transport = "native") -> Iterator[tuple[Mesh, Asked]]:
    """Yield the mesh of rank ``rank`` of ``ranks`` on the CPU, and the calls of its process groups from then on.

    Pass it to :func:`shardwise.session.build`, and train in this one process. torch.distributed is not started, and
    nothing waits. Times are the host's own, without those of a network.

    Args:
        plan: its ``mesh`` says how the ranks are split.
        rank: the rank of this process.
        ranks: the world size.
        transport: ``"native"``, the library calls that GPUs have, with a host wait for each; ``"queued"``, the same
            with waits of the device only, as with NCCL; ``"gloo"``, the messages of CPU ranks on several hosts.

    Raises:
        ValueError: the plan does not fit the number of ranks, or splits layers or sequences, whose ranks differ.
    """
    sizes = plan.mesh.resolve(ranks)
    if sizes.tp * sizes.pp * sizes.sp > 1:
        raise ValueError(
            f"alike_mesh() with tp={sizes.tp}, pp={sizes.pp}, sp={sizes.sp}: ranks with other parts, stages or rows do "
            "other things; give a plan of shards and replicas"
        )
    if not 0 <= rank < ranks:
        raise ValueError(f"alike_mesh() for rank {rank} of {ranks}: give 0..{ranks - 1}")
    asked = Asked()
    makers = {"native": _native, "queued": _queued}
    put_back = register_backend("cpu", makers[transport]) if transport in makers else lambda: None
    try:
        mesh = Mesh.among(tuple(range(ranks)), sizes, _AlikeMaker(rank, ranks, asked))
    finally:
        put_back()
    asked.reset()
    try:
        yield mesh, asked
    finally:
        mesh.close()


def _native(maker: GroupMaker, request: GroupRequest) -> NativeGroup:
    lists = request.rank_lists
    gather, reduce = (maker.process_group(f"{request.name}_{each}", lists, "") for each in ("gather", "reduce"))
    return NativeGroup(request.called, maker.device, request.control, gather, reduce)


def _queued(maker: GroupMaker, request: GroupRequest) -> NativeGroup:
    group = _native(maker, request)
    group.waits_in_queue = True
    return group
