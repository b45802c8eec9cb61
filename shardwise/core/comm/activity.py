"""What ranks are doing, in words, for the errors of those that wait for them."""

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

__all__ = ["Activity"]

# Keys of the store are shared with torch's own.
KEY = "shardwise/doing/"
ANSWER_S = 5.0
TELL_S = 2.0
"""Seconds between two times that a rank tells where its training is, unless it waits in vain."""
GRACE_S = 2.0
"""Seconds in which the others, who wait as long as this rank, come to give up as well."""


class Activity:
    """Of this rank: the calls that every rank has to make and few do often (saving, loading, taking a state), and where
    training is.

    What begins and ends is told to the store that the ranks met through, so that a rank that waits in vain can say what
    the others were doing. Where there is none, or it is gone, nothing is told.

    Args:
        limit_s: seconds that a rank waits for its peers in training before it gives up; ``None``: as long as its
            communicators do.

    Attributes:
        step: updates so far.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._inside: list[tuple[str, str]] = []
        self._last = ""
        self._place: tuple[int, str, str, Callable[[int], str], int] | None = None
        self._told_at, self.step = 0.0, 0
        self._met = set[str]()  # groups
        self._store: Any = None
        self.rank = 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            with contextlib.suppress(Exception):  # a backend may do without one
                self._store = _answering(default_store())

    @property
    def now(self) -> str:
        """What this rank is doing, the outermost first; empty where it is nothing of the kind."""
        return ", ".join(dict.fromkeys(what for what, _ in self._inside))

    @property
    def advice(self) -> str:
        """What was given with it, for ranks that do not meet in it."""
        return next((advice for _, advice in self._inside if advice), "")

    def limit(self, group: str) -> timedelta | None:
        """How long to wait for the peers of ``group`` now; ``None``: as long as the communicator does. That is so in
        calls that take one rank longer than others (a file, a disk), and at the first meeting of a pass: before it,
        a rank may have written a file or evaluated alone."""
        return self._limit if group in self._met and not self._inside else None

    def begin_pass(self) -> None:
        """A pass begins, perhaps later than on other ranks."""
        self._met.clear()

    def met(self, group: str) -> None:
        """This rank has waited for all of its peers in ``group``, and they came."""
        self._met.add(group)

    def at(self, phase: str, operation: str, name_of: Callable[[int], str], number: int) -> None:
        """In ``phase`` of a step this rank begins an ``operation`` on what ``name_of(number)`` says."""
        self._place = self.step, phase, operation, name_of, number
        now = time.monotonic()
        if now - self._told_at > TELL_S:
            self._told_at = now
            self._tell()

    @property
    def place(self) -> str:
        """Where training is, in words; empty before it has begun."""
        if self._place is None:
            return ""
        step, phase, operation, name_of, number = self._place
        return f"step {step}, {phase}, {operation} {name_of(number)}"

    @contextlib.contextmanager
    def doing(self, what: str, advice: str = "") -> Iterator[None]:
        """Inside the block this rank does ``what`` ("saving checkpoint 'x'"). Ctrl-C waits for its end."""
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
        """This rank waited in vain in ``what``, and will not come to anything else."""
        self._publish([f"{what} (where it gave up)", "", self.place])

    def around(self, ranks: Sequence[int]) -> str:
        """What this rank is doing and what the world's ``ranks`` were last known to do; empty where that is nothing."""
        told = {rank: "" for rank in ranks if rank != self.rank}
        own = f"rank {self.rank} is in: {self.now or self.place or 'training'}"
        if not self._ask(told):
            return f"{own}; the store that the ranks met through, on the host of rank 0, does not answer either"
        if not self._inside and not self._place and not any(told.values()):
            return ""
        others = "; ".join(f"rank {rank} {text or 'has made no such call'}" for rank, text in told.items())
        return f"{own}; {others}"

    def _tell(self) -> None:
        if len(self._inside) <= 1:  # what is inside of another is not told: each takes a message to the store
            self._publish([self._inside[0][0] if self._inside else "", self._last, self.place])

    def _publish(self, what: list[str]) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):
                # What is told is help for a message; a store that is gone must not become the error.
                self._store.set(f"{KEY}{self.rank}", json.dumps(what))

    def _ask(self, told: dict[int, str]) -> bool:
        """Fill in what each rank has told. Whether the store answers: to wait for a host that is lost has no end."""
        store, found = self._store, dict(told)
        if store is None:
            return True
        asking = threading.Thread(target=_read, args=(store, found), daemon=True, name="shardwise-asking")
        asking.start()
        asking.join(ANSWER_S)
        if asking.is_alive():
            self._store = None  # the thread may hold it for good
            return False
        told.update(found)
        return True


def _read(store: Any, found: dict[int, str]) -> None:
    until = time.monotonic() + GRACE_S
    for rank in found:
        told = ["", "", ""]
        with contextlib.suppress(Exception):
            while store.check([f"{KEY}{rank}"]):
                told = json.loads(store.get(f"{KEY}{rank}"))
                if told[0] or time.monotonic() > until:
                    break
                time.sleep(GRACE_S / 30)
        call, last, place = told
        if call:
            found[rank] = f"is in: {call}{f', at {place}' if place else ''}"
        elif place or last:
            calls = f"is in no such call, its last was: {last}" if last else ""
            found[rank] = ", and ".join(filter(None, [calls, f"was last at {place}" if place else ""]))


def _answering(store: Any) -> Any:
    """``store``, if to ask it ends also when ranks die; otherwise ``None``.

    A file of which a killed rank has written half a record is read for ever, whatever the time-out.
    """
    kept = store
    while isinstance(kept, PrefixStore):
        kept = kept.underlying_store
    return None if isinstance(kept, FileStore) else store
