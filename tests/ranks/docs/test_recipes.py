"""What CONTRIBUTING.md tells others to do works from outside: a format, a backend, a plugin, a tier and an architecture
of their own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.booster import Booster
from shardwise.core.checkpoint.formats import (
    detect_format,
    known_formats,
    open_checkpoint,
    register_format,
    write_checkpoint,
)
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.comm import register_backend
from shardwise.core.memory.disk import DiskError, register_medium
from shardwise.core.mesh import Mesh
from shardwise.core.parallel.tensor import Axis, cut_model, register_architecture
from shardwise.plan import DiskPlan, Plan, TensorPlan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.recipes.half_plugin import HalfPlugin
from tests.recipes.npz_format import FORMAT
from tests.recipes.plain_backend import PlainGroup, make_group
from tests.recipes.tensor_architecture import ARCHITECTURE, Mini
from tests.recipes.zlib_medium import open_compressed
from tests.support import tensor_setup
from tests.support.scope import Scope
from tests.support.sets import full

STEPS = 3


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def plainly(ranks: int) -> dict[str, torch.Tensor]:
    """The mean over the ranks' batches, in one process."""
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(batch(step, rank)).square().mean() for rank in range(ranks)]).mean().backward()
        optimizer.step()
    return model.state_dict()


def through(train: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> dict[str, torch.Tensor]:
    model = make()
    return train(model, torch.optim.Adam(model.parameters(), lr=0.01))


# ---- a format


def npz_of(model: nn.Module, path: Path) -> Path:
    np.savez(path, **{name: value.numpy() for name, value in model.state_dict().items()})
    return path


def loaded(path: str) -> dict[str, torch.Tensor]:
    put_back = register_format(FORMAT)
    try:
        torch.manual_seed(1 + dist.get_rank())
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        booster = Booster(plugin=HalfPlugin())
        boosted, *_ = booster.boost(model, torch.optim.Adam(model.parameters()))
        booster.load_model(boosted, path)
        return boosted.state_dict()
    finally:
        put_back()


def test_a_format_of_others_is_loaded_into_a_sharded_model(tmp_path: Path) -> None:
    model = make()
    path = npz_of(model, tmp_path / "weights.npz")
    for state in run_ranks(2, loaded, str(path)):
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_format_is_known_until_it_is_taken_back(tmp_path: Path) -> None:
    path = npz_of(make(), tmp_path / "weights.npz")
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:50])
    put_back = register_format(FORMAT)
    assert detect_format(path) == "npz"
    with open_checkpoint(path) as source:
        assert source.tensors()["model/0.weight"].shape == (5, 6)
        write_checkpoint(source, tmp_path / "copy.npz", "npz", dtype=torch.float64)
        with pytest.raises(ValueError, match="format npz has no such option"):
            write_checkpoint(source, tmp_path / "copy.npz", "npz", layout="fsdp2")
    with open_checkpoint(tmp_path / "copy.npz") as copied:
        assert copied.tensors()["model/0.weight"].dtype == torch.float64
    with pytest.raises(CheckpointError, match=r"cut\.npz"):
        open_checkpoint(tmp_path / "cut.npz")
    with pytest.raises(ValueError, match="'npz' already"):
        register_format(FORMAT)
    with pytest.raises(ValueError, match="is of format npz, which has names"):
        open_checkpoint(path, parameter_names=["a"])
    put_back()
    assert "npz" not in [each.name for each in known_formats()]
    with pytest.raises(CheckpointError, match=r"ends in '\.npz'"):
        open_checkpoint(path)
    with pytest.raises(TypeError, match="give a Format"):
        register_format("npz")  # type: ignore[arg-type]


# ---- a backend


def over_plain(plan: Plan) -> tuple[dict[str, torch.Tensor], str]:
    put_back = register_backend("cpu", make_group)
    try:
        mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    finally:
        put_back()
    assert isinstance(mesh.shard, PlainGroup)
    model = make()
    session = build(model, torch.optim.Adam(model.parameters(), lr=0.01), plan, mesh)
    for step in range(STEPS):
        session.backward(session.module(batch(step, mesh.rank)).square().mean())
        session.optimizer.step()
    state = session.module.state_dict()
    session.close()
    mesh.close()
    again = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    name = type(again.shard).__name__
    again.close()
    return state, name


@pytest.mark.parametrize("stage", [*full(1, 2), 3])
def test_a_backend_of_others_trains_as_plain(stage: int) -> None:
    expected = plainly(2)
    for state, name in run_ranks(2, over_plain, zero(stage)):
        torch.testing.assert_close(state, expected, atol=1e-6, rtol=1e-5)
        assert name != "PlainGroup"


# ---- a plugin


