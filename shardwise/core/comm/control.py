"""Small host-side messages and rare blocking operations over a gloo process group."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm.activity import Activity
from shardwise.core.comm.errors import PeerError

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor, and warns about the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Operation = Literal["sum", "max"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def encode(obj: object) -> bytes:
    """Return ``obj`` as JSON.

    Raises:
        TypeError: the message has a value that JSON cannot represent.
    """
    try:
        return json.dumps(obj).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"cannot exchange {type(obj).__name__} {obj!r:.200}: it is not JSON ({error}); give plain values"
        ) from error


def decode(data: bytes) -> Any:
    """Return the object that :func:`encode` wrote."""
    return json.loads(data)


class Control:
    """Blocking host-side collectives of one group.

    Args:
        name: the name of the group, for messages.
        process_group: a gloo process group.
        activity: activity of this rank, for messages.

    Attributes:
        process_group: the gloo process group.
        rank: this process in it.
        size: number of ranks of the group.
    """

    def __init__(self, name: str, process_group: dist.ProcessGroup, activity: Activity | None = None) -> None:
        self.name = name
        self.activity = activity or Activity()
        self.process_group = process_group
        self.rank = process_group.rank()
        self.size = process_group.size()

    def exchange(self, values: Sequence[float], purpose: str = "") -> list[list[float]]:
        """Return every rank's ``values`` (equally many) as float64, by rank; ``purpose`` is for messages."""
        if not values:
            self.barrier()
            return [[] for _ in range(self.size)]
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        gathered: list[list[float]] = self._gather(mine, exchange_of(purpose)).tolist()
        return gathered

    def all_reduce(self, values: Sequence[float], operation: Operation, purpose: str = "") -> list[float]:
        """Reduce all ranks' ``values`` (equally many) in fp64, number by number, with the same bits on all ranks."""
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        try:
            self._wait(dist.all_reduce(own, op=_OPERATIONS[operation], group=self.process_group, async_op=True))
        except RuntimeError as error:
            raise self.lost(exchange_of(purpose), error) from error
        result: list[float] = own.tolist()
        return result

    def exchange_object(self, obj: object) -> tuple[list[Any], int]:
        """Return every rank's ``obj`` by rank, after a round trip through JSON, and the bytes that this rank sent."""
        data = encode(obj)
        lengths = self._gather(torch.tensor([len(data)], device="cpu"), "exchange_object").flatten().tolist()
        return [decode(each) for each in self.exchange_bytes(data, lengths)], (self.size - 1) * len(data)

    def exchange_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Return every rank's ``data`` by rank. All ranks know the ``lengths`` of all data."""
        # All-gathers need equal lengths.
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._gather(padded, "exchange_object")
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._gather(torch.zeros(1, device="cpu"), "barrier")

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite a CPU tensor of any shape, dtype and strides with rank ``src``'s."""
        broadcast(tensor, src, self.process_group, self.name)

    def _gather(self, mine: Tensor, operation: str) -> Tensor:
        rows = torch.empty(self.size, mine.numel(), dtype=mine.dtype, device="cpu")
        try:
            self._wait(all_gather_single(rows.view(-1), mine, group=self.process_group, async_op=True))
        except RuntimeError as error:
            raise self.lost(operation, error) from error
        return rows

    def _wait(self, work: dist.Work | None) -> None:
        limit = self.limit
        if work is not None:
            work.wait() if limit is None else work.wait(limit)
            self.activity.met(self.name)

    @property
    def limit(self) -> timedelta | None:
        """Return how long to wait for peers. See :meth:`Activity.limit`."""
        return self.activity.limit(self.name)

    def around(self, ranks: Sequence[int]) -> str:
        """Return what this rank and the group's ``ranks`` are doing, for the end of an error message."""
        text = ""
        with contextlib.suppress(RuntimeError, ValueError, KeyError):  # the communicator may be destroyed
            members = dist.get_process_group_ranks(self.process_group)
            text = self.activity.around([members[rank] for rank in ranks])
        return f". In global ranks: {text}" if text else ""

    def lost(self, operation: str, error: Exception) -> PeerError:
        """Return the error for a failed operation."""
        return self.gave_up(
            PeerError(
                f"{operation} in group {self.name!r} (rank {self.rank} of {self.size}) failed: {error}. A rank of the "
                "group died, or did not come to the same operation in time; look at the first error of the other ranks"
            ),
            operation,
        )

    def gave_up(self, error: PeerError, operation: str = "a gather or a reduction") -> PeerError:
        """Return ``error`` with the activity of all ranks of the group, and publish that this rank timed out."""
        limit = self.limit
        self.activity.gave_up(self.activity.now or operation)
        around = self.around([rank for rank in range(self.size) if rank != self.rank])
        waits = f". The plan's comm has wait_timeout_s={limit.total_seconds():g}" if limit is not None else ""
        return PeerError(f"{error}{waits}{around}")


def exchange_of(purpose: str) -> str:
    """Return the name of an exchange, for messages."""
    return f"exchange of {purpose}" if purpose else "exchange"


def broadcast(tensor: Tensor, src: int, process_group: dist.ProcessGroup, name: str) -> None:
    """Broadcast a tensor as bytes, so that every dtype works and is bit-exact."""
    flat = tensor.detach().reshape(-1)
    if not flat.is_contiguous():
        flat = flat.contiguous()
    try:
        dist.broadcast(flat.view(torch.uint8), group=process_group, group_src=src)
    except RuntimeError as error:
        raise PeerError(
            f"broadcast of {tuple(tensor.shape)} x {tensor.dtype} from rank {src} in group {name!r} failed: {error}; "
            "look at the first error of the other ranks"
        ) from error
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
