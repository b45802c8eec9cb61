"""The store behind the disk tier over a medium of others: what it is asked for, and that its faults harm nothing."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from disk_setup import KIB, MIB, SIZES, disk_plan, holds, put
from program_setup import forked_python, python

from shardwise.core.memory.disk import DiskError, DiskStore, Medium, known_media, register_medium
from shardwise.plan import DiskPlan
from tests.recipes.zlib_medium import CompressedMemory, open_compressed
from tests.support.sets import full


class Shelf(CompressedMemory):
    """Keeps account of what it is asked for; ``fault`` is called before it is done, with what and where."""

    def __init__(self, fault: Callable[[str, int], None] = lambda what, at: None) -> None:
        super().__init__()
        self.fault = fault
        self.lock = threading.Lock()
        self.asked: list[tuple[str, int, int]] = []
        self.reserved: list[int] = []
        self.closed = 0

    def reserve(self, nbytes: int) -> None:
        self.fault("reserve", sum(self.reserved))
        self.reserved.append(nbytes)

    def read(self, offset: int, memory: memoryview) -> None:
        with self.lock:
            self.asked.append(("read", offset, memory.nbytes))
        self.fault("read", offset)
        super().read(offset, memory)

    def write(self, offset: int, memory: memoryview) -> None:
        with self.lock:
            self.asked.append(("write", offset, memory.nbytes))
        assert memory.readonly
        self.fault("write", offset)
        super().write(offset, memory)

    def close(self) -> None:
        self.closed += 1
        self.fault("close", 0)


@contextmanager
def registered(open: Callable[[DiskPlan, int], Any], name: str = "shelf") -> Iterator[None]:
    take_back = register_medium(name, open)
    try:
        yield
    finally:
        take_back()


@contextmanager
def over(medium: Any, **changes: Any) -> Iterator[DiskStore]:
    with (
        registered(lambda plan, rank: medium),
        DiskStore(disk_plan("somewhere", medium="shelf", **changes)) as store,
    ):
        store.reserve(2, 4 * MIB)
        yield store


@pytest.mark.parametrize(("block", "depth", "threads"), [(4 * KIB, 5, 2), (12 * KIB, 3, 1), (MIB, 8, 3)])
def test_odd_sizes_in_two_versions(block: int, depth: int, threads: int) -> None:
    shelf = Shelf()
    with over(shelf, block_bytes=block, queue_depth=depth, threads=threads) as store:
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
        wrote = {(at, size) for what, at, size in shelf.asked if what == "write"}
        read = {(at, size) for what, at, size in shelf.asked if what == "read"}
        assert read == wrote  # the same blocks, and sizes
        assert len(wrote) == len({at for at, _ in wrote}) and max(size for _, size in wrote) == block
        assert all(at % 4096 == 0 == size % 4096 for at, size in wrote)
        assert store.bytes_written == 2 * sum(record.padded_bytes for record in records)
        assert not shelf.closed
    assert shelf.closed == 1


def _raise(error: Exception, what: str, after: int = 0) -> Callable[[str, int], None]:
    """Raises at the calls of ``what`` after the first ``after``."""
    left = [after]

    def fault(asked: str, at: int) -> None:
        if asked == what:
            left[0] -= 1
            if left[0] < 0:
                raise error

    return fault


def test_a_write_that_fails_changes_nothing_committed() -> None:
    shelf = Shelf()
    with over(shelf, block_bytes=64 * KIB) as store:
        record = store.create("weights", MIB)
        put(store, record, 1)
        shelf.fault = _raise(RuntimeError("the bucket is gone"), "write", after=5)
        expected = (
            r"writing record 'weights' in shelf:somewhere, 65536 bytes at offset \d+: RuntimeError: the bucket is"
        )
        with pytest.raises(DiskError, match=expected) as found:
            put(store, record, 2)
        assert found.value.errno == errno.EIO
        with pytest.raises(DiskError, match="cannot commit"):
            store.commit()
        store.rollback()
        shelf.fault = _raise(OSError(errno.ETIMEDOUT, "no answer"), "read")
        with pytest.raises(DiskError, match=r"TimeoutError: .*no answer") as found:
            holds(store, record, 1)
        assert found.value.errno == errno.ETIMEDOUT
        shelf.fault = Shelf().fault
        assert holds(store, record, 1)
        put(store, record, 3)
        assert holds(store, record, 3)


def test_what_is_lost_or_changed_is_found() -> None:
    shelf = Shelf()
    with over(shelf, block_bytes=64 * KIB) as store:
        record = store.create("weights", MIB)
        put(store, record, 1)
        kept = dict(shelf._blocks)
        shelf._blocks[64 * KIB] = shelf._blocks[0]
        with pytest.raises(DiskError, match=r"reading record 'weights' .* are not what was written there"):
            holds(store, record, 1)
        del shelf._blocks[64 * KIB]
        with pytest.raises(DiskError, match="65536 bytes at offset 65536: KeyError: 65536"):
            holds(store, record, 1)
        shelf._blocks.update(kept)
        assert holds(store, record, 1)


def test_memory_is_lent_for_one_call() -> None:
    class Keeps(Shelf):
        def write(self, offset: int, memory: memoryview) -> None:
            super().write(offset, memory)
            self.kept = memory

        def read(self, offset: int, memory: memoryview) -> None:
            super().read(offset, memory)
            self.kept = memory

    keeper = Keeps()
    with over(keeper) as store:
        record = store.create("weights", MIB)
        for use in (put, holds):
            use(store, record, 1)
            with pytest.raises(ValueError, match="released"):
                keeper.kept[0]


def test_an_error_keeps_its_number_where_its_frames_hold_the_memory() -> None:
    class Holds(Shelf):
        def write(self, offset: int, memory: memoryview) -> None:
            held = pickle.PickleBuffer(memory)  # as a library's own buffer would
            if not kept:
                raise OSError(errno.EDQUOT, f"no room for {len(held.raw())} bytes")
            kept.append(held)

    kept: list[object] = []
    with over(Holds()) as store:
        record = store.create("weights", 4096)
        with pytest.raises(DiskError, match="no room for 4096 bytes") as found:
            put(store, record, 1)
        assert found.value.errno == errno.EDQUOT
        kept.append("it keeps the buffer as well")
        with pytest.raises(DiskError, match="BufferError"):
            put(store, record, 1)


def test_a_collection_of_garbage_within_a_transfer_ends_the_store_behind_it() -> None:
    """A thread of a store would wait for its own end, and the medium be closed below the transfers that run."""

    class Collects(Shelf):
        def read(self, offset: int, memory: memoryview) -> None:
            assert dropped.wait(120)
            gc.collect()
            self.open_in_read = not self.closed
            super().read(offset, memory)

        def close(self) -> None:
            super().close()
            ended.set()

    shelf, dropped, ended, threads = Collects(), threading.Event(), threading.Event(), set(threading.enumerate())
    with registered(lambda plan, rank: shelf):
        store = DiskStore(disk_plan("somewhere", medium="shelf"))
    store.reserve(1, 4096)
    record = store.create("weights", 4096)
    put(store, record, 1)
    transfer = store.read(record, store.buffer(4096))
    circle: list[object] = [store]
    circle.append(circle)
    del store, circle
    dropped.set()
    assert ended.wait(120) and transfer.finished() and shelf.open_in_read and shelf.closed == 1
    for thread in set(threading.enumerate()) - threads:
        thread.join(120)
        assert not thread.is_alive()


def test_space_that_is_refused() -> None:
    shelf = Shelf()
    with over(shelf) as store:
        put(store, store.create("weights", MIB), 1)
        shelf.fault = _raise(OSError(errno.ENOSPC, "3 bytes left"), "reserve")
        with pytest.raises(DiskError) as found:
            store.create("more", MIB)
        assert found.value.errno == errno.ENOSPC
        for part in ("cannot reserve 2097152 bytes", "'more'", "shelf:somewhere", "beside 2097152", "3 bytes left"):
            assert part in str(found.value)
        shelf.fault = Shelf().fault
        put(store, store.create("more", MIB), 2)
        assert shelf.reserved == [2 * MIB] * 2


def test_one_that_cannot_be_opened_or_closed() -> None:
    plan = disk_plan("somewhere", medium="shelf")

    def refuses(plan: DiskPlan, rank: int) -> Medium:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody there")

    with registered(refuses), pytest.raises(DiskError, match=r"cannot open shelf:somewhere: .*nobody there") as found:
        DiskStore(plan)
    assert found.value.errno == errno.ECONNREFUSED
    with (
        registered(lambda plan, rank: {}),
        pytest.raises(TypeError, match=r"opened \{\}, which has no reserve, read, wr"),
    ):
        DiskStore(plan)
    shelf = Shelf(_raise(RuntimeError("it is stuck"), "close"))
    with registered(lambda plan, rank: shelf):
        store = DiskStore(plan)
    with pytest.raises(DiskError, match="cannot close shelf:somewhere: RuntimeError: it is stuck"):
        store.close()
    store.close()
    assert shelf.closed == 1


def test_names() -> None:
    with pytest.raises(ValueError, match=r"medium='tape': give one of \['file'\], or register it on every rank"):
        DiskStore(disk_plan("somewhere", medium="tape"))
    take_back = register_medium("zlib", open_compressed)
    assert known_media() == ["file", "zlib"]
    for name in ("zlib", "file"):
        with pytest.raises(ValueError, match=f"name='{name}' is a registered medium already"):
            register_medium(name, open_compressed)
    with pytest.raises(ValueError, match=r"give one of \['file', 'zlib'\]"):
        DiskStore(disk_plan("somewhere", medium="tape"))
    take_back()
    take_back()
    assert known_media() == ["file"]
    with pytest.raises(TypeError, match=r"open=None: give a function"):
        register_medium("tape", None)  # type: ignore[arg-type]
    for wrong in ("", 3):
        with pytest.raises(TypeError, match=f"name={wrong!r}: give a name"):
            register_medium(wrong, open_compressed)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"medium={wrong!r}: give 'file'"):
            disk_plan("somewhere", medium=wrong)


def test_each_store_has_its_own() -> None:
    opened: list[int] = []

    def open(plan: DiskPlan, rank: int) -> Medium:
        opened.append(rank)
        return CompressedMemory()

    plan = disk_plan("somewhere", medium="shelf")
    with registered(open), DiskStore(plan, 3) as one, DiskStore(plan, 3) as other:
        for seed, store in enumerate((one, other)):
            store.reserve(1, MIB)
            put(store, store.create("weights", MIB), seed)
        assert all(holds(store, store._records["weights"], seed) for seed, store in enumerate((one, other)))
    assert opened == [3, 3]


def test_a_forked_child_closes_nothing() -> None:
    shelf = Shelf()
    with over(shelf) as store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                store.close()
                code = shelf.closed
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shelf.closed == 1


EXITS = """
from shardwise.core.memory.disk import DiskStore, register_medium
from shardwise.plan import DiskPlan
from tests.recipes.zlib_medium import CompressedMemory
class Says(CompressedMemory):
    def close(self):
        print(len(self._blocks), flush=True)
register_medium("says", lambda plan, rank: Says())
store = DiskStore(DiskPlan(directory="somewhere", medium="says", block_bytes=4096))
store.reserve(1, 2**16)
handle = store.write(store.create("weights", 2**16), store.buffer(2**16))
raise SystemExit(3)
"""


@pytest.mark.parametrize("whole", [False, *full(True)], ids=["forks", "whole"])
def test_the_end_of_the_interpreter_closes_after_the_last_transfer(whole: bool) -> None:
    done = (python if whole else forked_python)("-c", EXITS)
    assert (done.returncode, done.stdout, done.stderr) == (3, "16\n", "")
