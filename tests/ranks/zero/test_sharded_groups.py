"""``shardwise.zero`` and ``shardwise.deepspeed`` in groups of some ranks, each compared with a run in one process.

Everything is fp32 unless said otherwise; parameters agree within 1e-6 of each tensor's largest element.
``ReduceScatterBucketer`` on gloo is tested for its documented order, sizes, groups and errors.
"""

import functools
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import deepspeed
from shardwise.core.comm import PeerError
from shardwise.testing import PlainRecipe, assert_close, train_plain
from shardwise.zero import ShardedModelV2, ShardedOptimizerV2, TensorShardStrategy, ZeroInitContext
from shardwise.zero.sharded_model.reduce_scatter import ReduceScatterBucketer
from tests.support.groups_setup import (
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
from tests.support.on_ranks import assert_refused, on_ranks, raises
from tests.support.sets import full
from tests.support.sharded_setup import adam

RTOL = 1e-6

# case, strategy, whether parameters are sharded, whether over gloo, arguments of the model
Recipe = tuple[str, str, bool, bool, dict[str, Any]]
RECIPES: list[Recipe] = [
    ("mlp", "tensor", True, False, {}),
    ("residual", "bucket", True, True, {"gradient_predivide_factor": None}),
    ("tied", "bucket", False, False, {"reduce_scatter_bucket_size_mb": 1e-4}),
]


@on_ranks(4, timeout=120.0)
@pytest.mark.parametrize(
    ("name", "count"),
    [pytest.param("pairs", 1, marks=pytest.mark.campaign), *full(("strided", 3)), ("one_and_three", 2)],
)
def test_each_group_trains_its_own_model(name: str, count: int) -> None:
    number, group = join(GROUPS[name])
    for case, strategy, shard, gloo, arguments in RECIPES[:count]:
        with transport(gloo):
            model, optimizer = made(group, case, strategy, shard, **arguments)
        ranks = len(GROUPS[name][number])
        train(model, optimizer, case, steps_of(case, number, ranks))
        if arguments.get("gradient_predivide_factor", 1.0) is None:
            assert model.session.plan.comm.predivide == (1.0 if model.session.mesh.size == 1 else 2.0)
        kinds = {type(each).__name__ for each in model.session.mesh.groups if each.size > 1}
        assert kinds <= ({"GlooGroup"} if gloo else {"SharedGroup"})
        state, expected = model.state_dict(), plain(case, number, ranks)
        assert_close({key: state[key] for key in expected}, expected, RTOL, f"{case} in group {number} of {name}")
        model.close()


# ---- checkpoints


@on_ranks(4)
def test_checkpoint_of_one_group_is_loaded_by_another(tmp_path: Path) -> None:
    """The first group saves while the second does not; both load the files. One rank loads the files of three."""
    number, group = join(GROUPS["one_and_three"])
    model, optimizer = made(group, "mlp", "bucket")
    steps = steps_of("mlp", 1, 3)
    rows = len(GROUPS["one_and_three"][number])
    train(model, optimizer, "mlp", [[micro[:rows] for micro in step] for step in steps[:1]])
    before = [model.state_dict()]
    if number == 1:
        saver = model.session.checkpoints
        saver.save(f"{tmp_path}/first", "now")
        for tag in ("later", "last"):
            saver.save(f"{tmp_path}/first", tag, use_async=True)
            saver.wait_for_saves()
        assert {each.name for each in (tmp_path / "first").iterdir()} >= {"now", "later", "last"}
        train(model, optimizer, "mlp", steps[1:])
    dist.broadcast_object_list(before, src=GROUPS["one_and_three"][1][0])
    for tag in ("now", "last"):
        assert model.session.checkpoints.load(f"{tmp_path}/first", tag) is not None
        assert_close(model.state_dict(), before[0], 0.0, "loaded")
    model.close()


# ---- errors


@on_ranks(4)
@pytest.mark.parametrize("gloo", [False, True])
def test_an_error_stays_in_its_group(gloo: bool) -> None:
    """Rank 1 fails in the first pass of its group; the other group, which would wait, trains to its end."""
    number, group = join(GROUPS["strided"], 600.0 if dist.get_rank() in (0, 2) else 60.0)
    with transport(gloo):
        model, optimizer = made(group, "mlp")
    steps = steps_of("mlp", number, 2)
    if number == 0:
        train(model, optimizer, "mlp", steps)
        assert_close(model.state_dict(), plain("mlp", 0, 2), RTOL, "a group that did not fail")
    elif dist.get_rank() == 3:
        with pytest.raises(PeerError, match=r"of ranks \[1, 3\]"), waits_at_most(0.5):
            train(model, optimizer, "mlp", steps)
    dist.barrier()
    model.close()


@on_ranks(4)
def test_invalid_groups_are_refused() -> None:
    _, pairs = join(GROUPS["pairs"])
    _, strided = join(GROUPS["strided"])
    strangers = [dist.new_group([rank], backend="gloo") for rank in range(4)]
    stranger = strangers[(dist.get_rank() + 1) % 4]
    strategy = TensorShardStrategy()

    def model(context: Any = pairs, of_model: Any = pairs, reducing: Any = None) -> ShardedModelV2:
        with ZeroInitContext("cpu", strategy, True, dp_process_group=context, convert_fp16=False):
            module = nn.Linear(4, 4)
        return ShardedModelV2(module, strategy, of_model, reducing)

    sharded = model()

    def optimizer(**groups: Any) -> ShardedOptimizerV2:
        return ShardedOptimizerV2(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), **groups)

    assert_refused(
        (lambda: model(context=stranger), "dp_process_group=-100"),
        (lambda: model(context=None, of_model=stranger), "process_group=-100"),
        (lambda: model(of_model=strided), "process_group has ranks"),
        (lambda: model(of_model=None), "process_group has ranks [0, 1, 2, 3]"),
        (lambda: model(reducing=strided), "reduce_scatter_process_group has ranks"),
        (lambda: optimizer(dp_process_group=strided), "dp_process_group has ranks"),
        (lambda: optimizer(mp_process_group=pairs), "the model-parallel group of ranks"),
        (lambda: optimizer(mp_process_group=stranger), "mp_process_group=-100"),
        error=ValueError,
    )
    optimizer()  # a valid one may follow
    sharded.close()


