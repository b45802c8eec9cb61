"""``shardwise.pytorch``: plans from arguments of torch's DDP and FSDP, and states in the format of ``fully_shard``.

Two ranks train what torch's own wrappers train. Files of ``torch.distributed.checkpoint`` can be read in both
directions.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as theirs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
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
import shardwise.pytorch.state_dict as ours
from shardwise.core.mesh import Mesh
from shardwise.plan import ByModule, ParamGroupPlan, Plan, replicated, zero
from shardwise.pytorch import plan_of_ddp, plan_of_fsdp, plan_of_fully_shard
from shardwise.session import Session, build
from shardwise.testing import run_ranks
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
    """Run two steps of two passes each."""
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
    """Return the plans in fp64, and with bf16 over fp32."""
    policy = ModuleWrapPolicy({Block})
    grid = init_device_mesh("cpu", (2, 1))
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
    for each in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
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
def test_plans_train_as_torch_wrappers(quick: bool) -> None:
    """Compare torch's wrapper with each plan, in fp64, and with bf16 over fp32."""
    plans, halves = ({n: p for n, p in each.items() if (n in QUICK) is quick} for each in plans_by_name())
    assert (len(plans), len(halves)) == ((5, 1) if quick else (8, 1))
    wanted = by_torch(fsdp2)
    check([by_torch(DistributedDataParallel)], wanted, "torch's two")
    for name, plan in plans.items():
        check([own(plan)], wanted, name)
    wanted = by_torch(lambda m: fsdp2(m, mp_policy=BF16), torch.float32)
    for name, plan in halves.items():  # a 16-bit product may be summed in another order
        check([own(plan, torch.float32)], wanted, name, 1e-2)


@on_ranks(4)
def test_backward_gathers_from_secondary_shards() -> None:
    wanted = by_torch(lambda m: fsdp2(m, reshard_after_forward=2))
    found = own(lambda m: plan_of_fully_shard(m, units=[m[1], m[2]], reshard_after_forward=2))
    check([found], wanted, "reshard_after_forward=2")


def test_arguments_become_fields_of_the_plan() -> None:
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
    with warnings.catch_warnings(action="error"):
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


def test_arguments_without_a_plan_are_refused() -> None:
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


FULL = StateDictOptions(full_state_dict=True)
FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def dcp_net() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[3].bias.requires_grad_(False)
    return model


