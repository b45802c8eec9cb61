"""Threads of one rank that use one model change what is gathered one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from shardwise.core.base.interrupts import deferred_interrupts

__all__ = ["in_turn"]


# [Note: Which thread touches what]
# The caller's thread, and autograd's where backward runs in one (on a GPU), change what is gathered, take gradients and
# make steps. Threads of the user's own may run the same model beside it, to evaluate. So whatever changes residency
# (who is gathered, pinned, fetched ahead) holds ChunkPool.lock from beginning to end, its exchange with the peers
# included: two threads' rounds that came in pieces would be answered with each other's. The lock is re-entrant, because
# to make room in a gather the ledger calls back into the pool (drop_idle). What a thread's running modules pin is its
# own (hooks._Running). Under a declared capacity a second thread is an error (shards/meter.py): what operations
# allocate is counted for one.
# * shardwise-update          masters, state, new parameters; see [Note: Updates during backward]
# * shardwise-disk            requests and checksums; shardwise-disk-io reads and writes; see [Note: Threads of a store]
# * shardwise-gloo-worker     messages, nothing else; see [Note: Who waits for a message]
# The first of these never takes the lock, and nothing that holds the lock waits for it.
class _HasLock(Protocol):
    @property
    def lock(self) -> threading.RLock: ...


Self = TypeVar("Self", bound=_HasLock)
Args = ParamSpec("Args")
Result = TypeVar("Result")


def in_turn(method: Callable[Concatenate[Self, Args], Result]) -> Callable[Concatenate[Self, Args], Result]:
    """A method that holds its object's ``lock`` while it runs, and whose end Ctrl-C waits for."""

    @wraps(method)
    def locked(self: Self, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with self.lock, deferred_interrupts("a gather"):
            return method(self, *args, **kwargs)

    return locked
