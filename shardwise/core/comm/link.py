"""Messages from rank to rank over one communicator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm.block_formats import GRADIENTS, VALUES, BlockFormat
from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.traffic import Traffic

__all__ = ["Link", "Message", "Sent", "Wire", "check_sent"]

# gloo takes non-negative 32-bit tags. Part of one is the buffer's number: what ranks that lost each other send of other
# buffers (another model's) is never taken. No two operations that are half a million apart are in flight together.
TAG_RANGE, BUFFER_RANGE = 1 << 19, 1 << 10


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
        keyword = "group_dst" if start is dist.isend else "group_src"
        what = f"{what} of group {self._name!r}"
        try:
            return Message(start(tensor, group=self._process_group, tag=tag, **{keyword: peer}), what)
        except RuntimeError as error:
            raise _lost(what, error) from error


class Message:
    """One that was started. ``wait`` may be called again, and lets go of the operation.

    Attributes:
        what: for errors.
        arrived: called when it is there; again by the next wait, if it was interrupted.
    """

    def __init__(self, work: dist.Work | None, what: str) -> None:
        self._work = work
        self._failed: RuntimeError | None = None
        self._waited = False
        self.what = what
        self.arrived: Callable[[], None] = lambda: None

    def wait(self, at_most: timedelta | None = None) -> None:
        """Until it is through.

        Args:
            at_most: in place of the communicator's own time-out.
        """
        if self._work is None:
            return
        # An interrupt that came during the wait is raised behind it; gloo's would then wait for a second message.
        if self._failed is None and not (self._waited and self._work.is_completed()):
            self._waited = True
            try:
                self._work.wait() if at_most is None else self._work.wait(at_most)
            except RuntimeError as error:
                self._failed = error
        if self._failed is not None:
            raise _lost(self.what, self._failed) from self._failed
        self.arrived()
        self._work = None

    def finished(self) -> bool:
        """Whether it is known to be done; over gloo that is known of what was waited for."""
        return self._work is None or self._work.is_completed()


def _lost(what: str, error: Exception) -> PeerError:
    return PeerError(
        f"{what} failed: {error}. That rank died, or did not come to the same operation in time; look at the first "
        "error of the other ranks"
    )


HEADER = 12
"""Numbers that say what comes: a dtype, dimensions, their sizes."""
NOTHING = -1
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


class Sent:
    """What is under way to another rank, and stays as it is until then."""

    def __init__(self) -> None:
        self._messages: list[tuple[Message, Tensor]] = []

    def add(self, message: Message, x: Tensor) -> None:
        """One more."""
        self._messages.append((message, x))

    def wait(self) -> None:
        """Return when it is through. May be called again.

        Raises:
            PeerError: the peer did not take it.
        """
        while self._messages:
            self._messages[0][0].wait()
            self._messages.pop(0)

    def finished(self) -> bool:
        """Whether it is known to be through without waiting."""
        while self._messages and self._messages[0][0].finished():
            self._messages.pop(0)
        return not self._messages


# [Note: Messages that do not wait for each other]
# gloo finds a message by its tag. NCCL has no tags: between two ranks a communicator takes messages in the order in
# which both name them, and one that waits holds up what is behind it. Two ranks that both begin with a send, and
# receive then, would wait for each other for ever; so would a gradient behind an activation that is taken later. Hence
# each kind and each direction between two ranks (to a higher rank, to a lower one) has a communicator of its own: there
# one side only sends and the other only takes. That both name them in one order is the schedules' affair; it holds for
# each, and a test says so. What a rank waits for has been sent, or waits itself for something earlier in an order that
# comes to its end (simulate), never for room in a communicator.
#
# [Note: The first message]
# torch makes NCCL's communicator of two ranks when both name their first message in a group, and NCCL connects them
# then: until the peer comes to that message, too, a send holds the host. Ranks of which each sends before it receives,
# in a circle, would hold each other for ever. So who sends in such an order connects before: the same messages of one
# element, begun by all ranks in one order of all of them. The first of those that are left is the next one of both its
# ranks, so no circle can close; later messages hold no host. Only ranks that send each other something are connected,
# since each communicator takes time to make and tens of MB of a GPU's memory: all pairs of 8 ranks, in two lanes and
# both ways, would be 28 on each of them.
class Wire:
    """Tensors between the ranks of an axis (the stages of a pipeline, those that share sequences), in two lanes
    (activations and their gradients) that do not hold up each other. One thread uses it.

    Args:
        name: of the axis, for messages.
        lanes: over the same ranks: a communicator for each lane, or two, to higher ranks and to lower ones.
        device: where what is received lies.

    Attributes:
        traffic: what this rank has sent.
    """

    def __init__(self, name: str, lanes: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._links = [Link(lane, name) for lane in lanes]
        self._ways, self._rank = len(lanes) // 2, lanes[0].rank()
        self._under_way: list[Sent] = []
        self._connected: set[tuple[int, int, int]] = set()
        self._formats: tuple[BlockFormat, ...] = ()
        self.device = device
        self.traffic = Traffic()

    def compressed(self) -> Wire:
        """The same wire, whose floating-point messages are in 8 bits: activations, in the first lane, in e4m3, their
        gradients, in the second, in e5m2. What cannot be written so (fp64, numbers of tokens) travels as it is."""
        twin = copy.copy(self)  # what is under way is that of both
        twin._formats = (VALUES, GRADIENTS)
        return twin

    def connect(self, messages: Iterable[tuple[int, int, int]]) -> None:
        """Have messages hold no host of a rank from here on until its peer comes to them, as the first one does over a
        device's library (see [Note: The first message]); nothing to do over gloo, or a second time.

        Both ranks of a message give it, and what several ranks give at once they all give at once: before the first of
        these messages is begun.

        Args:
            messages: a sender, a receiver and a lane; those of other ranks are passed over.

        Raises:
            PeerError: a peer did not come.
        """
        if self._ways == 1:
            return
        what = "the first message"
        for message in sorted({*messages} - self._connected):
            sender, receiver, lane = message
            if sender == self._rank:
                self.send(torch.zeros(1, dtype=torch.uint8, device=self.device), receiver, lane, 0, what)
            elif receiver == self._rank:
                self.receive((torch.Size([1]), torch.uint8), sender, lane, 0, what)
            self._connected.add(message)

    def send(self, x: Tensor, peer: int, lane: int, tag: int, what: str, described: bool = False) -> Sent:
        """Start to send; ``x`` is kept until it is through.

        Args:
            x: any shape and dtype; the peer must know both, unless it is ``described``.
            peer: its rank in the pipeline.
            lane: 0 or 1.
            tag: of messages to that peer in that lane that are under way, this one alone has it; at most 2^30.
            what: for errors.
            described: its dtype and shape go first.
        """
        self._under_way[:] = [each for each in self._under_way if not each.finished()]
        x, sent = x.detach().contiguous(), Sent()
        self._under_way.append(sent)
        if described:
            self._describe(sent, _header(x), peer, lane, tag, what)
        format_ = self._format(x.shape, x.dtype, lane)
        self._start(sent, x if format_ is None else format_.write(x.view(1, -1)), peer, lane, tag, what)
        return sent

    def _format(self, shape: torch.Size, dtype: torch.dtype, lane: int) -> BlockFormat | None:
        fits = bool(self._formats) and self._formats[lane].takes(dtype) and shape.numel() > 0
        return self._formats[lane] if fits else None

    def send_nothing(self, peer: int, lane: int, tag: int, what: str) -> None:
        """To a peer that waits for the description of ``what``: there will be none."""
        self._under_way.append(Sent())
        self._describe(self._under_way[-1], torch.full((HEADER,), NOTHING, device="cpu"), peer, lane, tag, what)

    def _describe(self, sent: Sent, header: Tensor, peer: int, lane: int, tag: int, what: str) -> None:
        self._start(sent, header.to(self.device), peer, lane, tag + (1 << 30), f"the shape of {what}")

    def _start(self, sent: Sent, x: Tensor, peer: int, lane: int, tag: int, what: str) -> None:
        self.traffic.add("send", x.nbytes)
        link = self._link(lane, peer > self._rank)
        sent.add(link.send(x.view(-1), peer, tag, what), x)

    def _link(self, lane: int, upwards: bool) -> Link:
        return self._links[lane * self._ways + (upwards and self._ways > 1)]

    def receive(self, like: tuple[torch.Size, torch.dtype], peer: int, lane: int, tag: int, what: str) -> Tensor:
        """What ``peer`` sends with ``tag``.

        Args:
            like: shape and dtype.
            peer, lane, tag, what: as for :meth:`send`.

        Raises:
            PeerError: it did not come.
        """
        x = torch.empty(like[0], dtype=like[1], device=self.device)
        self.begin_receive(x, peer, lane, tag, what).wait()
        return x

    def begin_receive(self, x: Tensor, peer: int, lane: int, tag: int, what: str) -> Message:
        """Start to receive into ``x`` (contiguous); it is there when the message was waited for.

        Args:
            x: of the shape and dtype that the peer sends.
            peer, lane, tag, what: as for :meth:`send`.
        """
        link, format_ = self._link(lane, peer < self._rank), self._format(x.shape, x.dtype, lane)
        if format_ is None:
            return link.receive(x.view(-1), peer, tag, what)
        written = torch.empty(format_.row_bytes(x.numel()), dtype=torch.uint8, device=self.device)
        message = link.receive(written, peer, tag, what)
        message.arrived = partial(format_.read, written.view(1, -1), x.view(1, -1))
        return message

    def receive_described(self, peer: int, lane: int, tag: int, what: str) -> Tensor | None:
        """As :meth:`receive` of what is described; ``None`` where there is nothing (:meth:`send_nothing`)."""
        header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        self._link(lane, peer < self._rank).receive(header, peer, tag + (1 << 30), f"the shape of {what}").wait()
        like = _described(header)
        return None if like is None else self.receive(like, peer, lane, tag, what)

    def settle(self) -> None:
        """Return when all that was sent is through.

        Raises:
            PeerError: a peer did not take it.
        """
        while self._under_way:
            self._under_way[0].wait()
            self._under_way.pop(0)

    def forget(self) -> None:
        """What is under way is nobody's any more: the ranks have lost each other."""
        self._under_way.clear()


def check_sent(x: Tensor) -> None:
    """Raises:
    TypeError: its dtype is none that can be sent.
    ValueError: it has too many dimensions.
    """
    if x.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"a tensor of {x.dtype} between stages: one of {names} can be sent (torch.view_as_real)")
    if x.dim() > HEADER - 2:
        raise ValueError(f"a tensor of {x.dim()} dimensions between stages: at most {HEADER - 2} can be sent")


def _header(x: Tensor) -> Tensor:
    check_sent(x)
    numbers = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), device="cpu")


def _described(header: Tensor) -> tuple[torch.Size, torch.dtype] | None:
    kind, dims, *sizes = header.tolist()
    if kind == NOTHING:
        return None
    return torch.Size(sizes[:dims]), _DTYPES[kind]
