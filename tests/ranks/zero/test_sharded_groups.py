"""shardwise.zero and shardwise.deepspeed in groups of some ranks, each against a run of its own in one process.

Everything is fp32 unless said otherwise; parameters agree within 1e-6 of each tensor's largest element.
"""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups_setup import (
    GROUPS,
    Part,
    Whole,
    join,
    made,
    of_part,
    part_loss,
    part_steps,
    plain,
    steps_of,
    train,
    transport,
    waits_at_most,
    whole_loss,
)
from sets import full
from sharded_setup import STRATEGIES, adam, begin_with
from tier_setup import with_tiers
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.core.comm import PeerError
from shardwise.core.mesh import Mesh
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
from tests.support.models import MODELS

RTOL = 1e-6

# case, strategy, whether parameters are sharded, whether over gloo, arguments of the model
Recipe = tuple[str, str, bool, bool, dict[str, Any]]
RECIPES: list[Recipe] = [
    ("mlp", "tensor", True, False, {}),
    ("residual", "bucket", True, True, {"gradient_predivide_factor": None}),
    ("tied", "bucket", False, False, {"reduce_scatter_bucket_size_mb": 1e-4}),
]


def each_by_itself(name: str, recipes: list[Recipe]) -> list[tuple[int, dict[str, Tensor]]]:
    number, group = join(GROUPS[name])
    results = []
    for case, strategy, shard, gloo, arguments in recipes:
        with transport(gloo):
            model, optimizer = made(group, case, strategy, shard, **arguments)
        train(model, optimizer, case, steps_of(case, number, len(GROUPS[name][number])))
        if arguments.get("gradient_predivide_factor", 1.0) is None:
            assert model.session.plan.comm.predivide == (1.0 if model.session.mesh.size == 1 else 2.0)
        kinds = {type(each).__name__ for each in model.session.mesh.groups if each.size > 1}
        assert kinds <= ({"GlooGroup"} if gloo else {"SharedGroup"})
        results.append((number, model.state_dict()))
        model.close()
    return results


def check(name: str, recipes: list[Recipe]) -> None:
    for results in run_ranks(4, each_by_itself, name, recipes, timeout=120.0):
        for (case, *_), (number, state) in zip(recipes, results, strict=True):
            expected = plain(case, number, len(GROUPS[name][number]))
            assert_close({key: state[key] for key in expected}, expected, RTOL, f"{case} in group {number} of {name}")


@pytest.mark.parametrize(
    ("name", "count"),
    [pytest.param("pairs", 1, marks=pytest.mark.campaign), *full(("strided", 3)), ("one_and_three", 2)],
)
def test_each_group_trains_its_own_model(name: str, count: int) -> None:
    check(name, RECIPES[:count])


@pytest.mark.campaign
@pytest.mark.parametrize("name", list(GROUPS))
def test_every_habit_in_groups(name: str) -> None:
    ways = [(strategy, shard, gloo) for strategy in STRATEGIES for shard in (True, False) for gloo in (True, False)]
    # Not gpt: the gradient of a key's bias is rounding alone, and Adam makes steps of it.
    for case in ("tied", "odd_sizes", "zero_sized", "checkpointed", "residual"):
        check(name, [(case, *way, {}) for way in ways])


# ---- checkpoints


def saved_and_loaded(folder: str) -> list[dict[str, Tensor]]:
    """The first group saves while the second does not; both load it; one of three ranks' is loaded by one."""
    found = []
    number, group = join(GROUPS["one_and_three"])
    model, optimizer = made(group, "mlp", "bucket")
    steps = steps_of("mlp", 1, 3)
    rows = len(GROUPS["one_and_three"][number])
    train(model, optimizer, "mlp", [[micro[:rows] for micro in step] for step in steps[:1]])
    before = model.state_dict()
    if number == 1:
        saver = model.session.checkpoints
        saver.save(f"{folder}/first", "now")
        saver.save(f"{folder}/first", "later", use_async=True)
        saver.wait_for_saves()
        saver.save(f"{folder}/first", "last", use_async=True)
        saver.wait_for_saves()
        assert {each.name for each in Path(folder, "first").iterdir()} >= {"now", "later", "last"}
        train(model, optimizer, "mlp", steps[1:])
    dist.barrier()
    for tag in ("now", "last"):
        restored = model.session.checkpoints.load(f"{folder}/first", tag)
        assert restored is not None
        found.append(model.state_dict())
    if number == 1:
        assert_close(found[0], before, 0.0, "what was saved")
    model.close()
    return found


