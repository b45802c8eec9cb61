"""What a step gives to a disk first: tiles are read while forward runs, the last parameters written beside tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.update.disk_tiles import DiskTile
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import sharded
from tests.support.tier_setup import backward, make_net, small_tiles, with_tiers

TILE_READ, TILE_ENDED, LAYER_USED = "a tile is being read", "a tile's transfers are over", "a layer was used"
PARAMETERS = "parameters of chunk"


def events_of_a_step(plan: Plan) -> tuple[list[str], list[str], set[tuple[bool, bool]]]:
    """In forward and in ``step()``, where writes are the names of their records; and which reads are urgent."""
    events: list[str] = []
    reads: set[tuple[bool, bool]] = set()
    start, finish, read, write = DiskTile.start, DiskTile.finish, DiskStore.read, DiskStore.write

    def started(self: DiskTile) -> None:
        events.append(TILE_READ)
        start(self)

    def asked(self: DiskStore, record: Any, buffer: Any, **how: Any) -> Any:
        reads.add((record.name.startswith(PARAMETERS), how.get("urgent", False)))
        return read(self, record, buffer, **how)

    def written(self: DiskStore, record: Any, buffer: Any) -> Any:
        events.append(record.name)
        return write(self, record, buffer)

    def ended(self: DiskTile) -> None:
        events.append(TILE_ENDED)
        finish(self)

    model = make_net()
    model.blocks[0].register_forward_hook(lambda *_: events.append(LAYER_USED))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    # No tile is seen to be over before it must be, however fast the disk is.
    tiles = mock.patch.multiple(DiskTile, start=started, finish=ended, finished=lambda self: False)
    with small_tiles(), sharded(model, optimizer, plan) as session:
        backward(session, 0)
        session.optimizer.step()
        with tiles, mock.patch.multiple(DiskStore, read=asked, write=written):
            events.clear()
            backward(session, 1, passes=1)
            forward = events.copy()
            events.clear()
            session.optimizer.step()
    return forward, events, reads


def test_the_order_of_a_step(tmp_path: Path) -> None:
    ((forward, update, reads),) = run_ranks(1, events_of_a_step, with_tiers(zero(3), "all_disk", str(tmp_path)))
    assert forward.index(TILE_READ) < forward.index(LAYER_USED)
    last = max(index for index, event in enumerate(update) if event.startswith(PARAMETERS))
    assert TILE_ENDED in update[last:]
    assert reads == {(True, True), (False, False)}  # parameters, for which compute waits, and no others
