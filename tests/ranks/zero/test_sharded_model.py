"""``ShardedModelV2`` and ``ShardedOptimizerV2`` on 1, 2 and 3 ranks, compared with plain mixed-precision training.

Both sum 16-bit gradients over ranks in fp32, in rank order, and store the sum in fp32 (in 16 bits where the shard is
reused), so the masters agree within 1e-6 of each tensor's largest element: kernels may differ in fp32's last bit. Other
tests: arguments, state, loss scale, clipping, use before an optimizer exists, and faults of the original by number.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.memory.tier import Tier
from shardwise.testing import assert_close
from shardwise.zero import (
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
    convert_to_zero_v2,
    no_shard_zero_context,
)
from shardwise.zero.sharded_model.utils import col_model_deepcopy
from tests.support.models import MODELS, make_batches
from tests.support.on_ranks import assert_refused, on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.sharded_setup import (
    OFFLOAD,
    SCALE,
    SETTINGS,
    STEPS,
    Setting,
    adam,
    built,
    linear,
    plain,
    step_with,
    train,
)

RTOL = 1e-6


KNOWN = list(SETTINGS)
ODD = ["tied", "whole_tied", "offloaded_whole", "frozen", "unused", "predivided"]
SOME = ["by_tensor", "tied", "whole_no_buckets", "reused_shard", "accumulated", "whole_accumulated"]
SOME += ["offloaded_whole", "checkpointed"]
OTHERS = [name for name in KNOWN if name not in SOME and name != "by_layer"]  # "offloaded" differs by its device only


@on_ranks(timeout=120.0)
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ["by_tensor", "whole_tied"]),
        (2, SOME),
        (3, ["zero_sized", "odd_sizes"]),
        *full((2, OTHERS), (3, ODD)),
        *campaign(*((ranks, KNOWN) for ranks in (1, 2, 3))),
    ],
)
def test_training_equals_plain_torch(ranks: int, names: list[str]) -> None:
    for name in names:
        setting, expected = SETTINGS[name], plain(name, ranks)
        model = built(setting)
        train(setting, make_batches(MODELS[setting.case], ranks, STEPS, setting.passes), model)
        state = model.state_dict()
        model.close()
        assert_close({key: state[key] for key in expected}, expected, RTOL, f"{name} on {ranks} ranks")


# ---- effects of the arguments


GRADIENTS = [[1.0, 2.0, 5.0, 7.0], [3.0, 1.0, 1.0, 2.0]]


@on_ranks(2)
def test_gradient_predivide_and_postdivide() -> None:
    halves = [torch.tensor(g, dtype=torch.float16) for g in GRADIENTS]
    found = []
    for factor in (1.0, 3.0):
        model, optimizer = linear(gradient_predivide_factor=factor, optimizer={"initial_scale": 1.0})
        before = model.state_dict()["weight"].flatten()
        after = step_with(model, optimizer, GRADIENTS[dist.get_rank()])
        model.close()
        parts = [(each / factor).float() for each in halves]
        found.append((parts[0] + parts[1]) * (factor / 2))
        assert torch.equal(after, before - found[-1])
    assert not torch.equal(*found)  # division by 3 rounds


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "sent", "dtype"),
    [
        ({}, 4, torch.float32),
        ({"fp32_reduce_scatter": True}, 8, torch.float32),
        ({"reuse_fp16_shard": True}, 4, torch.float16),
    ],
    ids=["default", "defect_13", "reused"],
)
def test_gradients_are_sent_and_added_in_the_dtypes_of_the_arguments(
    options: dict[str, Any], sent: int, dtype: torch.dtype
) -> None:
    model, optimizer = linear(**options)
    model(torch.ones(1, 4))
    model.session.reset_traffic()
    step_with(model, optimizer, [1.0, 2.0, 3.0, 4.0])
    assert model.session.traffic()["reduce_scatter"] == sent
    assert next(iter(model.session._engine.grads.states.values())).accumulate_dtype is dtype
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["bucket", *full("tensor", "whole")])
def test_strategies_gather_by_tensor_or_by_layer(strategy: str) -> None:
    gpt, whole = MODELS["gpt"].factory(), strategy == "whole"
    model = built(Setting("gpt", shard=not whole, strategy="tensor" if whole else strategy))
    calls = model.session.mesh.shard.traffic.calls
    before = calls.get("all_gather", 0)
    with torch.no_grad():
        model(*make_batches(MODELS["gpt"], 2)[0][0][dist.get_rank()]["args"])
    count = calls.get("all_gather", 0) - before
    model.close()
    # The head's weight is tied to the token embedding, which may be gathered again for the head.
    owners = [m for m in gpt.modules() if next(m.parameters(recurse=False), None) is not None]
    least = {"bucket": len(owners) - 1, "tensor": len(list(gpt.parameters())), "whole": 0}[strategy]
    assert least <= count <= least + (not whole)


@on_ranks(2)
def test_no_shard_zero_context_leaves_parameters_unsharded() -> None:
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=True):
        first = nn.Linear(6, 6)
        with no_shard_zero_context():
            second = nn.Linear(6, 6)
        module = nn.Sequential(first, second)
    torch.manual_seed(0)
    model = ShardedModelV2(module, strategy)
    optimizer = ShardedOptimizerV2(model, adam(model), initial_scale=SCALE)
    optimizer.backward(model(torch.ones(2, 6)).float().square().mean())
    optimizer.step()
    found = {}
    for chunk in model.session._engine.shards.chunks:
        names = [model.session._engine.shards.layout.facts[slot.param].names[0] for slot in chunk.spec.slots]
        found.update(dict.fromkeys(names, chunk.resident))
    model.close()
    assert found == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}


@on_ranks(2)
def test_offloaded_state_is_on_the_host() -> None:
    model, optimizer = linear(**OFFLOAD, optimizer={"cpu_offload": True})
    step_with(model, optimizer, [1.0] * 4)
    accounts = model.session._engine.accounts
    host, device = (sum(accounts.state_bytes(tier)) for tier in (Tier.HOST, Tier.DEVICE))
    assert host == optimizer.get_memory_usage()[1] == 2 * 4 and device == 0  # masters: two fp32 elements per rank
    model.close()


@on_ranks(2)
def test_unsupported_arguments_are_refused() -> None:
    model, _ = linear()
    outside = "parameter 'weight' was made outside of ZeroInitContext"
    assert_refused(
        (lambda: linear(optimizer={"cpu_offload": True}), "cpu_offload=True"),
        (lambda: ShardedOptimizerV2(model, adam(model)), "the model already has an optimizer ("),
        error=RuntimeError,
    )
    assert_refused((lambda: ShardedModelV2(model, TensorShardStrategy()), "module is a Sharded"), error=TypeError)
    assert_refused(
        (lambda: ShardedModelV2(nn.Linear(2, 2), TensorShardStrategy()), outside),
        (lambda: linear(offload_config={"device": "nvme"}), "offload_config={'device': 'nvme'}"),
        (lambda: linear(gradient_predivide_factor=0.0), "gradient_predivide_factor=0.0"),
        (lambda: linear(process_group=dist.GroupMember.NON_GROUP_MEMBER), "process_group=-100"),
        (lambda: linear(optimizer={"mp_process_group": dist.group.WORLD}), "the model-parallel group of ranks [0, 1]"),
        error=ValueError,
    )
    model.close()


@on_ranks(2)
def test_arguments_without_effect_warn_once() -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        model, _ = linear(reduce_scatter_bucket_size_mb=3, **OFFLOAD)
    model.close()
    first, second = (str(each.message) for each in caught if "no effect" in str(each.message))
    assert "reduce_scatter_bucket_size_mb=3" in first and "cpu_offload=False" in second


@on_ranks(2)
def test_a_reused_shard_refuses_accumulation() -> None:
    model, optimizer = linear(reuse_fp16_shard=True)
    optimizer.backward(model(torch.ones(1, 4)).sum())
    (parameter,) = model.parameters()
    raises(RuntimeError, "reuse_fp16_shard=True", lambda: optimizer.backward(model(torch.ones(1, 4)).sum()))
    # The refused pass changed nothing: the gradient is that of the first pass.
    assert parameter.grad is not None and float(parameter.grad.float().sum()) == 4.0
    optimizer.step()
    assert float(step_with(model, optimizer, [1.0] * 4)[0]) == 6.0  # the first pass counts, and training goes on
    model.close()


# ---- further methods


@on_ranks(2)
@pytest.mark.parametrize("shard", [True, False])
def test_dump_memory_stats(shard: bool, tmp_path: Path) -> None:
    setting = Setting("residual", shard=shard, strategy="bucket", model={"use_memory_tracer": True})
    model = built(setting)
    with pytest.warns(UserWarning, match="nothing ran yet"):
        model.dump_memory_stats(tmp_path / "early.log")

    def fail(*_: object) -> None:
        raise MemoryError

    handle = model.module.norm.register_forward_pre_hook(fail)
    raises(MemoryError, None, lambda: model(*make_batches(MODELS["residual"], 2)[0][0][dist.get_rank()]["args"]))
    handle.remove()
    model.dump_memory_stats(tmp_path / "failed.log")
    train(Setting("residual"), make_batches(MODELS["residual"], 2, 2), model)
    model.dump_memory_stats(tmp_path / "all.log")
    assert model.cuda_margin_space > 0
    model.close()
    dist.barrier()
    text = {file.stem: file.read_text("utf-8") for file in tmp_path.iterdir()}  # rank 0 has written them
    assert text.keys() == {"failed", "all"}
    assert not shard or ("blocks.0" in text["failed"] and "backward" not in text["failed"])
    for word in ("peak model", "gradients", *(("backward", "non-model bytes") if shard else ())):
        assert word in text["all"]


@on_ranks(2)
def test_backward_by_grad() -> None:
    for by_grad in (False, True):
        model, optimizer = linear()
        output = model(torch.ones(2, 4))
        if by_grad:
            optimizer.backward_by_grad(output, torch.ones_like(output))
        else:
            optimizer.backward(output.sum())
        optimizer.step()
        assert model.state_dict()["weight"].flatten().tolist() == [6.0] * 4
        model.close()


@on_ranks(2)
def test_fp32_and_convert_to_zero_v2() -> None:
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=True, convert_fp16=False):
        module = nn.Linear(4, 1, bias=False)
        nn.init.constant_(module.weight, 8.0)
    model, optimizer = convert_to_zero_v2(
        module, torch.optim.SGD(module.parameters(), lr=1.0), {"shard_strategy": strategy}, None
    )
    model.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    assert model.state_dict()["weight"].flatten().tolist() == [7.0] * 4 and optimizer.loss_scale == 1.0
    model.close()


# ---- use before and without an optimizer, state


@on_ranks(2)
def test_optimizer_may_be_created_after_use() -> None:
    setting = SETTINGS["tied"]
    steps = make_batches(MODELS["tied"], 2, STEPS)
    model = built(setting)
    batch = steps[0][0][dist.get_rank()]
    with torch.no_grad():
        before = float(MODELS["tied"].loss(model, batch))
    state = model.state_dict()
    model.load_state_dict(state)
    train(setting, steps, model)
    fresh = built(setting)
    fresh.load_state_dict({name: value.half() for name, value in state.items()})
    train(setting, steps, fresh)
    assert_close(model.state_dict(), fresh.state_dict(), 0.0, "an optimizer after use")
    assert float(MODELS["tied"].loss(model, batch).detach()) < before
    for each in (model, fresh):
        each.close()


@on_ranks(2)
def test_col_model_deepcopy() -> None:
    model = built(SETTINGS["tied"])
    train(SETTINGS["tied"], make_batches(MODELS["tied"], 2, 1), model)
    other = MODELS["tied"].factory(seed=5)
    col_model_deepcopy(model, other)
    raises(ValueError, r"differs in \['bias'", lambda: col_model_deepcopy(model, nn.Linear(3, 3)))
    copied = dict(other.named_parameters())
    state = {name: value for name, value in model.state_dict().items() if name in copied}
    assert_close({name: other.state_dict()[name] for name in state}, state, 0.0, "the copy")
    assert other.state_dict()["head.weight"].dtype is torch.float32
    model.close()


@on_ranks(2)
def test_defect_10_scaler_state_survives_a_resume() -> None:
    setting = SETTINGS["tied"]
    steps = make_batches(MODELS["tied"], 2, 4)
    straight, first, again = (built(setting) for _ in range(3))
    train(setting, steps, straight)
    one = train(setting, steps[:2], first)
    other = ShardedOptimizerV2(again, adam(again), initial_scale=2 * SCALE)
    again.load_state_dict(first.state_dict())
    other.load_state_dict(one.state_dict())
    for step in steps[2:]:
        other.backward(MODELS["tied"].loss(again, step[0][dist.get_rank()]))
        other.step()
    assert_close(again.state_dict(), straight.state_dict(), 0.0, "resumed")
    assert one.loss_scale == other.loss_scale == SCALE
    for each in (straight, first, again):
        each.close()


@on_ranks(2)
def test_defect_5_shape_mismatch_is_not_skipped() -> None:
    model, _ = linear()
    with pytest.raises(RuntimeError, match=r"weight: \(1, 5\) instead of \(1, 4\)"):
        model.load_state_dict({"weight": torch.zeros(1, 5)})
    model.close()


# ---- fp16


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "cpu_offload"),
    [({}, False), ({"bf16": True}, False), ({"bf16": True, **OFFLOAD}, True)],
    ids=["defect_11", "defect_11_bf16", "defect_3_bf16_on_the_host"],
)
def test_clip_grad_norm_returns_the_unscaled_norm_and_clips(options: dict[str, Any], cpu_offload: bool) -> None:
    model, optimizer = linear(optimizer={"initial_scale": 64.0, "cpu_offload": cpu_offload}, **options)
    before = model.state_dict()["weight"].flatten()
    optimizer.backward(model(torch.tensor([[1.0, 2.0, 2.0, 4.0]])).sum())
    assert optimizer.clip_grad_norm(model, 0.5) == pytest.approx(5.0)
    optimizer.step()
    assert float((model.state_dict()["weight"].flatten() - before).norm()) == pytest.approx(0.5, rel=1e-5)
    model.close()