def test_one_group_saves_and_another_loads(tmp_path: Path) -> None:
    results = run_ranks(4, saved_and_loaded, str(tmp_path))
    for found in results:
        for state in found:
            assert_close(state, results[0][0], 0.0, "loaded")


def on_one_disk(folder: str) -> tuple[int, dict[str, Tensor]]:
    """Groups whose shards and states are on a disk, in the same directory."""
    number, group = join(GROUPS["strided"])
    plan = with_tiers(zero(3), "all_disk", folder)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm, group)
    module = MODELS["mlp"].factory()
    session = build(module, adam(module), plan, mesh)
    assert session.optimizer is not None
    for step in steps_of("mlp", number, 2):
        session.backward(MODELS["mlp"].loss(session.module, step[0][mesh.rank]))
        session.optimizer.step()
    state = session.module.state_dict()
    session.close()
    mesh.close()
    return number, state


def test_groups_share_a_disk_directory(tmp_path: Path) -> None:
    for number, state in run_ranks(4, on_one_disk, str(tmp_path)):
        assert_close(state, plain("mlp", number, 2), RTOL, f"group {number}")


def traced(folder: str) -> None:
    _, group = join(GROUPS["pairs"])
    model, optimizer = made(group, "residual", "bucket", tensor_placement_policy="auto")
    train(model, optimizer, "residual", steps_of("residual", 0, 2))
    model.dump_memory_stats(f"{folder}/stats.log")
    model.close()


