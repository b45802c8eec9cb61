"""A model without its optimizers in the session's own format: what is saved is what is trained, masters in full."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.deepspeed.saving import WithoutFrozen
from shardwise.plan import zero
from shardwise.strategies.saving import ModelOnly
from shardwise.testing import run_ranks
from tests.support.checkpoint_setup import SCALER, plans
from tests.support.engine_setup import adam, sharded
from tests.support.sets import full

NAMES = ("zero1", "zero3", "host", "bf16", "bf16 disk", "fp16", "straddling", "mixed")
State = dict[str, Tensor]


def model() -> nn.Module:
    """In fp32, its first layer frozen."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    net[0].requires_grad_(False)
    return net


def alone(name: str, directory: str) -> State:
    """Trained a step, so that masters are not what 16 bits can hold; saved twice without the optimizer. The masters."""
    net = model()
    with sharded(net, adam(net), plans(f"{directory}/disk")[name]) as session:
        for _ in range(2):
            session.backward(session.module(torch.ones(3, 6)).float().square().mean())
            session.optimizer.step()  # type: ignore[union-attr]
        saver = Checkpointer(ModelOnly(session))
        saver.save(directory, "all", use_async=name == "fp16")
        saver.wait_for_saves()
        Checkpointer(WithoutFrozen(ModelOnly(session))).save(directory, "trained")  # type: ignore[arg-type]
        return session.module.state_dict()


def loaded(name: str, directory: str, tag: str) -> State:
    net = model()
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    with sharded(net, adam(net), plans(f"{directory}/disk")[name]) as session:
        Checkpointer(ModelOnly(session)).load(directory, tag, strict=tag == "all")
        return session.module.state_dict()


QUICK = [(name, 1 + number % 2) for number, name in enumerate(NAMES)]


@pytest.mark.parametrize(("name", "ranks"), [*QUICK, *full(*((name, 3 - ranks) for name, ranks in QUICK))])
def test_a_model_alone_is_saved_as_it_is_trained(name: str, ranks: int, tmp_path: Path) -> None:
    masters = run_ranks(ranks, alone, name, str(tmp_path))[0]
    half = name in ("bf16", "bf16 disk", "fp16")
    kept = masters["2.weight"]
    assert kept.dtype == torch.float32
    assert not half or not torch.equal(kept, kept.bfloat16().float()), "not what 16 bits hold"
    for tag in ("all", "trained"):
        frozen = {n for n in masters if n.startswith("0.") and tag == "trained"}
        with open_checkpoint(tmp_path / tag) as source:
            facts = {n.removeprefix("model/"): fact for n, fact in source.tensors().items() if n.startswith("model/")}
            assert facts.keys() == masters.keys() - frozen
            for each, fact in facts.items():
                read = source.read(f"model/{each}", 0, masters[each].numel()).view(masters[each].shape)
                assert read.dtype == fact.dtype == masters[each].dtype and torch.equal(read, masters[each]), (tag, each)
        for own in run_ranks(ranks, loaded, name, str(tmp_path), tag):
            assert all(torch.equal(own[n], masters[n]) for n in facts), tag


def test_optimizers_that_keep_their_state_beside_other_weights_are_told(tmp_path: Path) -> None:
    net = model()
    with sharded(net, adam(net), zero(1)) as session:
        Checkpointer(ModelOnly(session)).save(tmp_path, "one")
        with pytest.raises(ValueError, match=r"missing from the checkpoint: optimizer 0 \(Adam\)"):
            session.checkpoints.load(tmp_path, "one")
        with pytest.warns(UserWarning, match=r"optimizer 0 \(Adam\): the checkpoint has no optimizers, so its"):
            session.checkpoints.load(tmp_path, "one", strict=False)


def test_a_static_loss_scale_is_the_plans(tmp_path: Path) -> None:
    """That of a run whose scale moved replaced it, for good."""
    moving = plans(str(tmp_path))["fp16"]
    fixed = moving.but(scaler=dataclasses.replace(SCALER, initial_scale=64.0, min_scale=64.0, max_scale=64.0))
    for plan, before, after in ((moving, 256.0, 128.0), (fixed, 64.0, 64.0), (moving, 256.0, 128.0)):
        net = model()
        with sharded(net, adam(net), plan) as session:
            scaler = session.optimizers[0].scaler
            assert scaler is not None and scaler.scale == before
            if not (tmp_path / "one").exists():
                scaler.update(overflow=True)
                session.checkpoints.save(tmp_path, "one")
                state = session.optimizers[0].state_dict()
            session.checkpoints.load(tmp_path, "one")
            assert scaler.scale == after
            session.optimizers[0].load_state_dict(state)
            assert scaler.scale == after
