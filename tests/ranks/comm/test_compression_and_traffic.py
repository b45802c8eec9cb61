"""Compressed collectives, bytes on the wire, agreement of many ranks, and the limit of open files (``ulimit -n``).

Traffic is compared to the byte with the formulas of this file. With N ranks, a collective on an array of B bytes sends
(N-1)/N B from every rank; an all-reduce sends twice that. Psi is the padded bytes of the trainable chunks. Padding is
fewer than N * R elements a chunk, and fewer than 64 bytes in front of each matrix. Small exchanges of the ranks (which
parameters were used, norms) count as ``exchange`` and have a bound of their own.

Stage 3 gathers in a step, for a chain of K equal units, a budget of b units and a prefetch of p:

* forward gathers each unit once: K;
* backward reads the weights of the last r units in reverse. r = K if the model's input requires a gradient, else K - 1,
  because only that gradient reads the first layer's weight;
* units that are still gathered are not gathered again: the last max(1, b) units, or max(1 + p, b) once the order is
  known (from the second step on), because units that are about to be used are not evicted.
"""

import itertools
import math
import os
import resource
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.comm import (
    BLOCK,
    FORMATS,
    GRADIENTS,
    INT4,
    INT8,
    VALUES,
    BlockFormat,
    Group,
    GroupMaker,
    P2PChannel,
    Summary,
    compressed,
    members,
)
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, chain, meshes, sharded
from tests.support.launching import SECONDS, forked, start
from tests.support.on_ranks import on_ranks
from tests.support.scope import CPU, Scope, values
from tests.support.sets import campaign, full

RANKS = 4


def opened() -> int:
    return len(os.listdir("/dev/fd"))


def limited(rank: int, meet: str) -> None:
    """Build a mesh in a process whose soft limit leaves room for two more files."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    before = opened() + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    plan = zero(3).but(shared_memory=False)
    mesh = Mesh.create(plan.mesh, torch.device("cpu"), plan.comm)
    assert mesh.world.exchange([float(rank)]) == [[float(each)] for each in range(RANKS)]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > opened() > before
    dist.barrier()
    os._exit(17)


def too_few(limit: int) -> None:
    """Ask for more files than the hard limit allows."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    with warnings.catch_warnings(record=True, action="always") as found:
        members.make_room(10)  # the limit has room for these
        assert not found and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 10 + members.MARGIN
        members.make_room(5000)
        members.make_room(5000)
    (told,) = found
    said, there = str(told.message), opened()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, limit)
    assert f"at most {limit} are allowed" in said and "5000 ranks" in said
    numbers = [count + members.GROUPS * 5000 + members.MARGIN for count in range(there - 4, there + 5)]
    assert any(f"Allow {number} on every host" in said for number in numbers)
    os._exit(17)


def ended(target: Callable[..., None], *arguments: tuple[object, ...]) -> list[int | None]:
    begun = [start(forked(target, *each)) for each in arguments]
    for each in begun:
        each.join(SECONDS)
    return [each.exitcode for each in begun]


def test_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    assert ended(limited, *((rank, f"{tmp_path}/meet") for rank in range(RANKS))) == [17] * RANKS


def test_low_hard_limit_of_open_files_warns_once() -> None:
    assert ended(too_few, (1000,)) == [17]


