"""Tests of ``TensorTracker`` against formulas and a scan of live tensors, and of ``AllocatorTracker`` with a fake
CUDA.
"""

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.memory.trace.tracker import AllocatorTracker, TensorTracker, make_tracker
from tests.support.cuda_setup import FakeCuda

CPU = torch.device("cpu")
F32 = 4


pytestmark = pytest.mark.usefixtures("frozen")


def tracker() -> TensorTracker:
    return TensorTracker(CPU)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_lowers_live_and_peak_bytes(reentrant: bool) -> None:
    rows, width, depth = 1024, 32, 6
    layers = ((nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.GELU()) for _ in range(depth))
    blocks = [nn.Sequential(*each) for each in layers]
    x = torch.ones(rows, width, requires_grad=True)

    def run(checkpointed: bool) -> tuple[int, int]:
        with tracker() as t:
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant) if checkpointed else block(y)
            kept = t.live_bytes
            y.sum().backward()
            peak = t.take_peak()
        for block in blocks:
            block.zero_grad()
        x.grad = None
        return kept, peak

    row = rows * width * F32
    kept, peak = run(False)
    assert kept == depth * row * (4 + 4 + 1 + 1)
    kept_less, peak_less = run(True)
    assert kept_less == depth * row
    assert peak_less < peak * 0.5
    # Recomputed activations count, although they are allocated inside the autograd engine.
    assert peak_less >= row * depth + row * 10


def test_exceptions_restore_everything() -> None:
    t = tracker()
    depth = torch._C._len_torch_dispatch_stack()

    def fail(kept: Tensor) -> None:
        raise ValueError(f"{kept.numel()} is too many")

    with pytest.raises(ValueError, match="100"), t:
        fail(torch.ones(100))
    gc.collect()
    assert torch._C._len_torch_dispatch_stack() == depth and t.live_bytes == 0

    x = torch.ones(10, requires_grad=True)
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), t:
        (x * 3).exp().sum().backward()
    gc.collect()
    assert torch._C._len_torch_dispatch_stack() == depth and t.live_bytes == 0
    with t:
        y = x * 2
    assert t.live_bytes == 40 and y is not None


def test_excluded_storages() -> None:
    old = torch.ones(10)
    t = tracker()
    t.exclude(old)
    with t:
        base = torch.ones(5)
        chunk = torch.empty(1000)
        t.exclude(chunk[10:20])  # a view excludes the entire storage
        assert t.live_bytes == 20 and t.take_peak() == 20  # the peak is as if it had never been counted
        chunk.resize_(2000)
        rows = chunk.view(2, 1000)[1]
        assert t.live_bytes == 20 and t.take_peak() == 20
        temporary = torch.ones(50)
        assert t.take_peak() == 220
        t.exclude(base)  # existed during the entire interval
        assert t.take_peak() == 200
        del temporary
        torch.ones(300)
        later = torch.ones(100)  # created after the peak
        t.exclude(later)
        assert t.take_peak() == 1200 and t.live_bytes == 0
    del rows, chunk, old, base, later
    assert not t._count.excluded and not t._count.made


def live_storages() -> int:
    """Return the bytes of the storages of all tensors that Python's garbage collector tracks."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor:
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


OPERATIONS: list[Callable[[list[Tensor], int], None]] = [
    lambda kept, i: kept.append(torch.ones(i + 1)),
    lambda kept, i: kept.append(kept[i % len(kept)] * 2),
    lambda kept, i: kept.append(kept[i % len(kept)].view(-1)[: i + 1]),
    lambda kept, i: kept.append(torch.cat([k.flatten() for k in kept[-2:]])),
    lambda kept, i: kept.append(kept[i % len(kept)].detach().clone().t()),
    lambda kept, i: kept.extend(torch.ones(2, 3).sort(dim=1)),
    lambda kept, i: kept[i % len(kept)].neg_(),
    lambda kept, i: kept.__delitem__(slice(1, 1 + i % len(kept))),
    lambda kept, i: kept.append(torch.empty(1).resize_(i + 1)),
    lambda kept, i: kept.append(kept[i % len(kept)].to(torch.float64)),
    lambda kept, i: kept.extend(kept[i % len(kept)].flatten().chunk(3)),
]


def test_against_a_scan_of_all_tensors() -> None:
    numbers = random.Random(7)
    gc.collect()
    gc.freeze()  # existing objects are no longer listed
    for _ in range(60):
        with tracker() as t:
            kept = [torch.ones(7)]
            for _ in range(20):
                numbers.choice(OPERATIONS)(kept, numbers.randrange(50))
                assert t.live_bytes == live_storages()
        kept.clear()
        assert t.live_bytes == live_storages() == 0
        kept.append(torch.ones(5))  # created outside of the context, so not counted
        assert t.live_bytes == 0 and live_storages() == 20
        kept.clear()


def test_allocator_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, model = FakeCuda(monkeypatch), {"bytes": 1000}
    cuda.allocate(1000)
    t = make_tracker(torch.device("cuda"), lambda: model["bytes"])
    assert isinstance(t, AllocatorTracker) and isinstance(make_tracker(CPU, int), TensorTracker)
    with t, t:
        cuda.allocate(300)
        cuda.allocate(-200)
        assert t.live_bytes == 100 and t.take_peak() == 300
        cuda.allocate(50)
        t.sample()
        cuda.allocate(4000)  # model data grows
        model["bytes"] += 4000
        cuda.allocate(20)
        assert t.take_peak() == 170
        cuda.allocate(-4000)  # model data shrinks
        model["bytes"] -= 4000
        t.sample()
        cuda.allocate(500)
        assert t.take_peak() == 670 and t.live_bytes == 670
        model["bytes"] += 600  # Memory that becomes model data was non-model data at the beginning of the interval.
        assert t.take_peak() == 670 and t.take_peak() == t.live_bytes == 70
