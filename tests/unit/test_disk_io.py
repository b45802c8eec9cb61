"""The knobs of the transfers mean what they say, and every fault is an error with its place that harms nothing else."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_setup import KIB, MIB, Log, disk_plan, holds, mounted, pattern, put, small_disk

from shardwise.core.memory.disk.io import MOST_AT_ONCE, Request, ThreadQueue, TransferFunction
from shardwise.core.memory.disk.store import DiskError, DiskStore
from tests.support.sets import full


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.mark.parametrize("block", [4 * KIB, 12 * KIB, 256 * KIB, MIB, 3 * MIB])
def test_no_request_exceeds_the_block(tmp_path: Path, log: Log, block: int) -> None:
    nbytes = 5 * MIB + 1234
    with DiskStore(disk_plan(tmp_path, block_bytes=block, threads=2), queues=log.queue) as store:
        store.reserve(1, nbytes)
        record = store.create("weights", nbytes)
        put(store, record, 1)
        written = sorted((r.offset, r.nbytes) for r in log.requests)
        assert holds(store, record, 1)
    assert max(size for _, size in written) == block
    # Neither twice nor left out: each begins where the one before ends.
    assert [start for start, _ in written] == [0, *(start + size for start, size in written[:-1])]
    assert sum(size for _, size in written) == record.padded_bytes
    # Whole blocks, except at the end of a segment (about 1 MiB) or of the record.
    assert len(written) <= -(-record.padded_bytes // block) + 6


def _queues() -> Iterator[Any]:
    """Each number of threads and requests is quick with one of the ways to submit them."""
    ways = [(True, True), (False, True), (True, False), (False, False)]
    for number, (threads, depth) in enumerate([(1, 1), (1, 5), (3, 4), (4, 1)]):
        for overlap, single in ways:
            case = pytest.param(threads, depth, overlap, single, id=f"{single}-{overlap}-{threads}-{depth}")
            yield case if (overlap, single) == ways[number] else full(case)[0]


@pytest.mark.parametrize(("threads", "depth", "overlap", "single"), _queues())
def test_requests_in_flight(tmp_path: Path, log: Log, threads: int, depth: int, overlap: bool, single: bool) -> None:
    plan = disk_plan(
        tmp_path, block_bytes=64 * KIB, threads=threads, queue_depth=depth, overlap_events=overlap, single_submit=single
    )
    with DiskStore(plan, queues=log.queue) as store:
        store.reserve(3, 4 * MIB)
        records = [store.create(str(n), 4 * MIB) for n in range(3)]
        buffers = [store.buffer(4 * MIB).fill_(n) for n in range(3)]
        log.gate.clear()
        writes = [store.write(record, buffer) for record, buffer in zip(records, buffers, strict=True)]
        while len(log.threads) < threads or log.in_flight < threads * depth:  # all queues fill up without a result
            assert not writes[0].finished()
        log.gate.set()
        for write in writes:
            write.wait()
        store.commit()
        for buffer in buffers:
            store.give(buffer)
    assert log.depths == [depth] * threads
    assert log.most_in_flight == threads * depth
    assert len(log.threads) == threads and threading.get_ident() not in log.threads
    assert max(log.submissions) == (1 if single else depth)
    assert log.closed == threads


def test_overlapping_events_keep_the_queue_full(tmp_path: Path) -> None:
    """With overlap the queue is refilled beside requests in flight; without, only once all of them are done."""
    seen = {}
    for overlap in (True, False):
        log = Log()
        plan = disk_plan(tmp_path, block_bytes=16 * KIB, queue_depth=4, overlap_events=overlap)
        with DiskStore(plan, queues=log.queue) as store:
            store.reserve(1, 4 * MIB)
            put(store, store.create("weights", 4 * MIB), 1)
        seen[overlap] = log.in_flight_at_submission
    assert set(seen[False]) == {0}
    assert max(seen[True]) > 0


def test_urgent_reads_go_before_what_waits(tmp_path: Path, log: Log) -> None:
    with DiskStore(disk_plan(tmp_path, block_bytes=4 * KIB, queue_depth=1), queues=log.queue) as store:
        store.reserve(3, 64 * KIB)
        records = [store.create(name, 64 * KIB) for name in ("patient", "urgent", "urgent, too")]
        for seed, record in enumerate(records):
            put(store, record, seed)
        log.requests.clear()
        log.gate.clear()
        buffers = [store.buffer(64 * KIB) for _ in records]
        pairs = zip(records, buffers, strict=True)
        handles = [store.read(record, buffer, urgent="urgent" in record.name) for record, buffer in pairs]
        log.gate.set()
        for seed, (handle, buffer) in enumerate(zip(handles, buffers, strict=True)):
            handle.wait()
            assert torch.equal(buffer, pattern(64 * KIB, seed))
        read = [request.owner.operation.what for request in log.requests]
        last = [max(at for at, what in enumerate(read) if repr(record.name) in what) for record in records]
        assert last[1] < last[2] < last[0]


def test_errors_are_results() -> None:
    _in_time(_errors_as_results)


def test_a_deep_queue_has_no_more_threads_than_help() -> None:
    gate = threading.Event()

    def transfer(request: Request) -> int:
        assert gate.wait(120)
        return request.nbytes

    before = threading.active_count()
    queue = ThreadQueue(2**16, transfer)
    queue.submit([Request(False, 0, 4096, offset, None, 0) for offset in range(MOST_AT_ONCE + 20)])
    assert threading.active_count() - before == MOST_AT_ONCE
    gate.set()
    assert {request.offset for request, _ in queue.reap(MOST_AT_ONCE + 20)} == set(range(MOST_AT_ONCE + 20))
    queue.close()
    assert threading.active_count() == before


def _in_time(call: Callable[[], None]) -> None:
    """A result that never comes fails the test instead of stopping it."""
    done = concurrent.futures.Future[None]()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result(timeout=120)


def _errors_as_results() -> None:
    def transfer(request: Request) -> int:
        if request.offset == 1:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if request.offset == 2:
            raise ZeroDivisionError("broken on purpose")
        return -errno.ENOSPC if request.offset == 3 else request.nbytes

    queue = ThreadQueue(2, transfer)
    queue.submit([Request(False, 0, 4096, offset, None, 0) for offset in range(4)])
    results: dict[int, int] = {}
    while len(results) < 4:
        results |= {request.offset: result for request, result in queue.reap(1)}
    assert results == {0: 4096, 1: -errno.EBADF, 2: -errno.EIO, 3: -errno.ENOSPC}
    queue.close()
    queue.close()


def _allow(monkeypatch: pytest.MonkeyPatch, allowed: int) -> list[str]:
    """The names of a store's threads that were started, of which there may be only so many."""
    real, started = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("shardwise-disk"):
            if len(started) == allowed:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return started


