"""Tests of the disk tier's ``DiskStore``, checksum and ``RunDirectory``.

- The store returns what was written; each record has a committed and a new version; buffers and threads are released.
- The checksum equals its definition and detects any single change.
- ``DiskSource`` objects share a few buffers for gathers and reads ahead.
- A run's directory is removed with its process, and those of other processes are kept.
"""

import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.core.base.checksum import ROW_WEIGHTS, ROW_WORDS, checksum
from shardwise.core.comm.local import LocalGroup
from shardwise.core.memory.disk import rank_file as disk_file
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.rank_file import RunDirectory, remove_abandoned
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.shards.shard_memory import DiskSource, ReadAhead
from tests.support.disk_setup import KIB, MIB, SIZES, Log, disk_plan, holds, pattern, put
from tests.support.on_ranks import raises
from tests.support.program_setup import forked_python, python
from tests.support.sets import campaign


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(disk_plan(tmp_path)) as made:
        made.reserve(4, 4 * MIB)
        yield made


BLOCKS = ((4 * KIB, 32, 2), (12 * KIB, 3, 1), (MIB, 8, 3), (8 * MIB, 1, 1))


# By default direct I/O with every block size, and buffered I/O with one; the campaign has the other cases.
@pytest.mark.parametrize(
    ("direct", "block", "depth", "threads"),
    [
        *((True, *block) for block in BLOCKS),
        (False, *BLOCKS[1]),
        *campaign(*((False, *block) for block in BLOCKS if block != BLOCKS[1])),
    ],
)
def test_round_trip_of_odd_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, block: int, depth: int, threads: int
) -> None:
    if not direct:
        _refuse_direct(monkeypatch)
        warnings.simplefilter("ignore")
    with DiskStore(disk_plan(tmp_path, block_bytes=block, queue_depth=depth, threads=threads)) as store:
        store.reserve(len(SIZES), 4 * MIB)
        records = [store.create(f"record {size}", size) for size in SIZES]
        for round_ in range(3):
            buffers = [store.buffer(size) for size in SIZES]
            for index, buffer in enumerate(buffers):
                buffer.copy_(pattern(buffer.numel(), 100 * round_ + index + 50))
                buffer[: SIZES[index]] = pattern(SIZES[index], 100 * round_ + index)
            writes = [store.write(record, buffer) for record, buffer in zip(records, buffers, strict=True)]
            for write in writes:
                write.wait()
            store.commit()
            for buffer in buffers:
                store.give(buffer)
            assert all(holds(store, record, 100 * round_ + index) for index, record in enumerate(records))


