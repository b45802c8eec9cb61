"""The recipes of CONTRIBUTING.md, written outside the package: formats, backends, plugins, tiers and architectures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.booster import Booster
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.formats import (
    detect_format,
    known_formats,
    open_checkpoint,
    register_format,
    write_checkpoint,
)
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.core.comm import register_backend
from shardwise.core.memory.disk import DiskError, register_medium
from shardwise.core.mesh import Mesh
from shardwise.core.parallel.tensor import Axis, cut_model, register_architecture
from shardwise.plan import DiskPlan, Plan, TensorPlan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close
from tests.recipes.half_plugin import HalfPlugin
from tests.recipes.npz_format import FORMAT
from tests.recipes.plain_backend import PlainGroup, make_group
from tests.recipes.tensor_architecture import ARCHITECTURE, Mini
from tests.recipes.zlib_medium import open_compressed
from tests.support import tensor_setup
from tests.support.engine_setup import adam, data, one_mesh, plain_steps, seeded, sharded, tanh_net
from tests.support.on_ranks import on_ranks, raises
from tests.support.scope import Scope
from tests.support.sets import full

STEPS = 3


def square(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss in fp32."""
    return model(data(rank, step).float()).float().square().mean()


def made(seed: int = 0) -> nn.Module:
    return seeded(tanh_net, seed).float()


def plainly() -> dict[str, Tensor]:
    """Train one process on the mean over the batches of two ranks."""
    model = made()
    return plain_steps(model, adam(model, 0.01), STEPS, square)


def train(session: Session, first: int, last: int) -> None:
    for step in range(first, last):
        session.backward(square(session.module, session.mesh.rank, step))
        session.optimizer.step()


# ---- a format


def npz_of(model: nn.Module, path: Path) -> Path:
    np.savez(path, **{name: value.numpy() for name, value in model.state_dict().items()})
    return path


@on_ranks(2)
def test_registered_format_loads_into_a_sharded_model(tmp_path: Path) -> None:
    put_back = register_format(FORMAT)
    try:
        path = npz_of(made(), tmp_path / f"weights{dist.get_rank()}.npz")
        model, booster = made(1), Booster(plugin=HalfPlugin())
        boosted, *_ = booster.boost(model, adam(model))
        booster.load_model(boosted, path)
        assert_close(boosted.state_dict(), made().state_dict(), 0.0, "npz")
    finally:
        put_back()


def test_format_is_known_until_it_is_unregistered(tmp_path: Path) -> None:
    path = npz_of(made(), tmp_path / "weights.npz")
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:50])
    put_back = register_format(FORMAT)
    assert detect_format(path) == "npz"
    with open_checkpoint(path) as source:
        assert source.tensors()["model/0.weight"].shape == (8, 6)
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


@on_ranks(2)
@pytest.mark.parametrize("stage", [*full(1, 2), 3])
def test_registered_backend_equals_plain_torch(stage: int) -> None:
    plan = zero(stage)  # type: ignore[arg-type]
    put_back = register_backend("cpu", make_group)
    try:
        mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    finally:
        put_back()
    assert isinstance(mesh.shard, PlainGroup)
    model = made()
    with sharded(model, adam(model, 0.01), plan, mesh) as session:
        train(session, 0, STEPS)
        assert_close(session.module.state_dict(), plainly(), 1e-5, "over the backend")
    mesh.close()
    with one_mesh(plan) as again:
        assert not isinstance(again.shard, PlainGroup)


# ---- a plugin


@on_ranks(2)
@pytest.mark.parametrize("shard_parameters", [True, *full(False)])
def test_own_plugin_trains(shard_parameters: bool) -> None:
    net, booster = made(), Booster(plugin=HalfPlugin(shard_parameters))
    model: Any
    optimizer: Any
    model, optimizer, *_ = booster.boost(net, adam(net, 0.01))
    for step in range(STEPS):
        booster.backward(square(model, dist.get_rank(), step), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    expected, begun = plainly(), made().state_dict()
    for name, value in model.state_dict().items():
        assert (value - expected[name]).abs().max() < 0.2 * (value - begun[name]).abs().max(), name


# ---- a tier


def elsewhere(medium: str, update: str = "step") -> Plan:
    """Return a ZeRO-3 plan that keeps shards, masters and state on a medium."""
    disk = DiskPlan(directory="nowhere", block_bytes=4096, medium=medium)
    tiers = replace(on_device(), param_disk_fraction=1.0, state_disk_fraction=1.0, disk=disk)
    return zero(3).but(tiers=tiers, update=update)


@on_ranks(2)
@pytest.mark.parametrize("update", ["step", *full("backward")])
def test_registered_medium_trains_and_resumes_from_a_checkpoint(update: str, tmp_path: Path) -> None:
    model, other = made(), made(1)
    take_back = register_medium("zlib", open_compressed)
    try:
        first, second = (build(each, adam(each, 0.01), elsewhere("zlib", update)) for each in (model, other))
    finally:
        take_back()
    train(first, 0, STEPS - 1)
    Checkpointer(first).save(tmp_path)
    train(first, STEPS - 1, STEPS)
    Checkpointer(second).load(tmp_path)
    train(second, STEPS - 1, STEPS)
    held, moved = first.memory().by_tier["disk"], first.traffic()
    assert set(held) >= {"parameters", "masters", "optimizer state"}, held
    assert moved["disk_read"] and moved["disk_write"]
    state = first.module.state_dict()
    assert_close(state, plainly(), 1e-5, "over the medium")
    assert_close(second.module.state_dict(), state, 0.0, "from the checkpoint")
    for each in (first, second):
        each.close()


@on_ranks(2)
def test_medium_that_one_rank_does_not_know_raises_on_all() -> None:
    model, own = made(), dist.get_rank() == 0
    take_back = register_medium("zlib", open_compressed) if not own else lambda: None
    unknown = r"medium='zlib': give one of \['file'\]"
    words = f"^{unknown}, or register it on every rank" if own else f"rank 0: ValueError: {unknown}"
    try:
        raises(ValueError if own else DiskError, words, build, model, adam(model), elsewhere("zlib"))
    finally:
        take_back()


# ---- an architecture


@on_ranks()
@pytest.mark.parametrize("ranks", [2, *full(4)])
def test_registered_architecture_is_sharded(ranks: int) -> None:
    """Logits and all gradients equal those of the unsharded model."""
    ids = torch.randint(0, 29, (2, 5), generator=torch.Generator().manual_seed(0))
    found = []
    with Scope("shared") as group:
        axis = Axis(group)
        words = "Mini cannot be cut: it has no module of a known architecture"
        raises(ValueError, words, cut_model, Mini(), axis, TensorPlan())
        take_back = register_architecture(ARCHITECTURE)
        try:
            for cut in (False, True):
                model = seeded(Mini)
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
