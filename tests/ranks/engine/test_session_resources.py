"""Resources of a session: ``offload_states`` between steps, and what sessions release if they are dropped or fail.

Training with states that move to host memory between steps equals training without. Sessions that are dropped without
``close()``, and builds that fail, release descriptors, shared mappings and threads.
"""

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import deepspeed
from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from shardwise.core.comm import PeerError
from shardwise.core.mesh import Mesh
from shardwise.deepspeed.config_object import OffloadStateTypeEnum
from shardwise.plan import Plan, replicated, zero
from shardwise.session import Session, build
from shardwise.strategies.sessions import OF_TRAINER, shard
from shardwise.testing import assert_close, run_ranks
from shardwise.zero import ShardedModelV2, TensorShardStrategy, ZeroInitContext
from tests.support.engine_setup import sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign
from tests.support.tier_setup import with_tiers

RANKS, STEPS = 2, 4
CASES = [(0, {}), (2, {"bf16": {"enabled": True}}), (3, {}), (3, {"fp16": {"enabled": True, "loss_scale": 8.0}})]


def trained(stage: int, more: dict[str, Any], moving: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train, and move the states between steps if ``moving``; return weights and optimizer state."""
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    with warnings.catch_warnings(action="ignore"):
        engine = deepspeed.initialize(model=model, config=config)[0]
    dtype = next(engine.parameters()).dtype
    for step in range(STEPS):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        engine.backward(engine(x).float().square().mean())
        if moving and step == 1:
            raises(RuntimeError, "has_gradients=True", lambda: engine.offload_states())
        engine.step()
        if moving:
            moves(engine, x, step)
    state = engine.optimizer.state_dict()
    weights = engine.state_dict()
    engine.destroy()
    return weights, state


def moves(engine: deepspeed.DeepSpeedEngine, x: torch.Tensor, step: int) -> None:
    session = engine.session
    before, expected = session.memory(), engine(x)
    kinds = [None, [OffloadStateTypeEnum.hp_params], ["optim_states", "contiguous_grad_buffer"], None][step]
    engine.offload_states(include=kinds, pin_memory=step % 2 == 0, non_blocking=True)
    after = session.memory()
    device, host = before.by_tier["device"], after.by_tier["host"]
    moved = [kind for kind in ("masters", "optimizer state") if device.get(kind)]
    # fp32 shards without masters are the parameters, and stay.
    assert "optimizer state" in moved and ("masters" in moved) == (engine.bfloat16_enabled() or engine.fp16_enabled())
    for kind in moved:
        assert host[kind] == device[kind] and kind not in after.by_tier["device"]
    assert after.copied_bytes == 0 and before.master_bytes == after.master_bytes
    assert torch.equal(engine(x), expected)  # evaluation still works
    assert engine.optimizer.state_dict()["state"]  # and so does state_dict()
    for call in (lambda: engine.backward(engine(x).float().sum()), engine.step):
        raises(RuntimeError, "offloaded to host memory", call)
    engine.zero_grad()
    engine.offload_states()  # no effect: everything is moved already
    engine.reload_states()
    engine.reload_states()
    assert session.memory().by_tier["device"].items() >= {kind: device[kind] for kind in moved}.items()
    engine.offload_states(device="none")
    engine.offload_states(include=["lp_grads"])
    assert not session.memory().by_tier.get("host", {}).get("optimizer state")
    for wrong in ({"device": "nvme"}, {"include": ["lp_params"]}):
        raises(NotImplementedError, "offload_param keeps parameters in host memory", engine.offload_states, **wrong)


def every_case() -> list[Any]:
    return [(trained(stage, more, False), trained(stage, more, True)) for stage, more in CASES]


def test_offloaded_states_do_not_change_training() -> None:
    for results in run_ranks(RANKS, every_case):
        for (stage, more), (stayed, moved) in zip(CASES, results, strict=True):
            assert_close(moved[0], stayed[0], 0.0, f"stage {stage}, {more}")
            for number, state in stayed[1]["state"].items():
                assert_close(moved[1]["state"][number], state, 0.0, f"state {number} of stage {stage}, {more}")


SECONDS = 60.0
SMALL = {"min_chunk_size_m": 1e-4, "hidden_dim": 8, "search_range_m": 1}
Held = dict[str, int]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.LayerNorm(3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def held() -> Held:
    """Return the numbers of this process's descriptors, shared mappings and threads."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        shared = sum("memfd:" in line or "/dev/shm" in line for line in maps)
    threads = [each for each in threading.enumerate() if "shardwise" in each.name]
    return {"descriptors": len(os.listdir("/proc/self/fd")), "shared mappings": shared, "threads": len(threads)}


def engine_plans(directory: str) -> dict[str, Plan]:
    """Return plans that each create resources of another kind."""
    return {
        "ddp": replicated(),
        "zero1": zero(1),
        "zero2": zero(2),
        "zero3": zero(3),
        "zero3 updated early": zero(3).but(update="backward"),
        "zero3 on the host": with_tiers(zero(3), "all_host", directory),
        "zero2 with state on a disk": with_tiers(zero(2), "s_disk", directory),
        "zero3 on a disk, updated early": with_tiers(zero(3).but(update="backward"), "all_disk", directory),
    }


def train(session: Session) -> None:
    session.backward(session.module(torch.randn(2, 5)).square().mean())
    for optimizer in session.optimizers:
        optimizer.step()


def of_plan(plan: Plan, mesh: Mesh | None = None) -> None:
    model = net()
    session = build(model, optimizer_of(model), plan, mesh)
    train(session)
    session.module(torch.randn(2, 5)).square().mean().backward()  # a pass without a step


def asynchronous(plan: Plan, directory: str) -> None:
    """Save asynchronously, with a communicator of its own."""
    model = net()
    session = build(model, optimizer_of(model), plan)
    session.checkpoints.save(directory, "a", use_async=True)
    session.checkpoints.wait_for_saves()


def of_group(plan: Plan) -> None:
    """Train over a process group whose members create communicators among themselves."""
    group = dist.new_group(list(range(dist.get_world_size())))
    model = net()
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm, group)
    train(build(model, optimizer_of(model), plan, mesh))
    dist.destroy_process_group(group)


