"""The store behind the disk tier over a medium of others: what it is asked for, names, and one that cannot be used."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from disk_setup import KIB, MIB, SIZES, disk_plan, holds, put

from shardwise.core.memory.disk import DiskError, DiskStore, Medium, known_media, register_medium
from shardwise.plan import DiskPlan
from tests.recipes.zlib_medium import CompressedMemory, open_compressed


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
    with registered(lambda plan, rank: medium), DiskStore(disk_plan("somewhere", medium="shelf", **changes)) as store:
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
