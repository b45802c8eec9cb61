"""``datasets``, mapped and streamed, split over two ranks in every supported way.

Every row is read once, and training equals a plain loop over the ranks' rows (fp32, within 1e-6).
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.plan import zero
from shardwise.testing import assert_close
from tests.support.huggingface_setup import launched, quiet
from tests.support.on_ranks import everywhere, on_ranks
from tests.support.sets import full

pytest.importorskip("datasets", reason="pip install 'shardwise[trl]'")
pytest.importorskip("accelerate")

ROWS, BATCH, STEPS, RANKS = 16, 4, 2, 2
WAYS = ["streamed", *full("mapped", "sampler", "streamed by node")]


def rows() -> Any:
    import datasets

    datasets.disable_progress_bars()
    values = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    made = [{"row": row, "x": one.tolist()[:3], "y": one.tolist()[3:]} for row, one in enumerate(values)]
    return datasets.Dataset.from_list(made).map(lambda row: {"y": [2 * row["y"][0]]}).with_format("torch")


def loader(way: str, rank: int) -> Any:
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader, DistributedSampler

    data = rows()
    if way == "sampler":
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, RANKS, rank, shuffle=True, seed=3))
    if way.startswith("streamed"):
        data = data.to_iterable_dataset(num_shards=RANKS).shuffle(seed=3, buffer_size=4)
    return DataLoader(split_dataset_by_node(data, rank, RANKS) if way.endswith("by node") else data, BATCH)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


@on_ranks(RANKS, timeout=200.0)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_split_and_train_as_in_one_process(way: str) -> None:
    from shardwise.huggingface import ShardwiseAccelerator

    model, plain, data, seen = net(), net(), rows()[:], []
    optimizer, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    batches = loader(way, dist.get_rank())
    with launched(), quiet():
        accelerator: Any = ShardwiseAccelerator(plan=zero(3), cpu=True)
        module, step = accelerator.prepare(model, optimizer)
        for batch in batches if way in ("sampler", "streamed by node") else accelerator.prepare(batches):
            loss = nn.functional.mse_loss(module(batch["x"]), batch["y"])
            accelerator.backward(loss)
            step.step()
            step.zero_grad()
            together = everywhere((batch["row"].tolist(), loss.item()))
            seen.append([row for own, _ in together for row in own])
            expected = nn.functional.mse_loss(plain(data["x"][seen[-1]]), data["y"][seen[-1]])
            assert expected.item() == pytest.approx(sum(each for _, each in together) / RANKS, rel=1e-6)
            theirs.zero_grad()
            expected.backward()
            theirs.step()
        assert_close(module.state_dict(), plain.state_dict(), 1e-6, way)
        accelerator.close()
    assert sorted(row for step in seen for row in step) == list(range(ROWS)) and len(seen) == STEPS
