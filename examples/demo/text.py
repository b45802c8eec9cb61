"""Text for the demo: the bytes of the text files of a folder, split by file into training and held-out text.

Which files are held out depends on their paths only, so that adding files never moves one to the other side.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["ByteWindows", "Corpus", "load_corpus", "text_files"]

MEBI = 1024**2
# One file in this many is held out; a folder of few files holds out the end of its text instead.
HELD_OUT_EVERY = 20
# Third-party code that lives inside the standard library's folder, and what version control keeps.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
# Between files. Text never contains it, so the model can learn what a beginning looks like.
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``held_out``: uint8, 1-D. ``digest`` identifies the text; ``files`` counts those read."""

    train: Tensor
    held_out: Tensor
    files: int
    held_out_files: int
    digest: str


def _rank_of(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _looks_like_text(start: bytes) -> bool:
    if not start or b"\0" in start:
        return False
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as problem:
        return problem.start >= len(start) - 3  # a character that the sample cut in two
    return True


def text_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """``(relative path, path)`` of the text files under ``folder``, in an order that depends on their paths only.

    Hidden files and folders, installed packages and links are left out. The order is that of a hash, so a size limit
    takes an even sample of the folder rather than its first letters.
    """
    found: list[tuple[str, Path]] = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(n for n in folders if n not in SKIPPED_FOLDERS and not n.startswith("."))
        paths = (Path(where, name) for name in names if not name.startswith("."))
        found += [(p.relative_to(folder).as_posix(), p) for p in paths if p.is_file() and not p.is_symlink()]
    for relative, path in sorted(found, key=lambda item: (_rank_of(item[0]), item[0])):
        try:
            with path.open("rb") as file:
                start = file.read(4096)
        except OSError:
            continue  # not readable by this user: not part of the text
        if _looks_like_text(start):
            yield relative, path


def _tensor(parts: list[bytes]) -> Tensor:
    # An empty buffer cannot be wrapped, hence the separator in front.
    return torch.frombuffer(bytearray(SEPARATOR + SEPARATOR.join(parts)), dtype=torch.uint8)


def load_corpus(folder: Path, train_bytes: int, held_out_bytes: int, limit_bytes: int = 64 * MEBI) -> Corpus:
    """The text of ``folder``, at most ``limit_bytes`` of it.

    One file in twenty (by a hash of its relative path) is held out. Where that leaves fewer than ``train_bytes`` or
    ``held_out_bytes`` on a side, the last tenth of all text is held out instead.

    Raises:
        ValueError: the folder holds too little text.
    """
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    digest = hashlib.sha256()
    for relative, path in text_files(folder):
        with path.open("rb") as file:
            text = file.read(limit_bytes - total)
        total += len(text)
        digest.update(relative.encode("utf-8", "surrogateescape") + SEPARATOR + text)
        (held_out if _rank_of(relative) % HELD_OUT_EVERY == 0 else train).append(text)
        if total >= limit_bytes:
            break
    needed = max(train_bytes * 10 // 9, held_out_bytes * 10) + 20  # for the fallback below
    if total < needed:
        raise ValueError(
            f"{total} bytes of text found, but at least {needed} are needed; give a folder with more UTF-8 text "
            "(hidden files, links and installed packages do not count)"
        )
    corpus = Corpus(_tensor(train), _tensor(held_out), len(train) + len(held_out), len(held_out), digest.hexdigest())
    if corpus.train.numel() >= train_bytes and corpus.held_out.numel() >= held_out_bytes:
        return corpus
    everything = _tensor(train + held_out)
    cut = everything.numel() - everything.numel() // 10
    return Corpus(everything[:cut], everything[cut:], corpus.files, 0, corpus.digest)


class ByteWindows(Dataset[Tensor]):
    """Windows of ``context + 1`` bytes, each starting where the last one's targets ended: int64 ``(context + 1,)``."""

    def __init__(self, text: Tensor, context: int) -> None:
        if text.numel() <= context:
            raise ValueError(f"{text.numel()} bytes hold no window of {context + 1}; give more text")
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (self.text.numel() - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()

    def spread(self, count: int) -> list[int]:
        """At most ``count`` indices, evenly spaced over the text."""
        count = min(count, len(self))
        return [i * len(self) // count for i in range(count)]