def dcp_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam with two groups, one of which has a frozen parameter."""
    groups = [{"params": list(model[0].parameters()), "lr": 0.01}, {"params": list(model[2:].parameters())}]
    return torch.optim.AdamW(groups, lr=0.05)


def steps(model: nn.Module, backward: Any, optimizer: Any, count: int = 2) -> None:
    for step in range(count):
        backward(model(data(0, step)).square().mean())  # equal on every rank
        optimizer.step()
        optimizer.zero_grad()


def state_by_torch(seed: int = 0, count: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(dcp_net, seed)
    fully_shard(model)
    optimizer = dcp_adam(model)
    steps(model, lambda loss: loss.backward(), optimizer, count)
    return model, optimizer


def sharded(stage: int, seed: int = 0, count: int = 2) -> Session:
    model = seeded(dcp_net, seed)
    session = shardwise.shard(model, dcp_adam(model), stage=stage)
    steps(session.module, session.backward, session.optimizer, count)
    return session


def same(found: Any, wanted: Any, where: str = "") -> None:
    """Compare containers, and the kinds, placements and values of their tensors."""
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), (where, list(found), list(wanted))
        for key in wanted:
            same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for at, each in enumerate(wanted):
            same(found[at], each, f"{where}/{at}")
    elif isinstance(wanted, DTensor):
        assert isinstance(found, DTensor), where
        assert (found.placements, found.shape) == (wanted.placements, wanted.shape), where
        same(found.to_local(), wanted.to_local(), where)
    elif isinstance(wanted, Tensor):
        assert not isinstance(found, DTensor), where
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14, msg=where)
    else:
        assert found == wanted, (where, found, wanted)


def as_theirs(stage: int, plain: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Tensor]:
    session = sharded(stage)
    for options in (None, FULL, FIRST, FLAT, StateDictOptions(cpu_offload=True, ignore_frozen_params=True)):
        wanted = theirs.get_state_dict(plain, optimizer, options=options)
        found = ours.get_state_dict(session.module, session.optimizer, options=options)
        same(found[0], wanted[0], "weights")
        same(found[1], wanted[1], "optimizer")
    whole = session.module.state_dict()
    other = sharded(stage, seed=7, count=1)
    for options in (None, FLAT, FULL):
        given = ours.get_state_dict(session.module, session.optimizer, options=options)
        taken = {"model_state_dict": given[0], "optim_state_dict": given[1]}
        ours.set_state_dict(other.module, other.optimizer, **taken, options=options)
        same(ours.get_state_dict(other.module, other.optimizer, options=FULL)[1], ours_full(session), "taken")
        steps(other.module, other.backward, other.optimizer, 1)
    if stage == 3:
        weights, state = ours.get_state_dict(session.module, session.optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=os.path.join(folder, "ours"))
        refused(session, plain)
    first = ours.get_model_state_dict(session.module, options=FIRST)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ours.set_model_state_dict(other.module, first, options=spread)
    check([other.module.state_dict()], whole, "from rank 0")
    for each in (session, other):
        each.close()
        each.mesh.close()
    return whole


@on_ranks(2)
@pytest.mark.full
def test_states_at_stage_1_equal_those_of_fully_shard() -> None:
    as_theirs(1, *state_by_torch(), "")


def on_rank(folder: str) -> dict[str, Tensor]:
    plain, optimizer = state_by_torch()
    whole = as_theirs(3, plain, optimizer, folder)
    weights, state = theirs.get_state_dict(plain, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=os.path.join(folder, "theirs"))
    # Load the file that shardwise wrote into a model under fully_shard with other values.
    model, optimizer = state_by_torch(seed=7)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=os.path.join(folder, "ours"))
    theirs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    check([dict(theirs.get_model_state_dict(model, options=FULL))], whole, "fully_shard")
    return whole


def ours_full(session: Session) -> dict[str, Any]:
    return ours.get_optimizer_state_dict(session.module, session.optimizer, options=FULL)


def refused(session: Session, plain: nn.Module) -> None:
    module, optimizer, use = session.module, session.optimizer, "shardwise.pytorch.state_dict"
    give, take = ours.get_optimizer_state_dict, ours.set_optimizer_state_dict
    lacking, fresh = ours_full(session), sharded(3, count=0)
    lacking["state"].pop("0.weight")
    assert_refused(
        (lambda: theirs.get_optimizer_state_dict(module, optimizer), use),
        (lambda: theirs.get_state_dict(module, optimizer), use),
        (lambda: theirs.set_model_state_dict(module, module.state_dict(), options=FULL), use),
        (lambda: take(module, optimizer, lacking), "no optimizer state for 0.weight (1 of 6)"),
        (lambda: give(fresh.module, fresh.optimizer), "session.checkpoints.load(directory) reads"),
        error=RuntimeError,
    )
    assert_refused(
        (lambda: ours.get_model_state_dict(plain), "give session.module"),
        (lambda: give(module, optimizer.optimizer), "give session.optimizer"),
        error=TypeError,
    )
    fresh.close()
    fresh.mesh.close()


def test_states_equal_those_of_fully_shard_and_files_load_in_both_directions(tmp_path: Path) -> None:
    whole = run_ranks(2, on_rank, str(tmp_path))[0]
    # In one process, load the files that two ranks wrote into plain torch, and into a session.
    model = seeded(dcp_net, 7)
    weights = dict(model.state_dict())
    dcp.load({"model": weights}, checkpoint_id=str(tmp_path / "ours"), no_dist=True)
    check([weights], whole, "plain torch")
    for name in ("ours", "theirs"):
        session = sharded(3, seed=7)
        session.checkpoints.load(str(tmp_path / name))
        check([session.module.state_dict()], whole, name)
        steps(session.module, session.backward, session.optimizer, 1)
        session.close()
        session.mesh.close()


@on_ranks(2)
def test_model_on_some_ranks_is_refused() -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    plan = zero(2)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm, groups[dist.get_rank()])
    model = nn.Linear(2, 4)
    session = build(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, mesh)
    with pytest.raises(NotImplementedError, match="a model of 1 of 2 ranks"):
        ours.get_model_state_dict(session.module)
    session.close()
