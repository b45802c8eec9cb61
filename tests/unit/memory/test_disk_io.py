"""Tests of the disk tier's transfers, faults and media.

- The options of transfers (threads, queue depth, overlap) are respected.
- Each fault raises an error that says where it occurred and affects nothing else.
- ``register_medium``: the store over another medium than files, invalid names, and media that fail.
"""

import errno
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.memory.disk import DiskError, DiskStore, Medium, known_media, register_medium
from shardwise.core.memory.disk.io_threads import Request, ThreadQueue, TransferFunction
from shardwise.plan import DiskPlan
from tests.recipes.zlib_medium import CompressedMemory, open_compressed
from tests.support.disk_setup import KIB, MIB, SIZES, Log, disk_plan, holds, put, small_disk
from tests.support.on_ranks import raises
from tests.support.sets import full

COUNTS, WAYS = [(1, 1), (1, 5), (3, 4), (4, 1)], [(True, True), (False, True), (True, False), (False, False)]
QUICK = [count + way for count, way in zip(COUNTS, WAYS, strict=True)]
"""Each number of threads and requests with one way of submission."""
OTHERS = [count + way for count in COUNTS for way in WAYS if count + way not in QUICK]


@pytest.mark.parametrize(("threads", "depth", "overlap", "single"), [*QUICK, *full(*OTHERS)])
def test_requests_in_flight(tmp_path: Path, threads: int, depth: int, overlap: bool, single: bool) -> None:
    log, ways = Log(), {"overlap_events": overlap, "single_submit": single}
    plan = disk_plan(tmp_path, block_bytes=64 * KIB, threads=threads, queue_depth=depth, **ways)
    with DiskStore(plan, queues=log.queue) as store:
        store.reserve(3, 4 * MIB)
        records = [store.create(str(n), 4 * MIB) for n in range(3)]
        buffers = [store.buffer(4 * MIB).fill_(n) for n in range(3)]
        log.gate.clear()
        writes = [store.write(record, buffer) for record, buffer in zip(records, buffers, strict=True)]
        while len(log.threads) < threads or log.in_flight < threads * depth:  # waits until all queues are full
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


@pytest.mark.parametrize("allowed", range(4))
def test_failure_to_start_threads_releases_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    before, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    real, started = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("shardwise-disk"):
            if len(started) == allowed:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    refusal = r"cannot start 2 threads, .*rank0\.data: can't start new thread; give fewer"
    raises(DiskError, refusal, DiskStore, disk_plan(tmp_path, threads=2))
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) == before and set(os.listdir("/proc/self/fd")) == files


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[DiskStore, Log]]:
    log = Log()
    with DiskStore(disk_plan(tmp_path, block_bytes=64 * KIB, threads=2, queue_depth=4), queues=log.queue) as store:
        store.reserve(2, 4 * MIB)
        yield store, log


def test_failed_write_keeps_the_committed_version(faulty: tuple[DiskStore, Log]) -> None:
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
    raises(DiskError, r"cannot commit: writing record 'second' .* failed", lambda: store.commit())
    assert all(holds(store, record, 1) for record in records)
    assert holds(store, records[0], 2, newest=True)
    raises(DiskError, "not complete", lambda: holds(store, records[1], 2, newest=True))
    store.rollback()
    assert all(holds(store, record, 1, newest=True) for record in records)
    for record in records:
        put(store, record, 3, commit=False)
    store.commit()
    assert all(holds(store, record, 3) for record in records)


def test_every_request_can_fail(tmp_path: Path) -> None:
    """No position of the failure hangs or leaves a request in flight that uses a buffer."""
    for position in range(8):
        log = Log()
        plan = disk_plan(tmp_path, block_bytes=4 * KIB, queue_depth=2, overlap_events=bool(position % 2))
        with DiskStore(plan, queues=log.queue) as store:
            store.reserve(1, 32 * KIB)
            record = store.create("weights", 32 * KIB)
            log.fail_next(after=position)
            raises(DiskError, "EIO", put, store, record, 1)
            assert log.in_flight == 0