@pytest.mark.full
def test_traces_of_groups_have_names_of_their_own(tmp_path: Path) -> None:
    run_ranks(4, traced, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stats.log", "stats.log.rank2"]


# ---- errors


def one_fails(gloo: bool) -> tuple[str, int, dict[str, Tensor]]:
    """Rank 1 fails in the first pass of its group; the other, which would wait for long, trains to its end."""
    number, group = join(GROUPS["strided"], 600.0 if dist.get_rank() in (0, 2) else 60.0)
    with transport(gloo):
        model, optimizer = made(group, "mlp")
    said, state = "", {}
    steps = steps_of("mlp", number, 2)
    if number == 0:
        train(model, optimizer, "mlp", steps)
        state = model.state_dict()
    else:
        try:
            if dist.get_rank() == 1:
                raise KeyError("a bad sample")
            with waits_at_most(0.5):
                train(model, optimizer, "mlp", steps)
        except (KeyError, PeerError) as error:
            said = f"{type(error).__name__}: {error}"
    dist.barrier()
    model.close()
    return said, number, state


@pytest.mark.parametrize("gloo", [False, True])
def test_an_error_stays_in_its_group(gloo: bool) -> None:
    results = run_ranks(4, one_fails, gloo)
    for rank, (said, number, state) in enumerate(results):
        if number == 0:
            assert said == ""
            assert_close(state, plain("mlp", 0, 2), RTOL, f"rank {rank}, whose group did not fail")
    assert results[1][0].startswith("KeyError")
    assert results[3][0].startswith("PeerError") and "of ranks [1, 3]" in results[3][0]


def wrong_groups() -> list[str]:
    _, pairs = join(GROUPS["pairs"])
    _, strided = join(GROUPS["strided"])
    strangers = [dist.new_group([rank], backend="gloo") for rank in range(4)]
    stranger = strangers[(dist.get_rank() + 1) % 4]
    strategy = TensorShardStrategy()

    def model(context: Any = pairs, of_model: Any = pairs, reducing: Any = None) -> ShardedModelV2:
        with ZeroInitContext("cpu", strategy, True, dp_process_group=context, convert_fp16=False):
            module = nn.Linear(4, 4)
        return ShardedModelV2(module, strategy, of_model, reducing)

    whole = model()

    def optimizer(**groups: Any) -> ShardedOptimizerV2:
        return ShardedOptimizerV2(whole, torch.optim.SGD(whole.parameters(), lr=0.1), **groups)

    said = []
    for attempt in (
        lambda: model(context=stranger),
        lambda: model(context=None, of_model=stranger),
        lambda: model(of_model=strided),
        lambda: model(of_model=None),
        lambda: model(reducing=strided),
        lambda: optimizer(dp_process_group=strided),
        lambda: optimizer(mp_process_group=pairs),
        lambda: optimizer(mp_process_group=stranger),
    ):
        try:
            attempt()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    optimizer()  # and a right one may follow
    whole.close()
    return said


def test_groups_that_do_not_fit() -> None:
    wanted = [
        "dp_process_group=-100",
        "process_group=-100",
        "process_group has ranks",
        "process_group has ranks [0, 1, 2, 3]",
        "reduce_scatter_process_group has ranks",
        "dp_process_group has ranks",
        "the model-parallel group of ranks",
        "mp_process_group=-100",
    ]
    for said in run_ranks(4, wrong_groups):
        begin_with(said, wanted)


# ---- model parallelism: data-parallel ranks 0, 2 and 1, 3; parts on 0, 1 and on 2, 3

CLIP, SCALE = 0.5, 128.0


def parts_in_zero(mark: str, dtype: str) -> tuple[dict[str, Tensor], list[float]]:
    me = dist.get_rank()
    _, data = join(GROUPS["strided"])
    _, model_group = join(GROUPS["pairs"])
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, True, dp_process_group=data, convert_fp16=dtype == "fp16"):
        module = Part(me % 2, mark)
    model = ShardedModelV2(module, strategy, data)
    optimizer = ShardedOptimizerV2(
        model, adam(model), initial_scale=SCALE, dp_process_group=data, mp_process_group=model_group
    )
    norms = []
    for step in part_steps():
        optimizer.backward(part_loss(model, step[0][me // 2]))
        norms.append(optimizer.clip_grad_norm(model, CLIP))
        optimizer.step()
        assert not optimizer.last_step_skipped
    state = model.state_dict()
    model.close()
    return state, norms


@functools.cache
def whole() -> tuple[dict[str, Tensor], list[float]]:
    run = train_plain(Whole, whole_loss, adam, part_steps(), PlainRecipe(max_norm=CLIP))
    assert min(run.norms) > CLIP
    return run.masters[-1], run.norms


@pytest.mark.parametrize("mark", ["tensor_model_parallel", *full("is_tensor_parallel")])
def test_the_norm_is_that_of_the_whole_model(mark: str) -> None:
    state, norms = whole()
    for rank, (found, seen) in enumerate(run_ranks(4, parts_in_zero, mark, "fp32")):
        assert seen == pytest.approx(norms, rel=1e-5)
        expected = of_part(state, rank % 2)
        assert_close({name: found[name] for name in expected}, expected, RTOL, f"the part of rank {rank}")


def all_overflowing(places: list[tuple[int, str]]) -> list[list[Any]]:
    _, data = join(GROUPS["strided"])
    _, model_group = join(GROUPS["pairs"])
    return [overflowing(data, model_group, where, layer) for where, layer in places]


def overflowing(data: Any, model_group: Any, where: int, layer: str) -> list[Any]:
    """One rank's gradient of one layer is not finite: nobody steps, and all scales stay alike."""
    me = dist.get_rank()
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, True, dp_process_group=data):
        module = Part(me % 2)
    model = ShardedModelV2(module, strategy, data)
    optimizer = ShardedOptimizerV2(model, adam(model), initial_scale=SCALE, hysteresis=1, mp_process_group=model_group)
    before = model.state_dict()
    told = []
    for step, bad in zip(part_steps(), (True, False, True), strict=True):
        loss = part_loss(model, step[0][me // 2])
        if bad and me == where:
            own, common = model(step[0][me // 2][0].half())
            loss = loss + (own if layer == "own" else common).float().sum() * math.inf
        optimizer.backward(loss)
        optimizer.step()
        told.append((optimizer.last_step_skipped, optimizer.loss_scale))
    why = optimizer.skipped_because
    changed = not torch.equal(before["common.weight"], model.state_dict()["common.weight"])
    model.close()
    return [told, changed, why]


@pytest.mark.parametrize("places", [[(3, "own")], *full([(1, "common"), (0, "common")])], ids=["own", "common"])
def test_an_overflow_on_one_part_skips_the_step_on_all(places: list[tuple[int, str]]) -> None:
    for rank, found in enumerate(run_ranks(4, all_overflowing, places)):
        for (where, layer), (told, changed, why) in zip(places, found, strict=True):
            assert told == [(True, SCALE / 2), (False, SCALE / 2), (True, SCALE / 4)] and changed, (where, layer)
            assert ("model-parallel rank" in why) == (rank % 2 != where % 2), (where, layer, why)


def unmarked() -> list[str]:
    _, data = join(GROUPS["strided"])
    _, model_group = join(GROUPS["pairs"])
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, True, convert_fp16=False):
        module = nn.Linear(3, 3)
    model = ShardedModelV2(module, strategy, data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = ShardedOptimizerV2(model, adam(model), mp_process_group=model_group)
    assert optimizer.loss_scale == 1.0
    model.close()
    return [str(each.message) for each in caught if "no parameter is marked" in str(each.message)]


def test_a_model_without_marks_warns_once() -> None:
    said = run_ranks(4, unmarked)
    assert [len(each) for each in said] == [1, 0, 0, 0] and "tensor_model_parallel = " in said[0][0]


# ---- DeepSpeed's mpu


def mpu(data: Any, model: Any = None, **sizes: int) -> Any:
    answers = {"get_data_parallel_group": lambda: data, "get_model_parallel_group": lambda: model}
    if model is None:
        del answers["get_model_parallel_group"]
    return SimpleNamespace(**answers, **{name: lambda size=size: size for name, size in sizes.items()})


def config(**changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,  # of two ranks
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8},
        **changes,
    }


def parts_in_deepspeed(folder: str, in_context: bool) -> tuple[dict[str, Tensor], list[float], list[str]]:
    me = dist.get_rank()
    _, data = join(GROUPS["strided"])
    _, model_group = join(GROUPS["pairs"])
    unit = mpu(data, model_group)
    with deepspeed.zero.Init(mpu=unit, enabled=in_context):
        module = Part(me % 2)
    engine, optimizer, _, _ = deepspeed.initialize(model=module, optimizer=adam(module), mpu=unit, config=config())
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (me, 4, 2) and optimizer is not None
    norms = []
    steps = part_steps()
    for index, step in enumerate(steps):
        engine.backward(part_loss(engine, step[0][me // 2]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        if index == 1:
            engine.save_checkpoint(folder, "two")
            engine.save_16bit_model(folder)
    state = engine.module_state_dict()
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and path.endswith(f"mp_rank_0{me % 2}/two")
    engine.backward(part_loss(engine, steps[2][0][me // 2]))
    engine.step()
    assert_close(engine.module_state_dict(), state, 0.0, "after loading")
    names = sorted(each.name for each in Path(folder).iterdir())
    engine.destroy()
    engine.session.mesh.close()
    return state, norms, names


@pytest.mark.parametrize("in_context", [*full(False), True])
def test_an_mpu_divides_and_joins(tmp_path: Path, in_context: bool) -> None:
    state, norms = whole()
    for rank, (found, seen, names) in enumerate(run_ranks(4, parts_in_deepspeed, str(tmp_path), in_context)):
        assert seen == pytest.approx(norms, rel=1e-5)
        expected = of_part(state, rank % 2)
        assert_close({name: found[name] for name in expected}, expected, RTOL, f"the part of rank {rank}")
        assert names == ["mp_rank_00", "mp_rank_01"]


def contexts() -> list[str]:
    me = dist.get_rank()
    number, pairs = join(GROUPS["pairs"])
    _, strided = join(GROUPS["strided"])
    with deepspeed.zero.Init(data_parallel_group=pairs):
        module = nn.Linear(4, 2)
    with deepspeed.zero.GatheredParameters(module.weight, modifier_rank=1):
        module.weight.data.fill_(float(me))
    assert module.weight.unique().tolist() == [2.0 * number + 1]
    said = []
    other, nobody = nn.Linear(2, 2), dist.GroupMember.NON_GROUP_MEMBER
    attempts: list[Any] = [
        lambda: deepspeed.initialize(model=module, config=config(), mpu=mpu(strided)),
        lambda: deepspeed.initialize(model=other, config=config(), mpu=mpu(pairs, get_pipe_parallel_world_size=2)),
        lambda: deepspeed.initialize(model=other, config=config(), mpu=mpu(nobody)),
        lambda: deepspeed.zero.Init(data_parallel_group=pairs, mpu=mpu(strided)),
        lambda: deepspeed.zero.Init(data_parallel_group=pairs, zero_param_parallel_group=strided),
        lambda: deepspeed.zero.Init(zero_param_parallel_group=pairs),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("nothing")
        except (ValueError, NotImplementedError) as error:
            said.append(str(error))
    engine = deepspeed.initialize(model=module, optimizer=adam(module), config=config())[0]
    assert engine.session.mesh.ranks == tuple(GROUPS["pairs"][number]) and engine.dp_world_size == 2
    with deepspeed.zero.GatheredParameters(module.weight, modifier_rank=0):
        module.weight.data.fill_(float(me))
    assert engine.module_state_dict()["weight"].unique().tolist() == [2.0 * number]
    engine.destroy()
    engine.session.mesh.close()
    return said


def test_contexts_remember_their_group() -> None:
    wanted = [
        "weight was built in a zero.Init for ranks",
        "mpu.get_pipe_parallel_world_size()=2",
        "mpu.get_data_parallel_group()=-100",
        "zero.Init with groups of different ranks",
        "zero.Init takes no argument for zero_optimization.zero_hpz_partition_size",
        "zero.Init takes no argument for zero_optimization.zero_hpz_partition_size",
    ]
    for said in run_ranks(4, contexts):
        begin_with(said, wanted)
