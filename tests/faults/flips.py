"""Every byte of small checkpoints is changed, cut off, removed or swapped, one fault at a time; each must be detected.

For each fault ``shardwise checkpoint verify`` has to fail and name the file and a tensor with bytes there, and a load
has to refuse the checkpoint; with ``"auto"`` it has to fall back to the previous one. The layout of a file is computed
here from the manifest as docs/checkpoint-format.md describes it.
"""

import argparse
import contextlib
import copy
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardwise.cli import checkpoint as command
from shardwise.core.checkpoint import save
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.formats.native import verify
from shardwise.core.checkpoint.source import CheckpointDamage
from shardwise.plan import zero
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.faults.report import Report
from tests.faults.small import Small
from tests.support.checkpoint_setup import differences, everything

PIECE_BYTES = 512  # so that tensors have several shards
MANIFEST = "manifest.json"
OLD, NEW = "old", "new"


class Subject:
    """A run that saves and loads, with tensors of several dtypes and shards, on one rank or on each of several."""

    def __init__(self) -> None:
        model = Small(narrow=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.session = build(model, optimizer, zero(1))
        self.saver = Checkpointer(self.session)

    def step(self) -> None:
        self.session.backward(self.session.module(torch.ones(2, 7)))
        self.session.optimizer.step()
        self.scheduler.step()

    def save(self, root: str, tag: str) -> None:
        position = {"next": 3, "order": torch.randperm(8)}
        given = {"lr_schedulers": [self.scheduler], "data_position": position, "user_state": ("mine", torch.eye(2))}
        with mock.patch.object(save, "PIECE_BYTES", PIECE_BYTES):
            self.saver.save(root, tag, **given)  # type: ignore[arg-type]

    def load(self, root: str, tag: str | None) -> Any:
        return self.saver.load(root, tag, lr_schedulers=[self.scheduler])

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(everything(self.session))


def write_two(root: str) -> dict[str, Any]:
    """Save two checkpoints on this rank; return the state in the older one."""
    subject = Subject()
    subject.step()
    subject.save(root, OLD)
    state = subject.state()
    subject.step()
    subject.save(root, NEW)
    subject.session.close()
    return state


# ---- faults


@dataclass(frozen=True)
class Fault:
    """One fault; one of ``tensors`` has to be named (if empty, the manifest itself is damaged)."""

    kind: str
    what: str
    files: tuple[str, ...]
    tensors: tuple[str, ...]
    apply: Callable[[], None]
    undo: Callable[[], None]
    loads: int = 1  # ways to load that are tried: the newest, "auto", by its name; or one of them in turn


class Place:
    """A checkpoint directory: the layout of its files, and ways to damage them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.content = {file.name: file.read_bytes() for file in sorted(directory.iterdir())}
        data = json.loads(self.content[MANIFEST])
        self.headers = {name: header for name, _, header, _ in data["files"]}
        names = [entry[0] for entry in data["files"]]
        self.pieces: list[tuple[str, int, int, str]] = []  # file, first byte, end, tensor
        for tensor, entry in data["tensors"].items():
            width = getattr(torch, entry["dtype"]).itemsize
            self.pieces += [(names[f], at, at + n * width, tensor) for f, at, _, n, _ in entry["pieces"]]
        self.pieces.sort()
        self.fds = {name: os.open(directory / name, os.O_RDWR) for name in self.content}
        # A file has a header and the shards, with no byte between them.
        for name, header in self.headers.items():
            own = [(start, end) for file, start, end, _ in self.pieces if file == name]
            assert [header, *(end for _, end in own)] == [*(start for start, _ in own), len(self.content[name])], name

    def tensors(self, file: str) -> tuple[str, ...]:
        """Return the tensors with bytes in a file."""
        return tuple(tensor for name, _, _, tensor in self.pieces if name == file)

    def region(self, file: str, at: int) -> tuple[str, tuple[str, ...]]:
        """Return what byte ``at`` belongs to, and the tensors of which one has to be named."""
        if file == MANIFEST:
            return "manifest", ()
        if at < self.headers[file]:
            kind = "header" if self.content[file][at : self.headers[file]].strip() else "padding"
            return kind, self.tensors(file)
        return "data", tuple(t for name, start, end, t in self.pieces if name == file and start <= at < end)

    def put(self, file: str, at: int, data: bytes) -> None:
        os.pwrite(self.fds[file], data, at)

    def put_all(self, parts: list[tuple[str, int, bytes]]) -> None:
        for part in parts:
            self.put(*part)

    def replace(self, file: str, content: bytes) -> None:
        os.ftruncate(self.fds[file], len(content))
        self.put(file, 0, content)

    def restore(self, file: str) -> None:
        """Undo all changes of a file's content."""
        self.replace(file, self.content[file])

    def resize(self, file: str, nbytes: int) -> None:
        os.ftruncate(self.fds[file], nbytes)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


def changed_bytes(place: Place, stride: int, bits: int, head_bits: int) -> Iterator[Fault]:
    """Yield every ``stride``-th byte with ``bits`` of its bits in turn, and with all eight.

    Every byte of the manifest's first line, which says which checkpoint is the newest, has ``head_bits`` of them
    flipped.
    """
    for file, content in place.content.items():
        head = content.index(b"\n") if file == MANIFEST else 0
        for at in (at for at in range(len(content)) if at < head or at % stride == 0):
            kind, tensors = place.region(file, at)
            put, good = partial(place.put, file, at), content[at : at + 1]
            masks = [1 << (at // stride + bit) % 8 for bit in range(head_bits if at < head else bits)]
            for mask in [*masks, 0xFF] if bits > 1 else masks:
                loads, what = 3 if at < head and head_bits > 1 else int(mask == masks[0]), f"byte {at} ^ {mask:#x}"
                change, undo = partial(put, bytes([content[at] ^ mask])), partial(put, good)
                yield Fault(f"flipped in {kind}", what, (file,), tensors, change, undo, loads)


def cut_and_longer(place: Place) -> Iterator[Fault]:
    """Let each file end at, before and after each of its boundaries, and let it be longer."""
    for file, content in place.content.items():
        size = len(content)
        if file == MANIFEST:
            edges = {0, size, *(at + 1 for at, byte in enumerate(content) if byte == ord("\n"))}
        else:
            edges = {0, 8, place.headers[file], size, *(start for name, start, _, _ in place.pieces if name == file)}
        lengths = {edge + by for edge in edges for by in (-1, 0, 1)} | {size // 2, size + 4096}
        for length in sorted(length for length in lengths if length >= 0 and length != size):
            kind, what = "cut off" if length < size else "longer", f"{length} of {size} bytes"
            resize, restore = partial(place.resize, file, length), partial(place.restore, file)
            yield Fault(kind, what, (file,), place.tensors(file), resize, restore)


def swapped_pieces(place: Place) -> Iterator[Fault]:
    """Swap every two shards of equal length, in one file or in two."""
    for (file, start, end, tensor), (file2, start2, end2, tensor2) in itertools.combinations(place.pieces, 2):
        data, data2 = place.content[file][start:end], place.content[file2][start2:end2]
        if len(data) != len(data2) or data == data2:
            continue
        swap = partial(place.put_all, [(file, start, data2), (file2, start2, data)])
        back = partial(place.put_all, [(file, start, data), (file2, start2, data2)])
        yield Fault("swapped pieces", f"{tensor}, {tensor2}", (file, file2), (tensor, tensor2), swap, back)


def _exchange(one: Path, other: Path) -> None:
    aside = one.with_name(".aside")
    for before, after in ((one, aside), (other, one), (aside, other)):
        os.rename(before, after)


def swapped_and_missing_files(place: Place, older: Place) -> Iterator[Fault]:
    """Swap files of a checkpoint, replace them by those of the other checkpoint, or remove them."""
    directory = place.directory
    for file in place.content:
        here, gone, tensors = directory / file, directory.parent / "gone", place.tensors(file)
        move, back = partial(os.rename, here, gone), partial(os.rename, gone, here)
        yield Fault("missing file", file, (file,), tensors, move, back)
        if file in older.content:
            named = () if file == MANIFEST else (file,)
            replace, restore = partial(place.replace, file, older.content[file]), partial(place.restore, file)
            yield Fault("file of the other checkpoint", file, named, tensors, replace, restore)
    for one, other in itertools.combinations(place.headers, 2):
        swap, tensors = (
            partial(_exchange, directory / one, directory / other),
            place.tensors(one) + place.tensors(other),
        )
        yield Fault("swapped files", f"{one}, {other}", (one, other), tensors, swap, swap)


# ---- detection


class Judge:
    """Applies faults to the newer of two checkpoints and records those that are not detected."""

    def __init__(self, root: Path, report: Report, older: dict[str, Any]) -> None:
        self.root, self.report, self._older = root, report, older
        self.subject = Subject()
        self._number = 0
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        self._options = [parser.parse_args(["checkpoint", "verify", str(path)]) for path in (root, root / NEW)]

    def named(self, texts: list[str], fault: Fault) -> str:
        """Return what the messages lack; empty if nothing."""
        text = "\n".join(texts)
        wrong = [f"{file} is not named" for file in fault.files if file not in text]
        if fault.tensors and not any(tensor in text for tensor in fault.tensors):
            wrong.append(f"none of {', '.join(fault.tensors[:4])} is named")
        if fault.kind == "swapped pieces":  # both are wrong
            wrong += [f"{tensor} is not named" for tensor in fault.tensors if tensor not in text]
        return "; ".join(wrong)

    def judge(self, fault: Fault) -> None:
        """Apply the fault, check, undo."""
        self._number += 1
        fault.apply()
        try:
            self._verify(fault)
            for way in range(3) if fault.loads == 3 else [self._number % 3] * fault.loads:
                self._load(fault, (None, "auto", NEW)[way])
        except Exception as error:
            self._lost(fault, f"{type(error).__name__}: {error}")
        finally:
            fault.undo()
        self.report.counts[fault.kind] += 1

    def _lost(self, fault: Fault, why: str) -> None:
        self.report.lost.append(f"{', '.join(fault.files)}: {fault.kind}, {fault.what}: {why}")

    def _verify(self, fault: Fault) -> None:
        printed = io.StringIO()
        if self._number % 2:
            found = verify(self.root / NEW)
        else:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = command.main(self._options[1])
            found = printed.getvalue().splitlines() if code == 1 else []
        problem = self.named(found, fault) if found else f"verify does not find it {printed.getvalue()}"
        if problem:
            self._lost(fault, f"{problem}: {found}")

    def _load(self, fault: Fault, tag: str | None) -> None:
        if tag != "auto":
            try:
                self.subject.load(str(self.root), tag)
            except CheckpointDamage as damage:
                if str(self.root / NEW) not in str(damage):
                    self._lost(fault, f"the load names {damage}")
            else:
                self._unread(fault, "the load does not find it")
            return
        with contextlib.redirect_stdout(io.StringIO()):
            restored = self.subject.load(str(self.root), "auto")
        if restored.tag == NEW:
            self._unread(fault, "'auto' takes it")
        elif restored.tag != OLD or restored.skipped != (str(self.root / NEW),):
            self._lost(fault, f"'auto' takes {restored.tag} and skips {restored.skipped}")
        elif differences(self.subject.state(), self._older):
            self._lost(fault, "'auto' restores other values than the older one's")

    def _unread(self, fault: Fault, why: str) -> None:
        """One rank does not read the random state of a second one: then nothing wrong was loaded."""
        if fault.tensors and all(tensor.startswith("state/rng/1/") for tensor in fault.tensors):
            self.report.counts["in what one rank does not read"] += 1
        else:
            self._lost(fault, why)

    def check_whole(self) -> None:
        """Check that everything is as before, after the faults."""
        if verify(self.root / NEW) or verify(self.root / OLD) or self.subject.load(str(self.root), None).tag != NEW:
            self.report.lost.append("the checkpoints are not what they were: a fault was not undone")

    def latest(self) -> None:
        """Check that the newest checkpoint is loaded for any content of ``latest``, which is for people."""
        latest = self.root / "latest"
        content = latest.read_bytes()
        for bad in [*(content[:at] + b"\0" + content[at + 1 :] for at in range(len(content))), b"", b"old\n", None]:
            latest.unlink()
            if bad is not None:
                latest.write_bytes(bad)
            if self.subject.load(str(self.root), None).tag != NEW or self.subject.load(str(self.root), "auto").skipped:
                self.report.lost.append(f"with latest {bad!r} another one is loaded")
            with contextlib.redirect_stdout(io.StringIO()):
                if command.main(self._options[0]):
                    self.report.lost.append(f"with latest {bad!r} verify complains")
            self.report.counts["changes to latest"] += 1
        latest.write_bytes(content)


def _damage(root: Path, older: dict[str, Any], report: Report, stride: int, bits: int, head: int) -> None:
    judge = Judge(root, report, older)
    new, old = Place(root / NEW), Place(root / OLD)
    faults = itertools.chain(changed_bytes(new, stride, bits, head), cut_and_longer(new), swapped_pieces(new))
    for number, fault in enumerate(itertools.chain(faults, swapped_and_missing_files(new, old))):
        if fault.kind.startswith("flipped") or stride == 1 or number % stride == 0 or "file" in fault.kind:
            judge.judge(fault)
    judge.check_whole()
    judge.latest()
    for place in (new, old):
        place.close()
    judge.subject.session.close()


def campaign(stride: int = 1, bits: int = 8, head_bits: int = 8) -> Report:
    """Flip every ``stride``-th byte, ``bits`` single bits of each, and ``head_bits`` where a manifest says which is the
    newest.

    1, 8 and 8 are everything.
    """
    report = Report("flips")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        for ranks in (1, 2):
            root = Path(folder) / f"of-{ranks}"
            older = run_ranks(ranks, write_two, str(root))[0] if ranks > 1 else write_two(str(root))
            before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
            sizes = (len(content) for path, content in before.items() if path.parent.name == NEW)
            report.counts[f"bytes in {ranks} rank's checkpoint"] = sum(sizes)
            _damage(root, older, report, stride, bits if ranks == 1 else 1, head_bits)
            assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
            shutil.rmtree(root)
    return report
