"""Tests of memory accounting and placement.

- ``Ledger``: requests must fit, reclaimable memory is freed first, and the error shows the accounts and advice.
- ``HostArena``: tensors are zero, aligned and disjoint.
- ``assign_homes`` and ``missed_shares``: fractions on host and disk are met to within a chunk, evenly over the model.
- ``place``: memory, tiers, dtypes and buffers of each chunk for a plan.
"""

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.booster.plugin import GeminiPlugin
from shardwise.core.engine.placement import ChunkPlacement, DiskBuffers, Placement, RankFacts, describe, place
from shardwise.core.memory.host import HostArena
from shardwise.core.memory.ledger import ADVICE, DeviceMemoryError, Ledger
from shardwise.core.memory.tier import Home, Tier, assign_homes, missed_shares
from shardwise.core.shards.layout import Layout, ParamInfo, make_layout
from shardwise.plan import AutoPlan, ByTensor, DiskPlan, Plan, TierPlan, on_device, zero
from tests.support.on_ranks import raises

DISK = DiskPlan(directory="/nowhere", block_bytes=4096, queue_depth=1, threads=1, state_buffers=1, param_buffers=1)


def shares(**fields: Any) -> TierPlan:
    disk = DISK if any(fields.get(f"{kind}_disk_fraction") for kind in ("param", "state")) else None
    return replace(on_device(), disk=disk, **fields)


AUTO = AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=0.0)
CPU = torch.device("cpu")
KIB = 1024


def test_ledger_reads_the_accounts_at_each_check() -> None:
    held = {"gradients": 3 * KIB}
    ledger = Ledger(CPU, 10 * KIB)
    ledger.account("gradients", lambda: held["gradients"])
    assert ledger.free_bytes() == 7 * KIB
    ledger.require(7 * KIB, "an array")
    held["gradients"] = 4 * KIB
    raises(DeviceMemoryError, None, lambda: ledger.require(7 * KIB, "an array"))
    ledger.require(6 * KIB, "an array")
    assert ledger.peak_bytes == 10 * KIB
    assert dict(ledger.bytes_by_kind()) == held


def test_reclaimable_memory_is_freed_first() -> None:
    spare = [4 * KIB]
    ledger = Ledger(CPU, 10 * KIB)
    ledger.account("idle arrays", lambda: sum(spare))
    ledger.reclaimable(spare.clear)
    ledger.require(6 * KIB, "an array")
    assert spare
    ledger.require(7 * KIB, "an array")
    assert not spare


def test_error_shows_accounts_and_advice() -> None:
    ledger = Ledger(CPU, 10 * KIB)
    ledger.account("parameter shards", lambda: 2 * KIB)
    ledger.account("masters and optimizer state", lambda: 7 * KIB)
    ledger.account("gradients", lambda: 0)
    text = raises(DeviceMemoryError, None, ledger.require, 3 * KIB, "gathering unit 4")
    assert text.startswith("the device cpu is 2 KiB too small: 12 KiB needed, capacity 10 KiB. ")
    assert "Gathering unit 4 needs 3 KiB more. The device holds:" in text
    assert text.index("masters and optimizer state: 7 KiB") < text.index("parameter shards: 2 KiB")
    assert text.index(ADVICE["masters and optimizer state"]) < text.index(ADVICE["parameter shards"])
    assert "gradients: " not in text and ADVICE["gradients"] not in text
    assert zero(3).but(**dict.fromkeys(re.findall(r"\w+_fraction", "".join(ADVICE.values())), 0.0)) == zero(3)
    ledger.account("gathered parameters", lambda: 3 * KIB)
    raises(DeviceMemoryError, "There is no room for the model. The device holds", ledger.require, 0, "the model")


