"""Training on hosts with several ranks each: as in plain PyTorch, with each byte once to a host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_setup import PLANS, adam, check, data, one_mesh, run_plain, run_sharded, seeded, sharded
from scope import PER_HOST, hosts_of
from sets import campaign, full
from torch import Tensor, nn
from wander_setup import Wanderer, counted, fails_and_goes_on, wander

from shardwise.comm import HostsGroup
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close, run_ranks

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
def test_training_is_that_of_plain_torch(name: str, size: int) -> None:
    found = run_ranks(size, on_hosts, PER_HOST, layers, several, PLANS[name], 3)
    check(found, run_plain(layers, several, size, 3), f"{name} of {size} ranks")


@pytest.mark.parametrize("late", [False, *full(True)])
def test_arrays_renewed_at_their_first_use(late: bool) -> None:
    plan = zero(2).but(gather_on_use=True, overlap=not late)
    check(run_ranks(4, on_hosts, 2, layers, several, plan, 3), run_plain(layers, several, 4, 3), "renewed late")


@pytest.mark.parametrize(("prefetch", "size"), [(2, 3), *full((0, 3), (0, 4), (2, 4))])
def test_ranks_that_wander_train_as_in_plain_torch(size: int, prefetch: int) -> None:
    """They gather other layers, in another order, with collectives of their own in between."""
    plan = zero(3).but(prefetch=prefetch, gathered_fraction=0.2)
    found = run_ranks(size, on_hosts, PER_HOST, Wanderer, wander, plan, 4)
    check(found, run_plain(Wanderer, wander, size, 4), f"{size} ranks", 1e-9)


def failing() -> list[str]:
    with hosts_of(PER_HOST):
        return fails_and_goes_on(zero(3))


def test_a_rank_that_fails_goes_on() -> None:
    ends = run_ranks(4, failing)
    assert all(each[-1] == "made 2" for each in ends) and "ArithmeticError" in ends[1]


def step_of(plan: Plan, steps: int) -> list[tuple[dict[str, int], dict[str, int], int, list[str]]]:
    """Of each step: bytes from other hosts and to all ranks, parameters' with padding, and what the ranks met for."""
    model, found = seeded(layers), list[tuple[dict[str, int], dict[str, int], int, list[str]]]()
    with hosts_of(PER_HOST), counted() as purposes, sharded(model, adam(model), plan) as session:
        assert session.optimizer is not None
        assert isinstance(session.mesh.shard, HostsGroup) == plan.comm.by_hosts
        for step in range(steps):
            session.mesh.world.barrier()
            session.reset_traffic()
            purposes.clear()
            session.backward(session.module(data(session.mesh.rank, step, width=WIDTH)).square().mean())
            session.optimizer.step()
            session.mesh.world.barrier()
            whole = sum(chunk.spec.padded_numel * chunk.spec.dtype.itemsize for chunk in session.engine.chunks)
            found.append((session.traffic_from_other_hosts(), session.traffic(), whole, list(purposes)))
    return found


@pytest.mark.parametrize("stage", [3, *full(1, 2)])
def test_bytes_of_a_step_between_hosts(stage: int) -> None:
    """Two hosts of two ranks. A host takes the sums of its half from the other, and the other half of the parameters,
    once between two updates as they fit into its landing; from rank to rank each of its ranks takes both, the latter as
    often as it gathers."""
    for by_hosts in (True, False):
        ranks = run_ranks(4, step_of, zero(stage).but(by_hosts=by_hosts), 3)  # type: ignore[arg-type]
        for step in (1, 2):
            _, sent, whole, purposes = ranks[0][step]
            for first in (0, 2):
                gather, reduce = (sum(ranks[first + i][step][0][kind] for i in (0, 1)) for kind in ("gather", "reduce"))
                assert reduce == whole // 2 * (1 if by_hosts else 2)
                assert gather == (whole // 2 if by_hosts else 2 * sent["all_gather"] * 2 // 3)
            assert sent["all_gather"] % (whole * 3 // 4) == 0 and sent["reduce_scatter"] == whole * 3 // 4
            assert stage != 3 or len(purposes) == 2, purposes


def test_8_bits_go_the_same_way() -> None:
    """Numbers in 8 bits do not depend on the hosts: sums are made of slices as they left each rank."""
    plan = zero(3).but(compress="fp8", master_weights=True)
    one, other = (run_ranks(4, low, plan.but(by_hosts=by_hosts)) for by_hosts in (True, False))
    for rank in range(4):
        assert_close(one[rank], other[rank], 0.0, "8 bits")


def low(plan: Plan) -> dict[str, Tensor]:
    with hosts_of(PER_HOST):
        model = layers_in_fp32()
        with sharded(model, adam(model), plan) as session:
            assert session.optimizer is not None
            for step in range(2):
                session.backward(session.module(data(session.mesh.rank, step, width=WIDTH).float()).square().mean())
                session.optimizer.step()
            return session.module.state_dict()


def layers_in_fp32() -> nn.Module:
    return seeded(layers).float()


def on_its_host(per_host: int) -> tuple[str, dict[str, Tensor]]:
    plan = zero(3).but(secondary="host")
    with hosts_of(per_host), one_mesh(plan) as mesh:
        return repr(mesh.secondary), run_sharded(layers, several, plan, 3, mesh)


@pytest.mark.parametrize(
    ("per_host", "group"), [(2, "SharedGroup('secondary', rank"), *full((4, "None"), (1, "None"), (3, "None"))]
)
def test_secondary_shards_are_placed_inside_a_host_by_themselves(per_host: int, group: str) -> None:
    found = run_ranks(4, on_its_host, per_host)
    assert all(told.startswith(group) and ("of 2" in told) == (per_host == 2) for told, _ in found)
    check([state for _, state in found], run_plain(layers, several, 4, 3), "secondary shards of each host")
