"""Setup for tests of shardwise.zero: settings, models built in the context, and the plain run of each."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.testing import PlainRecipe, train_plain
from shardwise.zero import (
    BucketTensorShardStrategy,
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
)
from tests.support.models import MODELS, make_batches

STEPS, SCALE = 3, 128.0
STRATEGIES = {"tensor": TensorShardStrategy, "bucket": BucketTensorShardStrategy}
OFFLOAD = {"offload_config": {"device": "cpu"}}


@dataclass(frozen=True)
class Setting:
    case: str
    dtype: torch.dtype = torch.float16
    shard: bool = True
    strategy: str = "tensor"
    passes: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    def recipe(self) -> PlainRecipe:
        reused = self.model.get("reuse_fp16_shard")
        return PlainRecipe(
            param_dtype=self.dtype,
            buffer_dtype=self.dtype,
            reduce_dtype=None if reused else torch.float32,  # 16-bit values, whose sum is not rounded
            loss_scale=SCALE if self.dtype is torch.float16 else 1.0,
        )


BF16 = torch.bfloat16
SETTINGS = {
    "by_tensor": Setting("mlp"),
    "by_layer": Setting("gpt", strategy="bucket"),
    "by_layer_bf16": Setting("gpt", BF16, strategy="bucket", passes=2),
    "whole_tied": Setting("tied", shard=False),
    "whole_accumulated": Setting("mlp", shard=False, passes=3),
    "whole_small_buckets": Setting("gpt", BF16, shard=False, model={"reduce_scatter_bucket_size_mb": 1e-4}),
    "whole_no_buckets": Setting("unused", shard=False, model={"reduce_scatter_bucket_size_mb": 0}),
    "tied": Setting("tied", strategy="bucket"),
    "unused": Setting("unused"),
    "zero_sized": Setting("zero_sized", strategy="bucket"),
    "frozen": Setting("frozen", BF16),
    "odd_sizes": Setting("odd_sizes", model={"fp32_reduce_scatter": True}),
    "reused_shard": Setting("residual", strategy="bucket", model={"reuse_fp16_shard": True}),
    "accumulated": Setting("mlp", passes=3, model={"fp32_reduce_scatter": True}),
    "offloaded": Setting("gpt", strategy="bucket", passes=2, model=OFFLOAD, optimizer={"cpu_offload": True}),
    "offloaded_whole": Setting("mlp", BF16, shard=False, model=OFFLOAD, optimizer={"cpu_offload": True}),
    "checkpointed": Setting("checkpointed", BF16, strategy="bucket"),
    "buffers": Setting("buffers"),
    "predivided": Setting("mlp", model={"gradient_predivide_factor": None}),
    "placed_on_cpu": Setting("mlp", model={"tensor_placement_policy": "cpu"}),
    "placed_by_trace": Setting("residual", strategy="bucket", model={"tensor_placement_policy": "auto"}),
}


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=lr)


def built(setting: Setting) -> ShardedModelV2:
    strategy = STRATEGIES[setting.strategy]()
    with ZeroInitContext("cpu", strategy, shard_param=setting.shard, bf16=setting.dtype is BF16):
        module = MODELS[setting.case].factory()
    return ShardedModelV2(module, strategy, **setting.model)


def train(setting: Setting, steps: list[Any], model: ShardedModelV2) -> ShardedOptimizerV2:
    rank = dist.get_rank()
    optimizer = ShardedOptimizerV2(model, adam(model), initial_scale=SCALE, **setting.optimizer)
    for step in steps:
        for micro in step:
            optimizer.backward(MODELS[setting.case].loss(model, micro[rank]))
        optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.last_step_skipped
    return optimizer


@functools.cache
def plain(name: str, ranks: int) -> dict[str, Tensor]:
    setting = SETTINGS[name]
    case = MODELS[setting.case]
    steps = make_batches(case, ranks, STEPS, setting.passes)
    run = train_plain(case.factory, case.loss, adam, steps, setting.recipe())
    trained = {name for name, parameter in case.factory().named_parameters() if parameter.requires_grad}
    return {name: value if name in trained else run.parameters[-1][name] for name, value in run.masters[-1].items()}


def linear(shard: bool = True, optimizer: dict[str, Any] | None = None, **model: Any) -> Any:
    """Return a model with a weight of 4 x 1 whose gradient is the input, and SGD with a rate of 1."""
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=shard, bf16=model.pop("bf16", False)):
        module = nn.Linear(4, 1, bias=False)
        nn.init.constant_(module.weight, 8.0)
    sharded = ShardedModelV2(module, strategy, **model)
    options = {"initial_scale": 16.0, **(optimizer or {})}
    return sharded, ShardedOptimizerV2(sharded, torch.optim.SGD(sharded.parameters(), lr=1.0), **options)


def step_with(model: ShardedModelV2, optimizer: ShardedOptimizerV2, inputs: list[float]) -> Tensor:
    optimizer.backward(model(torch.tensor([inputs])).sum())
    optimizer.step()
    return model.state_dict()["weight"].flatten()
