"""Activations that ranks send each other, on the late device: tensor and sequence parallelism."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardwise.core.base.device import on_stream, side_stream
from shardwise.core.comm import GRADIENTS, Group, GroupMaker, P2PChannel, compressed
from shardwise.core.parallel.sequence import SequenceAxis
from shardwise.core.parallel.sequence.attention import attend_by_heads
from shardwise.core.parallel.sequence.mask import SequenceMask
from shardwise.core.parallel.sequence.parts import Parts
from shardwise.core.parallel.sequence.ring import Rotation, ring_attention
from shardwise.core.parallel.tensor import Axis
from tests.support.late_setup import GPU, off, on_late_device, on_ranks, there


@contextmanager
def _joined() -> Iterator[tuple[Group, P2PChannel]]:
    """Yield a group of all ranks and a channel between them."""
    with closing(GroupMaker(GPU, None, 60.0)) as maker:
        ranks = [list(range(dist.get_world_size()))]
        yield maker.make("axis", ranks), maker.make_wire("axis", ranks)


def _numbers(*shape: int, of: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(of))


def sent_first(connected: bool) -> str:
    """Return the outcome when all ranks send to the next one before they receive."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    with on_ranks(0):
        maker = GroupMaker(GPU, None, 3.0)
        wire = maker.make_wire("axis", [list(range(ranks))])
        if connected:
            wire.connect([(rank, after, 0), (before, rank, 0)])
        wire.send(torch.full((4,), float(rank), device=GPU), after, 0, 1, "a number")
        found = wire.receive((torch.Size([4]), torch.float32), before, 0, 1, "a number").tolist()
        wire.settle()
        maker.close()
        return str(found == [before] * 4)


@on_late_device
def axis_of_parts(name: str) -> Iterator[str]:
    """Sums, gathers and reduce-scatters of activations, each in memory that the one before used."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with _joined() as (group, _):
        axis, found, expected = Axis(group), list[Tensor](), list[Tensor]()
        for turn in range(3):
            by_rank = [_numbers(4, 6, of=10 * turn + other) for other in range(ranks)]
            x, total = there(by_rank[rank]), sum(by_rank[1:], by_rank[0])
            sizes = [1, 4 - 1] if ranks == 2 else [1] * ranks
            # Each is read at once, since a wait for a later one would cover it.
            found += [axis.total(x) + 0, axis.total(x[0, :5]) + 0, axis.collect(x) + 0, axis.total_part(x, 0, sizes)]
            expected += [total, total[0, :5], torch.stack(by_rank), total.split(sizes)[rank]]
            (full,) = group.buffers([(6, torch.float32)])
            full.resize(6, (0, *range(5, 4 + ranks), 6))
            full.local.copy_(x[0])
            group.reduce_scatter(group.part_of(full, rank), full, 1.0).wait()
            group.all_gather_in_place(full).wait()
            found, expected = [*found, full.local], [*expected, total[0]]
        for pair in zip(found, expected, strict=True):
            yield from off(name, *pair)


@on_late_device
def waited_elsewhere(name: str) -> Iterator[str]:
    """An 8-bit sum that is started on one stream and waited for on another, after which the first reuses its memory."""
    ranks, rank, numel = dist.get_world_size(), dist.get_rank(), 4096
    with _joined() as (plain, _):
        group = compressed(plain, GRADIENTS)
        (full,) = group.buffers([(ranks * numel, torch.float32)])
        for turn in range(3):
            full.local.fill_(float(turn + rank))
            out, other = torch.empty(numel, device=GPU), side_stream(GPU)
            handle = group.reduce_scatter(out, full, 1.0)
            with on_stream(other):
                handle.wait()
                found = out + 0
            del handle
            row = ranks * GRADIENTS.row_bytes(numel)
            again = [torch.full((row,), 9, dtype=torch.uint8, device=GPU) for _ in range(2)]
            with on_stream(other):
                yield from off(name, found, torch.full((numel,), sum(float(turn + each) for each in range(ranks))))
            assert len(again) == 2


@on_late_device
def messages_over_gloo(name: str) -> Iterator[str]:
    """8-bit messages and described ones between ranks that share a GPU; their memory is overwritten once they are
    sent."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    with _joined() as (_, wire):
        x = there(_numbers(3, 40, of=rank)) * 2
        wire.compressed().send(x, after, 0, 0, "numbers")
        wire.send(x, after, 1, 1, "described numbers", described=True)
        x.zero_()
        found = wire.compressed().receive((x.shape, x.dtype), before, 0, 0, "numbers")
        described, expected = wire.receive_described(before, 1, 1, "described numbers"), _numbers(3, 40, of=before) * 2
        wire.settle()
        yield from off(name, described, expected)
        yield from off(f"{name}, 8 bits", found, expected, 0.1)


@on_late_device
def parts_of_sequences(name: str) -> Iterator[str]:
    """Attention over parts of a sequence, by a ring or by heads, with its gradients."""
    ranks, rank, length = dist.get_world_size(), dist.get_rank(), 12
    with _joined() as (group, wire):
        axis, parts = SequenceAxis(group, wire), Parts(length, ranks, zigzag="ring" in name)
        whole = [_numbers(2, 4, length, 8, of=at).requires_grad_() for at in range(3)]
        weight = _numbers(2, 4, length, 8, of=9)
        q, k, v = (there(parts.take(x.detach(), 2, rank)).requires_grad_() for x in whole)
        if "ring" in name:
            found = ring_attention(Rotation(axis, parts, ranks), (q, k, v), SequenceMask(length, True), 0.4)
        else:

            def attend(q: Tensor, k: Tensor, v: Tensor, _: slice) -> Tensor:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4).transpose(1, 2)

            found = attend_by_heads((q, k, v), attend, parts, axis).transpose(1, 2)
        (found * there(parts.take(weight, 2, rank))).sum().backward()
        expected = functional.scaled_dot_product_attention(*whole, is_causal=True, scale=0.4)
        (expected * weight).sum().backward()
        yield from off(name, found, parts.take(expected.detach(), 2, rank))
        for own, other in zip((q, k, v), whole, strict=True):
            yield from off(f"{name}, gradient", own.grad, parts.take(other.grad, 2, rank))
