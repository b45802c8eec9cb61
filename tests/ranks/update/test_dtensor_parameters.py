"""DTensor parameters: ``build`` refuses them, and shardwise's optimizers update them in place under ``fully_shard``."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.booster import Booster
from shardwise.booster.plugin import TorchFSDPPlugin
from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.plan import replicated, zero
from shardwise.session import build
from shardwise.testing import assert_close, run_ranks
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full

OPTIMIZERS = {"hybrid": HybridAdam, "cpu": CPUAdam, "fused": FusedAdam}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a net whose row counts two ranks do not share evenly, some with fewer than three rows."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("fully_shard", "0.weight"), ("shard", "2.weight"), ("replicate", "2.weight"), ("buffer", "table")],
)
@on_ranks(2)
def test_dtensor_parameters_are_refused_by_name_on_every_rank(kind: str, name: str) -> None:
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fully_shard":
        fully_shard(model, mesh=mesh)
    elif kind == "buffer":
        model.register_buffer("table", distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None))
    else:
        place = {"shard": Shard(0), "replicate": Replicate()}[kind]
        whole = model[2].weight.detach()  # type: ignore[index]
        model[2].weight = nn.Parameter(distribute_tensor(whole, mesh, [place], src_data_rank=None))  # type: ignore[index]
    plan = zero(2) if kind != "buffer" else replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(ValueError, rf"{name} \(.*is a DTensor", build, model, optimizer, plan)


def groups(model: Any) -> list[dict[str, Any]]:
    first, second = ([p for n, p in model.named_parameters() if word in n] for word in ("weight", "bias"))
    return [{"params": first, "weight_decay": 0.1}, {"params": second, "lr": 0.03}]


def updates(model: Any, backward: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        backward(model(inputs.to(next(model.parameters()).dtype)).float().square().sum())
        optimizer.step()


def plainly(kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = net(dtype)
    optimizer = OPTIMIZERS[kind](groups(model), lr=0.01)
    updates(model, Tensor.backward, optimizer, range(6))
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, moments


def under_fully_shard(kind: str, dtype: torch.dtype, folder: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run six updates; after three, save everything and load it into new objects."""
    booster = Booster(plugin=TorchFSDPPlugin(auto_wrap_policy=ModuleWrapPolicy({nn.Linear})))
    for part in (range(3), range(3, 6)):
        plain_model = net(dtype)
        optimizer: Any = OPTIMIZERS[kind](groups(plain_model), lr=0.01)
        model: Any
        model, optimizer, *_ = booster.boost(plain_model, optimizer)
        if part.start:
            booster.load_checkpoint(folder, model, optimizer)
        updates(model, lambda loss, own=optimizer: booster.backward(loss, own), optimizer, part)
        if not part.start:
            booster.save_checkpoint(folder, model, optimizer)
    weights, state = model.state_dict(), optimizer.state_dict()["state"]
    names = {id(p): n for n, p in model.module.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    moments = {name: state[number]["exp_avg"] for number, name in enumerate(order)}
    return dict(weights), [moments[name] for name in names.values()]


BF16, FP32 = torch.bfloat16, torch.float32
QUICK = [("hybrid", BF16, 2), ("cpu", FP32, 2), ("fused", BF16, 2)]
OTHERS = [row for row in itertools.product(OPTIMIZERS, (BF16, FP32), (2, 4)) if row not in QUICK]


@pytest.mark.parametrize(("kind", "dtype", "ranks"), [*QUICK, *full(*OTHERS)])
def test_optimizers_under_fully_shard_equal_plain_ones(
    kind: str, dtype: torch.dtype, ranks: int, tmp_path: Path
) -> None:
    weights, moments = plainly(kind, dtype)
    for got, held in run_ranks(ranks, under_fully_shard, kind, dtype, str(tmp_path)):
        assert_close(got, weights, 0.0 if dtype == torch.bfloat16 else 1e-6, f"{kind} of {dtype}")
        for own, expected in zip(held, moments, strict=True):
            assert own.dtype == expected.dtype == torch.float32
            assert_close({"exp_avg": own}, {"exp_avg": expected}, 1e-6, f"{kind} of {dtype}")


@on_ranks(2)
def test_dtensor_moments_are_not_offloaded_by_the_optimizer() -> None:
    booster = Booster(plugin=TorchFSDPPlugin())
    plain_model = net()
    model: Any
    optimizer: Any = HybridAdam(plain_model.parameters(), nvme_offload_fraction=1.0)
    model, optimizer, *_ = booster.boost(plain_model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = r"nvme_offload_fraction=1\.0.*shard the model by a plan"
    raises(RuntimeError, words, updates, model, lambda loss: booster.backward(loss, optimizer), optimizer, range(1))
    assert_close(dict(model.state_dict()), before, 0.0, "nothing was updated")
