"""What messages over gloo need: threads that wait for them and go on with them, and memory that they arrive in."""

from __future__ import annotations

import queue
import threading
import weakref

import torch
from torch import Tensor

from shardwise.comm.errors import PeerError
from shardwise.comm.link import Message
from shardwise.modes import ordinary_tensors

__all__ = ["Batch", "Scratch", "Watcher"]


class Scratch:
    """Receive buffers, kept between operations because fresh pages cost as much as the transfer."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements of ``dtype``: the smallest kept buffer that is large enough, or a new one."""
        nbytes = numel * dtype.itemsize
        fitting = [index for index, kept in enumerate(self._free) if kept.numel() >= nbytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        else:
            if self._free:
                # Grow by replacing, so that mixed sizes do not pile up.
                self._free.pop(min(range(len(self._free)), key=lambda index: self._free[index].numel()))
            with ordinary_tensors():
                block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return block[:nbytes].view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Return what :meth:`take` gave."""
        with ordinary_tensors():
            self._free.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()))


# [Note: Who waits for a message]
# gloo tells whether a message is through only to who waits for it, and a wait holds up its thread. A rank in backward
# wants to ask and go on. So the first question (``finished``) gives the batch to a thread that waits, and the answer is
# an event from then on. A batch has one waiter: who comes first takes it, so a user that needs it now does not queue
# behind others in the thread. Gathers and reductions have a thread each, since a reduction may be late for reasons that
# gathers know nothing of. These threads touch messages and nothing else; sums are made in the thread that asks, in the
# order in which reductions began.
class Watcher:
    """One thread that waits for what it is given, one after the other, from the first time on.

    A thread for each would have to be started, and torch keeps 150 bytes for every thread that ever waited.
    """

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.close = weakref.finalize(self, self._batches.put, None)
        """Ends the thread; so does the loss of the last reference to this."""
        self.close.atexit = False

    def watch(self, batch: Batch) -> None:
        """Wait for ``batch`` once the thread comes to it, unless somebody else does by then."""
        self._batches.put(batch)
        if self._thread is None:
            self._thread = threading.Thread(target=_wait_for_each, args=[self._batches], daemon=True)
            self._thread.name = "shardwise-gloo-watcher"
        if self._thread.ident is None:  # also where an interrupt came before it was started
            self._thread.start()


def _wait_for_each(batches: queue.SimpleQueue[Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.wait_unless_taken()
        del batch  # the next may be long in coming


class Batch:
    """Messages that are waited for together. As a handle, an all-gather is done when they are.

    Whoever waits first takes it: its user in ``wait()``, or the watcher after the user has asked whether it is
    finished. So no user waits for a batch that the watcher has not come to.
    """

    def __init__(self, messages: list[Message], watcher: Watcher) -> None:
        self._messages = messages
        self._watcher: Watcher | None = watcher
        self._taker: dict[str, object] = {}
        self._done = threading.Event()
        self._error: PeerError | None = None

    def wait(self) -> None:
        if self._messages:
            self.wait_unless_taken()
            self._done.wait()
        if self._error is not None:
            raise self._error

    def finished(self) -> bool:
        """Whether all messages are through (or lost, which ``wait`` tells). A point-to-point operation of gloo knows
        that only from its own ``wait``, so after the first question the watcher waits."""
        if self._messages and self._watcher is not None:
            self._watcher.watch(self)
        self._watcher = None
        return not self._messages or self._done.is_set()

    def wait_unless_taken(self) -> None:
        """Wait for the messages, unless another thread does."""
        me = object()
        try:
            # One operation of the dictionary, so that two threads cannot both be first.
            if self._taker.setdefault("is", me) is not me:
                return
            for message in self._messages:
                message.wait()
            self._messages = []
        except PeerError as error:
            self._error = error
        except BaseException:  # an interrupt: it can be waited for again
            if self._taker.get("is") is me:
                self._taker.clear()
            raise
        self._done.set()
