"""What ColossalAI's wrappers of models and optimizers offer, under every plugin; and who lacks what is not there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import LowLevelZeroPlugin
from shardwise.testing import assert_close, run_ranks
from tests.support.booster_setup import PLUGINS, batch, start
from tests.support.sets import full

RANKS = 2
ENGINE = ("zero1", "zero2", "gemini")


def _run(plugin: Any, precision: str | None = None) -> tuple[Booster, nn.Module, Any, Any]:
    model, optimizer, _ = start()
    booster = Booster(plugin=plugin, mixed_precision=precision)
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    inputs, targets = batch(0)
    booster.backward(nn.functional.mse_loss(boosted(inputs).float(), targets), wrapped)
    return booster, boosted, wrapped, optimizer


def _methods(name: str) -> dict[str, Any]:
    booster, model, wrapped, optimizer = _run(PLUGINS[name]())
    assert wrapped.optim is optimizer and wrapped.unwrap() is optimizer
    assert [id(p) for p in wrapped.parameters] == [id(p) for g in wrapped.param_groups for p in g["params"]] != []
    assert model.unwrap(unwrap_peft=False) is model.unwrap(True) is model.unwrap()
    before = wrapped.get_grad_norm(2.0)
    wrapped.clip_grad_by_value(0.5)
    clipped = float(wrapped.clip_grad_by_norm(0.1, norm_type=2.0, error_if_nonfinite=True))
    wrapped.step()
    norm = wrapped.get_grad_norm(norm_type=2.0)
    said = []
    for call in (lambda: wrapped.get_grad_norm(3.0), lambda: wrapped.nothing_like_it, lambda: model.nothing_like_it):
        with pytest.raises((ValueError, AttributeError)) as error:
            call()
        said.append(str(error.value))
    booster.close()
    return {"before": before, "clipped": clipped, "norm": norm, "said": said}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", *full("zero1", "gemini")])
def test_the_published_methods_are_there(name: str) -> None:
    for found in run_ranks(RANKS, _methods, name):
        assert found["before"] is None and found["clipped"] > 0.1
        # The engine tells the norm of what step() applies, the wrappers of torch that of the last clipping.
        assert found["norm"] == pytest.approx(0.1 if name in ENGINE else found["clipped"], rel=1e-4)
        norm, optimizer, model = found["said"]
        assert norm.startswith("norm_type=3.0: ") and "p=2" in norm
        outer = "BoostedOptimizer" if name in ENGINE else "Optimizer"
        assert outer in optimizer and "nor has the AdamW in it" in optimizer and "'nothing_like_it'" in optimizer
        assert "Net in it" in model and not model.startswith("'Net'"), model


def _states(name: str) -> dict[str, Any]:
    booster, model, wrapped, _ = _run(PLUGINS[name]())
    wrapped.step()
    found = {
        "model": [model.state_dict(), model.state_dict(only_rank_0=True)],
        "optimizer": [
            wrapped.state_dict(only_rank_0=False),
            wrapped.state_dict(only_rank_0=True),
            wrapped.state_dict(),
        ],
    }
    given: dict[str, Any] = {"mine": torch.ones(1)}
    assert model.state_dict(destination=given, prefix="a.") is given
    found["destination"] = given
    found["parent"] = nn.ModuleDict({"part": model}).state_dict()
    with pytest.raises(ValueError, match=r"state_dict\(keep_vars=True\)"):
        model.state_dict(keep_vars=True)
    booster.close()
    return found


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    entries = {f"{i}.{key}": value for i, entry in state["state"].items() for key, value in entry.items()}
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["zero2", *full("zero1", "gemini")])
def test_a_state_can_be_rank_0s_alone(name: str) -> None:
    first, second = run_ranks(RANKS, _states, name)
    for found in (first, second):
        full, _, default = found["optimizer"]
        assert full["param_groups"] == default["param_groups"] and len(_tensors(full)) > 10
        assert_close(_tensors(full), _tensors(default), rtol=0.0, what="only_rank_0=False")
        values = {key: value for key, value in found["model"][0].items() if isinstance(value, torch.Tensor)}
        for where, prefix in (("destination", "a."), ("parent", "part.")):
            there = {key.removeprefix(prefix): v for key, v in found[where].items() if key.startswith(prefix)}
            assert list(there) == list(found["model"][0])
            assert_close({key: there[key] for key in values}, values, rtol=0.0, what=where)
        assert "mine" in found["destination"]
    assert_close(_tensors(first["optimizer"][1]), _tensors(first["optimizer"][0]), rtol=0.0, what="rank 0's")
    assert list(first["model"][1]) == list(first["model"][0])
    assert second["optimizer"][1]["state"] == {} == second["model"][1]
    assert second["optimizer"][1]["param_groups"] == first["optimizer"][1]["param_groups"]


def _overflowing() -> list[Any]:
    booster, model, wrapped, _ = _run(LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=1024.0))
    found: list[Any] = [wrapped.loss_scale]
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(math.inf)
    else:
        next(p for p in model.parameters() if p.grad is not None).grad.mul_(1.0)
    for norm_type in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="give p > 0"):
            wrapped.clip_grad_by_norm(1.0, norm_type)
    with pytest.raises(RuntimeError) as error:
        wrapped.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    found.append(str(error.value))
    found.append(wrapped.clip_grad_by_norm(1.0))
    wrapped.step()
    booster.close()
    return [*found, wrapped.last_step_skipped]


def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for() -> None:
    for scale, said, norm, skipped in run_ranks(RANKS, _overflowing):
        assert scale == 1024.0 and skipped
        assert said.startswith("clip_grad_by_norm(1.0): the norm of the gradients is inf")
        assert norm == math.inf
