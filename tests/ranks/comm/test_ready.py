"""Places for a buffer's next reduction: there before it begins, right for every size, and counted as what came."""

from __future__ import annotations

from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from scope import PER_HOST, Scope, same, summed, values
from sets import full

from shardwise.comm import ready
from shardwise.comm.gloo import GlooGroup
from shardwise.comm.link import Link, Message
from shardwise.testing import run_ranks

KINDS = ["gloo", "hosts"]
NUMEL = 600
SIZES = [600, 600, 60, 300, 600, 120]
"""Elements a rank, of one buffer in turn."""


def reduced(kind: str, dtype: torch.dtype, spread: bool, kept_bytes: int) -> list[tuple[int, int, int]]:
    """Of each of some reductions: places posted where it began and behind it, and bytes received from other hosts."""
    found, posted = [], {"receive": 0, "receive_aside": 0}

    def counting(name: str) -> Any:
        real = getattr(Link, name)

        def post(link: Link, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Message:
            posted[name] += tag >= ready.READY and "reduc" in what
            return real(link, tensor, peer, tag, what)

        return post

    patched = {name: counting(name) for name in posted}
    with mock.patch.object(ready, "KEPT_BYTES", kept_bytes), mock.patch.multiple(Link, **patched), Scope(kind) as group:
        size = group.size
        (full,) = group.buffers([(size * NUMEL, dtype)])
        group.barrier()
        for round_, numel in enumerate(SIZES):
            group.reset_traffic()
            posted.update(dict.fromkeys(posted, 0))
            full.wait_writable()
            full.resize(size * numel)
            full.local.copy_(values(group.rank, size * numel, dtype, round_))
            if spread:
                group.all_reduce(full, 0.5).wait()
                out, first = full.local, 0
            else:
                out, first = torch.empty(numel, dtype=dtype), group.rank * numel
                group.reduce_scatter(out, full, 0.5).wait()
            whole = summed(size, size * numel, dtype, dtype, 0.5, round_, kind)
            same(out, whole[first : first + out.numel()], kind)
            found.append((posted["receive"], posted["receive_aside"], group.from_other_hosts()["reduce"]))
        full.wait_writable()
        group.barrier()
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "spread"),
    [
        *[("gloo", torch.float32, False), ("gloo", torch.bfloat16, True), ("hosts", torch.bfloat16, False)],
        ("hosts", torch.float32, True),
        *full(("gloo", torch.float32, True), ("gloo", torch.bfloat16, False)),
        *full(("hosts", torch.float32, False), ("hosts", torch.bfloat16, True)),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_places_are_there_before_a_reduction_begins(kind: str, dtype: torch.dtype, spread: bool) -> None:
    size = 4
    for found in run_ranks(size, reduced, kind, dtype, spread, 1 << 20):
        parts = 1 if kind == "hosts" else size - 1
        taken = (
            size - PER_HOST if kind == "hosts" else size - 1
        )  # slices of sums; its own ranks' a rank has on its host
        width = 4 if kind == "hosts" else dtype.itemsize
        for at, (begun, kept, received) in enumerate(found):
            assert (begun, kept) == (parts if at == 0 else 0, parts), f"reduction {at}"
            spread_bytes = (taken // PER_HOST if kind == "hosts" else taken) * dtype.itemsize if spread else 0
            assert received == SIZES[at] * (parts * width + spread_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_room_is_posted_where_it_begins(kind: str) -> None:
    for found in run_ranks(4, reduced, kind, torch.float32, False, NUMEL * 4 * 3 - 1 if kind == "gloo" else 0):
        assert {(begun > 0, kept) for begun, kept, _ in found} == {(True, 0)}


def uneven(kind: str) -> int:
    """Parts of equal and of other lengths, in turn; places that are kept are for the former."""
    with Scope(kind) as group:
        assert isinstance(group, GlooGroup)
        size = group.size
        lengths = [3, 40, 7, 1][:size]
        bounds = tuple(accumulate(lengths, initial=0))
        (full,) = group.buffers([(size * 50, torch.float32)])
        for round_ in range(6):
            full.wait_writable()
            full.resize(*((size * 50, None) if round_ % 3 else (bounds[-1], bounds)))
            full.local.copy_(values(group.rank, full.local.numel(), torch.float32, round_))
            own = group.part_of(full, group.rank)
            out = torch.empty(own.numel())
            group.reduce_scatter(out, full, 1.0).wait()
            whole = summed(size, full.local.numel(), torch.float32, torch.float32, 1.0, round_, kind)
            first = bounds[group.rank] if round_ % 3 == 0 else 50 * group.rank
            same(out, whole[first : first + out.numel()], kind)
        full.wait_writable()
        group.barrier()
        return sum(map(len, group.ready._kept.values()))


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_other_lengths_go_between(kind: str, size: int) -> None:
    for rank, kept in enumerate(run_ranks(size, uneven, kind)):
        assert kept == (size - 1 if kind == "gloo" else 1), f"rank {rank}"