def test_short_transfers_are_continued(tmp_path: Path) -> None:
    class Short(ThreadQueue):
        """Transfers only a part of large requests, as file systems may."""

        def __init__(self, depth: int, transfer: TransferFunction) -> None:
            super().__init__(depth, transfer)
            self.whole: dict[int, Request] = {}

        def submit(self, requests: Sequence[Request]) -> None:
            parts = []
            for r in requests:
                parts.append(Request(r.writing, r.address, min(r.nbytes, 8192), r.offset, r.owner, r.segment))
                self.whole[id(parts[-1])] = r
            super().submit(parts)

        def reap(self, at_least: int) -> list[tuple[Request, int]]:
            return [(self.whole.pop(id(r)), result) for r, result in super().reap(at_least)]

    plan = disk_plan(tmp_path, block_bytes=36 * KIB, queue_depth=3, threads=2)
    with DiskStore(plan, queues=Short) as store:
        store.reserve(1, 3 * MIB)
        record = store.create("weights", 3 * MIB - 77)
        put(store, record, 1)
        assert holds(store, record, 1)
        assert store.bytes_written == store.bytes_read == 3 * MIB


@pytest.mark.parametrize("stale", [False, True])
def test_changed_content_is_detected(faulty: tuple[DiskStore, Log], stale: bool) -> None:
    """One flipped bit, or a block of the older version; test_disk.py has other changes."""
    store, _ = faulty
    record = store.create("weights", 3 * MIB - 3)
    put(store, record, 1)  # at offset 0
    put(store, record, 2)  # at offset 3 MiB
    fd = os.open(f"/proc/self/fd/{store._file.fd}", os.O_RDWR)  # opened again, as another process would
    base = 3 * MIB
    block = bytearray(os.pread(fd, MIB, MIB if stale else base + MIB))
    if not stale:
        block[777_777] ^= 0x10
    os.pwrite(fd, block, base + MIB)
    os.close(fd)
    expected = rf"reading record 'weights' in .*rank0\.data: the 1048576 bytes at offset {base + MIB} are not what was"
    with pytest.raises(DiskError, match=expected) as found:
        holds(store, record, 2)
    assert found.value.errno == 0
    # The other version is intact, and the store can be used.
    put(store, record, 3)
    assert holds(store, record, 3)


def test_dead_thread_raises(tmp_path: Path) -> None:
    log = Log()
    with DiskStore(disk_plan(tmp_path), queues=log.queue) as store:
        store.reserve(1, MIB)
        record, buffer = store.create("weights", MIB), store.buffer(MIB)
        log.break_at = 1
        handle = store.write(record, buffer)
        raises(DiskError, r"writing record 'weights'.* thread stopped: ZeroDivisionError: broken on", handle.wait)
        assert handle.finished() and log.closed == 1  # nothing is in flight
        raises(DiskError, "thread stopped", lambda: store.write(record, buffer).wait())
        store.rollback()


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, 16 * MIB) as folder, DiskStore(disk_plan(folder)) as store:
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
        # Another file fills the disk; reserved space can still be written.
        with open(folder / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(64 * KIB))
        put(store, record, 2)
        put(store, record, 3)
        assert holds(store, record, 3)
        os.unlink(folder / "filler")
        put(store, store.create("more", 2 * MIB), 4)


def test_unusable_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    is_file = r"cannot make a run directory in '.*/file'.*choose a directory, not a file"
    raises(DiskError, is_file, DiskStore, disk_plan(tmp_path / "file"))
    below = tmp_path / "file" / "below"
    raises(DiskError, r"run directory in '.*/file/below'.*ENOTDIR", DiskStore, disk_plan(below))
    with pytest.raises(DiskError, match=r"run directory in '/proc/nothing'") as found:
        DiskStore(disk_plan("/proc/nothing"))
    again = pickle.loads(pickle.dumps(found.value))
    assert (type(again), again.errno, str(again)) == (DiskError, errno.ENOENT, str(found.value))


