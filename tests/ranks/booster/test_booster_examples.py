"""The published examples run as printed, data loaders divide the data, and the torch plugins honour their arguments."""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.testing import RankError, run_ranks
from tests.support.sets import full

RANKS = 2
PRINTED = Path(__file__).parents[3] / "examples" / "booster_plugins"


def parts() -> tuple[nn.Module, TensorDataset, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    return model, dataset, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.MSELoss()


def epochs(booster: Booster, model: Any, optimizer: Any, train_dataloader: DataLoader[Any], criterion: Any) -> None:
    """What may follow each printed example: the loss falls, and every rank holds the same model."""
    losses = []
    for epoch in range(6):
        train_dataloader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, targets in train_dataloader:
            loss = criterion(model(inputs).float(), targets)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    batches = len(train_dataloader)
    mean = torch.stack([sum(losses[:batches]), sum(losses[-batches:])])  # of the first and the last epoch
    dist.all_reduce(mean)
    assert mean[1] < mean[0]
    for value in model.state_dict().values():
        mine, first = value.float(), value.float().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(mine, first)


def _printed(name: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        names = runpy.run_path(str(PRINTED / name), run_name="__main__")
    epochs(*(names[part] for part in ("booster", "model", "optimizer", "train_dataloader", "criterion")))
    return out.getvalue()


@pytest.mark.parametrize("name", ["low_level_zero.py", "ddp.py", *full("gemini.py", "fsdp.py")])
def test_defect_15_printed_examples_run_as_printed(name: str) -> None:
    for shown in run_ranks(RANKS, _printed, name):
        assert 0.5 < float(shown.removeprefix("loss ")) < 3.0  # of four classes: log(4) = 1.4


# -- what the Booster's users rely on


def _divided(seed: int, drop_last: bool) -> list[int]:
    plugin = LowLevelZeroPlugin()
    loader = plugin.prepare_dataloader(list(range(11)), 2, shuffle=True, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
    return [int(i) for batch in loader for i in batch]


def test_defect_13_seed_of_prepare_dataloader_shuffles() -> None:
    first, second = run_ranks(RANKS, _divided, 1, False)
    assert len(first) == len(second) == 6 and set(first) | set(second) == set(range(11))
    assert run_ranks(RANKS, _divided, 1, False) == [first, second]
    assert run_ranks(RANKS, _divided, 2, False) != [first, second]
    first, second = run_ranks(RANKS, _divided, 1, True)
    assert len(first) == len(second) == 4 and not set(first) & set(second)


def _missing_entry() -> None:
    model, *_ = parts()
    Booster(plugin=GeminiPlugin(chunk_config_dict={3: {"chunk_size": 16}})).boost(model)


def test_chunk_config_dict_without_this_number_of_ranks() -> None:
    with pytest.raises(RankError, match=r"entries for \[3\] ranks"):
        run_ranks(RANKS, _missing_entry)


def _output_dtypes() -> list[torch.dtype]:
    found = []
    for plugin in (
        GeminiPlugin(precision="bf16"),
        GeminiPlugin(precision="bf16", force_outputs_fp32=True),
        LowLevelZeroPlugin(precision="fp32"),
    ):
        model, *_ = parts()
        boosted, *_ = Booster(plugin=plugin).boost(model)
        found.append(boosted(torch.ones(1, 4)).dtype)
    return found


def test_force_outputs_fp32() -> None:
    assert run_ranks(RANKS, _output_dtypes) == [[torch.bfloat16, torch.float32, torch.float32]] * 2


def _scheduler_after_boost(make: Callable[[], Plugin]) -> list[float]:
    model, _, optimizer, _ = parts()
    booster = Booster(plugin=make())
    model, optimizer, *_ = booster.boost(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
        scheduler.step()
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "make", [TorchDDPPlugin, *full(TorchFSDPPlugin), functools.partial(GeminiPlugin, precision="bf16")]
)
def test_a_scheduler_may_be_built_after_boost(make: Callable[[], Plugin]) -> None:
    assert run_ranks(RANKS, _scheduler_after_boost, make) == [[2.5e-3], [2.5e-3]]


# -- the torch plugins and parameters that are not used


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(inputs)
        return output


def _unused(find: bool) -> None:
    model = PartlyUsed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = Booster(plugin=TorchDDPPlugin(find_unused_parameters=find)).boost(model, optimizer)
    for _ in range(2):
        optimizer.backward(boosted(torch.ones(1, 4)).sum())
        optimizer.step()


def _unused_sharded(make: Callable[[], Plugin]) -> None:
    torch.manual_seed(0)
    model = PartlyUsed()
    before = model.unused.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = Booster(plugin=make()).boost(model, optimizer)
    for _ in range(2):
        optimizer.backward(boosted(torch.ones(1, 4)).sum())
        optimizer.step()
    state = boosted.state_dict()
    assert torch.equal(state["unused.weight"], before) and not torch.equal(state["used.weight"], before)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
        functools.partial(GeminiPlugin, precision="fp32"),
        functools.partial(GeminiPlugin, precision="fp32", chunk_config_dict={2: {"chunk_size": 8}}),
    ],
    ids=["zero2", "gemini-one-chunk", "gemini-chunks"],
)
def test_unused_parameters_are_no_error(make: Callable[[], Plugin]) -> None:
    run_ranks(RANKS, _unused_sharded, make)


def test_ddp_find_unused_parameters() -> None:
    run_ranks(RANKS, _unused, True)
    with pytest.raises(RankError, match="find_unused_parameters"):
        run_ranks(RANKS, _unused, False)


def _fsdp_arguments() -> None:
    policy = ModuleWrapPolicy({nn.Linear})
    # ignored modules stay whole, and param groups stay as they were
    model, _, _, _ = parts()
    model[0].requires_grad_(False)
    groups = [{"params": [model[2].weight], "lr": 0.5}, {"params": [model[2].bias], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    booster = Booster(plugin=TorchFSDPPlugin(ignored_modules=[model[0]], auto_wrap_policy=policy))
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    assert not isinstance(model[0].weight, DTensor) and isinstance(model[2].weight, DTensor)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-2]
    assert optimizer.param_groups[0]["params"][0] is model[2].weight
    optimizer.backward(boosted(torch.ones(1, 4)).sum())
    whole = model[2].bias.grad.full_tensor()
    assert optimizer.clip_grad_by_norm(0.1) > 0.1
    optimizer.clip_grad_by_value(0.01)
    assert model[2].bias.grad.full_tensor().abs().max() <= 0.01 < whole.abs().max()
    optimizer.step()

    # rank 0's values, bf16 compute, fp32 BatchNorm
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    own = model[0].weight.detach().clone()
    dist.broadcast(own, src=0)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = TorchFSDPPlugin(mixed_precision=mixed, sync_module_states=True, auto_wrap_policy=policy)
    boosted, *_ = Booster(plugin=plugin).boost(model)
    assert torch.equal(boosted.state_dict()["0.weight"], own)
    output = boosted(torch.randn(6, 4))
    assert output.dtype is torch.bfloat16 and model[1].running_mean.dtype is torch.float32
    output.sum().backward()
    assert model[1].weight.grad is not None

    # integer and fp64 buffers are not cast
    model = nn.Sequential(nn.Linear(4, 2))
    for name, dtype in (("whole", torch.int32), ("wide", torch.float64), ("single", torch.float32)):
        model.register_buffer(name, torch.zeros(1, dtype=dtype))
    Booster(plugin=TorchFSDPPlugin(mixed_precision=MixedPrecision(buffer_dtype=torch.float16))).boost(model)
    assert [each.dtype for each in model.buffers()] == [torch.int32, torch.float64, torch.float16]

    # meta parameters come to life
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def ones(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    boosted, optimizer, *_ = Booster(plugin=TorchFSDPPlugin(param_init_fn=ones)).boost(model, optimizer)
    assert boosted(torch.ones(1, 4)).tolist() == [[41.0, 41.0]]
    assert all(isinstance(parameter, DTensor) for parameter in optimizer.param_groups[0]["params"])


def test_fsdp_arguments() -> None:
    run_ranks(RANKS, _fsdp_arguments)


def _fsdp_groups() -> None:
    everyone = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    hybrid = ShardingStrategy.HYBRID_SHARD
    for plugin, local in (
        (TorchFSDPPlugin(process_group=everyone), 4),
        (TorchFSDPPlugin(process_group=(everyone, alone), sharding_strategy=hybrid), 4),
        (TorchFSDPPlugin(process_group=(alone, everyone), sharding_strategy=hybrid), 8),
    ):
        model, *_ = parts()
        boosted, *_ = Booster(plugin=plugin).boost(model)
        assert model[0].weight.to_local().shape == (local, 4)
        boosted(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        gradient = model[2].weight.grad.full_tensor()
        first = gradient.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(gradient, first)
    assert plugin.data_parallel() == (dist.get_rank(), 2)
    assert TorchFSDPPlugin(process_group=alone).data_parallel() == (0, 1)


def test_fsdp_process_groups() -> None:
    run_ranks(RANKS, _fsdp_groups)
