"""Point-to-point messages between ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.base.device import copy_ahead, page_locked
from shardwise.core.comm.block_formats import GRADIENTS, VALUES, BlockFormat
from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.traffic import Traffic

# gloo takes non-negative 32-bit tags. A part of each tag is the buffer's number, so that messages of other buffers (of
# another model) from ranks out of sync never match. Operations half a million apart are never in flight at once.
TAG_RANGE, BUFFER_RANGE = 1 << 19, 1 << 10


class Link:
    """Sends and receives over one communicator, with a tag per operation."""

    def __init__(self, process_group: dist.ProcessGroup, name: str) -> None:
        self.process_group = process_group
        self._name = name
        self._count = 0

    def tag(self, buffer: int) -> int:
        """Return an unused tag for an operation on buffer number ``buffer``; the same on every rank."""
        self._count = (self._count + 1) % TAG_RANGE
        return self._count + buffer % BUFFER_RANGE * TAG_RANGE

    def send(self, tensor: Tensor, peer: int, tag: int, what: str) -> Message:
        """Start to send; ``tensor`` must not change until the message is done."""
        return self._start(dist.isend, tensor, peer, tag, f"{what}: sending to rank {peer}")

    def receive(self, tensor: Tensor, peer: int, tag: int, what: str) -> Message:
        """Start to receive into ``tensor``."""
        return self._start(dist.irecv, tensor, peer, tag, f"{what}: receiving from rank {peer}")

    def _start(self, start: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int, what: str) -> Message:
        keyword = "group_dst" if start is dist.isend else "group_src"
        what = f"{what} of group {self._name!r}"
        try:
            return Message(start(tensor, group=self.process_group, tag=tag, **{keyword: peer}), what)
        except RuntimeError as error:
            raise _lost(what, error) from error


class Message:
    """A started message. ``wait`` is idempotent, and drops the operation.

    Attributes:
        what: description of the data, for error messages.
        arrived: called in order when the message is there; again by the next wait after an interrupt.
    """

    def __init__(self, work: dist.Work | None, what: str) -> None:
        self._work = work
        self._failed: RuntimeError | None = None
        self._waited = False
        self.what = what
        self.arrived = list[Callable[[], object]]()

    def wait(self, at_most: timedelta | None = None) -> None:
        """Return when the message is complete.

        Args:
            at_most: timeout instead of the communicator's.
        """
        if self._work is None:
            return
        # An interrupt during the wait is raised after it; a second wait of gloo would wait for a second message.
        if self._failed is None and not (self._waited and self._work.is_completed()):
            self._waited = True
            try:
                self._work.wait() if at_most is None else self._work.wait(at_most)
            except RuntimeError as error:
                self._failed = error
        if self._failed is not None:
            raise _lost(self.what, self._failed) from self._failed
        for each in self.arrived:
            each()
        self._work = None

    def finished(self) -> bool:
        """Return whether the message is known to be done. gloo knows that only of messages that were waited for."""
        return self._work is None or self._work.is_completed()


def _lost(what: str, error: Exception) -> PeerError:
    return PeerError(
        f"{what} failed: {error}. That rank died, or did not come to the same operation in time; look at the first "
        "error of the other ranks"
    )


HEADER = 12
"""Numbers of a header: dtype, number of dimensions, sizes."""
NOTHING = -1
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


class SendHandle:
    """The handle of a send, which keeps its tensors alive."""

    def __init__(self) -> None:
        self._messages: list[tuple[Message, Tensor]] = []

    def add(self, message: Message, x: Tensor) -> None:
        """Add a message and its tensor."""
        self._messages.append((message, x))

    def wait(self) -> None:
        """Return when everything is sent. Idempotent.

        Raises:
            PeerError: the peer did not receive it.
        """
        while self._messages:
            self._messages[0][0].wait()
            self._messages.pop(0)

    def finished(self) -> bool:
        """Return whether everything is known to be sent, without waiting."""
        while self._messages and self._messages[0][0].finished():
            self._messages.pop(0)
        return not self._messages


# [Note: Messages that do not wait for each other]
# gloo matches messages by tags. NCCL has no tags: between two ranks, a communicator matches messages in the order in
# which both issue them, and one that waits blocks those after it. Two ranks that both send first and then receive
# would deadlock; so would a gradient after an activation that is received later. Therefore each kind and each direction
# between two ranks (to a higher rank, to a lower one) has a separate communicator, in which one side only sends and the
# other only receives. The schedules issue both sides in the same order, which a test checks. A message that a rank
# waits for has been sent, or waits for an earlier one in an order that terminates (simulate), never for capacity of a
# communicator.
#
# [Note: The first message]
# torch makes NCCL's communicator of two ranks at their first message in a group, and NCCL connects them then: a send
# blocks the host until the peer comes to that message. Ranks that all send before they receive, in a circle, would
# deadlock. So ranks that send in such an order connect first: by messages of one element, which all ranks issue in one
# global order. The first remaining message is the next one of both its ranks, so there is no circle; later messages do
# not block the host. Only ranks that send each other something are connected, since each communicator takes time and
# tens of MB of GPU memory: all pairs of 8 ranks, in two lanes and both directions, would be 28 per rank.
class P2PChannel:
    """Point-to-point channel between the ranks of an axis (pipeline stages, or ranks that share sequences).

    It has two independent lanes, for activations and for their gradients. For one thread.

    Args:
        name: name of the axis, for messages.
        groups: communicators over the same ranks: one for each lane, or two (to higher ranks, and to lower ones).
        device: device of received tensors.

    Attributes:
        traffic: counts of what this rank has sent.
    """

    def __init__(self, name: str, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._links = [Link(lane, name) for lane in groups]
        self._ways, self._rank = len(groups) // 2, groups[0].rank()
        self._under_way: list[SendHandle] = []
        self._connected: set[tuple[int, int, int]] = set()
        self._formats: tuple[BlockFormat, ...] = ()
        self.device = device
        # gloo sends host memory only: ranks that share a GPU send and receive copies in page-locked memory.
        self._copies = self._ways == 1 and device.type == "cuda"
        self.traffic = Traffic()

    def compressed(self) -> P2PChannel:
        """Return a channel that sends floating-point tensors in 8 bits: activations in e4m3, gradients in e5m2.

        Other dtypes (fp64, token ids) are sent unchanged.
        """
        twin = copy.copy(self)  # both share the messages in flight
        twin._formats = (VALUES, GRADIENTS)
        return twin

    def connect(self, messages: Iterable[tuple[int, int, int]]) -> None:
        """Connect ranks, so that later messages do not block the host; see [Note: The first message].

        Does nothing over gloo, or a second time. Both ranks of each message give it, all ranks at the same time, before
        the first of these messages is sent.

        Args:
            messages: sender, receiver and lane; those of other ranks are ignored.

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

    def send(self, x: Tensor, peer: int, lane: int, tag: int, what: str, described: bool = False) -> SendHandle:
        """Start to send; ``x`` is kept alive until it is sent.

        Args:
            x: any shape and dtype; the peer must know both, unless ``described``.
            peer: rank of the receiver on the axis.
            lane: 0 or 1.
            tag: unique among messages to that peer in that lane that are in flight; at most 2^30.
            what: description of the data, for error messages.
            described: send dtype and shape first.
        """
        self._under_way[:] = [each for each in self._under_way if not each.finished()]
        x, sent = x.detach().contiguous(), SendHandle()
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
        """Tell a peer that waits for the header of ``what`` that nothing will be sent."""
        self._under_way.append(SendHandle())
        self._describe(self._under_way[-1], torch.full((HEADER,), NOTHING, device="cpu"), peer, lane, tag, what)

    def _describe(self, sent: SendHandle, header: Tensor, peer: int, lane: int, tag: int, what: str) -> None:
        self._start(sent, header.to(self.device), peer, lane, tag + (1 << 30), f"the shape of {what}")

    def _start(self, sent: SendHandle, x: Tensor, peer: int, lane: int, tag: int, what: str) -> None:
        self.traffic.add("send", x.nbytes)
        if self._copies:
            x = page_locked(x.shape, x.dtype).copy_(x)  # the host waits
        sent.add(self._link(lane, peer > self._rank).send(x.view(-1), peer, tag, what), x)

    def _link(self, lane: int, upwards: bool) -> Link:
        return self._links[lane * self._ways + (upwards and self._ways > 1)]

    def receive(self, like: tuple[torch.Size, torch.dtype], peer: int, lane: int, tag: int, what: str) -> Tensor:
        """Receive what ``peer`` sends with ``tag``.

        Args:
            like: shape and dtype.
            peer, lane, tag, what: see :meth:`send`.

        Raises:
            PeerError: the peer did not send the tensor.
        """
        x = torch.empty(like[0], dtype=like[1], device=self.device)
        self.begin_receive(x, peer, lane, tag, what).wait()
        return x

    def begin_receive(self, x: Tensor, peer: int, lane: int, tag: int, what: str) -> Message:
        """Start to receive into ``x`` (contiguous), which is valid after the message's ``wait()``.

        Args:
            x: a tensor of the shape and dtype that the peer sends.
            peer, lane, tag, what: see :meth:`send`.
        """
        format_, sent = self._format(x.shape, x.dtype, lane), x
        if format_ is not None:
            sent = torch.empty(format_.row_bytes(x.numel()), dtype=torch.uint8, device=self.device)
        place = page_locked(sent.shape, sent.dtype) if self._copies else sent
        message = self._link(lane, peer < self._rank).receive(place.view(-1), peer, tag, what)
        if self._copies:
            message.arrived.append(partial(copy_ahead, sent, place))
        if format_ is not None:
            message.arrived.append(partial(format_.read, sent.view(1, -1), x.view(1, -1)))
        return message

    def exchange(self, x: Tensor, out: Tensor, sent: Sequence[int], came: Sequence[int], lane: int, what: str) -> None:
        """Send each rank its slice of ``x``, and receive each rank's slice of ``out``, both 1-D and contiguous.

        It is one operation in a communicator of all ranks: with messages, NCCL would make one for each pair.

        Args:
            x, out: input and output, of one dtype.
            sent, came: the sizes of the slices of ``x`` and of ``out``, by rank.
            lane, what: see :meth:`send`.

        Raises:
            PeerError: a rank did not come.
        """
        parts, places = torch.split(x, list(sent)), torch.split(out, list(came))
        format_ = self._format(x.shape, x.dtype, lane)
        if format_ is not None:
            written = [format_.write(part.view(1, -1)).view(-1) for part in parts]
            sizes = [format_.row_bytes(numel) for numel in came]
            read = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self.exchange(torch.cat(written), read, [each.numel() for each in written], sizes, lane, what)
            for place, row in zip(places, torch.split(read, sizes), strict=True):
                format_.read(row.view(1, -1), place.view(1, -1))
            places[self._rank].copy_(parts[self._rank])  # not rounded
            return
        self.traffic.add("send", x.nbytes - parts[self._rank].nbytes)
        work = dist.all_to_all_single(out, x, list(came), list(sent), self._links[0].process_group, async_op=True)
        Message(work, f"the exchange of {what}").wait()

    def receive_described(self, peer: int, lane: int, tag: int, what: str) -> Tensor | None:
        """Receive a described tensor; ``None`` after :meth:`send_nothing`."""
        header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        self.begin_receive(header, peer, lane, tag + (1 << 30), f"the shape of {what}").wait()
        like = _described(header)
        return None if like is None else self.receive(like, peer, lane, tag, what)

    def settle(self) -> None:
        """Return when all sends are done.

        Raises:
            PeerError: a peer did not receive one.
        """
        while self._under_way:
            self._under_way[0].wait()
            self._under_way.pop(0)

    def forget(self) -> None:
        """Drop all sends in flight, once the ranks are out of sync."""
        self._under_way.clear()


def check_sent(x: Tensor) -> None:
    """Raise TypeError for a dtype that cannot be sent, and ValueError for too many dimensions."""
    if x.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"a tensor of {x.dtype} between stages cannot be sent; use one of {names} (torch.view_as_real)")
    if x.dim() > HEADER - 2:
        raise ValueError(f"a tensor of {x.dim()} dimensions between stages cannot be sent; use at most {HEADER - 2}")


def _header(x: Tensor) -> Tensor:
    check_sent(x)
    numbers = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), device="cpu")


def _described(header: Tensor) -> tuple[torch.Size, torch.dtype] | None:
    kind, dims, *sizes = header.tolist()
    return None if kind == NOTHING else (torch.Size(sizes[:dims]), _DTYPES[kind])