class Shelf(CompressedMemory):
    """A medium that records its requests and may raise an error in close()."""

    def __init__(self, stuck: Exception | None = None) -> None:
        super().__init__()
        self.stuck, self.lock, self.closed = stuck, threading.Lock(), 0
        self.asked: dict[str, list[tuple[int, int]]] = {"read": [], "write": []}
        self.reserved: list[int] = []

    def reserve(self, nbytes: int) -> None:
        self.reserved.append(nbytes)

    def read(self, offset: int, memory: memoryview) -> None:
        with self.lock:
            self.asked["read"].append((offset, memory.nbytes))
        super().read(offset, memory)

    def write(self, offset: int, memory: memoryview) -> None:
        with self.lock:
            self.asked["write"].append((offset, memory.nbytes))
        assert memory.readonly
        super().write(offset, memory)

    def close(self) -> None:
        self.closed += 1
        if self.stuck is not None:
            raise self.stuck


@contextmanager
def registered(open: Callable[[DiskPlan, int], Any]) -> Iterator[None]:
    take_back = register_medium("shelf", open)
    try:
        yield
    finally:
        take_back()


@pytest.mark.parametrize(("block", "depth", "threads"), [(4 * KIB, 5, 2), (12 * KIB, 3, 1), (MIB, 8, 3)])
def test_medium_with_odd_sizes_in_two_versions(block: int, depth: int, threads: int) -> None:
    shelf = Shelf()
    plan = disk_plan("somewhere", medium="shelf", block_bytes=block, queue_depth=depth, threads=threads)
    with registered(lambda plan, rank: shelf), DiskStore(plan) as store:
        store.reserve(2, 4 * MIB)
        assert (store.direct, store.removed, store.path) == (False, [], "shelf:somewhere")
        records = [store.create(f"record {size}", size) for size in SIZES]
        assert shelf.reserved == [2 * record.padded_bytes for record in records if record.nbytes]
        assert store.reserved_bytes == sum(shelf.reserved)
        for first, commit in ((0, True), (50, False)):
            for seed, record in enumerate(records):
                put(store, record, first + seed, commit=commit)
        assert all(holds(store, record, seed + 50, newest=True) for seed, record in enumerate(records))
        assert all(holds(store, record, seed) for seed, record in enumerate(records))
        store.commit()
        assert all(holds(store, record, seed + 50) for seed, record in enumerate(records))
        wrote = set(shelf.asked["write"])
        assert set(shelf.asked["read"]) == wrote  # the same offsets and sizes
        assert len(wrote) == len({at for at, _ in wrote}) and max(size for _, size in wrote) == block
        assert all(at % 4096 == 0 == size % 4096 for at, size in wrote)
        assert store.bytes_written == 2 * sum(record.padded_bytes for record in records)
        assert not shelf.closed
    assert shelf.closed == 1


def test_medium_that_cannot_be_opened_or_closed() -> None:
    plan = disk_plan("somewhere", medium="shelf")

    def refuses(plan: DiskPlan, rank: int) -> Medium:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody there")

    with registered(refuses), pytest.raises(DiskError, match=r"cannot open shelf:somewhere: .*nobody there") as found:
        DiskStore(plan)
    assert found.value.errno == errno.ECONNREFUSED
    with registered(lambda plan, rank: {}):
        raises(TypeError, r"opened \{\}, which has no reserve, read, wr", DiskStore, plan)
    shelf = Shelf(RuntimeError("it is stuck"))
    with registered(lambda plan, rank: shelf):
        store = DiskStore(plan)
    raises(DiskError, "cannot close shelf:somewhere: RuntimeError: it is stuck", lambda: store.close())
    store.close()
    assert shelf.closed == 1


def test_names_of_media() -> None:
    tape = disk_plan("somewhere", medium="tape")
    raises(ValueError, r"medium='tape': give one of \['file'\], or register it on every rank", DiskStore, tape)
    take_back = register_medium("zlib", open_compressed)
    assert known_media() == ["file", "zlib"]
    for name in ("zlib", "file"):
        raises(ValueError, f"name='{name}' is a registered medium already", register_medium, name, open_compressed)
    raises(ValueError, r"give one of \['file', 'zlib'\]", DiskStore, tape)
    take_back()
    take_back()
    assert known_media() == ["file"]
    raises(TypeError, r"open=None: give a function", lambda: register_medium("tape", None))
    for wrong in ("", 3):
        raises(TypeError, f"name={wrong!r}: give a name", register_medium, wrong, open_compressed)
        raises(ValueError, f"medium={wrong!r}: give 'file'", disk_plan, "somewhere", medium=wrong)
