"""The demo's text: which files count, how they are split, and what happens with little of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.cli.demo_data import SEPARATOR, ByteWindows, load_corpus, require_text, text_files
from shardwise.cli.errors import BadInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(80):
        (tmp_path / f"part{i % 4}").mkdir(exist_ok=True)
        (tmp_path / f"part{i % 4}" / f"file{i}.txt").write_text(f"<{i}>" * 100, "utf-8")
    return tmp_path


def test_only_text_is_read(folder: Path) -> None:
    (folder / "binary.txt").write_bytes(b"a\0b")
    (folder / "latin.txt").write_bytes("é".encode("latin-1") * 50)
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_text("no")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.txt").write_text("no")
    (folder / "link.txt").symlink_to(folder / "part0" / "file0.txt")
    # A character of two bytes across the end of the sample that is looked at.
    (folder / "cut.txt").write_bytes(b"a" * 4095 + "é".encode())
    names = {relative for relative, _ in text_files(folder)}
    assert names == {f"part{i % 4}/file{i}.txt" for i in range(80)} | {"cut.txt"}


def test_split_is_by_file_and_does_not_move(folder: Path) -> None:
    before = load_corpus(folder, 100, 100)
    assert before.held_out_files > 0
    held_out = {part for part in bytes(before.held_out.tolist()).split(SEPARATOR) if part}
    train = {part for part in bytes(before.train.tolist()).split(SEPARATOR) if part}
    assert len(held_out) == before.held_out_files and len(held_out | train) == before.files == 80
    (folder / "another.txt").write_text("new text")
    after = load_corpus(folder, 100, 100)
    assert held_out <= set(bytes(after.held_out.tolist()).split(SEPARATOR))
    assert after.digest != before.digest


def test_loading_twice_gives_the_same(folder: Path) -> None:
    one, two = load_corpus(folder, 100, 100), load_corpus(folder, 100, 100)
    assert torch.equal(one.train, two.train) and torch.equal(one.held_out, two.held_out) and one.digest == two.digest


def test_limit(folder: Path) -> None:
    corpus = load_corpus(folder, 10, 10, limit_bytes=2000)
    assert corpus.train.numel() + corpus.held_out.numel() <= 2000 + corpus.files + 1


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_bytes(b"x" * 900 + b"y" * 100)
    corpus = load_corpus(tmp_path, 100, 50)
    assert corpus.held_out_files == 0
    assert set(corpus.held_out.tolist()) == {ord("y")}
    assert ord("y") not in corpus.train[-800:].tolist()


@pytest.mark.parametrize("text", [None, b"", b"too little"])
def test_too_little_text_says_how_much_is_needed(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "a.txt").write_bytes(text)
    for check in (require_text, load_corpus):
        with pytest.raises(BadInput, match="at least 1020 are needed"):
            check(tmp_path, 100, 100)
    with pytest.raises(BadInput, match="no such folder"):
        require_text(tmp_path / "nowhere", 1, 1)


def test_windows_cover_the_text_once() -> None:
    windows = ByteWindows(torch.arange(11, dtype=torch.uint8), context=3)
    assert [windows[i].tolist() for i in range(len(windows))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows[0].dtype == torch.int64
    assert windows.spread(2) == [0, 1] and windows.spread(100) == [0, 1, 2]
    with pytest.raises(ValueError, match="2 bytes"):
        ByteWindows(torch.zeros(2, dtype=torch.uint8), context=2)
