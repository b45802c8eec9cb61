"""shardwise.zero with its parameters on GPUs, and ReduceScatterBucketer over NCCL."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpu.on_device import adamw, device_of_rank, to_device
from shardwise.testing import PlainRecipe, RankPool, assert_close, train_plain
from shardwise.zero import BucketTensorShardStrategy, ShardedModelV2, ShardedOptimizerV2, ZeroInitContext
from shardwise.zero.sharded_model.reduce_scatter import ReduceScatterBucketer
from tests.support.models import MODELS, make_batches

CASE, STEPS, SCALE = MODELS["gpt"], 3, 128.0
OFFLOAD: dict[str, dict[str, Any]] = {
    "device": {},
    "state_on_host": {"offload_config": {"device": "cpu"}},
    "all_on_host": {"tensor_placement_policy": "cpu"},
}


def train(device_type: str, shard: bool, where: str) -> dict[str, Tensor]:
    device = device_of_rank(device_type)
    strategy = BucketTensorShardStrategy()
    with ZeroInitContext(device, strategy, shard_param=shard):
        module = CASE.factory()
    model = ShardedModelV2(module, strategy, **OFFLOAD[where])
    options = {"cpu_offload": True} if where == "state_on_host" else {}
    optimizer = ShardedOptimizerV2(model, adamw(model), initial_scale=SCALE, **options)
    for step in make_batches(CASE, dist.get_world_size(), STEPS):
        optimizer.backward(CASE.loss(model, to_device(step[0][dist.get_rank()], device)))
        optimizer.step()
    state = model.state_dict()
    model.close()
    return state


@functools.cache
def plain(ranks: int) -> dict[str, Tensor]:
    recipe = PlainRecipe(param_dtype=torch.float16, reduce_dtype=torch.float32, loss_scale=SCALE)
    return train_plain(CASE.factory, CASE.loss, adamw, make_batches(CASE, ranks, STEPS), recipe).masters[-1]


@pytest.mark.parametrize("where", OFFLOAD)
@pytest.mark.parametrize("shard", [True, False])
def test_training_equals_plain_torch(pool: RankPool, device_type: str, shard: bool, where: str) -> None:
    for state in pool.run(train, device_type, shard, where):
        expected = plain(pool.world_size)
        # 16-bit kernels of the two devices differ in the last bit.
        assert_close({name: state[name] for name in expected}, expected, 1e-2, f"{where}, shard={shard}")


def bucketed() -> list[list[float]]:
    device = device_of_rank("cuda")
    bucketer, results = ReduceScatterBucketer(bucket_size_mb=1), []
    for numel in (3, 2**20, 5):
        rows = [torch.full((numel,), float(dist.get_rank() + index), device=device) for index in range(2)]
        bucketer.reduce_scatter_async(rows, callback_fn=lambda result: results.append(result))
    bucketer.flush()
    return [[float(len(result)), float(result.min()), float(result.max())] for result in results]


@pytest.mark.gpus(2)
def test_the_bucketer_over_nccl(two_ranks: RankPool) -> None:
    for rank, found in enumerate(two_ranks.run(bucketed)):
        total = 1.0 + 2 * rank
        assert found == [[2.0**20, total, total], [3.0, total, total], [5.0, total, total]]
