"""Gemini in groups of two ranks that are replicas of each other, against one process; and BatchNorm on two ranks.

Parameters and norms agree within 1e-6 in fp32, relative to each tensor's largest element. Adam has an epsilon of its
learning rate, so that a rounding error of a gradient is no larger a step; and no bias is before a normalisation, where
its gradient would be nothing else.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.testing import assert_close, run_ranks
from tests.support.booster_setup import Run, batch, start
from tests.support.sets import full

RTOL, STEPS, MICRO, MAX_NORM = 1e-6, 3, 2, 0.3
make_adam = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-2)


def one_process() -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer, scheduler = start(make=make_adam)
    norms = []
    for step in range(STEPS):
        for index in range(MICRO):
            inputs, targets = batch(step * MICRO + index)
            nn.functional.mse_loss(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict(), norms


GROUPS: list[dict[str, Any]] = [
    {"min_chunk_size_m": 1e-4, "hidden_dim": 8, "search_range_m": 0.01},
    {
        "chunk_config_dict": {2: {"chunk_size": 40}},
        "shard_param_frac": 0.5,
        "offload_optim_frac": 0.5,
        "offload_param_frac": 0.25,
    },
]


def in_groups(given: dict[str, Any], folder: str) -> tuple[dict[str, torch.Tensor], list[float], tuple[int, ...]]:
    plugin = GeminiPlugin(precision="fp32", extra_dp_size=2, max_norm=MAX_NORM, **given)
    run = Run(plugin, make=make_adam)
    norms = []
    for step in range(STEPS):
        for index in range(MICRO):
            run.backward(step * MICRO + index)
        run.finish()
        norms.append(run.optimizer.get_grad_norm())
    run.booster.save_model(run.model, Path(folder) / "model.safetensors")
    mesh = plugin.session(run.model).mesh
    return run.model.state_dict(), norms, (mesh.shard.size, mesh.replicate.size)


@pytest.mark.parametrize("given", [*full(GROUPS[0]), GROUPS[1]], ids=["searched", "offloaded"])
def test_groups_of_ranks_equal_one_process(given: dict[str, Any], tmp_path: Path) -> None:
    expected, norms = one_process()
    del expected["_extra_state"]
    assert min(norms) > MAX_NORM  # every step is clipped
    for state, found, sizes in run_ranks(4, in_groups, given, str(tmp_path)):
        assert sizes == (2, 2)
        assert_close({name: state[name] for name in expected}, expected, RTOL, "parameters")
        assert found == pytest.approx(norms, rel=RTOL)
    saved = load_file(tmp_path / "model.safetensors")
    saved = {name: value for name, value in saved.items() if name in expected}
    assert_close(saved, {name: expected[name] for name in saved}, RTOL, "the saved model")


# -- BatchNorm

RANKS = 2
NORM: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "ddp-own-buffers": functools.partial(TorchDDPPlugin, broadcast_buffers=False),
    "fsdp": TorchFSDPPlugin,
    "zero1": functools.partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero2": functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "gemini": functools.partial(GeminiPlugin, precision="fp32", chunk_config_dict={RANKS: {"chunk_size": 30}}),
}


def net(kind: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6, bias=False), kind(6), nn.Tanh(), nn.Linear(6, 3))


def share(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch(step)
    return inputs[rank::RANKS] * (rank + 1), targets[rank::RANKS]


def each_with_its_own(broadcast: bool) -> list[dict[str, torch.Tensor]]:
    """One process with a copy a rank: each normalises over its own batch, and all apply the mean of their gradients."""
    copies = [net() for _ in range(RANKS)]
    optimizers = [make_adam(model.parameters()) for model in copies]
    for step in range(STEPS):
        for rank, model in enumerate(copies):
            if rank == 0:
                before = copy.deepcopy(list(model.buffers()))
            elif broadcast:
                for mine, first in zip(model.buffers(), before, strict=True):
                    mine.copy_(first)
            inputs, targets = share(step, rank)
            nn.functional.mse_loss(model(inputs), targets).backward()
        for several in zip(*(model.parameters() for model in copies), strict=True):
            mean = torch.stack([parameter.grad for parameter in several]).mean(0)  # type: ignore[misc]
            for parameter in several:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [dict(model.state_dict()) for model in copies]


def trained(name: str, folder: str) -> dict[str, torch.Tensor]:
    """The parameters, and this rank's own buffers."""
    model = net()
    booster = Booster(plugin=NORM[name]())
    boosted, optimizer, criterion, *_ = booster.boost(model, make_adam(model.parameters()), nn.MSELoss())
    for step in range(STEPS):
        inputs, targets = share(step, dist.get_rank())
        booster.backward(criterion(boosted(inputs), targets), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(boosted, Path(folder) / "model.safetensors")
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return dict(boosted.state_dict()) | own


@pytest.mark.parametrize("name", ["ddp", "ddp-own-buffers", "zero2", *full("fsdp", "zero1", "gemini")])
def test_each_rank_normalises_over_its_own_batch(name: str, tmp_path: Path) -> None:
    expected = each_with_its_own(broadcast=name == "ddp")
    assert not torch.equal(expected[0]["1.running_mean"], expected[1]["1.running_mean"])
    for rank, found in enumerate(run_ranks(RANKS, trained, name, str(tmp_path))):
        found = {key.removeprefix("module."): value for key, value in found.items()}
        assert_close(found, expected[rank], RTOL, f"rank {rank}")
    assert_close(load_file(tmp_path / "model.safetensors"), expected[0], RTOL, "the file has rank 0's buffers")
