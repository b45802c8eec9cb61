"""torch DCP with real FSDP2 at two ranks: what it saves is read, and what is written here it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from shardwise.core.checkpoint.formats import open_checkpoint, write_dcp
from shardwise.testing import run_ranks
from tests.support.sets import full

RANKS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embed(tokens)) * self.scale.sum() + self.frozen.sum()
        return self.head(hidden).logsumexp(-1).mean()


def _built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model.block)
    fully_shard(model)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6).view(2, 3) % 7).backward()
    optimizer.step()


def _states(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)


def _full(value: Any) -> Any:
    # A copy: step counts are changed in place by the next step.
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def _save(folder: str, flat: bool) -> dict[str, torch.Tensor]:
    model, optimizer = _built(1)
    for _ in range(3):
        _step(model, optimizer)
    states, optimized = _states(model, optimizer, flat)
    # torchtitan has the model's names at the top.
    content = {**states, "optimizer": optimized} if flat else {"model": states, "optim": optimized}
    if flat:
        content["train_state"] = {"step": torch.tensor(3)}
    dcp.save(content, checkpoint_id=folder)
    truth = {f"model/{name}": _full(value) for name, value in states.items()}
    nested = _states(model, optimizer, False)[1]
    for name, entry in nested["state"].items():
        truth |= {f"optimizer/0/{name}/{key}": _full(value) for key, value in entry.items()}
    return truth


def _load(folder: str, flat: bool) -> tuple[dict[str, Any], list[Any], float]:
    model, optimizer = _built(2)
    states, optimized = _states(model, optimizer, flat)
    content = {**states, "optimizer": optimized} if flat else {"model": states, "optim": optimized}
    dcp.load(content, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_model_state_dict(model, {k: content[k] for k in states} if flat else content["model"])
    loaded = content["optimizer" if flat else "optim"]
    set_optimizer_state_dict(model, optimizer, loaded, options=options)
    again = get_optimizer_state_dict(model, optimizer)
    found = {f"model/{name}": _full(value) for name, value in get_model_state_dict(model).items()}
    for name, entry in again["state"].items():
        found |= {f"optimizer/0/{name}/{key}": _full(value) for key, value in entry.items()}
    _step(model, optimizer)
    loss = model(torch.arange(6).view(2, 3) % 7).item()
    return found, again["param_groups"], loss


def _continued(folder: str) -> tuple[list[Any], float]:
    model, optimizer = _built(1)
    for _ in range(3):
        _step(model, optimizer)
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    _step(model, optimizer)
    dist.barrier()
    return groups, model(torch.arange(6).view(2, 3) % 7).item()


@pytest.mark.parametrize("flat", [False, *full(True)], ids=["fsdp2", "torchtitan"])
def test_fsdp2_comes_and_goes(flat: bool, tmp_path: Path) -> None:
    truth = run_ranks(RANKS, _save, str(tmp_path / "theirs"), flat)[0]
    source = open_checkpoint(tmp_path / "theirs")
    small = source.state()["optimizers"][0]["small"]
    tensors = source.tensors()
    for name, expected in truth.items():
        if name.endswith("/step"):
            assert small[name.split("/")[2]] == {"step": {"dtype": "float32", "value": 3.0}}
            continue
        fact = tensors[name]
        got = source.read(name, 0, fact.numel).reshape(fact.shape)
        assert torch.equal(got, expected) and got.dtype == expected.dtype, name
        for start in range(0, fact.numel, 3):
            count = min(5, fact.numel - start)
            assert torch.equal(source.read(name, start, count), expected.reshape(-1)[start : start + count]), name
    assert set(tensors) == {name for name in truth if not name.endswith("/step")}
    write_dcp(source, tmp_path / "ours", "torchtitan" if flat else "fsdp2")
    groups, loss = run_ranks(RANKS, _continued, "")[0]
    for found, again, next_loss in run_ranks(RANKS, _load, str(tmp_path / "ours"), flat):
        assert set(found) == set(truth)
        wrong = [name for name in truth if not torch.equal(found[name], truth[name])]
        assert not wrong
        assert again == groups
        assert next_loss == loss, "the next step is the one that would have followed"