def test_arena_tensors_share_one_storage() -> None:
    wanted = [(3, torch.float32), (0, torch.float32), (1000, torch.bfloat16), (1, torch.float64), (65, torch.int8)]
    total = sum(HostArena.rounded(n * dtype.itemsize) for n, dtype in wanted)
    arena = HostArena(total, pin_for=None)
    taken = [arena.take(numel, dtype) for numel, dtype in wanted]
    assert not arena.pinned
    for _ in range(2):  # a failed request allocates nothing
        raises(RuntimeError, f"{total + 256} bytes do not fit into an arena of {total}", arena.take, 1, torch.int8)
    for index, (tensor, (numel, dtype)) in enumerate(zip(taken, wanted, strict=True)):
        assert tensor.shape == (numel,) and tensor.dtype is dtype and not tensor.any()
        tensor.fill_(index + 1)
    for index, tensor in enumerate(taken):
        assert (tensor == index + 1).all()
    offsets = [t.data_ptr() - taken[0].data_ptr() for t in taken if t.numel()]
    assert offsets == [0, 256, 256 + 2048, 256 + 2048 + 256]
    assert len({t.untyped_storage().data_ptr() for t in taken}) == 1
    assert taken[0].untyped_storage().nbytes() == total


D, H, S = Tier.DEVICE, Tier.HOST, Tier.DISK


def states(sizes: list[int], host: float, disk: float) -> list[Tier]:
    plan = shares(state_host_fraction=host, state_disk_fraction=disk)
    return [home.state for home in assign_homes(sizes, [False] * len(sizes), plan)]


def test_homes_of_small_examples() -> None:
    equal = [10] * 4
    assert states(equal, 0.0, 0.0) == [D] * 4
    assert states(equal, 1.0, 0.0) == [H] * 4
    assert states(equal, 0.0, 1.0) == [S] * 4
    assert states(equal, 0.5, 0.0) == [H, D, H, D]
    assert Counter(states(equal, 0.25, 0.25)) == {D: 2, H: 1, S: 1}
    assert Counter(states(equal, 0.5, 0.5)) == {S: 2, H: 2}
    assert states([], 0.5, 0.5) == []
    assert states([100], 0.3, 0.0) == [D] and states([100], 0.6, 0.0) == [H]


def test_gradients_are_placed_with_the_state() -> None:
    plan = shares(param_disk_fraction=1.0, state_host_fraction=1.0)
    assert assign_homes([1, 2], [False, True], plan) == [Home(S, H), Home(D, H)]
    assert [Home(S, state).grad for state in (D, H, S)] == [D, H, H]


def test_auto_starts_on_the_host() -> None:
    plan = shares(auto=AUTO, state_disk_fraction=1.0)
    assert assign_homes([1, 2], [False, True], plan) == [Home(H, H), Home(D, H)]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), host=st.floats(0, 1), rest=st.floats(0, 1))
def test_fractions_are_met_within_a_chunk(sizes: list[int], host: float, rest: float) -> None:
    disk = (1 - host) * rest
    found = states(sizes, host, disk)
    total, largest = sum(sizes), max(sizes)
    held = {tier: sum(s for s, t in zip(sizes, found, strict=True) if t is tier) for tier in Tier}
    assert abs(held[D] - (1 - host - disk) * total) <= largest
    assert abs(held[S] - disk * total) <= 2 * largest
    # Every prefix of the model has about the same fraction off the device.
    seen = away = 0
    for size, tier in zip(sizes, found, strict=True):
        seen, away = seen + size, away + size * (tier is not D)
        assert abs(away - (host + disk) * seen) <= largest


@pytest.mark.parametrize(("host", "disk"), [(0.1 + 0.2, 0.7), (0.7, 0.1 + 0.2), (1 / 3, 2 / 3)])
def test_fractions_that_add_up_to_one_leave_nothing_on_the_device(host: float, disk: float) -> None:
    assert D not in states([7] * 30, host, disk)


