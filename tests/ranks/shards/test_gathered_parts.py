"""Blocks that gather some parameters: wherever shards are at home, over memory, messages and replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import adam, data, seeded, sharded
from tests.support.sets import full
from tests.support.tier_setup import with_tiers

BASE = zero(3, torch.bfloat16)
PLANS = {
    "memory": zero(3),
    "masters": BASE,
    "messages": BASE.but(shared_memory=False),
    "replicas": zero(3, torch.bfloat16, dp_replicate=2),
    "secondary": zero(3).but(secondary=2),
    "later": zero(3).but(gather_on_use=True),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 6))


def one_step(session: Session, step: int) -> None:
    x = data(session.mesh.rank, step).to(session.params[0].dtype)
    session.backward(session.module(x).float().square().mean())
    session.optimizers[0].step()


def edited(plan: Plan, on_disk: bool) -> None:
    model = seeded(net)
    with sharded(model, adam(model), plan) as session:
        one_step(session, 0)
        before, first = session.module.state_dict(), [model[0].weight, model[0].bias]
        with session.gathered([model[2].weight]):
            shown = {name: param.detach().clone() for name, param in model[2].named_parameters()}
            assert all(bool(param.isnan().all()) for param in model[0].parameters())
            model[2].bias.data.zero_()  # no part of the model
        for name, value in shown.items():
            assert torch.equal(value, before[f"2.{name}"].to(value.dtype)), name
        session.reset_traffic()
        with session.gathered(first, write_back=True), torch.no_grad():
            first[0].data = first[0].data.clone()
            first[1][2:30] = 0.5
            inside = session.module.state_dict()
            first[1][30:] = -0.5
        moved = session.traffic()
        before["0.bias"][2:30] = 0.5
        assert_close(inside, before, 0.0, "a state inside of the block")
        before["0.bias"][30:] = -0.5
        assert_close(session.module.state_dict(), before, 0.0, "some were written")
        assert not on_disk or moved["disk_write"] > 0
        with session.gathered(session.params):
            assert session.engine.pool.blocks.all_held
            assert model.state_dict().keys() == before.keys()
        other = seeded(net)
        with sharded(other, adam(other), plan) as second:
            one_step(second, 0)
            second.module.load_state_dict(before)
            for each in (session, second):
                one_step(each, 1)
            assert_close(session.module.state_dict(), second.module.state_dict(), 0.0, "training goes on with it")


@pytest.mark.parametrize("name", ["masters", "messages", *full("memory", "replicas", "secondary", "later")])
def test_some_parameters_are_changed(name: str) -> None:
    run_ranks(4 if name in ("replicas", "secondary") else 2, edited, PLANS[name], False)


@pytest.mark.parametrize("mix", ["thirds", *full("all_disk", "p_disk_s_host")])
def test_some_parameters_are_changed_on_other_tiers(mix: str, tmp_path: Path) -> None:
    run_ranks(2, edited, with_tiers(BASE, mix, str(tmp_path)), True)


def held(plan: Plan) -> list[list[bool]]:
    """Blocks over some units that end in another order than they began in."""
    model = seeded(net)
    with sharded(model, adam(model), plan) as session:
        one, two = session.gathered(model[0].parameters()), session.gathered([model[0].bias, model[2].bias])
        shown = lambda: [not bool(each.weight.isnan().any()) for each in (model[0], model[2], model[3])]  # noqa: E731
        found = []
        for call in (one.__enter__, two.__enter__):
            call()
            found.append(shown())
        for block in (one, two):
            block.__exit__(None, None, None)
            found.append(shown())
        one_step(session, 0)
    return found


@pytest.mark.parametrize("name", ["memory", "messages"])
def test_what_another_block_has_stays(name: str) -> None:
    first, both = [True, False, False], [True, True, False]
    assert run_ranks(2, held, PLANS[name]) == [[first, both, both, [False] * 3]] * 2


def in_capacity(capacity: int) -> tuple[int, int]:
    """What the device holds behind the build, and the largest unit's bytes."""
    model = seeded(net)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    with sharded(model, adam(model), zero(3).but(device_capacity_bytes=capacity)) as session:
        sizes = session.engine.pool.sizes
        if capacity < 1 << 30:
            with pytest.raises(DeviceMemoryError), session.module.gathered():
                pass
            for name, param in model.named_parameters():
                with session.gathered([param]):
                    assert torch.equal(param.data, expected[name])
        return sum(session.ledger.held().values()), max(sizes.values())


def test_a_loop_has_room_where_the_model_has_not() -> None:
    held, largest = run_ranks(2, in_capacity, 1 << 40)[0]
    run_ranks(2, in_capacity, held + largest + largest // 8)
