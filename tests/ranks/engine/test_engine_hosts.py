"""Training on hosts with several ranks each equals plain PyTorch; recovery from an error; secondary shards per host."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from shardwise.plan import zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, check, data, one_mesh, run_plain, run_sharded
from tests.support.exchange_setup import fails_and_goes_on
from tests.support.on_ranks import on_ranks
from tests.support.scope import PER_HOST, hosts_of
from tests.support.sets import campaign, full

WIDTH, LAYERS = 32, 4


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def several(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    for index in range(2):
        yield model(data(rank, step, index, WIDTH)).square().mean(), False


def on_hosts(per_host: int, *args: Any) -> Any:
    with hosts_of(per_host):
        return run_sharded(*args)


@pytest.mark.parametrize("size", [4, *campaign(3)])
@pytest.mark.parametrize("name", ["zero1", "zero3_straddling", *full("ddp", "zero2", "zero3", "half", "zero3_tensor")])
def test_training_on_several_hosts_equals_plain_torch(name: str, size: int) -> None:
    found = run_ranks(size, on_hosts, PER_HOST, layers, several, PLANS[name], 3)
    check(found, run_plain(layers, several, size, 3), f"{name} of {size} ranks")


def failing() -> list[str]:
    with hosts_of(PER_HOST):
        return fails_and_goes_on(zero(3).but(same_order=False))


def test_training_continues_after_an_error_on_one_rank() -> None:
    ends = run_ranks(4, failing)
    assert all(each[-1] == "made 2" for each in ends) and "ArithmeticError" in ends[1]


@pytest.mark.parametrize(
    ("per_host", "group"), [(2, "SharedGroup('secondary', rank"), *full((4, "None"), (1, "None"), (3, "None"))]
)
@on_ranks(4)
def test_secondary_host_puts_the_group_inside_a_host(per_host: int, group: str) -> None:
    plan = zero(3).but(secondary="host")
    with hosts_of(per_host), one_mesh(plan) as mesh:
        told = repr(mesh.secondary)
        assert told.startswith(group) and ("of 2" in told) == (per_host == 2)
        found = run_sharded(layers, several, plan, 3, mesh)
    check([found], run_plain(layers, several, 4, 3), "secondary shards of each host")
