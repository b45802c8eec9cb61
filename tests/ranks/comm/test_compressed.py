"""Collectives in 8 bits: what they give on every way beside plain arithmetic, their bytes, what cannot be."""

from __future__ import annotations

import itertools

import pytest
import torch
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
    compressed,
)
from shardwise.testing import run_ranks
from tests.support.scope import CPU, Scope, values
from tests.support.sets import full

SLICES = (0, 1, 7, BLOCK, 3 * BLOCK + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE = {VALUES: 2.0**-4, GRADIENTS: 2.0**-3, INT8: 0.0, INT4: 0.0}
ABSOLUTE = {VALUES: 2.0**-17, GRADIENTS: 2.0**-31, INT8: 1 / 127, INT4: 1 / 7}


def rounded(row: Tensor, format_: BlockFormat) -> Tensor:
    row = row.clone()
    format_.round_(row)
    return row


def given(rank: int, numel: int, dtype: torch.dtype, round_: int = 0) -> Tensor:
    """Of several magnitudes."""
    powers = torch.arange(numel) % 11 - 5
    return (values(rank, numel, torch.float32, round_) * torch.exp2(powers)).to(dtype)


def by_slice(full: Tensor, size: int, format_: BlockFormat) -> Tensor:
    return torch.cat([rounded(part, format_) for part in full.view(size, -1)])


def written(numel: int, format_: BlockFormat) -> int:
    return -(-numel * format_.bits // 8) + -(-numel // BLOCK)


def both(kind: str, name: str) -> None:
    """Each dtype with each length, scales by turns."""
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
    """The bound that is stated, of the terms and of the sum."""
    terms = torch.stack([each.double().abs() for each in everyone]).sum(0) * scale
    exact = torch.stack([each.double() for each in everyone]).sum(0) * scale
    most = terms.max() if terms.numel() else 0.0
    bound = (2 * RELATIVE[format_] + RELATIVE[format_] ** 2 + 2**-7) * terms + ABSOLUTE[format_] * 4 * most
    assert ((found.double() - exact).abs() <= bound).all()


def overflow(group: Group) -> None:
    """What one rank has that is not finite no rank loses."""
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


WAYS = (("shared", 3), ("gloo", 3), ("native", 2))
EVERY = [(name, *way) for name in FORMATS for way in WAYS]
FEW = [EVERY[place * len(WAYS) % len(EVERY) + place] for place in range(len(WAYS))]
"""Each way, and each format."""


@pytest.mark.parametrize(("name", "kind", "size"), [case if case in FEW else full(case)[0] for case in EVERY])
def test_compressed_collectives_are_the_same_on_every_way(name: str, kind: str, size: int) -> None:
    run_ranks(size, both, kind, name)


def messages() -> None:
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
        shapes = sum(wire_shapes for wire_shapes in [12 * 8 * len(sent)])
        assert plain.traffic.bytes["send"] == (2 * bytes_ + shapes if rank == 0 else 0)
        wire.settle()
    finally:
        maker.close()


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


def test_compressed_messages() -> None:
    run_ranks(2, messages)