def _refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``open`` refuse O_DIRECT, and skip the check for file systems in memory."""
    real = os.open
    monkeypatch.setattr(disk_file, "_in_memory", lambda folder: None)

    def refusing(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=5),
    moves=st.lists(st.tuples(st.sampled_from(["write", "commit", "rollback"]), st.integers(0, 4)), max_size=25),
)
def test_versions_match_a_model(tmp_path: Path, sizes: list[int], moves: list[tuple[str, int]]) -> None:
    current: dict[int, int] = {}
    written: dict[int, int] = {}
    with DiskStore(disk_plan(tmp_path, block_bytes=8 * KIB)) as store:
        store.reserve(1, 70_000)
        records = [store.create(str(index), size) for index, size in enumerate(sizes)]
        for seed, (move, choice) in enumerate(moves):
            index = choice % len(sizes)
            if move == "write":
                put(store, records[index], seed, commit=False)
                written[index] = seed
            elif move == "commit":
                store.commit()
                current |= written
                written = {}
            else:
                store.rollback()
                written = {}
            for versions, newest in ((current, False), (current | written, True)):
                assert all(holds(store, records[number], seed, newest) for number, seed in versions.items())


def test_a_read_needs_a_version(store: DiskStore) -> None:
    record = store.create("weights", 100)
    buffer = store.buffer(100)
    raises(DiskError, r"'weights' in .*rank0\.data was never written", lambda: store.read(record, buffer))
    store.write(record, buffer).wait()
    raises(DiskError, "written but not committed", lambda: store.read(record, buffer))
    store.read(record, buffer, newest=True).wait()
    store.rollback()
    raises(DiskError, "never written", lambda: store.read(record, buffer, newest=True))


def test_a_version_in_use_is_not_overwritten(tmp_path: Path) -> None:
    log = Log()
    with DiskStore(disk_plan(tmp_path), queues=log.queue) as store:
        store.reserve(2, 8 * KIB)
        record = store.create("weights", 8 * KIB)
        put(store, record, 1)
        first, second = store.buffer(8 * KIB), store.buffer(8 * KIB)
        log.gate.clear()
        reading = store.read(record, first)
        writing = store.write(record, second.fill_(2))  # the other version may be written
        assert not reading.finished() and not writing.finished()
        raises(RuntimeError, "while writing record 'weights'", lambda: store.write(record, second))
        raises(DiskError, r"newest version .* is not complete", lambda: store.read(record, second, newest=True))
        log.gate.set()
        writing.wait()
        reading.wait()
        assert torch.equal(first, pattern(8 * KIB, 1))
        store.commit()
        log.gate.clear()
        store.read(record, first)
        store.write(record, second)
        log.gate.set()
        store.rollback()
        store.read(record, first.zero_()).wait()
        assert torch.equal(first, torch.full_like(first, 2))


def test_give_waits_for_transfers(tmp_path: Path) -> None:
    """``give`` waits for transfers that nobody waited for, as after an interrupt, so that the next user can reuse the
    buffer.
    """
    log = Log()
    with DiskStore(disk_plan(tmp_path), queues=log.queue) as store:
        store.reserve(1, 8 * KIB)
        record = store.create("weights", 8 * KIB)
        put(store, record, 1)
        for start in (store.read, store.write):
            buffer = store.buffer(8 * KIB)
            log.gate.clear()
            threading.Timer(0.2, log.gate.set).start()
            handle = start(record, buffer)
            store.give(buffer)
            assert handle.finished()


def test_arguments_are_checked(store: DiskStore, tmp_path: Path) -> None:
    record = store.create("weights", 5000)
    raises(ValueError, "'weights' of 5000 bytes already", lambda: store.create("weights", 1))
    raises(ValueError, "nbytes=-1", lambda: store.create("less", -1))
    whole = store.buffer(3 * 8192)
    raises(ValueError, r"give a contiguous CPU tensor of 8192 bytes", lambda: store.write(record, whole[:5000]))
    raises(ValueError, "contiguous: False", lambda: store.write(record, whole.view(-1, 2)[:, 0]))
    raises(ValueError, r"address 0x\w+ .* multiple of 4096", lambda: store.write(record, whole[8:]))
    with DiskStore(disk_plan(tmp_path)) as other, pytest.raises(ValueError, match="belongs to another store"):
        other.write(record, whole)


def test_close_releases_everything(tmp_path: Path) -> None:
    parent = tmp_path / "new" / "deeper"
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    store = DiskStore(disk_plan(parent, threads=3), rank=7)
    store.reserve(1, 100)
    record, buffer = store.create("weights", 100), store.buffer(100)
    assert len(list(parent.iterdir())) == 1
    assert store.path.endswith("rank7.data") and not os.path.exists(store.path)
    handle = store.write(record, buffer)
    store.close()
    store.close()
    handle.wait()  # close() waits for transfers in flight
    assert list(parent.iterdir()) == []
    assert set(threading.enumerate()) == threads and set(os.listdir("/proc/self/fd")) == files
    for use in (lambda: store.create("more", 1), lambda: store.write(record, buffer)):
        raises(DiskError, r"rank7\.data is closed", use)


EXITS = """
import sys, torch, warnings
warnings.simplefilter("ignore")  # temporary files may be in memory
from shardwise.core.memory.disk.store import DiskStore
from shardwise.plan import DiskPlan
store = DiskStore(DiskPlan(directory=sys.argv[1], block_bytes=4096, queue_depth=2, single_submit=True))
store.reserve(1, 2**20)
handle = store.write(store.create("weights", 2**20), store.buffer(2**20))
print(len(__import__("os").listdir(sys.argv[1])), flush=True)
raise SystemExit(3)
"""


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_store_is_closed_at_exit(whole: bool, tmp_path: Path) -> None:
    done = (python if whole else forked_python)("-c", EXITS, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_forked_process_cannot_use_the_store(store: DiskStore, tmp_path: Path) -> None:
    record = store.create("weights", 100)
    put(store, record, 1)
    buffer = store.buffer(100)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child == 0:
        code = 1
        try:
            raises(DiskError, "forked process", store.read, record, buffer)
            store.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(tmp_path.iterdir())) == 1, "it removes nothing of the parent's"
    assert holds(store, record, 1)


def test_buffered_io_where_direct_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_direct(monkeypatch)
    with pytest.warns(UserWarning, match="refuses O_DIRECT") as found:
        store = DiskStore(disk_plan(tmp_path))
    assert len(found) == 1 and str(tmp_path) in str(found[0].message) and found[0].filename == __file__
    with store:
        assert not store.direct


ROW = 8 * ROW_WORDS


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def by_definition(data: bytes, row_words: int = ROW_WORDS) -> int:
    """Return the checksum, computed with plain integers."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    while len(words) > row_words:
        rows = [words[i : i + row_words] for i in range(0, len(words), row_words)]
        sums = [sum(w * int(k) for w, k in zip(row, ROW_WEIGHTS, strict=False)) % 2**64 for row in rows]
        words = [s ^ (s >> 29) for s in sums]
    result = sum(w * int(k) for w, k in zip(words, ROW_WEIGHTS, strict=False)) % 2**64
    rest = data[len(data) // 8 * 8 :]
    tail = int.from_bytes(rest, "little") + 256 ** len(rest)
    return (result * 0x9E3779B97F4A7C15 + tail * 0xD1B54A32D192ED03 + len(data)) % 2**64


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 1, 3 * ROW + 13, 2**20])
def test_checksum_matches_its_definition(nbytes: int) -> None:
    data = random_bytes(nbytes)
    assert checksum(data) == by_definition(data.tobytes())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4 * ROW), st.data())