def test_frozen_chunks_do_not_count_as_state() -> None:
    """Every second chunk is frozen: a fraction of the state is a fraction of the others, wherever they are."""
    sizes, trainable = [100, 2] * 8, [False, True] * 8
    for share in (0.25, 0.5, 0.75, 1.0):
        for tier, name in ((Tier.HOST, "state_host_fraction"), (Tier.DISK, "state_disk_fraction")):
            homes = assign_homes(sizes, [False] * 16, shares(**{name: share}), trainable)
            assert sum(home.state is tier for home in homes[1::2]) == 8 * share
            assert all(home.state is Tier.DEVICE for home in homes[::2])
    last = assign_homes([100, 100, 100, 2], [False] * 4, shares(state_host_fraction=0.9), [False, False, False, True])
    assert [home.state for home in last] == [Tier.DEVICE] * 3 + [Tier.HOST]


def missed(sizes: list[int], trainable: list[bool] | None = None, **fields: Any) -> list[str]:
    plan = shares(**fields)
    return missed_shares(sizes, assign_homes(sizes, [False] * len(sizes), plan, trainable), plan, trainable)


def test_missed_fractions_are_reported() -> None:
    (line,) = missed([10], state_host_fraction=0.3)
    assert line.startswith("state_host_fraction=0.3, but the actual fraction is 0:")
    assert "there are 1." in line and "min_chunk_size_m" in line
    (line,) = missed([10], state_host_fraction=0.6)
    assert line.startswith("state_host_fraction=0.6, but the actual fraction is 1:")
    both = missed([10, 10], param_host_fraction=0.2, state_disk_fraction=0.75)
    assert [line.split("=")[0] for line in both] == ["param_host_fraction", "state_disk_fraction"]
    (line,) = missed([100, 2], [False, True], state_disk_fraction=0.5)
    assert "there are 1." in line


FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
RATIOS = ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio")


@pytest.mark.parametrize("value", [-1e-9, math.nextafter(1.0, 2.0), 1.0000001, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*FRACTIONS, *RATIOS])
def test_fractions_outside_of_0_to_1_are_refused(name: str, value: float) -> None:
    raises(ValueError, rf"{name}={value}: give a share in \[0, 1\]", lambda: GeminiPlugin(**{name: value}))


HALF = torch.bfloat16
HOST: dict[str, Any] = {"param_host_fraction": 1.0, "state_host_fraction": 1.0}
ON_DISK: dict[str, Any] = {"param_disk_fraction": 1.0, "state_disk_fraction": 1.0, "disk": DISK}
STATE_ON_DISK: dict[str, Any] = {"param_host_fraction": 1.0, "state_disk_fraction": 1.0, "disk": DISK}
TWO_RANKS = RankFacts(rank=0, size=2, device_type="cpu")
ON_GPU = replace(TWO_RANKS, device_type="cuda")


def layout_for(ranks: int, dtype: torch.dtype) -> Layout:
    """Return a layout with a weight, a frozen weight, and a bias that is small enough to stay gathered."""
    params = [("weight", 256, True, 0), ("frozen", 512, False, -1), ("bias", 8, True, 0)]
    infos = [ParamInfo((name,), torch.Size([size]), dtype, trains, at, 0) for name, size, trains, at in params]
    return make_layout(infos, nn.Module(), ByTensor(persist_numel=8), ranks, 1)


def placed(plan: Plan, facts: RankFacts) -> tuple[Placement, Layout]:
    layout = layout_for(facts.size, plan.precision.param_dtype or torch.float32)
    return place(plan, layout, facts), layout


def text(each: ChunkPlacement) -> str:
    """Describe a placement: memory, initials of the tiers of shard, state and gradient, and unusual settings."""
    home, master, quantization = each.home, each.master_dtype, each.quantization
    words = [each.memory, "".join(tier.value[:2] for tier in (home.param, home.state, home.grad))]
    words += [str(master).removeprefix("torch.")] if master is not None else []
    words += [f"grads: {each.grad_memory}"] if each.grad_memory != "first use" else []
    words += [f"{quantization.format} by {'owner' if quantization.by_owner else 'gather'}"] if quantization else []
    words += [f"secondary {each.secondary_numel}"] if each.secondary_numel else []
    words += ["resident"] if each.resident else []
    return " ".join([*words, *(["new shard"] if each.keeps_new_shard else [])])


