"""The current activity of each rank, in words, for error messages of ranks that wait for it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.torch_internals import default_store

# The store is shared with torch's own keys.
KEY = "shardwise/doing/"
ANSWER_S = 5.0
TELL_S = 2.0
"""Seconds between two reports of a rank's position in training."""
GRACE_S = 2.0
"""Seconds in which the other ranks, which wait as long as this one, also give up."""


class Activity:
    """The activity of this rank: rare collective calls (saving, loading, taking a state), and where training is.

    Beginnings and ends are published in the rendezvous store, so that a rank whose wait times out can report what the
    others were doing. Without a store nothing is published.

    Args:
        limit_s: seconds that a rank waits for its peers in training; ``None``: the communicators' timeouts.

    Attributes:
        step: updates so far.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._inside: list[tuple[str, str]] = []
        self._last = ""
        self._place: tuple[int, str, str, Callable[[int], str], int] | None = None
        self._published_at, self.step = 0.0, 0
        self._met = set[str]()  # groups
        self._store: Any = None
        self.rank = 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            with contextlib.suppress(Exception):  # a backend may have none
                self._store = _answering(default_store())

    @property
    def now(self) -> str:
        """The collective calls that this rank is in, outermost first; empty outside any call."""
        return ", ".join(dict.fromkeys(what for what, _ in self._inside))

    @property
    def advice(self) -> str:
        """The advice of the outermost call that has one, for ranks that are out of sync."""
        return next((advice for _, advice in self._inside if advice), "")

    def limit(self, group: str) -> timedelta | None:
        """Return how long to wait for the peers of ``group``. ``None`` is the timeout of the communicator.

        ``None`` applies in calls that may take one rank longer than others (a file, a disk), and at the first exchange
        of a pass, before which a single rank may have written a file or run an evaluation.
        """
        return self._limit if group in self._met and not self._inside else None

    def begin_pass(self) -> None:
        """Note that a pass begins, perhaps later than on other ranks."""
        self._met.clear()

    def met(self, group: str) -> None:
        """Note that all peers in ``group`` have come."""
        self._met.add(group)

    def at(self, phase: str, operation: str, name_of: Callable[[int], str], number: int) -> None:
        """Note that this rank begins an ``operation`` on ``name_of(number)`` in a ``phase`` of a step."""
        self._place = self.step, phase, operation, name_of, number
        now = time.monotonic()
        if now - self._published_at > TELL_S:
            self._published_at = now
            self._tell()

    @property
    def place(self) -> str:
        """The position in training, in words; empty before training has begun."""
        if self._place is None:
            return ""
        step, phase, operation, name_of, number = self._place
        return f"step {step}, {phase}, {operation} {name_of(number)}"

    @contextlib.contextmanager
    def doing(self, what: str, advice: str = "") -> Iterator[None]:
        """Publish that this rank does ``what`` ("saving checkpoint 'x'") inside the block, and defer Ctrl-C to its
        end."""
        with deferred_interrupts(what):
            try:
                self._inside.append((what, advice))
                self._tell()
                yield
            finally:
                self._inside.pop()
                if not self._inside:
                    self._last = what
                self._tell()

    def gave_up(self, what: str) -> None:
        """Publish that this rank's wait in ``what`` timed out."""
        self._publish([f"{what} (where it gave up)", "", self.place])

    def around(self, ranks: Sequence[int]) -> str:
        """Return this rank's activity and the last known activity of global ``ranks``; empty if nothing is known."""
        calls = {rank: "" for rank in ranks if rank != self.rank}
        own = f"rank {self.rank} is in: {self.now or self.place or 'training'}"
        if not self._ask(calls):
            return f"{own}; the rendezvous store on the host of rank 0 does not answer either"
        if not self._inside and not self._place and not any(calls.values()):
            return ""
        return "; ".join([own, *(f"rank {rank} {text or 'has made no such call'}" for rank, text in calls.items())])

    def _tell(self) -> None:
        if len(self._inside) <= 1:  # nested calls are not published: each would be a message to the store
            self._publish([self._inside[0][0] if self._inside else "", self._last, self.place])

    def _publish(self, what: list[str]) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):
                # This only helps error messages; a lost store must not become the error.
                self._store.set(f"{KEY}{self.rank}", json.dumps(what))

    def _ask(self, calls: dict[int, str]) -> bool:
        """Fill in what each rank has published; return whether the store answers, since a lost host never does."""
        store, replies = self._store, dict(calls)
        if store is None:
            return True
        asking = threading.Thread(target=_read, args=(store, replies), daemon=True, name="shardwise-asking")
        asking.start()
        asking.join(ANSWER_S)
        if asking.is_alive():
            self._store = None  # the thread may keep the lock forever
            return False
        calls.update(replies)
        return True


def _read(store: Any, replies: dict[int, str]) -> None:
    until = time.monotonic() + GRACE_S
    for rank in replies:
        record = ["", "", ""]
        with contextlib.suppress(Exception):
            while store.check([f"{KEY}{rank}"]):
                record = json.loads(store.get(f"{KEY}{rank}"))
                if record[0] or time.monotonic() > until:
                    break
                time.sleep(GRACE_S / 30)
        call, last, place = record
        if call:
            replies[rank] = f"is in: {call}{f', at {place}' if place else ''}"
        elif place or last:
            calls = f"is in no such call, its last was: {last}" if last else ""
            replies[rank] = ", and ".join(filter(None, [calls, f"last reported {place}" if place else ""]))


def _answering(store: Any) -> Any:
    """Return ``store`` if reads end when ranks die, otherwise ``None``.

    A FileStore in which a killed rank has written half a record is read forever, regardless of the timeout.
    """
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return None if isinstance(inner, FileStore) else store