def test_threads_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = _allow(monkeypatch, 2)
    with DiskStore(disk_plan(tmp_path, block_bytes=64 * KIB)) as store:
        store.reserve(1, MIB)
        record = store.create("weights", MIB)
        put(store, record, 1)
        assert holds(store, record, 1)
    assert sorted(started) == ["shardwise-disk", "shardwise-disk-io"]


@pytest.mark.parametrize("allowed", range(4))
def test_a_store_that_gets_too_few_threads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    before, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    _allow(monkeypatch, allowed)
    with pytest.raises(DiskError, match=r"cannot start 2 threads, .*rank0\.data: can't start new thread; give fewer"):
        DiskStore(disk_plan(tmp_path, threads=2))
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) == before and set(os.listdir("/proc/self/fd")) == files


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[DiskStore, Log]]:
    log = Log()
    with DiskStore(disk_plan(tmp_path, block_bytes=64 * KIB, threads=2, queue_depth=4), queues=log.queue) as store:
        store.reserve(2, 4 * MIB)
        yield store, log


def test_a_write_that_fails_changes_nothing_committed(faulty: tuple[DiskStore, Log]) -> None:
    store, log = faulty
    records = [store.create(name, 3 * MIB + 5) for name in ("first", "second")]
    for record in records:
        put(store, record, 1)
    put(store, records[0], 2, commit=False)
    log.fail_next(errno.EIO, after=9)
    with pytest.raises(DiskError) as found:
        put(store, records[1], 2, commit=False)
    assert found.value.errno == errno.EIO
    for part in ("writing record 'second' in", "rank0.data, 65536 bytes at offset", "EIO", "errno 5", "kernel's log"):
        assert part in str(found.value)
    with pytest.raises(DiskError, match=r"cannot commit: writing record 'second' .* failed"):
        store.commit()
    assert all(holds(store, record, 1) for record in records)
    assert holds(store, records[0], 2, newest=True)
    with pytest.raises(DiskError, match="not complete"):
        holds(store, records[1], 2, newest=True)
    store.rollback()
    assert all(holds(store, record, 1, newest=True) for record in records)
    for record in records:
        put(store, record, 3, commit=False)
    store.commit()
    assert all(holds(store, record, 3) for record in records)


def test_a_failed_write_can_be_repeated(faulty: tuple[DiskStore, Log]) -> None:
    store, log = faulty
    record = store.create("weights", MIB)
    put(store, record, 1)
    log.fail_next(errno.ENOSPC)
    with pytest.raises(DiskError, match=r"ENOSPC.*free space there") as found:
        put(store, record, 2)
    assert found.value.errno == errno.ENOSPC
    put(store, record, 2)
    assert holds(store, record, 2)


