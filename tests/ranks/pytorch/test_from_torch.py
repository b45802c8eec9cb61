"""Arguments of torch's DDP and FSDP as plans: two ranks train what torch's own wrappers train with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.plan import ByModule, ParamGroupPlan, Plan, replicated, zero
from shardwise.pytorch import plan_of_ddp, plan_of_fsdp, plan_of_fully_shard
from tests.support.engine_setup import check, data, seeded
from tests.support.on_ranks import assert_refused, on_ranks
from tests.support.sets import full

State = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x)).tanh()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, eps=0.05)


def train(model: nn.Module, backward: Callable[[Tensor], object], optimizer: Any, dtype: torch.dtype) -> None:
    """Two steps of two passes each."""
    for step in range(2):
        for index in range(2):
            backward(model(data(dist.get_rank(), step, index).to(dtype)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def own(plan: Callable[[nn.Module], Plan], dtype: torch.dtype = torch.float64) -> State:
    model = seeded(net).to(dtype)
    session = shardwise.shard(model, adam(model), plan(model))
    train(session.module, session.backward, session.optimizer, dtype)
    state = {name: value.double() for name, value in session.module.state_dict().items()}
    session.close()
    session.mesh.close()
    return state


def by_torch(wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype = torch.float64) -> State:
    model = seeded(net).to(dtype)
    wrapped = wrap(model)
    optimizer = adam(model)
    train(wrapped, lambda loss: loss.backward(), optimizer, dtype)
    state = model.state_dict()
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).double() for n, v in state.items()}


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for block in (model[1], model[2]):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, _module_classes_to_ignore=())


def plans_by_name() -> tuple[dict[str, Callable[[nn.Module], Plan]], dict[str, Callable[[nn.Module], Plan]]]:
    """In fp64, and with bf16 over fp32."""
    policy = ModuleWrapPolicy({Block})
    grid = init_device_mesh("cpu", (2, 1))
    strategies = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
    plans: dict[str, Callable[[nn.Module], Plan]] = {
        "ddp": lambda model: plan_of_ddp(bucket_cap_mb=1, find_unused_parameters=True, static_graph=True),
        "ddp over a mesh": lambda model: plan_of_ddp(device_mesh=init_device_mesh("cpu", (2,))),
        "offload": lambda m: plan_of_fsdp(m, auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True)),
        "no prefetch": lambda model: plan_of_fsdp(model, backward_prefetch=None, sync_module_states=True),
        "frozen": lambda model: plan_of_fsdp(model, process_group=dist.group.WORLD, use_orig_params=True),
        "fully_shard": lambda model: plan_of_fully_shard(model, units=[model[1], model[2]]),
        "stays": lambda m: plan_of_fully_shard(m, init_device_mesh("cpu", (2,)), reshard_after_forward=False),
        "host": lambda model: plan_of_fully_shard(model, offload_policy=CPUOffloadPolicy()),
        "replicas": lambda model: plan_of_fully_shard(model, grid),
    }
    for each in strategies:
        plans[each.name] = lambda model, each=each: plan_of_fsdp(model, sharding_strategy=each)
    hybrid = ShardingStrategy.HYBRID_SHARD
    plans["hybrid"] = lambda model: plan_of_fsdp(model, sharding_strategy=hybrid, device_mesh=grid)
    halves: dict[str, Callable[[nn.Module], Plan]] = {
        "bf16": lambda model: plan_of_fully_shard(model, mp_policy=BF16, units=[model[1], model[2]]),
        "bf16, FSDP1": lambda model: plan_of_fsdp(model, mixed_precision=MIXED, auto_wrap_policy=policy),
    }
    return plans, halves


QUICK = ["ddp", "offload", "fully_shard", ShardingStrategy.SHARD_GRAD_OP.name, "hybrid", "bf16"]


@on_ranks(2)
@pytest.mark.parametrize("quick", [True, *full(False)], ids=["quick", "others"])
def test_plans_train_what_torch_trains(quick: bool) -> None:
    """What torch trains, and each plan; in fp64, and with bf16 over fp32."""
    rank = dist.get_rank()
    plans, halves = ({n: p for n, p in each.items() if (n in QUICK) is quick} for each in plans_by_name())
    found = {name: own(plan) for name, plan in plans.items()}
    ddp = by_torch(DistributedDataParallel)
    whole = by_torch(fsdp2)
    check([ddp], whole, "torch's two")
    single = torch.float32
    (wanted, found, wanted_bf16, found_bf16) = (
        whole,
        found,
        by_torch(lambda m: fsdp2(m, mp_policy=BF16), single),
        {name: own(plan, single) for name, plan in halves.items()},
    )
    assert (len(found), len(found_bf16)) == ((5, 1) if quick else (8, 1))
    for name, state in found.items():
        check([state], wanted, f"{name}, rank {rank}")
    for name, state in found_bf16.items():  # a product in 16 bits may be added up in another order
        check([state], wanted_bf16, f"{name}, rank {rank}", 1e-2)


@on_ranks(4)
def test_backward_gathers_from_some_ranks() -> None:
    rank = dist.get_rank()
    (wanted, found) = (
        by_torch(lambda m: fsdp2(m, reshard_after_forward=2)),
        own(lambda m: plan_of_fully_shard(m, units=[m[1], m[2]], reshard_after_forward=2)),
    )
    check([found], wanted, f"reshard_after_forward=2, rank {rank}")


def test_every_argument_becomes_something_of_the_plan() -> None:
    model = seeded(net)
    assert plan_of_ddp(init_sync=False).comm.sync_init is False
    assert plan_of_ddp(bucket_cap_mb=2).shard.packing.chunk_numel == 2 * 2**20 // 4  # type: ignore[union-attr]
    assert plan_of_ddp().mesh == replicated().mesh
    plan = plan_of_fsdp(model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=MIXED, forward_prefetch=True)
    assert plan.shard.packing == ByModule(unit_classes=(), unit_names=("2", "1"))
    assert plan.shard.prefetch == 1 and plan.shard.gathered_fraction == 0.0 and not plan.comm.sync_init
    assert plan.precision.param_dtype is torch.bfloat16 and plan.precision.reduce_dtype is torch.float32
    assert plan.precision.buffer_dtype is None and plan.precision.scaler is None and plan.precision.cast_inputs
    half = plan_of_fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16, output_dtype=torch.float32))
    assert half.precision.scaler is not None and half.precision.output_dtype is torch.float32
    assert plan_of_fully_shard(model).but(sync_init=True) == zero(3)
    assert plan_of_fully_shard(model, reshard_after_forward=2).but(sync_init=True) == zero(3).but(secondary=2)
    stays = plan_of_fully_shard(model, reshard_after_forward=False)
    assert plan_of_fully_shard(model, reshard_after_forward=1) == stays and stays.shard.always_gathered
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = plan_of_fully_shard(model, ignored_params=set(model[0].parameters())).shard.groups
        assert groups == plan_of_fsdp(model, ignored_modules=[model[0]]).shard.groups
        assert groups == (ParamGroupPlan(names=("0.weight", "0.bias"), reshard_after_forward=False),)
    with pytest.warns(UserWarning, match="1.inner.weight.*: 4 ignored parameters are not sharded"):
        plan_of_fsdp(model, ignored_states=[model[1]])
    with pytest.warns(UserWarning, match="BACKWARD_POST: one unit is prefetched"):
        plan_of_fsdp(model, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    with pytest.warns(UserWarning, match="broadcast_buffers=True: buffers are rank 0's at the beginning"):
        plan_of_ddp(broadcast_buffers=True)
    with pytest.warns(UserWarning, match=r"device_id='cuda:3' is not in the plan"):
        plan_of_fsdp(model, device_id="cuda:3")  # type: ignore[arg-type]


def test_what_no_plan_says_is_refused() -> None:
    model, other = seeded(net), nn.Linear(2, 2)
    meta = nn.Linear(2, 2, device="meta")
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mixed, low = MixedPrecision(param_dtype=torch.bfloat16), MixedPrecision(keep_low_precision_grads=True)
    hybrid = ShardingStrategy.HYBRID_SHARD
    assert_refused(
        (lambda: plan_of_ddp(device_ids=[0, 1]), "device_ids=[0, 1]"),
        (lambda: plan_of_ddp(dim=1), "dim=1"),
        (lambda: plan_of_ddp(check_reduction=True), "check_reduction=True"),
        (lambda: plan_of_ddp(bucket_cap_mb_list=[1, 2]), "bucket_cap_mb_list=[1, 2]"),
        (lambda: plan_of_ddp(delay_all_reduce_named_params=[]), "delay_all_reduce_named_params="),
        (lambda: plan_of_ddp(param_to_hook_all_reduce=other.weight), "param_to_hook_all_reduce="),
        (lambda: plan_of_fsdp(meta, param_init_fn=lambda module: None), "param_init_fn="),
        (lambda: plan_of_fsdp(model, mixed_precision=low), "keep_low_precision_grads=True"),
        (lambda: plan_of_fsdp(normed, mixed_precision=mixed), "1 (BatchNorm1d) would be computed in fp32"),
        (lambda: plan_of_fully_shard(model, shard_placement_fn=lambda p: None), "shard_placement_fn="),
        (lambda: plan_of_fully_shard(model, dp_mesh_dims=("dp",)), "dp_mesh_dims="),
        error=NotImplementedError,
    )
    assert_refused(
        (lambda: plan_of_fully_shard(model, reshard_after_forward=0), "reshard_after_forward=0"),
        (lambda: plan_of_fully_shard(model, reshard_after_forward="2"), "reshard_after_forward='2'"),  # type: ignore[arg-type]
        (lambda: plan_of_fully_shard(model, units=[other]), "units=['Linear'] are no modules"),
        (lambda: plan_of_fully_shard(model, ignored_params=[other.weight]), "are not the model's"),
        (lambda: plan_of_fsdp(model, sharding_strategy=hybrid), "LOCAL_WORLD_SIZE"),
        (lambda: plan_of_ddp(bucket_cap_mb=0), "bucket_cap_mb=0"),
        error=ValueError,
    )
