"""Parameters that torch divides: refused by our engine, and updated in place by our optimizers under fully_shard."""

from __future__ import annotations

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
from tests.support.sets import full

OPTIMIZERS = {"hybrid": HybridAdam, "cpu": CPUAdam, "fused": FusedAdam}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Rows that two ranks do not share evenly, and fewer than three ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def ours_or_theirs(kind: str, rank_only: int | None) -> str:
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if rank_only in (None, dist.get_rank()):
        if kind == "fully_shard":
            fully_shard(model, mesh=mesh)
        elif kind == "buffer":
            model.register_buffer("table", distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None))
        else:
            place = {"shard": Shard(0), "replicate": Replicate()}[kind]
            whole = model[2].weight.detach()  # type: ignore[index]
            divided = distribute_tensor(whole, mesh, [place], src_data_rank=None)
            model[2].weight = nn.Parameter(divided)  # type: ignore[index]
    try:
        build(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(2) if kind != "buffer" else replicated())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("fully_shard", "0.weight"), ("shard", "2.weight"), ("replicate", "2.weight"), ("buffer", "table")],
)
def test_what_is_divided_already_is_refused_by_name_on_every_rank(kind: str, name: str) -> None:
    for said in run_ranks(2, ours_or_theirs, kind, None):
        assert said.startswith("ValueError") and f"{name} (" in said and "is a DTensor" in said, said


def groups(model: Any) -> list[dict[str, Any]]:
    first, second = (
        [p for n, p in model.named_parameters() if "weight" in n],
        [p for n, p in model.named_parameters() if "bias" in n],
    )
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
    """Six updates, after three of which all is saved and loaded into new ones."""
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


ADAMS = {
    f"{ranks}-{dtype}-{kind}": (kind, dtype, ranks)
    for ranks in (2, 4)
    for dtype in (torch.bfloat16, torch.float32)
    for kind in OPTIMIZERS
}
QUICK = ("2-torch.bfloat16-hybrid", "2-torch.float32-cpu", "2-torch.bfloat16-fused")
ROWS = {name: pytest.param(*case, id=name) for name, case in ADAMS.items()}


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks"),
    [*(ROWS[name] for name in QUICK), *full(*(row for name, row in ROWS.items() if name not in QUICK))],
)
def test_our_adams_under_fully_shard_are_the_plain_ones(
    kind: str, dtype: torch.dtype, ranks: int, tmp_path: Path
) -> None:
    weights, moments = plainly(kind, dtype)
    for got, held in run_ranks(ranks, under_fully_shard, kind, dtype, str(tmp_path)):
        assert_close(got, weights, 0.0 if dtype == torch.bfloat16 else 1e-6, f"{kind} of {dtype}")
        for own, expected in zip(held, moments, strict=True):
            assert own.dtype == expected.dtype == torch.float32
            assert_close({"exp_avg": own}, {"exp_avg": expected}, 1e-6, f"{kind} of {dtype}")


def offloaded() -> str:
    booster = Booster(plugin=TorchFSDPPlugin())
    plain_model = net()
    model: Any
    optimizer: Any = HybridAdam(plain_model.parameters(), nvme_offload_fraction=1.0)
    model, optimizer, *_ = booster.boost(plain_model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        updates(model, lambda loss: booster.backward(loss, optimizer), optimizer, range(1))
    except RuntimeError as error:
        assert_close(dict(model.state_dict()), before, 0.0, "nothing was updated")
        return str(error)
    return "taken"


def test_divided_moments_are_not_offloaded_by_the_optimizer() -> None:
    for said in run_ranks(2, offloaded):
        assert "nvme_offload_fraction=1.0" in said and "shard the model by a plan" in said
