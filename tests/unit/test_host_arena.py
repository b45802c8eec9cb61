"""One block of host memory: what is taken is zero, aligned, apart, and as much as was announced."""

from __future__ import annotations

import pytest
import torch

from shardwise.core.memory.host import HostArena


def test_tensors_do_not_overlap_and_share_one_storage() -> None:
    wanted = [(3, torch.float32), (0, torch.float32), (1000, torch.bfloat16), (1, torch.float64), (65, torch.int8)]
    total = sum(HostArena.rounded(n * dtype.itemsize) for n, dtype in wanted)
    arena = HostArena(total, pin_for=None)
    taken = [arena.take(numel, dtype) for numel, dtype in wanted]
    assert not arena.pinned
    with pytest.raises(RuntimeError, match=f"{total + 256} bytes do not fit into an arena of {total} bytes"):
        arena.take(1, torch.int8)
    for index, (tensor, (numel, dtype)) in enumerate(zip(taken, wanted, strict=True)):
        assert tensor.shape == (numel,) and tensor.dtype is dtype and not tensor.any()
        tensor.fill_(index + 1)
    for index, tensor in enumerate(taken):
        assert (tensor == index + 1).all()
    offsets = [t.data_ptr() - taken[0].data_ptr() for t in taken if t.numel()]
    assert offsets == [0, 256, 256 + 2048, 256 + 2048 + 256]
    assert len({t.untyped_storage().data_ptr() for t in taken}) == 1
    assert taken[0].untyped_storage().nbytes() == total


def test_more_than_was_announced_is_an_error() -> None:
    arena = HostArena(256, pin_for=None)
    arena.take(1, torch.float32)
    for _ in range(2):  # an error takes nothing
        with pytest.raises(RuntimeError, match="512 bytes do not fit into an arena of 256 bytes"):
            arena.take(1, torch.float32)
