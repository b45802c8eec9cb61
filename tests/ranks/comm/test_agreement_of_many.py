"""How thousands of ranks agree, tried with a few: the same answers as where each rank gets every rank's numbers."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import other_numbers
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm import Group, Summary, register_backend
from shardwise.core.grads import reducer
from shardwise.core.mesh import Mesh
from shardwise.plan import ByTensor
from shardwise.testing import assert_close, run_ranks
from tests.support.alike_setup import PLANS, WIDTH, Blocks, made, real_native
from tests.support.engine_setup import plain_steps
from tests.support.scope import Scope
from tests.support.sets import campaign, full

FLAGS, MORE_FLAGS = 100, 2000


def numbers(rank: int) -> list[float]:
    return [float(rank), -2.0 * rank, 7.0, *(float((rank * step) % 5) for step in range(60))]


def flags(rank: int) -> list[bool]:
    return [(each + rank) % 7 == 0 for each in range(FLAGS)]


def told(kind: str, rows_up_to: int) -> dict[str, Any]:
    rank = dist.get_rank()
    with mock.patch.object(Group, "rows_up_to", rows_up_to), Scope(kind) as group:
        found: dict[str, Any] = {
            "unlike": group.summarize(numbers(rank), "a test", flags=flags(rank)),
            "alike": group.summarize([3.0, 2.0**53 - 1], "a test", flags=flags(0)),
            "one flag": group.summarize([1.0], "a test", flags=[rank == 1]),
            "one value": group.summarize([float(rank == 1)], "a test", flags=flags(0)),
            "more flags": group.summarize([1.0], "a test", flags=[(at + rank) % 9 == 0 for at in range(MORE_FLAGS)]),
            "nothing": group.summarize([], "a test"),
            "rows": group.exchange(numbers(rank), "a test"),
            "same rows": group.exchange([1.0, 2.5], "a test"),
            "no rows": group.exchange([], "a test"),
            "objects": group.exchange_object({"rank": rank}),
            "first's": group.broadcast_values(numbers(rank), "a test"),
            "first's, alike": group.broadcast_values(numbers(1), "a test"),
            "sums": group.totals([math.sqrt(each + 60.0) for each in numbers(rank)], "a test", beside=[1.0]),
            "largest": group.totals(numbers(rank), "a test", largest=True),
        }
        found["nan"] = [math.isnan(row[0]) for row in group.exchange([math.nan if rank else 1.0], "a test")]
        found["traffic"] = dict(group.traffic.bytes), dict(group.traffic.calls)
    return found


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        *[(2, "gloo"), (3, "native"), (5, "gloo")],
        *full((2, "native"), (3, "gloo"), (4, "gloo"), (4, "native"), (5, "native")),
    ],
)
def test_the_answers_are_the_same(ranks: int, kind: str) -> None:
    many, few = run_ranks(ranks, told, kind, 1), run_ranks(ranks, told, kind, 16)
    sums_of_few = few[0]["sums"]
    for one, other in zip(many, few, strict=True):
        traffic, _ = one.pop("traffic"), other.pop("traffic")
        assert one.pop("sums") == (pytest.approx(other.pop("sums")[0]), [True])
        assert one == other
        assert traffic[0]["exchange"] > 0
    every = [numbers(rank) for rank in range(ranks)]
    columns = list(zip(*every, strict=True))
    anywhere = [any(column) for column in zip(*(flags(rank) for rank in range(ranks)), strict=True)]
    least, most = [min(column) for column in columns], [max(column) for column in columns]
    assert many[0]["unlike"] == Summary(least, most, anywhere, False, False)
    assert many[0]["alike"] == Summary([3.0, 2.0**53 - 1], [3.0, 2.0**53 - 1], flags(0), True, True)
    assert many[0]["one flag"] == Summary([1.0], [1.0], [True], False, False)
    assert many[0]["one value"] == Summary([0.0], [1.0], flags(0), False, True)
    assert many[0]["rows"] == every
    assert many[0]["first's"] == every[0] and many[0]["first's, alike"] == numbers(1)
    sums = [math.fsum(math.sqrt(each + 60.0) for each in column) for column in columns]
    assert sums_of_few == (sums, [True]) and many[0]["largest"] == (most, [])
    assert many[0]["objects"] == [{"rank": rank} for rank in range(ranks)]
    assert many[0]["nan"] == [False, *[True] * (ranks - 1)]


SETS = [(0, 1), (1, 0), (2,), (0, 1), (2,), (1, 2), (2,), (0, 1)]
"""Blocks that all ranks use in a step; every second rank the other way round."""


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def through(model: Blocks, rank: int, step: int, x: Tensor) -> Tensor:
    used = SETS[step]
    for block in used if rank % 2 else reversed(used):
        x = model.blocks[block](x)
    return model.head(x)


def switching(name: str, rows_up_to: int, kept: int) -> tuple[dict[str, Tensor], list[list[int]], list[int]]:
    """What training comes to, the order of reductions behind each step, and the steps in which ranks spoke of it."""
    put_back = register_backend("cpu", real_native)
    orders, spoke, broadcast = list[list[int]](), list[int](), Group.broadcast_values

    def speak(group: Group, *args: Any, **rest: Any) -> list[float]:
        spoke.append(len(orders))
        return broadcast(group, *args, **rest)

    with (
        mock.patch.object(Group, "rows_up_to", rows_up_to),
        mock.patch.object(Group, "broadcast_values", speak),
        mock.patch.object(reducer, "MAX_ORDERS", kept),
    ):
        try:
            mesh = Mesh.create(PLANS[name].mesh, torch.device("cpu"), PLANS[name].comm)
        finally:
            put_back()
        plan = PLANS[name].but(packing=ByTensor(persist_numel=0), same_order=False)
        session = made(plan, mesh, 3)
        model = session.model
        for step in range(len(SETS)):
            with mock.patch.object(model, "forward", lambda x, step=step: through(model, mesh.rank, step, x)):
                session.backward(session.module(batch(mesh.rank, step)).square().mean())
            session.optimizer.step()
            session.optimizer.zero_grad()
            orders.append([state.spec.index for state in session.engine.grads.passes._reducer._order])
        state = {key: value.clone() for key, value in session.module.state_dict().items()}
        session.close()
        mesh.close()
    return state, orders, spoke


@pytest.mark.parametrize(
    ("name", "rows_up_to", "kept"),
    [
        ("zero2", 1, 64),
        *full(("zero1", 1, 64), ("zero2", 16, 64), ("zero3", 16, 64), ("zero3", 1, 1)),
        *campaign(("zero3", 1, 64)),
    ],
)
def test_an_order_is_agreed_on_once_for_each_set_in_use(name: str, rows_up_to: int, kept: int) -> None:
    """Ranks whose gradients come in different orders, and sets of chunks in use that change from step to step."""
    ranks = run_ranks(3, switching, name, rows_up_to, kept)
    plain = plainly()
    for state, orders, spoke in ranks:
        assert_close(state, plain, 1e-5, name)
        assert orders == ranks[0][1] and spoke == ([0, 2, 5] if kept > 1 else [0, 2, 3, 4, 5, 6, 7])
        if kept > 1:
            assert orders[0] == orders[1] == orders[3] == orders[7] and orders[2] == orders[4] == orders[6]


def plainly() -> dict[str, Tensor]:
    other_numbers.seed(0)
    plain = Blocks(3, WIDTH)
    loss = lambda model, rank, step: through(model, rank, step, batch(rank, step)).square().mean()  # noqa: E731
    return plain_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), len(SETS), loss, 3)
