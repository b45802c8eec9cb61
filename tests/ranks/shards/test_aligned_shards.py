"""Shards that begin at multiples of 64 bytes on every rank, for three ranks and odd sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.core.checkpoint import Checkpointer
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import adam, check, mean_square, run_plain, run_sharded, seeded, sharded

RANKS = 3


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 77), nn.Tanh(), nn.Linear(77, 31), nn.Tanh(), nn.Linear(31, 3))


def once(model: nn.Module, rank: int, step: int):  # type: ignore[no-untyped-def]
    yield mean_square(model, rank, step), False


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_plain_torchs(stage: int) -> None:
    plan = zero(stage).but(shared_memory=False if stage == 3 else None)
    check(run_ranks(RANKS, run_sharded, odd, once, plan, 3), run_plain(odd, once, RANKS, 3), f"stage {stage}")


def train_16_bits(plan: Plan, directory: str) -> tuple[list[int], list[int], int, int, dict[str, torch.Tensor]]:
    """Offsets and addresses of shards, bytes that a step reduces and that it should, and the saved state."""
    model = seeded(odd).float()
    with sharded(model, adam(model), plan) as session:
        for step in range(2):
            session.reset_traffic()
            session.backward(mean_square(lambda x: session.module(x.bfloat16()).float(), session.mesh.rank, step))
            session.optimizer.step()
        chunks, size = session.engine.shards.chunks, session.mesh.size
        large = [chunk for chunk in chunks if chunk.spec.padded_numel >= 16 * 32 * size]
        assert large
        starts = [start * each.spec.dtype.itemsize for each in large for start in each.spec.bounds]
        sent = sum(each.spec.padded_bytes * (size - 1) // size for each in chunks)
        Checkpointer(session).save(directory)
        found = session.traffic()["reduce_scatter"], sent
        return starts, [each.shard.data_ptr() for each in large], *found, session.module.state_dict()


def loaded(plan: Plan, directory: str) -> dict[str, torch.Tensor]:
    model = seeded(odd, 1).float()
    with sharded(model, adam(model), plan) as session:
        Checkpointer(session).load(directory)
        return session.module.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_in_16_bits(stage: int, tmp_path: Path) -> None:
    plan = zero(stage, torch.bfloat16).but(shared_memory=False)
    saved = run_ranks(RANKS, train_16_bits, plan, str(tmp_path / "saved"))
    for starts, addresses, sent, expected, _ in saved:
        assert not any(start % 64 for start in starts + addresses)
        assert sent == expected
    for state in run_ranks(2, loaded, plan, str(tmp_path / "saved")):
        assert_close(state, saved[0][-1], 0.0, "loaded by two ranks")