def test_a_read_that_fails_can_be_repeated(faulty: tuple[DiskStore, Log]) -> None:
    store, log = faulty
    record = store.create("weights", 3 * MIB)
    put(store, record, 1)
    log.fail_next(errno.EIO, after=20)
    with pytest.raises(DiskError, match=r"reading record 'weights' in .* bytes at offset \d+: EIO"):
        holds(store, record, 1)
    assert holds(store, record, 1)


def test_every_request_can_fail(tmp_path: Path) -> None:
    """No position of the failure hangs, or lets a buffer be touched afterwards."""
    for position in range(8):
        log = Log()
        plan = disk_plan(tmp_path, block_bytes=4 * KIB, queue_depth=2, overlap_events=bool(position % 2))
        with DiskStore(plan, queues=log.queue) as store:
            store.reserve(1, 32 * KIB)
            record = store.create("weights", 32 * KIB)
            log.fail_next(after=position)
            with pytest.raises(DiskError, match="EIO"):
                put(store, record, 1)
            assert log.in_flight == 0


def test_short_transfers_are_continued(tmp_path: Path) -> None:
    class Short:
        """Transfers only a part of large requests, as file systems may."""

        def __init__(self, depth: int, transfer: TransferFunction) -> None:
            self.inner = ThreadQueue(depth, transfer)
            self.whole: dict[int, Request] = {}

        def submit(self, requests: Sequence[Request]) -> None:
            parts = []
            for r in requests:
                size = 8192 if r.nbytes > 8192 else r.nbytes
                parts.append(Request(r.writing, r.address, size, r.offset, r.owner, r.segment))
                self.whole[id(parts[-1])] = r
            self.inner.submit(parts)

        def reap(self, at_least: int) -> list[tuple[Request, int]]:
            return [(self.whole.pop(id(r)), result) for r, result in self.inner.reap(at_least)]

        def close(self) -> None:
            self.inner.close()

    plan = disk_plan(tmp_path, block_bytes=36 * KIB, queue_depth=3, threads=2)
    with DiskStore(plan, queues=Short) as store:
        store.reserve(1, 3 * MIB)
        record = store.create("weights", 3 * MIB - 77)
        put(store, record, 1)
        assert holds(store, record, 1)
        assert store.bytes_written == store.bytes_read == 3 * MIB


def _fd(store: DiskStore) -> int:
    """The store's file, opened again as somebody else would."""
    return os.open(f"/proc/self/fd/{store._file.fd}", os.O_RDWR)


def test_a_file_that_was_cut_short(faulty: tuple[DiskStore, Log]) -> None:
    store, _ = faulty
    record = store.create("weights", 3 * MIB)
    put(store, record, 1)
    put(store, record, 2)
    os.truncate(f"/proc/self/fd/{store._file.fd}", 5 * MIB)
    with pytest.raises(DiskError, match=r"reading record 'weights' in .*rank0\.data, .* cut short from outside"):
        holds(store, record, 2)