# ---- model parallelism: data-parallel ranks 0, 2 and 1, 3; parts on 0, 1 and on 2, 3

CLIP, SCALE = 0.5, 128.0


@functools.cache
def whole() -> tuple[dict[str, Tensor], list[float]]:
    run = train_plain(Whole, whole_loss, adam, part_steps(), PlainRecipe(max_norm=CLIP))
    assert min(run.norms) > CLIP
    return run.masters[-1], run.norms


def of_a_part(mark: str = "tensor_model_parallel", half: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return this rank's part of the model, and its optimizer."""
    (_, data), (_, others) = join(GROUPS["strided"]), join(GROUPS["pairs"])
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, True, dp_process_group=data, convert_fp16=half):
        module = Part(dist.get_rank() % 2, mark)
    model = ShardedModelV2(module, strategy, data)
    options = {"initial_scale": SCALE, "mp_process_group": others, **options}
    return model, ShardedOptimizerV2(model, adam(model), dp_process_group=data, **options)


@on_ranks(4)
@pytest.mark.parametrize("mark", ["tensor_model_parallel", *full("is_tensor_parallel")])
def test_gradient_norm_covers_all_model_parallel_parts(mark: str) -> None:
    me = dist.get_rank()
    model, optimizer = of_a_part(mark)
    norms = []
    for step in part_steps():
        optimizer.backward(part_loss(model, step[0][me // 2]))
        norms.append(optimizer.clip_grad_norm(model, CLIP))
        optimizer.step()
        assert not optimizer.last_step_skipped
    state, expected_norms = whole()
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    found, expected = model.state_dict(), of_part(state, me % 2)
    assert_close({name: found[name] for name in expected}, expected, RTOL, f"the part of rank {me}")
    model.close()


@on_ranks(4)
@pytest.mark.parametrize(("where", "layer"), [(3, "own"), *full((1, "common"), (0, "common"))])
def test_overflow_in_one_part_skips_the_step_on_all(where: int, layer: str) -> None:
    """One rank's gradient of one layer is not finite."""
    me = dist.get_rank()
    model, optimizer = of_a_part(half=True, hysteresis=1)
    before = model.state_dict()
    for step, bad, scale in zip(part_steps(), (True, False, True), (SCALE / 2, SCALE / 2, SCALE / 4), strict=True):
        loss = part_loss(model, step[0][me // 2])
        if bad and me == where:
            own, common = model(step[0][me // 2][0].half())
            loss = loss + (own if layer == "own" else common).float().sum() * math.inf
        optimizer.backward(loss)
        optimizer.step()
        assert (optimizer.last_step_skipped, optimizer.loss_scale) == (bad, scale)
    assert ("model-parallel rank" in optimizer.skipped_because) == (me % 2 != where % 2)
    assert not torch.equal(before["common.weight"], model.state_dict()["common.weight"])
    model.close()


@on_ranks(4)
def test_model_without_parallel_marks_warns_once() -> None:
    _, data = join(GROUPS["strided"])
    _, model_group = join(GROUPS["pairs"])
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, True, convert_fp16=False):
        module = nn.Linear(3, 3)
    model = ShardedModelV2(module, strategy, data)
    with warnings.catch_warnings(record=True, action="always") as caught:
        optimizer = ShardedOptimizerV2(model, adam(model), mp_process_group=model_group)
    assert optimizer.loss_scale == 1.0
    model.close()
    texts = [str(each.message) for each in caught if "no parameter is marked" in str(each.message)]
    assert len(texts) == (dist.get_rank() == 0) and all("tensor_model_parallel = " in text for text in texts)


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


@on_ranks(4)
@pytest.mark.parametrize("in_context", [*full(False), True])
def test_mpu_splits_and_joins(tmp_path: Path, in_context: bool) -> None:
    folder = str(tmp_path)
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
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mp_rank_00", "mp_rank_01"]
    engine.destroy()
    engine.session.mesh.close()
    full_state, expected_norms = whole()
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    expected = of_part(full_state, me % 2)
    assert_close({name: state[name] for name in expected}, expected, RTOL, f"the part of rank {me}")


@on_ranks(4)
def test_contexts_remember_their_group() -> None:
    me = dist.get_rank()
    number, pairs = join(GROUPS["pairs"])
    _, strided = join(GROUPS["strided"])
    with deepspeed.zero.Init(data_parallel_group=pairs):
        module = nn.Linear(4, 2)
    with deepspeed.zero.GatheredParameters(module.weight, modifier_rank=1):
        module.weight.data.fill_(float(me))
    assert module.weight.unique().tolist() == [2.0 * number + 1]

    def initialize(model: nn.Module, unit: Any) -> Any:
        return deepspeed.initialize(model=model, config=config(), mpu=unit)

    other, nobody, init = nn.Linear(2, 2), dist.GroupMember.NON_GROUP_MEMBER, deepspeed.zero.Init
    hpz = "zero.Init takes no argument for zero_optimization.zero_hpz_partition_size"
    assert_refused(
        (lambda: initialize(module, mpu(strided)), "weight was built in a zero.Init for ranks"),
        (lambda: initialize(other, mpu(pairs, get_pipe_parallel_world_size=2)), "mpu.get_pipe_parallel_world_size()=2"),
        (lambda: initialize(other, mpu(nobody)), "mpu.get_data_parallel_group()=-100"),
        (lambda: init(data_parallel_group=pairs, mpu=mpu(strided)), "zero.Init with groups of different ranks"),
        (lambda: init(data_parallel_group=pairs, zero_param_parallel_group=strided), hpz),
        (lambda: init(zero_param_parallel_group=pairs), hpz),
    )
    engine = deepspeed.initialize(model=module, optimizer=adam(module), config=config())[0]
    assert engine.session.mesh.ranks == tuple(GROUPS["pairs"][number]) and engine.dp_world_size == 2
    with deepspeed.zero.GatheredParameters(module.weight, modifier_rank=0):
        module.weight.data.fill_(float(me))
    assert engine.module_state_dict()["weight"].unique().tolist() == [2.0 * number]
    engine.destroy()
    engine.session.mesh.close()


MIB = 1024 * 1024


def inputs(numel: int, dtype: torch.dtype = torch.float32, ranks: int | None = None, start: int = 0) -> list[Tensor]:
    """Return the numbers ``start + 10 r + i`` that rank r sends to rank i."""
    rank, ranks = dist.get_rank(), ranks or dist.get_world_size()
    return [torch.full((numel,), float(start + 10 * rank + i), dtype=dtype) for i in range(ranks)]


def expected(numel: int, start: int = 0, members: list[int] | None = None) -> list[float]:
    members = members or list(range(dist.get_world_size()))
    own = members.index(dist.get_rank())
    return [float(sum(start + 10 * rank + own for rank in members))] * numel


@on_ranks()
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_documented_use_and_its_sums(ranks: int) -> None:
    printed: list[str] = []
    bucketer = ReduceScatterBucketer(bucket_size_mb=1)
    bucketer.reduce_scatter_async(inputs(4), callback_fn=lambda result: printed.append("small"))
    bucketer.reduce_scatter_async(inputs(MIB // 4 // ranks + 1), callback_fn=lambda result: printed.append("big"))
    bucketer.reduce_scatter_async(inputs(4), callback_fn=lambda result: printed.append("small2"))
    assert printed == ["big"]
    bucketer.flush()
    bucketer.free()
    assert printed == ["big", "small", "small2"]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        sums(dtype)


def sums(dtype: torch.dtype) -> None:
    bucketer = ReduceScatterBucketer()
    results: list[Tensor] = []
    tensors = []
    for index, numel in enumerate((5, 1, 0, 12)):
        mine = inputs(numel, dtype, start=index)
        tensors += mine
        bucketer.reduce_scatter_async(mine, callback_fn=results.append)
    for tensor in tensors:
        tensor.fill_(float("nan"))  # the caller owns the inputs again
    bucketer.flush()
    shaped = [torch.ones(2, 3, dtype=dtype) for _ in range(dist.get_world_size())]
    bucketer.reduce_scatter_async(shaped, callback_fn=results.append)
    bucketer.flush()
    assert {result.dtype for result in results} == {dtype}
    found = [result.tolist() for result in results]
    assert found[:4] == [expected(numel, index) for index, numel in enumerate((5, 1, 0, 12))]
    assert found[4] == [[float(dist.get_world_size())] * 3] * 2


@on_ranks(2)
def test_full_bucket_is_flushed() -> None:
    order: list[str] = []
    bucketer = ReduceScatterBucketer(bucket_size_mb=8 * 4 * dist.get_world_size() / MIB)  # 8 elements of each rank
    for name, numel in (("a", 5), ("b", 3), ("c", 1), ("d", 8), ("e", 9)):
        bucketer.reduce_scatter_async(inputs(numel), callback_fn=lambda result, name=name: order.append(name))
        order.append("-")
    bucketer.flush()
    bucketer.flush()
    # c does not fit with a and b, d does not fit with c, and e is too large.
    assert order == ["-", "-", "a", "b", "-", "c", "-", "e", "-", "d"]


@on_ranks(3)
def test_buckets_of_two_groups() -> None:
    pair = dist.new_group([0, 2])
    bucketer = ReduceScatterBucketer()
    results: list[Tensor] = []
    if dist.get_rank() != 1:
        bucketer.reduce_scatter_async(inputs(3, ranks=2), pair, results.append)
    bucketer.reduce_scatter_async(inputs(2), dist.group.WORLD, results.append)
    bucketer.reduce_scatter_async(inputs(2), callback_fn=results.append)
    bucketer.flush()
    lists = [result.tolist() for result in results]
    if dist.get_rank() != 1:
        assert lists.pop(0) == expected(3, members=[0, 2])
    assert lists == [expected(2), expected(2)]
    assert len(bucketer._buckets) == (2 if dist.get_rank() != 1 else 1)  # no group means all ranks


@on_ranks(2)
def test_invalid_uses_raise_and_leave_it_usable() -> None:
    bucketer, one, two = ReduceScatterBucketer(), torch.ones(2), torch.ones(3)
    for bad, message in (
        ([one], "^input_list has 1 tensors for a group of 2"),
        ([one, two], "differ"),
        ([one, one.double()], "float64"),
        ([], "0 tensors"),
    ):
        raises(ValueError, message, bucketer.reduce_scatter_async, bad)
    bucketer.reduce_scatter_async([one, one])
    raises(RuntimeError, "1 inputs wait", lambda: bucketer.free())
    bucketer.flush()
    bucketer.free()
    bucketer.reduce_scatter_async([one, one])  # its memory is allocated again
    bucketer.flush()