def test_checksum_detects_changes_and_shifts(nbytes: int, choose: st.DataObject) -> None:
    data = random_bytes(nbytes)
    before = checksum(data)
    assert nbytes == 1 or checksum(np.roll(data, choose.draw(st.integers(1, nbytes - 1)))) != before
    data[choose.draw(st.integers(0, nbytes - 1))] ^= choose.draw(st.integers(1, 255))
    assert checksum(data) != before


CPU = torch.device("cpu")


def source(store: DiskStore, shared: ReadAhead, name: str, numel: int) -> DiskSource:
    made = DiskSource(store, store.create(name, numel * 4), numel, torch.float32, None, shared)
    with made.opened(write=True) as shard:
        assert not shard.any()
        shard.fill_(1.0)
    store.commit()
    return made


def test_gathers_in_flight_share_two_buffers(tmp_path: Path) -> None:
    with DiskStore(disk_plan(tmp_path)) as store:
        shared = ReadAhead(40_000, 2)
        store.reserve(2, 40_000)
        sources = [source(store, shared, f"s{i}", numel) for i, numel in enumerate((10_000, 1, 5_000, 0, 10_000))]
        group = LocalGroup("alone", CPU)
        outs = [torch.full((s._numel,), float("nan")) for s in sources]
        handles = [s.gather(group, out) for s, out in zip(sources, outs, strict=True)]
        for handle in reversed(handles):
            handle.wait()
        assert all((out == 1.0).all() for out in outs)
        assert store.idle_buffers(40_000) == 2


def test_reads_ahead_are_discarded_after_a_write(tmp_path: Path) -> None:
    with DiskStore(disk_plan(tmp_path)) as store:
        shared = ReadAhead(400, 4)
        store.reserve(4, 400)
        first, second = source(store, shared, "first", 100), source(store, shared, "second", 100)
        for each in (first, second, first):
            each.prepare()
        assert shared.count == 2 and store.idle_buffers(400) == 2
        with first.opened(write=True) as shard:
            shard.fill_(2.0)
        store.commit()
        out = torch.zeros(100)
        first.gather(LocalGroup("alone", CPU), out).wait()
        assert (out == 2.0).all()
        second.gather(LocalGroup("alone", CPU), out).wait()
        assert (out == 1.0).all()
        assert shared.count == 0 and store.idle_buffers(400) == 4


def test_run_directory(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "a" / "b"))
    path = Path(directory.path)
    assert path.parent == tmp_path / "a" / "b" and re.fullmatch(r"shardwise-disk-[0-9a-f]{16}", path.name)
    assert (path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert not path.exists()


def test_remove_abandoned_keeps_other_files(tmp_path: Path) -> None:
    name = "shardwise-disk-0123456789abcdef"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("")
    (tmp_path / name).symlink_to(elsewhere)
    kept = tmp_path / name.replace("0", "1", 1)
    kept.mkdir()
    for file in ("lock", "rank0.data", "thesis.tex"):
        (kept / file).write_text("")
    for other in ("shardwise-disk-0123", "shardwise-0123456789abcdef", name + ".bak"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "lock").write_text("")
    (tmp_path / name.replace("0", "2", 1)).write_text("a file")
    before = set(tmp_path.rglob("*"))
    remove_abandoned(str(tmp_path))
    assert before - set(tmp_path.rglob("*")) == {kept / "lock", kept / "rank0.data"}