FULL, FROZEN, MAPPED = "exchange, full dedede resident", "full dedede resident", "exchange, mapped dedede"
MASTERS = "exchange, full dedede float32 resident"
IN_HOST, TRACED = "exchange, full dehoho float32 grads: arena resident", "exchange hohoho grads: arena"
STATE_IN_HOST, SECOND = "exchange, full dehoho float32 resident", "exchange dedede secondary"
ON_DISK_FULL = "exchange, full dediho float32 grads: arena resident"
RING, INT8 = "grads: ring", "int8 by owner"
ON_DISK_RING = f"exchange, full dediho float32 {RING}"
IN_RING = [f"{MAPPED} {RING}", MASTERS.replace("resident", f"{RING} resident")]
FOUR_RANKS = RankFacts(0, 4, "cpu", secondary=2)
CASES: dict[str, tuple[Plan, RankFacts, list[str]]] = {
    "stage 1": (zero(1), TWO_RANKS, [FULL, FROZEN, FULL]),
    "one rank": (zero(3), RankFacts(0, 1, "cpu"), [FROZEN, FROZEN, FROZEN]),
    "stage 3": (zero(3), TWO_RANKS, [MAPPED, MAPPED, FULL]),
    "16 bits": (zero(3, HALF), ON_GPU, [f"{MAPPED} float32", MAPPED, MASTERS]),
    "16 bits, no masters": (zero(3, HALF).but(master_weights=False), ON_GPU, [MAPPED, MAPPED, FULL]),
    "a capacity": (zero(3), replace(TWO_RANKS, limited=True), ["exchange dedede", "exchange dedede", FULL]),
    "peers read the host": (zero(3).but(**HOST), TWO_RANKS, [TRACED, "exchange hodede", IN_HOST]),
    "host memory of a GPU": (zero(3).but(**HOST), ON_GPU, ["arena hohoho grads: arena", "arena hodede", IN_HOST]),
    "state on the host": (zero(1).but(state_host_fraction=1.0), TWO_RANKS, [STATE_IN_HOST, FROZEN, STATE_IN_HOST]),
    "a disk": (zero(3).but(**ON_DISK), TWO_RANKS, ["disk didiho float32 grads: arena", "disk didede", ON_DISK_FULL]),
    "state on a disk, updated during backward": (
        zero(3).but(**STATE_ON_DISK, update="backward"),
        ON_GPU,
        [f"arena hodiho float32 {RING} new shard", f"arena hodede {RING}", f"{ON_DISK_RING} resident new shard"],
    ),
    "updated during backward": (zero(3).but(update="backward"), TWO_RANKS, [f"{MAPPED} float32 {RING}", *IN_RING]),
    "a trace": (zero(3).but(auto=AUTO), TWO_RANKS, [TRACED, TRACED, IN_HOST]),
    "secondary shards": (zero(3).but(secondary=2), FOUR_RANKS, [f"{SECOND} 128", f"{SECOND} 256", FULL]),
    "8 bits": (
        zero(3).but(compress_weights="int8", compress_frozen="fp8"),
        TWO_RANKS,
        [f"{MAPPED} float32 {INT8}", "exchange dedede fp8 by gather", MASTERS.replace("resident", f"{INT8} resident")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_placement_of_each_plan(name: str) -> None:
    plan, facts, expected = CASES[name]
    placement, layout = placed(plan, facts)
    assert [text(each) for each in placement.chunks] == expected
    assert [each.spec for each in placement.chunks] == list(layout.chunks) and placement.warnings == ()
    assert [bool(each.tiles) for each in placement.chunks] == [True, False, True]


def test_gradient_dtypes() -> None:
    for (reduce, accumulate), expected in (
        ((None, None), (HALF, HALF)),
        ((None, torch.float32), (HALF, torch.float32)),
        ((torch.float32, None), (torch.float32, torch.float32)),
        ((torch.float16, torch.float32), (torch.float16, torch.float32)),
    ):
        plan = zero(3, HALF).but(reduce_dtype=reduce, accumulate_dtype=accumulate)
        first = placed(plan, TWO_RANKS)[0].chunks[0]
        assert (first.reduce_dtype, first.accumulate_dtype) == expected


def test_arena_bytes() -> None:
    """Tensors are rounded up to 256 bytes. The shard has 128 elements, which are 512 bytes in fp32."""
    arena = [each.arena_bytes for each in placed(zero(3).but(**HOST), ON_GPU)[0].chunks]
    assert arena == [512 + 512, 1024, 256 + 256]  # shard and gradient; frozen shard; master and gradient
    arena = [each.arena_bytes for each in placed(zero(3).but(**STATE_ON_DISK, update="backward"), ON_GPU)[0].chunks]
    assert arena == [512 + 512, 1024, 256]  # shard and new shard; frozen shard; new shard
    with_secondary = RankFacts(0, 4, "cuda", secondary=2)
    arena = [each.arena_bytes for each in placed(zero(3).but(**HOST, secondary=2), with_secondary)[0].chunks]
    assert arena == [256 + 512 + 256, 512 + 1024, 256 + 256]  # the secondary shard is twice as long
    assert all(each.arena_bytes == 0 for each in placed(zero(3), ON_GPU)[0].chunks)


def test_disk_buffers() -> None:
    disk = replace(DISK, state_buffers=3, param_buffers=5)
    placement, _ = placed(zero(3).but(**ON_DISK | {"disk": disk}), TWO_RANKS)
    expected = DiskBuffers(shard_bytes=1024, gathers=5, renewals=0, value_bytes=512, values=3)
    assert placement.disk_buffers == expected and placement.on_disk
    assert placement.staging() == {torch.float32: 256}
    early, _ = placed(zero(3).but(**ON_DISK | {"disk": disk}, update="backward"), TWO_RANKS)
    assert early.disk_buffers == replace(expected, gathers=4, renewals=1)
    state_alone, _ = placed(zero(3).but(**STATE_ON_DISK | {"disk": disk}), TWO_RANKS)
    assert state_alone.disk_buffers == DiskBuffers(value_bytes=512, values=3)
    without, _ = placed(zero(3), TWO_RANKS)
    assert (without.disk_buffers, without.staging(), without.on_disk) == (DiskBuffers(), {}, False)


def test_description_counts_chunks_with_equal_placement() -> None:
    plan = zero(3, HALF).but(**HOST, accumulate_dtype=torch.float32, compress_frozen="int8")
    rows = [re.split(r"  +", line.strip()) for line in describe(*placed(plan, TWO_RANKS)).splitlines()]
    grads = "host float32, reduced in bfloat16"
    assert rows == [
        ["chunks", "bytes", "shard", "in use", "masters", "state", "gradients", "first unit"],
        ["1", "256 B", "host bfloat16", "gathered", "host float32", "host", grads, "weight"],
        ["1", "512 B", "host bfloat16", "gathered, sent in int8", "-", "-", "-", "frozen"],
        ["1", "16 B", "device bfloat16", "resident", "host float32", "host", grads, "bias"],
        ["3", "784 B", "total"],
    ]
    infos = [ParamInfo((name,), torch.Size([64]), torch.float32, True, 0, 0) for name in "abc"]
    layout = make_layout(infos, nn.Module(), ByTensor(persist_numel=0), 2, 1)
    lines = describe(place(zero(3), layout, TWO_RANKS), layout).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["3", "384", "B"], ["3", "384", "B"]]
    assert lines[1].endswith(" a") and len(lines) == 3