def boosted(plugin: Callable[[], Any], close: bool) -> None:
    model = net()
    booster = Booster(plugin=plugin())
    module, optimizer, *_ = booster.boost(model, optimizer_of(model))
    booster.backward(module(torch.randn(2, 5)).square().mean(), optimizer)
    optimizer.step()
    if close:
        booster.close()
        booster.close()


def of_deepspeed(destroy: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(model=net(), config=config)[0]
    engine.backward(engine(torch.randn(2, 5)).square().mean())
    engine.step()
    if destroy:
        engine.destroy()


def of_sharded_model() -> None:
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=True, bf16=True):
        module = net()
    ShardedModelV2(module, strategy)(torch.randn(2, 5))


def of_lightning(plan: Plan) -> None:
    """Train as a strategy does, which keeps one mesh per layout of ranks for later runs of the Trainer."""
    model = net()
    train(shard(model, [optimizer_of(model)], plan, torch.device("cpu"), OF_TRAINER).session)


def failing(plan: Plan) -> None:
    """Fail at the last optimizer, which cannot be wrapped, after everything else was created."""
    model = net()

    class Odd(torch.optim.AdamW):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "step":
                raise RuntimeError("not this one")
            super().__setattr__(name, value)

    with pytest.raises((RuntimeError, ValueError)):
        build(model, [optimizer_of(model[0]), Odd([nn.Parameter(torch.ones(3))])], plan)  # type: ignore[index]


def uses(directory: str, shared: bool) -> dict[str, Callable[[], None]]:
    """Return functions that create a session and drop it, by name."""
    found: dict[str, Callable[[], None]] = {}
    for name, plan in engine_plans(directory).items():
        found[name] = partial(of_plan, plan.but(shared_memory=None if shared else False))
    plan = zero(3).but(shared_memory=None if shared else False)
    found["asynchronous saves"] = partial(asynchronous, plan, directory)
    found["a group"] = partial(of_group, plan)
    found["a build that fails"] = partial(failing, plan)
    if shared:
        found["gemini"] = partial(boosted, partial(GeminiPlugin, precision="fp32", **SMALL), False)  # type: ignore[arg-type]
        found["gemini, closed"] = partial(boosted, partial(GeminiPlugin, precision="fp32", **SMALL), True)  # type: ignore[arg-type]
        found["low level zero"] = partial(boosted, partial(LowLevelZeroPlugin, stage=2, precision="fp32"), False)
        found["torch's ddp"] = partial(boosted, TorchDDPPlugin, True)
        found["deepspeed"] = partial(of_deepspeed, False)
        found["deepspeed, destroyed"] = partial(of_deepspeed, True)
        found["sharded model"] = of_sharded_model
        found["lightning"] = partial(of_lightning, plan)
    return found


def drop_all(directory: str, shared: bool, times: int) -> dict[str, tuple[Held, Held]]:
    """Return the resources before and after ``times`` uses, for each use after which there are more."""
    different = {}
    for name, use in uses(directory, shared).items():
        use()
        gc.collect()
        dist.barrier()
        before = held()
        for _ in range(times):
            use()
        end = time.monotonic() + SECONDS
        while True:  # threads and sockets end with a short delay
            gc.collect()
            after = held()
            if all(after[what] <= before[what] for what in before) or time.monotonic() > end:
                break
            time.sleep(0.05)
        if any(after[what] > before[what] for what in before):
            different[name] = (before, after)
        dist.barrier()
    return different


@pytest.mark.parametrize("times", [2, *campaign(20)])
@pytest.mark.parametrize(
    "shared", [pytest.param(True, id="shared memory"), pytest.param(False, id="gloo", marks=pytest.mark.full)]
)
def test_dropped_sessions_release_their_resources(tmp_path: Path, shared: bool, times: int) -> None:
    assert run_ranks(2, drop_all, str(tmp_path), shared, times, timeout=600.0) == [{}, {}]


@on_ranks(2)
def test_peer_of_a_dropped_group_raises() -> None:
    """Rank 1 drops its mesh while rank 0 waits in a fence."""
    plan = zero(3)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    if dist.get_rank() == 1:
        del mesh
        gc.collect()
        return
    raises(PeerError, "rank 1 has closed the group", lambda: mesh.world.fence())


@on_ranks(2)
def test_gradients_from_before_sharding_warn() -> None:
    model = net()
    model(torch.ones(2, 5)).sum().backward()
    with (
        pytest.warns(UserWarning, match="gradients from before sharding are dropped"),
        sharded(model, optimizer_of(model), zero(3)),
    ):
        assert model[0].weight.grad is None


@on_ranks(2)
def test_closed_sessions_raise() -> None:
    for plan in (zero(2), zero(3)):
        model = net()
        with sharded(model, optimizer_of(model), plan) as session:
            train(session)
        raises(RuntimeError, r"step\(\).* was closed", session.optimizer.step)
    raises(RuntimeError, "the Sequential was closed", session.module, torch.ones(2, 5))
    raises(RuntimeError, "Sequential that was closed while", session.model, torch.ones(2, 5))
    raises(RuntimeError, "Sequential that was closed while", session.model.state_dict)
