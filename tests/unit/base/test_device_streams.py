"""Tests of streams, page-locked memory and worker threads on a fake CUDA with two GPUs.

They must use the model's GPU, whichever is the current one.
"""

import gc
import threading
from typing import Any, cast

import pytest
import torch

from shardwise.core.base.device import make_current, numbered, on_device, side_stream
from shardwise.core.comm import DONE, Buffer, LocalGroup
from shardwise.core.grads.chunk_grads import GradRing
from shardwise.core.memory.disk.store import BufferPool
from shardwise.core.memory.host import HostArena, host_block
from shardwise.core.memory.tier import Tier
from shardwise.core.shards.shard_memory import MemorySource
from shardwise.core.update.disk_tiles import TileVisits
from shardwise.core.update.optimizer_in_backward import EarlyUpdates
from shardwise.core.update.tiles import TileStepper
from tests.support.cuda_setup import FakeArray, FakeCuda, Stream

SECOND = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def _upload(cuda: FakeCuda) -> tuple[Any, FakeArray, torch.Tensor, Stream]:
    """Start a gather from host memory to the second GPU while the first one is current."""
    source, out, side = torch.zeros(4), FakeArray(cuda, 1), side_stream(SECOND)
    memory = MemorySource(Buffer(source), Tier.HOST, cast(Any, side))
    handle = memory.gather(LocalGroup("one", SECOND), cast(torch.Tensor, out))
    return handle, out, source, cast(Stream, side)


def test_wait_blocks_the_stream_of_the_arrays_gpu(cuda: FakeCuda) -> None:
    handle, out, source, side = _upload(cuda)
    assert side.device == 1 and side.comes_after(source)
    assert not out.owner.comes_after(source)
    handle.wait()
    assert out.owner.comes_after(source)
    assert not cuda.stream_of(0).given, "the other GPU has nothing to wait for"


def test_upload_waits_for_earlier_users_of_the_memory(cuda: FakeCuda) -> None:
    cuda.stream_of(1).given.append("reads the array that was there")
    before = cuda.stream_of(1).given[-1]
    _, _, _, side = _upload(cuda)
    assert side.comes_after(before)


def test_all_gather_starts_on_the_upload_stream(cuda: FakeCuda) -> None:
    streams, group, side = list[object](), LocalGroup("two", torch.device("meta")), side_stream(torch.device("cuda:0"))
    group.size, main = 2, cuda.stream_of(0)
    group._all_gather = lambda *_: streams.append(cuda.stream_of(0)) or DONE  # type: ignore[method-assign, func-returns-value]
    main.given.append("reads the array that was there")
    source = MemorySource(Buffer(torch.zeros(3)), Tier.HOST, cast(Any, side))
    source.gather(group, torch.empty(6, device="meta"))
    assert streams == [side] != [main] and cast(Stream, side).comes_after(main.given[-1])


def test_stream_changes_between_gather_and_use(cuda: FakeCuda) -> None:
    """The stream that reads the array waits for the copy, and the memory is recorded on that stream."""
    handle, out, source, _ = _upload(cuda)
    other = cuda.change_stream(1)
    handle.wait()
    assert other.comes_after(source)
    assert out.readers == [other], "its memory must not be given away while this stream reads"


def test_device_without_an_index_is_the_current_gpu(cuda: FakeCuda) -> None:
    make_current(SECOND)
    assert numbered(torch.device("cuda")) == SECOND and numbered(torch.device("cuda:0")).index == 0
    with on_device(torch.device("cuda:0")):
        assert cuda.current == 0
    assert cuda.current == 1
    for device in (torch.device("cpu"), torch.device("meta")):
        make_current(device)
        with on_device(device):
            assert numbered(device) == device and cuda.current == 1
    make_current(torch.device("cuda:0"))


@pytest.mark.parametrize("kind", ["arena", "block", "ring", "disk buffers"])
def test_memory_is_page_locked_for_the_models_gpu(cuda: FakeCuda, kind: str) -> None:
    """A new thread has the first GPU as the current one; a CUDA context there would take hundreds of MB."""
    makes = {
        "arena": lambda: HostArena(512, SECOND),
        "block": lambda: host_block(512, SECOND),
        "ring": lambda: GradRing(torch.device("cpu"), SECOND).take(100, torch.float32),
        "disk buffers": lambda: _pool().reserve(2, 4096),
    }

    def _pool() -> BufferPool:
        return BufferPool(lambda nbytes: host_block(nbytes, SECOND))

    thread = threading.Thread(target=makes[kind])
    thread.start()
    thread.join()
    gc.collect()
    assert cuda.ever_locked_on == {1}
    assert not cuda.locked, "what is dropped is unlocked, after the GPU has done its copies"
    assert set(cuda.synchronized) == {1}


def test_update_worker_has_the_models_gpu(cuda: FakeCuda) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    stepper = TileStepper(torch.optim.SGD([parameter], lr=0.1), [])
    early = EarlyUpdates(stepper, [], {}, TileVisits([], 1), {}, 2.0, SECOND)
    assert early._worker.submit(lambda: cuda.current).result() == 1 and cuda.current == 0
    early.close()