def boosted(plugin: HalfPlugin) -> dict[str, torch.Tensor]:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        booster = Booster(plugin=plugin)
        sharded, wrapped, *_ = booster.boost(model, optimizer)
        assert wrapped is not None
        for step in range(STEPS):
            booster.backward(sharded(batch(step, dist.get_rank())).float().square().mean(), wrapped)
            wrapped.step()
            wrapped.zero_grad()
        return sharded.state_dict()

    return through(train)


@pytest.mark.parametrize("shard_parameters", [True, *full(False)])
def test_a_plugin_of_others_trains(shard_parameters: bool) -> None:
    expected, begun = plainly(2), make().state_dict()
    for state in run_ranks(2, boosted, HalfPlugin(shard_parameters)):
        for name, value in state.items():  # Adam's first steps are as long as the rate, whatever the rounding
            assert (value - expected[name]).abs().max() < 0.01 < STEPS * 0.01
            assert (value - begun[name]).abs().max() > 0.02, name


# ---- a tier


def elsewhere(medium: str, update: str = "step") -> Plan:
    """ZeRO-3 whose shards, masters and state are at home in a medium."""
    disk = DiskPlan(directory="nowhere", block_bytes=4096, medium=medium)
    tiers = replace(on_device(), param_disk_fraction=1.0, state_disk_fraction=1.0, disk=disk)
    return zero(3).but(tiers=tiers, update=update)


def train(session: Session, first: int, last: int) -> None:
    for step in range(first, last):
        session.backward(session.module(batch(step, session.mesh.rank)).square().mean())
        session.optimizer.step()


def session_of(plan: Plan, model: nn.Module) -> Session:
    return build(model, torch.optim.Adam(model.parameters(), lr=0.01), plan)


def over_compressed(plan: Plan, folder: str) -> tuple[list[dict[str, torch.Tensor]], dict[str, int], dict[str, int]]:
    """States of a run and of one that goes on from its checkpoint; the bytes on the tier, and those that went there."""
    take_back = register_medium("zlib", open_compressed)
    try:
        session = session_of(plan, make())
        other = session_of(plan, nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    finally:
        take_back()
    train(session, 0, STEPS - 1)
    Checkpointer(session).save(folder)
    train(session, STEPS - 1, STEPS)
    Checkpointer(other).load(folder)
    train(other, STEPS - 1, STEPS)
    held, moved = session.memory().by_tier["disk"], session.traffic()
    states = [each.module.state_dict() for each in (session, other)]
    session.close()
    other.close()
    return states, dict(held), moved


@pytest.mark.parametrize("update", ["step", *full("backward")])
def test_a_tier_of_others_trains_as_plain_and_goes_on_from_a_checkpoint(update: str, tmp_path: Path) -> None:
    expected = plainly(2)
    for (state, resumed), held, moved in run_ranks(2, over_compressed, elsewhere("zlib", update), str(tmp_path)):
        torch.testing.assert_close(state, expected, atol=1e-6, rtol=1e-5)
        assert all(torch.equal(resumed[name], value) for name, value in state.items())
        assert set(held) >= {"parameters", "masters", "optimizer state"}, held
        assert moved["disk_read"] and moved["disk_write"]


def unknown() -> str:
    take_back = register_medium("zlib", open_compressed) if dist.get_rank() == 1 else lambda: None
    try:
        session_of(elsewhere("zlib"), make())
    except (ValueError, DiskError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        take_back()
    return ""


def test_a_tier_that_one_rank_does_not_know_is_an_error_on_all() -> None:
    own, peers = run_ranks(2, unknown)
    assert own.startswith("ValueError: medium='zlib': give one of ['file'], or register it on every rank")
    assert peers.startswith("DiskError: ") and "rank 0: ValueError: medium='zlib': give one of ['file']" in peers


# ---- an architecture


def cut_over_ranks() -> None:
    """Logits and every gradient are those of the whole model."""
    ids = torch.randint(0, 29, (2, 5), generator=torch.Generator().manual_seed(0))
    found = []
    with Scope("shared") as group:
        axis = Axis(group)
        with pytest.raises(ValueError, match="Mini cannot be cut: it has no module of a known architecture"):
            cut_model(Mini(), axis, TensorPlan())
        take_back = register_architecture(ARCHITECTURE)
        try:
            for cut in (False, True):
                torch.manual_seed(0)
                model = Mini().double()
                if cut:
                    tensor_setup.cut(model, axis, TensorPlan())
                    assert model.blocks[1].qkv.weight.shape[0] < 72
                logits = model(ids)
                logits.square().mean().backward()
                grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
                found.append(tensor_setup.whole(model, axis, grads | {"logits": logits.detach()}))
        finally:
            take_back()
    assert_close(found[1], found[0], 1e-11, "an architecture of others", floor=1e-2)


@pytest.mark.parametrize("ranks", [2, *full(4)])
def test_an_architecture_of_others_is_cut(ranks: int) -> None:
    run_ranks(ranks, cut_over_ranks)