SLICES = (0, 1, 7, BLOCK, 3 * BLOCK + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE = {VALUES: 2.0**-4, GRADIENTS: 2.0**-3, INT8: 0.0, INT4: 0.0}
ABSOLUTE = {VALUES: 2.0**-17, GRADIENTS: 2.0**-31, INT8: 1 / 127, INT4: 1 / 7}


def rounded(row: Tensor, format_: BlockFormat) -> Tensor:
    row = row.clone()
    format_.round_(row)
    return row


def given(rank: int, numel: int, dtype: torch.dtype, round_: int = 0) -> Tensor:
    """Return values of several magnitudes."""
    powers = torch.arange(numel) % 11 - 5
    return (values(rank, numel, torch.float32, round_) * torch.exp2(powers)).to(dtype)


def by_slice(full: Tensor, size: int, format_: BlockFormat) -> Tensor:
    return torch.cat([rounded(part, format_) for part in full.view(size, -1)])


def written(numel: int, format_: BlockFormat) -> int:
    return -(-numel * format_.bits // 8) + -(-numel // BLOCK)


WAYS = (("shared", 3), ("gloo", 3), ("native", 2))
EVERY = [(name, *way) for name in FORMATS for way in WAYS]
FEW = [EVERY[place * len(WAYS) % len(EVERY) + place] for place in range(len(WAYS))]
"""Each kind of group, and each format."""


@pytest.mark.parametrize(("name", "kind", "ranks"), [case if case in FEW else full(case)[0] for case in EVERY])
@on_ranks()
def test_compressed_collectives_are_equal_on_every_group(name: str, kind: str, ranks: int) -> None:
    """Each dtype with each length; scales alternate."""
    weights, gradients = FORMATS[name]
    with Scope(kind) as group:
        sent = compressed(group, weights)
        scales = (1.0, 1.0 / group.size)
        for turn, (dtype, numel) in enumerate(itertools.product(DTYPES, SLICES)):
            gathers(sent, numel, dtype, weights)
            reductions(compressed(group, gradients), numel, dtype, scales[turn % 2], gradients)
        overflow(compressed(group, gradients))
        with pytest.raises(ValueError, match=r"float64.*switch compression"):
            sent.all_reduce(sent.buffers([(group.size, torch.float64)])[0], 1.0)
        assert sent.exchange([float(group.rank)], "ranks") == [[float(r)] for r in range(group.size)]
        sent.barrier()


def gathers(group: Group, numel: int, dtype: torch.dtype, format_: BlockFormat) -> None:
    size, rank = group.size, group.rank
    full, shard = group.buffers([(size * numel, dtype), (numel, dtype)])
    expected = torch.cat([rounded(given(r, numel, dtype), format_) for r in range(size)])
    for own in (shard.local, group.slice_of(full.local, rank)):
        own.copy_(given(rank, numel, dtype))
        group.round_(own)
    group.fence()
    group.traffic.reset()
    out = torch.full((size * numel,), 7.0, dtype=dtype)
    handles = [group.all_gather(out, shard), group.all_gather_in_place(full)]
    for handle in handles * 2:
        handle.wait()
        assert handle.finished()
    assert torch.equal(out, expected)
    group.fence()
    assert torch.equal(full.local, expected)
    own_bytes = written(numel, format_) if group.sends_slices else numel * dtype.itemsize
    assert group.traffic.bytes["all_gather"] == 2 * (size - 1) * own_bytes
    group.fence()


def reductions(group: Group, numel: int, dtype: torch.dtype, scale: float, format_: BlockFormat) -> None:
    size, rank = group.size, group.rank
    (full,) = group.buffers([(size * numel, dtype)])
    everyone = [given(r, size * numel, dtype) for r in range(size)]
    total = by_slice(everyone[0], size, format_).float()
    for each in everyone[1:]:
        total = total + by_slice(each, size, format_).float()
    total *= scale
    own = slice(rank * numel, (rank + 1) * numel)
    group.traffic.reset()
    for out in (torch.empty(numel), torch.empty(numel, dtype=dtype), full.local[own]):
        full.wait_writable()
        full.local.copy_(everyone[rank])
        handle = group.reduce_scatter(out, full, scale)
        handle.wait()
        handle.wait()
        assert torch.equal(out, total[own].to(out.dtype))
    full.wait_writable()
    full.local.copy_(everyone[rank])
    handle = group.all_reduce(full, scale)
    while not handle.finished():
        pass
    handle.wait()
    assert torch.equal(full.local, by_slice(total.to(dtype), size, format_))
    within(full.local, everyone, scale, format_)
    own_bytes = written(numel, format_) if group.sends_slices else numel * dtype.itemsize
    assert sum(group.traffic.bytes.values()) == (3 + 2) * (size - 1) * own_bytes
    full.wait_writable()
    group.barrier()


def within(found: Tensor, everyone: list[Tensor], scale: float, format_: BlockFormat) -> None:
    """Check the documented bound of the error, for the rounded terms and the rounded sum."""
    terms = torch.stack([each.double().abs() for each in everyone]).sum(0) * scale
    exact = torch.stack([each.double() for each in everyone]).sum(0) * scale
    most = terms.max() if terms.numel() else 0.0
    bound = (2 * RELATIVE[format_] + RELATIVE[format_] ** 2 + 2**-7) * terms + ABSOLUTE[format_] * 4 * most
    assert ((found.double() - exact).abs() <= bound).all()


def overflow(group: Group) -> None:
    """A value of one rank that is not finite makes its block of the result not finite on all ranks."""
    (full,) = group.buffers([(group.size * 300, torch.float16)])
    for bad in (float("inf"), float("nan")):
        full.wait_writable()
        full.local.fill_(60000.0 if group.rank else 1.0)
        if group.rank == 0:
            full.local[5] = bad
        group.all_reduce(full, 1.0 / group.size).wait()
        assert not full.local[:BLOCK].isfinite().any()
        assert full.local[BLOCK:].isfinite().all()
        full.wait_writable()


def one_message(wire: P2PChannel, rank: int, x: Tensor, lane: int, format_: BlockFormat, tag: int) -> None:
    described = lane == 1
    if rank == 0:
        wire.send(x.t() if x.dim() == 2 else x, 1, lane, tag, "x", described=described)
        return
    expected = x.t().contiguous() if x.dim() == 2 else x
    like = (expected.shape, expected.dtype)
    found = wire.receive_described(0, lane, tag, "x") if described else wire.receive(like, 0, lane, tag, "x")
    assert found is not None
    if format_.takes(x.dtype) and x.numel():
        expected = rounded(expected.view(-1), format_).view(expected.shape)
    assert torch.equal(found, expected)
    assert found.dtype == x.dtype


@on_ranks(2)
def test_compressed_messages() -> None:
    maker = GroupMaker(CPU, False, 60.0)
    plain = maker.make_wire("pp", [[0, 1]])
    wire, rank = plain.compressed(), torch.distributed.get_rank()
    sent = [given(0, 300, dtype).view(3, 100) for dtype in DTYPES]
    sent += [torch.arange(5), torch.zeros(0, 4), given(0, 6, torch.float32).double()]
    try:
        for tag, x in enumerate(sent):
            for lane, format_ in enumerate((VALUES, GRADIENTS)):
                one_message(wire, rank, x, lane, format_, tag)
        bytes_ = sum(x.numel() + 3 for x in sent[:3]) + sum(x.nbytes for x in sent[3:])
        shapes = 12 * 8 * len(sent)
        assert plain.traffic.bytes["send"] == (2 * bytes_ + shapes if rank == 0 else 0)
        wire.settle()
    finally:
        maker.close()


WIDTH, DEPTH = 17, 5
UNIT = WIDTH * WIDTH + WIDTH
Case = tuple[Plan, dict[str, Any]]
"""A plan, and the settings of :func:`count`."""


@dataclass(frozen=True)
class Counted:
    """Steps of one rank: traffic by kind, and the padded sizes of the chunks in elements."""

    steps: list[dict[str, int]]
    trainable: list[int]
    frozen: list[int]
    peak_gathered: int


def count(
    plan: Plan,
    steps: int = 2,
    passes: int = 1,
    no_sync: bool = False,
    input_grad: bool = True,
    freeze: int = 0,
    mesh: Mesh | None = None,
) -> Counted:
    model = chain(WIDTH, DEPTH, freeze)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    with sharded(model, optimizer, plan, mesh) as session:
        traffic = []
        for _ in range(steps):
            session.reset_traffic()
            for index in range(passes):
                loss = session.module(torch.randn(3, WIDTH, requires_grad=input_grad)).square().mean()
                if no_sync and index + 1 < passes:
                    with session.no_sync():
                        before = session.traffic()
                        session.backward(loss)
                        assert session.traffic() == before
                else:
                    session.backward(loss)
            session.optimizer.step()
            traffic.append(session.traffic())
        chunks = session._engine.shards.layout.chunks
        trainable = [c.padded_numel for c in chunks if c.trainable]
        frozen = [c.padded_numel for c in chunks if not c.trainable]
        return Counted(traffic, trainable, frozen, session.memory().peak_gathered_bytes)


def count_all(cases: list[Case]) -> list[Counted]:
    with meshes() as mesh_of:
        return [count(plan, mesh=mesh_of(plan), **settings) for plan, settings in cases]


def counts(world_size: int, cases: list[Case]) -> list[Counted]:
    """Return the counts, which are equal on all ranks; check padding and exchanges against their bounds."""
    results = run_ranks(world_size, count_all, cases)
    for result in results:
        assert result == results[0]
    for (_, settings), counted in zip(cases, results[0], strict=True):
        # At most 64 numbers per message; two messages per unit and pass, and a few per step.
        messages = int(settings.get("passes", 1)) * (2 * DEPTH + 8) + 8
        for step in counted.steps:
            assert step["broadcast"] == 0 and step["exchange"] <= 64 * 8 * (world_size - 1) * messages
        padded = counted.trainable + counted.frozen
        assert UNIT * DEPTH <= sum(padded) < (UNIT + 16) * DEPTH + len(padded) * world_size
    return results[0]


def sends(numel: int, itemsize: int, ranks: int) -> int:
    assert numel % ranks == 0
    return (ranks - 1) * (numel // ranks) * itemsize


@pytest.mark.parametrize(
    ("ranks", "shared"), [(2, None), *full((3, False), (4, None)), *campaign((2, False), (3, None), (4, False))]
)
def test_bytes_of_a_step(ranks: int, shared: bool | None) -> None:
    """DDP, ZeRO-1 and ZeRO-2 send 2 Psi (N-1)/N, and more for each further pass that is reduced.

    Frozen parameters cost nothing there. Stage 3 gathers but does not reduce them, and they stay valid over a step.
    """
    kinds: list[dict[str, Any]] = [{}, {"passes": 3}, {"freeze": 2, "input_grad": False}]
    cases = [(name, settings) for name in ("ddp", "zero1", "zero2", "zero3") for settings in kinds]
    cases += [(name, {"passes": 3, "no_sync": True}) for name in ("ddp", "zero1")]
    plans = [(PLANS[name].but(shared_memory=shared, prefetch=0), settings) for name, settings in cases]
    for (name, settings), result in zip(cases, counts(ranks, plans), strict=True):
        passes, frozen = settings.get("passes", 1), settings.get("freeze", 0)
        psi, unit = (sends(numel, 4, ranks) for numel in (sum(result.trainable), result.trainable[0]))
        reduced = psi * (1 if "no_sync" in settings else passes)
        # Backward ends with the first unit gathered, and the next forward starts with it.
        gathers = passes * (2 * DEPTH - 1) - (passes - 1)
        if frozen:  # backward reads the trainable units except the first; the last one is still gathered
            gathers = DEPTH + (DEPTH - frozen - 1) - 1
        expected = (unit * gathers if name == "zero3" else psi, reduced, 0)
        assert_bytes(result, (0, 0, 2 * reduced) if name == "ddp" else expected)
        assert sum(result.frozen) >= frozen * UNIT


def assert_bytes(result: Counted, expected: tuple[int, int, int]) -> None:
    """Compare the gathered, scattered and reduced bytes of each step."""
    for step in result.steps:
        assert (step["all_gather"], step["reduce_scatter"], step["all_reduce"]) == expected


@pytest.mark.parametrize("shared", [None, *full(False)], ids=["shared", "gloo"])
def test_traffic_falls_with_the_gathered_budget(shared: bool | None) -> None:
    """Over gloo, units this small are all prefetched as soon as any is, so only ``prefetch=0`` is tested."""
    per_step, base = [], zero(3).but(shared_memory=shared)
    budgets = [(units, prefetch) for units in range(DEPTH + 1) for prefetch in ((0, 1) if shared is None else (0,))]
    plans = [base.but(gathered_fraction=units / DEPTH, prefetch=prefetch) for units, prefetch in budgets]
    for (units, prefetch), result in zip(budgets, counts(2, [(plan, {}) for plan in plans]), strict=True):
        unit = sends(result.trainable[0], 4, 2)
        kept = max(1 + prefetch, units)
        # A budget of all units is ZeRO-2: one gather, right after the update.
        assert_bytes(replace(result, steps=result.steps[1:]), (unit * (DEPTH + max(DEPTH - kept, 0)), unit * DEPTH, 0))
        # Resident units do not count as gathered.
        assert result.peak_gathered == (result.trainable[0] * 4 * kept if units < DEPTH else 0)
        if prefetch == budgets[-1][1]:
            per_step.append(result.steps[1]["all_gather"])
    assert per_step == sorted(per_step, reverse=True) and per_step[0] > per_step[-1]


@pytest.mark.parametrize(("shared", "stages"), [(None, (1, 2, 3)), *full((False, (3,))), *campaign((False, (1, 2)))])
def test_hybrid_shard(shared: bool | None, stages: tuple[int, ...]) -> None:
    """Reduce-scatter over the shard group, then all-reduce of the shard over the replicas."""
    plans = [zero(stage, dp_replicate=2).but(shared_memory=shared, prefetch=0) for stage in stages]
    for stage, result in zip(stages, counts(4, [(plan, {}) for plan in plans]), strict=True):
        psi = sends(sum(result.trainable), 4, 2)
        replicas = 2 * sends(sum(result.trainable) // 2, 4, 2)
        gathered = psi + psi * (DEPTH - 1) // DEPTH if stage == 3 else psi
        assert_bytes(result, (gathered, psi, replicas))


@on_ranks(2)
def test_gradients_of_unused_units_are_not_sent() -> None:
    model = chain(WIDTH, DEPTH)
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), zero(3)) as session:
        session.reset_traffic()
        session.backward(model[:2](torch.randn(3, WIDTH)).square().mean())
        session.optimizer.step()
        padded = session._engine.shards.layout.chunks[0].padded_numel
        assert session.traffic()["reduce_scatter"] == 2 * sends(padded, 4, 2)


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
            "sums": group.totals([math.sqrt(each + 60.0) for each in numbers(rank)], "a test", compared=[1.0]),
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
def test_agreement_of_many_ranks_equals_that_of_few(ranks: int, kind: str) -> None:
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
