"""Messages from rank to rank over one communicator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.eight_bits import GRADIENTS, VALUES, EightBits
from shardwise.comm.errors import PeerError
from shardwise.comm.traffic import Traffic

__all__ = ["Link", "Message", "Wire"]

# gloo takes non-negative 32-bit tags. Part of one is the buffer's number: what ranks that lost each other send of other
# buffers (another model's) is never taken. No two operations that are a million apart are in flight together.
TAG_RANGE, BUFFER_RANGE = 1 << 20, 1 << 10


class Link:
    """One communicator: sends and receives with a tag per operation."""

    def __init__(self, process_group: dist.ProcessGroup, name: str) -> None:
        self._process_group = process_group
        self._name = name
        self._count = 0

    def tag(self, buffer: int) -> int:
        """A tag that no other operation in flight uses, for buffer number ``buffer``; the same on every rank."""
        self._count = (self._count + 1) % TAG_RANGE
        return self._count + buffer % BUFFER_RANGE * TAG_RANGE

    def send(self, tensor: Tensor, peer: int, tag: int, what: str) -> Message:
        """Start to send; ``tensor`` must stay as it is until the message is done."""
        return self._start(dist.isend, tensor, peer, tag, f"{what}: sending to rank {peer}")

    def receive(self, tensor: Tensor, peer: int, tag: int, what: str) -> Message:
        """Start to receive into ``tensor``."""
        return self._start(dist.irecv, tensor, peer, tag, f"{what}: receiving from rank {peer}")

    def _start(self, start: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int, what: str) -> Message:
        what = f"{what} of group {self._name!r}"
        keyword = "group_dst" if start is dist.isend else "group_src"
        try:
            work = start(tensor, group=self._process_group, tag=tag, **{keyword: peer})
        except RuntimeError as error:
            raise _lost(what, error) from error
        return Message(work, what)


class Message:
    """One that was started. ``wait`` may be called again.

    Attributes:
        arrived: called once, when it is there.
    """

    def __init__(self, work: dist.Work | None, what: str) -> None:
        self._work = work
        self._what = what
        self.arrived: Callable[[], None] = lambda: None

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(self._what, error) from error
        self._work = None
        self.arrived()


def _lost(what: str, error: Exception) -> PeerError:
    return PeerError(
        f"{what} failed: {error}. That rank died, or did not come to the same operation in time; look at the first "
        "error of the other ranks"
    )


HEADER = 12
"""Numbers that say what comes: a dtype, dimensions, their sizes."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


class Wire:
    """Tensors between the ranks of an axis (the stages of a pipeline, those that share sequences), in two lanes
    (activations and their gradients) that do not hold up each other. One thread uses it.

    Args:
        name: of the axis, for messages.
        lanes: a communicator each, over the same ranks.
        device: where what is received lies.

    Attributes:
        traffic: what this rank has sent.
    """

    def __init__(self, name: str, lanes: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._links = [Link(lane, name) for lane in lanes]
        self._under_way: list[tuple[Message, Tensor]] = []
        self._formats: tuple[EightBits, ...] = ()
        self.device = device
        self.traffic = Traffic()

    def compressed(self) -> Wire:
        """The same wire, whose floating-point messages are in 8 bits: activations, in the first lane, in e4m3, their
        gradients, in the second, in e5m2. What cannot be written so (fp64, numbers of tokens) travels as it is."""
        twin = copy.copy(self)
        twin._formats = (VALUES, GRADIENTS)
        return twin

    def send(self, x: Tensor, peer: int, lane: int, tag: int, what: str, described: bool = False) -> None:
        """Start to send; ``x`` is kept until it is through.

        Args:
            x: any shape and dtype; the peer must know both, unless it is ``described``.
            peer: its rank in the pipeline.
            lane: 0 or 1.
            tag: of messages to that peer in that lane that are under way, this one alone has it; at most 2^30.
            what: for errors.
            described: its dtype and shape go first.
        """
        x = x.detach().contiguous()
        if described:
            self.describe(x, peer, lane, tag, what)
        format_ = self._format(x.shape, x.dtype, lane)
        self._start(x if format_ is None else format_.write(x.view(1, -1)), peer, lane, tag, what)

    def _format(self, shape: torch.Size, dtype: torch.dtype, lane: int) -> EightBits | None:
        fits = bool(self._formats) and self._formats[lane].takes(dtype) and shape.numel() > 0
        return self._formats[lane] if fits else None

    def describe(self, x: Tensor, peer: int, lane: int, tag: int, what: str) -> None:
        """Start to send dtype and shape of ``x``, which comes next; arguments as for :meth:`send`."""
        self._start(_header(x).to(self.device), peer, lane, tag + (1 << 30), f"the shape of {what}")

    def described(self, peer: int, lane: int, tag: int, what: str) -> tuple[torch.Size, torch.dtype]:
        """What :meth:`describe` told."""
        header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        self._links[lane].receive(header, peer, tag + (1 << 30), f"the shape of {what}").wait()
        return _described(header)

    def _start(self, x: Tensor, peer: int, lane: int, tag: int, what: str) -> None:
        self.traffic.add("send", x.nbytes)
        self._under_way.append((self._links[lane].send(x.view(-1), peer, tag, what), x))

    def receive(self, like: tuple[torch.Size, torch.dtype] | None, peer: int, lane: int, tag: int, what: str) -> Tensor:
        """What ``peer`` sends with ``tag``.

        Args:
            like: shape and dtype; ``None``: they are sent first.
            peer, lane, tag, what: as for :meth:`send`.

        Raises:
            PeerError: it did not come.
        """
        shape, dtype = like or self.described(peer, lane, tag, what)
        x = torch.empty(shape, dtype=dtype, device=self.device)
        self.begin_receive(x, peer, lane, tag, what).wait()
        return x

    def begin_receive(self, x: Tensor, peer: int, lane: int, tag: int, what: str) -> Message:
        """Start to receive into ``x`` (contiguous); it is there when the message was waited for.

        Args:
            x: of the shape and dtype that the peer sends.
            peer, lane, tag, what: as for :meth:`send`.
        """
        format_ = self._format(x.shape, x.dtype, lane)
        if format_ is None:
            return self._links[lane].receive(x.view(-1), peer, tag, what)
        written = torch.empty(format_.row_bytes(x.numel()), dtype=torch.uint8, device=self.device)
        message = self._links[lane].receive(written, peer, tag, what)
        message.arrived = partial(format_.read, written.view(1, -1), x.view(1, -1))
        return message

    def settle(self) -> None:
        """Return when all that was sent is through.

        Raises:
            PeerError: a peer did not take it.
        """
        while self._under_way:
            self._under_way[0][0].wait()
            self._under_way.pop(0)

    def forget(self) -> None:
        """What is under way is nobody's any more: a step has failed."""
        self._under_way.clear()


def _header(x: Tensor) -> Tensor:
    if x.dim() > HEADER - 2:
        raise ValueError(f"a tensor of {x.dim()} dimensions between stages: at most {HEADER - 2} can be sent")
    numbers = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)))


def _described(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    kind, dims, *sizes = header.tolist()
    return torch.Size(sizes[:dims]), _DTYPES[kind]
