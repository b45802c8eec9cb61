"""What ranks are doing, in words, for the errors of those that wait for them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from shardwise.interrupts import deferred_interrupts
from shardwise.torch_internals import default_store

__all__ = ["Activity"]

# Keys of the store are shared with torch's own.
KEY = "shardwise/doing/"
ANSWER_S = 5.0


class Activity:
    """Of this rank, in calls that every rank has to make and few do often: saving, loading, taking a state.

    What begins and ends is told to the store that the ranks met through, so that a rank that waits in vain can say what
    the others were doing. Where there is none, or it is gone, nothing is told.
    """

    def __init__(self) -> None:
        self._inside: list[tuple[str, str]] = []
        self._last = ""
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

    @contextlib.contextmanager
    def doing(self, what: str, advice: str = "") -> Iterator[None]:
        """Inside the block this rank does ``what`` ("saving checkpoint 'x'"). Ctrl-C waits for its end."""
        with deferred_interrupts(what):
            self._inside.append((what, advice))
            self._tell()
            try:
                yield
            finally:
                self._inside.pop()
                if not self._inside:
                    self._last = what
                self._tell()

    def gave_up(self, what: str) -> None:
        """This rank waited in vain in ``what``, and will not come to anything else."""
        self._publish([f"{what} (where it gave up)", ""])

    def around(self, ranks: Sequence[int]) -> str:
        """What this rank is doing and what the world's ``ranks`` were last known to do; empty where that is nothing."""
        told = {rank: "" for rank in ranks if rank != self.rank}
        if not self._ask(told):
            silent = "the store that the ranks met through, on the host of rank 0, does not answer either"
            return f"rank {self.rank} is in: {self.now or 'training'}; {silent}"
        if not self._inside and not any(told.values()):
            return ""
        others = "; ".join(f"rank {rank} {text or 'has made no such call'}" for rank, text in told.items())
        return f"rank {self.rank} is in: {self.now or 'training'}; {others}"

    def _tell(self) -> None:
        if len(self._inside) <= 1:  # what is inside of another is not told: each takes a message to the store
            self._publish([self._inside[0][0] if self._inside else "", self._last])

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
    for rank in found:
        told: list[str] = ["", ""]
        with contextlib.suppress(Exception):
            if store.check([f"{KEY}{rank}"]):
                told = json.loads(store.get(f"{KEY}{rank}"))
        if told[0]:
            found[rank] = f"is in: {told[0]}"
        elif told[1]:
            found[rank] = f"is in no such call, its last was: {told[1]}"


def _answering(store: Any) -> Any:
    """``store``, if to ask it ends also when ranks die; otherwise ``None``.

    A file of which a killed rank has written half a record is read for ever, whatever the time-out.
    """
    kept = store
    while isinstance(kept, PrefixStore):
        kept = kept.underlying_store
    return None if isinstance(kept, FileStore) else store
