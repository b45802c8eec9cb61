"""``datasets``, mapped and streamed, divided over two ranks in each way that there is: every row once, and training on
them equals a plain loop over what the ranks had together (fp32, within 1e-6)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.plan import zero
from shardwise.testing import run_ranks
from tests.support.huggingface_setup import launched, quiet
from tests.support.sets import full

ROWS, BATCH, STEPS, RANKS = 16, 4, 2, 2
WAYS = [("mapped", "accelerate streamed"), *full((("sampler", "streamed", "accelerate mapped"),))]
Seen = tuple[list[list[int]], list[float], dict[str, Tensor]]


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
    if way.endswith("streamed"):
        data = data.to_iterable_dataset(num_shards=RANKS).shuffle(seed=3, buffer_size=4)
    return DataLoader(data if way.startswith("accelerate") else split_dataset_by_node(data, rank, RANKS), BATCH)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def on_rank(ways: tuple[str, ...]) -> list[Seen]:
    from shardwise.huggingface import ShardwiseAccelerator

    found: list[Seen] = []
    for way in ways:
        model, seen, losses = net(), [], []
        optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), loader(way, dist.get_rank())
        with launched(), quiet():
            if way.startswith("accelerate"):
                accelerator: Any = ShardwiseAccelerator(plan=zero(3), cpu=True)
                module, step, batches = accelerator.prepare(model, optimizer, batches)
                session, backward = accelerator.session_of(module), accelerator.backward
            else:
                session = shardwise.shard(model, optimizer, stage=3)
                module, step, backward = session.module, session.optimizer, session.backward
            for batch in batches:
                loss = nn.functional.mse_loss(module(batch["x"]), batch["y"])
                backward(loss)
                step.step()
                step.zero_grad()
                seen.append(batch["row"].tolist())
                losses.append(float(loss))
            found.append((seen, losses, session.module.state_dict()))
            session.close()
            session.mesh.close()
    return found


@pytest.mark.parametrize("ways", WAYS)
def test_rows_are_divided_and_train_as_in_one_process(ways: tuple[str, ...]) -> None:
    pytest.importorskip("datasets", reason="pip install 'shardwise[trl]'")
    pytest.importorskip("accelerate")
    data = rows()[:]
    for way, one, other in zip(ways, *run_ranks(RANKS, on_rank, ways, timeout=200.0), strict=True):
        steps = [[*mine, *theirs] for mine, theirs in zip(one[0], other[0], strict=True)]
        assert sorted(row for step in steps for row in step) == list(range(ROWS)) and len(steps) == STEPS, way
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, losses in zip(steps, zip(one[1], other[1], strict=True), strict=True):
            loss = nn.functional.mse_loss(model(data["x"][step]), data["y"][step])
            assert loss.item() == pytest.approx(sum(losses) / RANKS, rel=1e-6), way
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for state in (one[2], other[2]):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7, msg=f"{way}: {name}")
