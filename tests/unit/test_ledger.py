"""The accounts of a device: what is asked for must fit, spare memory goes first, and the error says what helps.

One block of host memory: what is taken is zero, aligned, apart, and as much as was announced.
"""

from __future__ import annotations

import pytest
import torch

from shardwise.core.memory.host import HostArena
from shardwise.core.memory.ledger import ADVICE, DeviceMemoryError, Ledger

CPU = torch.device("cpu")
KIB = 1024


def test_what_is_held_is_asked_at_each_check() -> None:
    held = {"gradients": 3 * KIB}
    ledger = Ledger(CPU, 10 * KIB)
    ledger.account("gradients", lambda: held["gradients"])
    assert ledger.free_bytes() == 7 * KIB
    ledger.require(7 * KIB, "an array")
    held["gradients"] = 4 * KIB
    with pytest.raises(DeviceMemoryError):
        ledger.require(7 * KIB, "an array")
    ledger.require(6 * KIB, "an array")
    assert ledger.peak_bytes == 10 * KIB
    assert dict(ledger.held()) == held


def test_what_is_kept_for_speed_goes_first() -> None:
    spare = [4 * KIB]
    ledger = Ledger(CPU, 10 * KIB)
    ledger.account("idle arrays", lambda: sum(spare))
    ledger.reclaimable(spare.clear)
    ledger.require(6 * KIB, "an array")
    assert spare
    ledger.require(7 * KIB, "an array")
    assert not spare


def test_the_error_has_the_accounts_and_what_would_help() -> None:
    ledger = Ledger(CPU, 10 * KIB)
    ledger.account("parameter shards", lambda: 2 * KIB)
    ledger.account("masters and optimizer state", lambda: 7 * KIB)
    ledger.account("gradients", lambda: 0)
    with pytest.raises(DeviceMemoryError) as error:
        ledger.require(3 * KIB, "gathering unit 4")
    text = str(error.value)
    assert "gathering unit 4 needs 3 KiB more on cpu, which makes 12 KiB of a capacity of 10 KiB" in text
    assert "2 KiB too much" in text
    assert text.index("masters and optimizer state: 7 KiB") < text.index("parameter shards: 2 KiB")
    assert text.index(ADVICE["masters and optimizer state"]) < text.index(ADVICE["parameter shards"])
    assert "gradients: " not in text and ADVICE["gradients"] not in text
    ledger.account("gathered parameters", lambda: 3 * KIB)
    with pytest.raises(DeviceMemoryError, match=r"^the model: cpu holds 12 KiB of a capacity of 10 KiB: "):
        ledger.require(0, "the model")


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
