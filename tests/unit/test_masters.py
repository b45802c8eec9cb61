"""Sums that tell changes of a shard, whatever its size is to their blocks."""

from __future__ import annotations

import pytest
import torch

from shardwise.build import build
from shardwise.plan import zero
from shardwise.update.masters import BLOCK, _sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("extra", [-1, 0, 1, 7])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_each_element_counts(dtype: torch.dtype, blocks: int, extra: int) -> None:
    """Also where the blocks fill the shard, and where there is nothing at all."""
    numel = blocks * BLOCK * 8 // dtype.itemsize + extra
    if numel < 0:
        numel = 2
    shard = torch.arange(numel).to(dtype)
    before = _sums(shard)
    assert torch.equal(before, _sums(shard.clone()))
    for at in {0, numel // 2, numel - 1} if numel else ():
        changed = shard.clone()
        changed[at] += 1.0 + shard[at]
        assert not torch.equal(before, _sums(changed)), at


def test_shards_of_whole_blocks_train() -> None:
    """bf16 weights of 512 elements, one block: half of all sizes that are powers of two are whole blocks."""
    model = torch.nn.Linear(32, 16, bias=False)
    assert model.weight.numel() == 4 * BLOCK
    session = build(model, torch.optim.AdamW(model.parameters(), lr=0.01), zero(3, torch.bfloat16))
    losses = []
    for _ in range(3):
        loss = session.module(torch.ones(4, 32)).float().square().mean()
        session.backward(loss)
        assert session.optimizer is not None
        session.optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    session.close()
    session.mesh.close()