@pytest.mark.parametrize("what", ["bit", "torn", "swapped", "stale", "zeros"])
def test_content_that_was_changed(faulty: tuple[DiskStore, Log], what: str) -> None:
    store, _ = faulty
    record = store.create("weights", 3 * MIB - 3)
    put(store, record, 1)  # at offset 0
    put(store, record, 2)  # at offset 3 MiB
    fd = _fd(store)
    base, page = 3 * MIB, 4096
    block = bytearray(os.pread(fd, MIB, base + MIB))
    if what == "bit":
        block[777_777] ^= 0x10
    elif what == "torn":
        block[MIB // 2 :] = os.pread(fd, MIB // 2, MIB + MIB // 2)  # half of it is still the older version's
    elif what == "swapped":
        block[:page], block[page : 2 * page] = block[page : 2 * page], block[:page]
    elif what == "stale":
        block[:] = os.pread(fd, MIB, MIB)
    else:
        block[-page:] = bytes(page)
    os.pwrite(fd, block, base + MIB)
    os.close(fd)
    expected = rf"reading record 'weights' in .*rank0\.data: the 1048576 bytes at offset {base + MIB} are not what was"
    with pytest.raises(DiskError, match=expected) as found:
        holds(store, record, 2)
    assert found.value.errno == 0
    # The other version was not touched, and the store goes on.
    put(store, record, 3)
    assert holds(store, record, 3)


def test_changes_in_the_padding_do_not_matter(faulty: tuple[DiskStore, Log]) -> None:
    store, _ = faulty
    record = store.create("weights", 4097)
    put(store, record, 1)
    fd = _fd(store)
    os.pwrite(fd, b"\x00" * 100, 4097 + 50)
    os.close(fd)
    assert holds(store, record, 1)


def test_a_dead_thread_is_an_error_not_a_hang(tmp_path: Path) -> None:
    log = Log()
    with DiskStore(disk_plan(tmp_path), queues=log.queue) as store:
        store.reserve(1, MIB)
        record, buffer = store.create("weights", MIB), store.buffer(MIB)
        put_back = pattern(MIB, 5)
        buffer.copy_(put_back)
        log.break_at = 1
        handle = store.write(record, buffer)
        with pytest.raises(DiskError, match=r"writing record 'weights'.* thread stopped: ZeroDivisionError: broken on"):
            handle.wait()
        assert handle.finished() and log.closed == 1  # nothing in flight any more
        with pytest.raises(DiskError, match="thread stopped"):
            store.write(record, buffer).wait()
        store.rollback()


def test_the_limit_on_file_sizes(tmp_path: Path) -> None:
    """A real error of the system in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    with DiskStore(disk_plan(tmp_path)) as store:
        store.reserve(1, 4 * MIB)
        record = store.create("weights", 4 * MIB)
        put(store, record, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MIB, before[1]))
        try:
            with pytest.raises(DiskError, match=r"'more' .*6\d+ bytes\) .* beside 8388608 bytes.*EFBIG.*ulimit -f"):
                store.create("more", 6 * MIB + 1)
            with pytest.raises(DiskError, match=r"writing record 'weights' .* EFBIG") as found:
                put(store, record, 2)
            assert found.value.errno == errno.EFBIG
            assert holds(store, record, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store.rollback()
        put(store, store.create("more", 3 * MIB), 9)
        put(store, record, 2)
        assert holds(store, record, 2)


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, 16 * MIB) as (folder, _), DiskStore(disk_plan(folder)) as store:
        store.reserve(1, 3 * MIB)
        record = store.create("weights", 3 * MIB)
        put(store, record, 1)
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        with pytest.raises(DiskError) as found:
            store.create("more", 6 * MIB)
        assert found.value.errno == errno.ENOSPC
        for part in ("cannot reserve 12582912 bytes", "record 'more'", f"free: {free} bytes", "ENOSPC", "free space"):
            assert part in str(found.value)
        assert store.reserved_bytes == 6 * MIB
        # Somebody else fills the disk: what is reserved is still there.
        with open(folder / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(64 * KIB))
        put(store, record, 2)
        put(store, record, 3)
        assert holds(store, record, 3)
        os.unlink(folder / "filler")
        put(store, store.create("more", 2 * MIB), 4)


def test_a_disk_that_gets_full_while_reserving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(disk_plan(tmp_path)) as store:
        put_size = store.reserved_bytes

        def full(fd: int, offset: int, nbytes: int) -> None:
            os.truncate(f"/proc/self/fd/{fd}", offset + 4096)  # a part of it, as happens
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(DiskError, match="ENOSPC"):
                store.create("weights", 9000)
        assert os.fstat(store._file.fd).st_size == put_size == 0
        store.reserve(1, 9000)
        put(store, store.create("weights", 9000), 1)


def test_a_device_that_loses_its_end(tmp_path: Path) -> None:
    """Real EIO: the file below a loop device is cut, so the device cannot read there any more."""
    with small_disk(tmp_path, 16 * MIB) as (folder, image), DiskStore(disk_plan(folder)) as store:
        if not store.direct:
            pytest.skip("no O_DIRECT on the loop device")
        store.reserve(1, 4 * MIB)
        records = [store.create(str(n), 2 * MIB) for n in range(3)]
        for n, record in enumerate(records):
            put(store, record, n)
        os.sync()
        whole = image.read_bytes()
        os.truncate(image, MIB // 2)
        with pytest.raises(DiskError, match=r"reading record '2' .* EIO .*kernel's log"):
            holds(store, records[2], 2)
        image.write_bytes(whole)
        assert holds(store, records[2], 2)


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"cannot make a run directory in '.*/file'.*choose a directory, not a file"):
        DiskStore(disk_plan(tmp_path / "file"))
    with pytest.raises(DiskError, match=r"run directory in '.*/file/below'.*ENOTDIR"):
        DiskStore(disk_plan(tmp_path / "file" / "below"))
    with pytest.raises(DiskError, match=r"run directory in '/proc/nothing'") as found:
        DiskStore(disk_plan("/proc/nothing"))
    again = pickle.loads(pickle.dumps(found.value))
    assert (type(again), again.errno, str(again)) == (DiskError, errno.ENOENT, str(found.value))


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "fixed", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs") as folder,
        pytest.raises(DiskError, match=r"run directory in .*fixed'.*EROFS.*read-only; choose a directory"),
    ):
        DiskStore(disk_plan(folder))


def test_a_file_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, *_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(DiskError, match=r"cannot make .*rank0\.data: EIO"):
        DiskStore(disk_plan(tmp_path))
    assert list(tmp_path.iterdir()) == []
