"""Tiers with one fault each, made inside the ranks by replacing a part of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from shardwise.core.comm import DONE
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.pool import ChunkPool
from shardwise.core.update.early import EarlyUpdates
from tests.parity.covering import Row
from tests.parity.sharded import Setting
from tests.parity.tiers import TierRun, train_tiers


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _not_written(word: str) -> Callable[[], Any]:
    """Records whose name begins with ``word`` stay as they were after the second write."""

    def patch() -> Any:
        writes: dict[str, int] = {}

        def make(real: Any) -> Any:
            def write(self: DiskStore, record: Any, buffer: torch.Tensor) -> Any:
                writes[record.name] = writes.get(record.name, 0) + 1
                return DONE if record.name.startswith(word) and writes[record.name] > 2 else real(self, record, buffer)

            return write

        return _wrap(DiskStore, "write", make)

    return patch


def _host_gradients_not_added() -> Any:
    """Only the last backward pass counts for gradients that are at home on the host."""

    def make(real: Any) -> Any:
        def complete(self: Reducer, state: ChunkGrads) -> None:
            if state.home is Tier.HOST:
                state.reduced = None
            real(self, state)

        return complete

    return _wrap(Reducer, "_complete", make)


def _early_parameters_not_taken_over() -> Any:
    """Parameters stay as before an update during backward whose state is on the disk."""
    return mock.patch.object(EarlyUpdates, "take_over", lambda self, chunks: None)


def _late_renewal_forgotten() -> Any:
    """Parameters that are to be renewed at their first use never are."""

    def renew_later(self: ChunkPool, chunk: Any, pending: Any) -> None:
        pass

    return mock.patch.object(ChunkPool, "renew_later", renew_later)


@dataclass(frozen=True)
class Fault:
    """``patch`` makes it; ``shown_by`` is a mix of tiers and a part of a row under which it must be noticed."""

    patch: Callable[[], Any]
    shown_by: tuple[str, Row]
    steps: int = 4


FAULTS: dict[str, Fault] = {
    "state_not_written": Fault(_not_written("optimizer state"), ("s_disk", {})),
    "host_gradients_not_added": Fault(_host_gradients_not_added, ("s_host", {"micro": "3x"})),
    "early_parameters_not_taken_over": Fault(_early_parameters_not_taken_over, ("s_disk", {"update": "backward"}), 2),
    "late_renewal_forgotten": Fault(_late_renewal_forgotten, ("s_host", {"order": "on_use"}), 2),
}


def train_faulty(fault: str, settings: Sequence[Setting]) -> list[TierRun]:
    """Runs on every rank of a pool: trainings with one fault. Nothing of it stays."""
    with FAULTS[fault].patch():
        return train_tiers(settings)
