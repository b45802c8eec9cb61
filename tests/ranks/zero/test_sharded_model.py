"""shardwise.zero on 1, 2 and 3 ranks against plain mixed-precision training, and upstream's faults by name.

Both sum 16-bit gradients over ranks in fp32, in rank order, and keep the sum in fp32 (in 16 bits where the shard
is reused), so the masters agree within 1e-6 of each tensor's largest element: kernels may differ in fp32's last bit.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sets import full
from sharded_setup import (
    OFFLOAD,
    SCALE,
    SETTINGS,
    STEPS,
    Setting,
    adam,
    begin_with,
    built,
    linear,
    plain,
    step_with,
    train,
)
from torch import Tensor, nn

from shardwise.core.memory.tier import Tier
from shardwise.core.optim import CPUAdam
from shardwise.testing import assert_close, run_ranks
from shardwise.zero import (
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
    convert_to_zero_v2,
    no_shard_zero_context,
)
from tests.support.models import MODELS, make_batches

RTOL = 1e-6


def run(names: list[str]) -> dict[str, dict[str, Tensor]]:
    results = {}
    for name in names:
        setting = SETTINGS[name]
        model = built(setting)
        steps = make_batches(MODELS[setting.case], dist.get_world_size(), STEPS, setting.passes)
        train(setting, steps, model)
        results[name] = model.state_dict()
        model.close()
    return results


KNOWN = [name for name in SETTINGS if name != "whole_accumulated"]
ODD = ["tied", "whole_tied", "offloaded_whole", "frozen", "unused", "predivided"]
SOME = ["by_tensor", "tied", "whole_no_buckets", "reused_shard", "accumulated", "offloaded_whole", "checkpointed"]
OTHERS = [name for name in KNOWN if name not in SOME and name != "by_layer"]  # "offloaded" is the same elsewhere


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ["by_tensor", "whole_tied"]),
        (2, SOME),
        (3, ["zero_sized", "odd_sizes"]),
        *full((2, OTHERS), (3, ODD)),
        *(pytest.param(ranks, KNOWN, marks=pytest.mark.campaign) for ranks in (1, 2, 3)),
    ],
)
def test_training_equals_plain_torch(ranks: int, names: list[str]) -> None:
    for results in run_ranks(ranks, run, names, timeout=120.0):
        for name, state in results.items():
            expected = plain(name, ranks)
            assert_close({key: state[key] for key in expected}, expected, RTOL, f"{name} on {ranks} ranks")


def test_defect_2_whole_parameters_over_count_accumulated_gradients() -> None:
    for results in run_ranks(2, run, ["whole_accumulated"]):
        state, expected = results["whole_accumulated"], plain("whole_accumulated", 2)
        assert_close({key: state[key] for key in expected}, expected, RTOL, "three passes a step")


# ---- what the arguments do


GRADIENTS = [[1.0, 2.0, 5.0, 7.0], [3.0, 1.0, 1.0, 2.0]]


def divided(factor: float) -> list[Tensor]:
    model, optimizer = linear(gradient_predivide_factor=factor, optimizer={"initial_scale": 1.0})
    before = model.state_dict()["weight"].flatten()
    after = step_with(model, optimizer, GRADIENTS[dist.get_rank()])
    model.close()
    return [before, after]


def test_gradients_are_divided_before_and_after() -> None:
    halves = [torch.tensor(g, dtype=torch.float16) for g in GRADIENTS]
    found = {}
    for factor in (1.0, 3.0):
        parts = [(each / factor).float() for each in halves]
        expected = (parts[0] + parts[1]) * (factor / 2)
        for before, after in run_ranks(2, divided, factor):
            assert torch.equal(after, before - expected)
        found[factor] = expected
    assert not torch.equal(found[1.0], found[3.0])  # dividing by 3 rounds


def bytes_sent(options: dict[str, Any]) -> tuple[int, torch.dtype]:
    model, optimizer = linear(**options)
    model(torch.ones(1, 4))
    model.session.reset_traffic()
    step_with(model, optimizer, [1.0, 2.0, 3.0, 4.0])
    sent = model.session.traffic()["reduce_scatter"]
    dtype = next(iter(model.session.engine.grads.states.values())).accumulate_dtype
    model.close()
    return sent, dtype


def test_defect_13_fp32_reduce_scatter_has_an_effect() -> None:
    assert run_ranks(2, bytes_sent, {}) == [(4, torch.float32)] * 2
    assert run_ranks(2, bytes_sent, {"fp32_reduce_scatter": True}) == [(8, torch.float32)] * 2


def test_a_reused_shard_holds_16_bit_gradients() -> None:
    assert run_ranks(2, bytes_sent, {"reuse_fp16_shard": True}) == [(4, torch.float16)] * 2


def gathers(strategy: str, shard: bool) -> int:
    model = built(Setting("gpt", shard=shard, strategy=strategy))
    group = model.session.mesh.shard
    before = group.traffic.calls.get("all_gather", 0)
    with torch.no_grad():
        model(*make_batches(MODELS["gpt"], 2)[0][0][dist.get_rank()]["args"])
    count = group.traffic.calls.get("all_gather", 0) - before
    model.close()
    return count


@pytest.mark.parametrize("strategy", ["bucket", *full("tensor", "whole")])
def test_strategies_gather_by_tensor_or_by_layer(strategy: str) -> None:
    gpt = MODELS["gpt"].factory()
    owners = [m for m in gpt.modules() if next(m.parameters(recurse=False), None) is not None]
    # The head has the weight of the tokens; what is gathered once may be gathered again for the head.
    layers, tensors = len(owners) - 1, len(list(gpt.parameters()))
    if strategy == "whole":
        assert run_ranks(2, gathers, "tensor", False) == [0, 0]
        return
    least = {"bucket": layers, "tensor": tensors}[strategy]
    for count in run_ranks(2, gathers, strategy, True):
        assert least <= count <= least + 1


def partly_whole() -> dict[str, bool]:
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=True):
        first = nn.Linear(6, 6)
        with no_shard_zero_context():
            second = nn.Linear(6, 6)
        module = nn.Sequential(first, second)
    torch.manual_seed(0)
    model = ShardedModelV2(module, strategy)
    optimizer = ShardedOptimizerV2(model, adam(model), initial_scale=SCALE)
    step_batch(model, optimizer)
    found = {}
    for chunk in model.session.engine.shards.chunks:
        names = [model.session.engine.shards.layout.facts[slot.param].names[0] for slot in chunk.spec.slots]
        found.update(dict.fromkeys(names, chunk.resident))
    model.close()
    return found


def step_batch(model: ShardedModelV2, optimizer: ShardedOptimizerV2) -> None:
    optimizer.backward(model(torch.ones(2, 6)).float().square().mean())
    optimizer.step()


def test_no_shard_zero_context_keeps_a_part_whole() -> None:
    expected = {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}
    assert run_ranks(2, partly_whole) == [expected] * 2


def offload_accounts() -> tuple[int, int, int]:
    model, optimizer = linear(**OFFLOAD, optimizer={"cpu_offload": True})
    step_with(model, optimizer, [1.0] * 4)
    memory = model.session.engine
    host, device = (sum(memory.accounts.state_bytes(tier)) for tier in (Tier.HOST, Tier.DEVICE))
    total = optimizer.get_memory_usage()[1]
    model.close()
    return host, device, total


def test_offloaded_state_is_on_the_host() -> None:
    for host, device, total in run_ranks(2, offload_accounts):
        assert host == total == 2 * 4 and device == 0  # masters: two fp32 elements a rank


def refusals() -> list[str]:
    said = []
    model, _ = linear()
    for attempt in (
        lambda: linear(optimizer={"cpu_offload": True}),
        lambda: ShardedOptimizerV2(model, torch.optim.SGD(model.parameters(), lr=1.0)),
        lambda: ShardedModelV2(nn.Linear(2, 2), TensorShardStrategy()),
        lambda: ShardedModelV2(model, TensorShardStrategy()),  # type: ignore[arg-type]
        lambda: linear(offload_config={"device": "nvme"}),
        lambda: linear(gradient_predivide_factor=0.0),
        lambda: linear(process_group=dist.GroupMember.NON_GROUP_MEMBER),
        lambda: linear(optimizer={"mp_process_group": dist.group.WORLD}),
    ):
        try:
            attempt()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    model.close()
    return said


def test_refusals() -> None:
    wanted = [
        "RuntimeError: cpu_offload=True",
        "RuntimeError: the model already has an optimizer (",
        "ValueError: parameter 'weight' was made outside of ZeroInitContext",
        "TypeError: module is a ShardedModelV2",
        "ValueError: offload_config={'device': 'nvme'}",
        "ValueError: gradient_predivide_factor=0.0",
        "ValueError: process_group=-100",
        "ValueError: the model-parallel group of ranks [0, 1]",
    ]
    for said in run_ranks(2, refusals):
        begin_with(said, wanted)


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = linear(reduce_scatter_bucket_size_mb=3, **OFFLOAD)
    model.close()
    return [str(each.message) for each in caught if "no effect" in str(each.message)]


def test_what_has_no_effect_is_said_once() -> None:
    for said in run_ranks(2, warned):
        assert len(said) == 2
        assert "reduce_scatter_bucket_size_mb=3" in said[0] and "cpu_offload=False" in said[1]


def second_pass() -> tuple[str, float, float]:
    model, optimizer = linear(reuse_fp16_shard=True)
    loss = model(torch.ones(1, 4)).sum()
    optimizer.backward(loss)
    (parameter,) = model.parameters()
    said = ""
    again = model(torch.ones(1, 4)).sum()
    try:
        optimizer.backward(again)
    except RuntimeError as error:
        said = str(error)
    shown = float("nan") if parameter.grad is None else float(parameter.grad.float().sum())
    optimizer.step()
    weight = float(step_with(model, optimizer, [1.0] * 4)[0])
    model.close()
    return said, shown, weight


def test_a_reused_shard_refuses_accumulation() -> None:
    for said, shown, weight in run_ranks(2, second_pass):
        assert "reuse_fp16_shard=True" in said
        assert shown == 4.0  # what was refused has changed nothing: .grad is that of the first pass
        assert weight == 6.0  # the first pass counts, and training goes on


# ---- the rest of the interface


def traced(folder: str) -> tuple[str, str, int]:
    path = Path(folder)
    model = built(Setting("residual", strategy="bucket", model={"use_memory_tracer": True}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.dump_memory_stats(path / "early.log")
    assert any("nothing ran yet" in str(each.message) for each in caught)
    batch = make_batches(MODELS["residual"], 2)[0][0][dist.get_rank()]
    handle = model.module.norm.register_forward_pre_hook(_fail)
    try:
        model(*batch["args"])
    except MemoryError:
        model.dump_memory_stats(path / "failed.log")
    handle.remove()
    setting = Setting("residual")
    train(setting, make_batches(MODELS["residual"], 2, 2), model)
    model.dump_memory_stats(path / "whole.log")
    margin = model.cuda_margin_space
    model.close()
    dist.barrier()
    return (path / "failed.log").read_text("utf-8"), (path / "whole.log").read_text("utf-8"), margin


def _fail(*_: object) -> None:
    raise MemoryError


def test_dump_memory_stats(tmp_path: Path) -> None:
    for failed, whole, margin in run_ranks(2, traced, str(tmp_path)):
        assert "blocks.0" in failed and "backward" not in failed
        assert "backward" in whole and "non-model bytes" in whole
        assert margin > 0
    assert not (tmp_path / "early.log").exists()


def whole_traced(folder: str) -> str:
    model = built(Setting("mlp", shard=False, model={"use_memory_tracer": True}))
    train(Setting("mlp"), make_batches(MODELS["mlp"], 2, 1), model)
    path = Path(folder, "log")
    model.dump_memory_stats(path)
    model.close()
    dist.barrier()
    return path.read_text("utf-8")


def test_dump_memory_stats_of_whole_parameters(tmp_path: Path) -> None:
    for text in run_ranks(2, whole_traced, str(tmp_path)):
        assert "peak model" in text and "gradients" in text


def published_example() -> float:
    """Upstream's GPT-2 example, at a small size."""
    shard_strategy = TensorShardStrategy()
    with ZeroInitContext(target_device=torch.device("cpu"), shard_strategy=shard_strategy, shard_param=True):
        model = MODELS["gpt"].factory()
    model = ShardedModelV2(model, shard_strategy, offload_config={"device": "cpu"})
    optimizer = CPUAdam(model.parameters(), lr=1e-2)
    optimizer = ShardedOptimizerV2(model, optimizer, cpu_offload=True, initial_scale=2**5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model.train()
    losses = []
    for step in make_batches(MODELS["gpt"], 2, 1) * 6:
        optimizer.zero_grad()
        loss = MODELS["gpt"].loss(model, step[0][dist.get_rank()])
        optimizer.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    assert len(model.blocks) == 2 and not model.eval().training
    model.close()
    return losses[-1] - losses[0]


@pytest.mark.full
def test_the_published_example() -> None:
    for change in run_ranks(2, published_example):
        assert change < -0.1


def by_grad() -> tuple[list[float], list[float]]:
    results = []
    for given in (False, True):
        model, optimizer = linear()
        output = model(torch.ones(2, 4))
        if given:
            optimizer.backward_by_grad(output, torch.ones_like(output))
        else:
            optimizer.backward(output.sum())
        optimizer.step()
        results.append(model.state_dict()["weight"].flatten().tolist())
        model.close()
    return results[0], results[1]


def test_backward_by_grad() -> None:
    for plain_backward, by_gradient in run_ranks(2, by_grad):
        assert plain_backward == by_gradient == [6.0] * 4


def converted() -> tuple[list[float], float]:
    strategy = TensorShardStrategy()
    with ZeroInitContext("cpu", strategy, shard_param=True, convert_fp16=False):
        module = nn.Linear(4, 1, bias=False)
        nn.init.constant_(module.weight, 8.0)
    model, optimizer = convert_to_zero_v2(
        module, torch.optim.SGD(module.parameters(), lr=1.0), {"shard_strategy": strategy}, None
    )
    model.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    weight = model.state_dict()["weight"].flatten().tolist()
    model.close()
    return weight, optimizer.loss_scale


def test_fp32_and_convert_to_zero_v2() -> None:
    for weight, scale in run_ranks(2, converted):
        assert weight == [7.0] * 4 and scale == 1.0
