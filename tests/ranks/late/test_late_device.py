"""The late device by itself: it computes as the CPU does; a race of each kind is found, and its mended twin is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.base.device import (
    SideCopy,
    behind_current,
    copy_ahead,
    on_stream,
    page_lock,
    page_locked,
    record_event,
    recorded,
    side_stream,
    synchronize,
    wait_event,
)
from shardwise.testing import RankError, RankPool
from tests.support.late import LateDevice, LateError, late_device
from tests.support.sets import campaign

SEEDS = range(8)
GPU = torch.device("cuda", 0)
SIZE = 1000


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """One rank that had no backward pass before."""
    with RankPool(1) as pool:
        yield pool


def _train(seed: int) -> tuple[float, int]:
    """How far a model on it is from one on the CPU, after three steps; and how many works were late."""
    with late_device(seed) as device:
        torch.manual_seed(0)
        here = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
        there = deepcopy(here).to(GPU)
        late = 0
        for _ in range(3):
            x = torch.randn(5, 6)
            for model, given in ((here, x), (there, x.to(GPU))):
                model.zero_grad()
                model(given).square().mean().backward()
                torch.optim.AdamW(model.parameters(), eps=1e-2).step()
            late += len(device.current.queue)
        pairs = zip(here.parameters(), there.parameters(), strict=True)
        return max(float((one - other.cpu()).abs().max()) for one, other in pairs), late


@pytest.mark.parametrize("seed", [*SEEDS[:4], *campaign(*SEEDS[4:])])
def test_training_gives_what_the_cpu_gives(pool: RankPool, seed: int) -> None:
    difference, late = pool.run(_train, seed)[0]
    assert difference < 1e-6
    assert late > 100 if seed % 4 < 2 else seed % 4 == 3 or not late


def _facts() -> list[object]:
    with late_device(0) as device:
        x = torch.arange(6.0, device="cuda").view(2, 3)
        parameter = nn.Parameter(x.clone())
        held = device.allocated_bytes(GPU)[0]
        big = torch.zeros(1000, 1000, device=GPU)
        more = device.allocated_bytes(GPU)[0] - held
        del big
        return [
            type(x) is Tensor and type(parameter) is nn.Parameter and str(x.device) == "cuda:0" and x.is_cuda,
            x[x > 2].tolist() == [3.0, 4.0, 5.0] and x.t().contiguous().view(-1)[1].item() == 3.0,
            (x @ x.t()).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]] and bool((x == x).all()),
            more >= 4_000_000 and device.allocated_bytes(GPU)[0] == held,
            torch.rand(3, device=GPU).tolist() != torch.rand(3, device=GPU).tolist(),
        ]


def test_tensors_are_plain_ones_of_a_gpu(pool: RankPool) -> None:
    assert pool.run(_facts) == [[True] * 5]


# ---- races: each with what is missing, and without that


def _filled(device: LateDevice, value: float, guarded: bool, kind: str) -> Tensor:
    """A tensor that ought to be ``value`` all over, made with a side stream. Returned on the CPU."""
    side = side_stream(GPU)
    assert side is not None
    if kind == "before":  # the side copy must come after who makes its source
        source, out = torch.zeros(SIZE, device=GPU), torch.zeros(SIZE, device=GPU)
        synchronize(GPU)
        source.fill_(value)
        first: AbstractContextManager[object] = behind_current(GPU, side) if guarded else on_stream(side)
        with first:
            out.copy_(source)
            done = record_event(GPU)
        wait_event(GPU, done)
        return out.cpu()
    if kind == "after":  # who reads must come after the side copy
        source = page_locked((SIZE,), torch.float32).fill_(value)
        out = torch.empty(SIZE, device=GPU)
        copy = SideCopy(source, out, side)
        if guarded:
            copy.wait()
        return (out + 0).cpu()
    if kind == "dropped":  # memory that a side stream reads must not be given to others
        source, out = torch.full((SIZE,), value, device=GPU), torch.zeros(SIZE, device=GPU)
        with behind_current(GPU, side):
            out.copy_(source)
            done = record_event(GPU)
        if guarded:
            recorded(source, side)
        del source
        torch.full((SIZE,), 3.0, device=GPU)
        wait_event(GPU, done)
        return out.cpu()
    if kind == "pinned":  # the host must not write what a copy still reads
        source, out = torch.full((SIZE,), value), torch.empty(SIZE, device=GPU)
        page_lock(source.view(torch.uint8), GPU)
        copy_ahead(out, source)
        if guarded:
            record_event(GPU).synchronize()
        source.fill_(3.0)
        return out.cpu()
    # "early": the host must not read what a copy still writes
    there = torch.full((SIZE,), value, device=GPU)
    here = page_locked((SIZE,), torch.float32)
    copy_ahead(here, there)
    if guarded:
        record_event(GPU).synchronize()
    return here.clone()


def _races(seed: int, guarded: bool, kind: str) -> tuple[bool, int]:
    """Whether the values are right, and how many races were found."""
    with late_device(seed, check=False) as device:
        found = _filled(device, 7.0, guarded, kind)
        return bool((found == 7.0).all()), len(device.races)


KINDS = ("before", "after", "dropped", "pinned", "early")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_guarded_is_right_with_every_seed(pool: RankPool, kind: str) -> None:
    assert [pool.run(_races, seed, True, kind)[0] for seed in SEEDS] == [(True, 0)] * len(SEEDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_race_is_found(pool: RankPool, kind: str) -> None:
    """By wrong values with some seed; where both sides are works of the device also by their order, with all seeds."""
    found = [pool.run(_races, seed, False, kind)[0] for seed in SEEDS]
    assert not all(right for right, _ in found)
    if kind not in ("pinned", "early"):
        assert all(races for _, races in found)


def _raises(seed: int) -> None:
    with late_device(seed) as device:
        _filled(device, 7.0, False, "after")


def test_a_race_is_raised_with_both_places(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"LateError.*does not wait for a copy on side stream 1 from late/test_late"
    ) as e:
        pool.run(_raises, 2)
    assert LateError.__name__ in str(e.value)


def _after_a_backward_pass() -> None:
    torch.ones(1, requires_grad=True).backward()
    with late_device(0):
        pass


def test_a_process_that_had_a_backward_pass_is_told() -> None:
    with RankPool(1) as pool, pytest.raises(RankError, match="had a backward pass before its first late_device"):
        pool.run(_after_a_backward_pass)
