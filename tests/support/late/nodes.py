"""Streams of autograd's nodes: backward runs each node on the stream that was current when forward created it."""

from bisect import bisect_right
from typing import Any

import torch

from shardwise.core.base.torch_internals import current_node
from tests.support.late.streams import Stream

LEAF = "torch::autograd::AccumulateGrad"


# As in torch's engine: the streams of the nodes that consume a node's output wait for it, and no others do. A leaf's
# node is created where its parameter is used first; here it has the stream of the last node that gives it a gradient,
# which is the same for a parameter with one use. Between nodes (sums of gradients, callbacks at the end) all streams
# wait for each other, which is more than in torch's engine.
class NodeStreams:
    """The streams that were current while forward created nodes.

    Args:
        first: the stream at the beginning.
    """

    def __init__(self, first: Stream) -> None:
        self._since, self._streams, self._made = [0], [first], set[Stream]()
        self._running: tuple[Any, Stream] | None = None
        self._used: dict[Stream, None] = {}

    def go_to(self, stream: Stream) -> None:
        """Change the program's stream to ``stream``."""
        number = torch._C._autograd._get_sequence_nr()
        if number > self._since[-1]:
            self._made.add(self._streams[-1])
        self._since.append(number)
        self._streams.append(stream)

    def current(self) -> Stream:
        """Return the stream of the node that runs in this thread of autograd, or the program's between nodes."""
        node, before, now = current_node(), self._running, self._streams[-1]
        if node is None:
            self.between()
            return now
        if before is not None and before[0] is node:
            return before[1]
        stream = self._of(node, now if before is None else before[1])
        self._made.add(now)
        if before is None:
            stream.wait_stream(now)
        elif len(self._made) > 1:
            self._finish(*before)
        self._running, self._used[stream] = (node, stream), None
        return stream

    def crossed(self, current: Stream) -> bool:
        """Return whether the node of ``current`` is not on the first stream: autograd then records its inputs for
        it."""
        return self._running is not None and self._running[1] is current is not self._streams[0]

    def between(self) -> None:
        """Let the program's stream wait for those of nodes, when no node runs."""
        if self._running is not None:
            for stream in self._used:
                self._streams[-1].wait_stream(stream)
            self._running = None
            self._used.clear()

    def _of(self, node: Any, leafs: Stream) -> Stream:
        if node.name() == LEAF:
            return leafs
        return self._streams[bisect_right(self._since, node._sequence_nr()) - 1]

    def _finish(self, node: Any, stream: Stream) -> None:
        """Let the streams of the following nodes wait; some of them do no work, so those after them count as well."""
        made, seen, following = stream.record_event(), {node}, [node]
        while following:
            for each, _ in following.pop().next_functions:
                if each is not None and each not in seen:
                    seen.add(each)
                    if (other := self._of(each, stream)) is stream:
                        following.append(each)
                    other.wait_event(made)
