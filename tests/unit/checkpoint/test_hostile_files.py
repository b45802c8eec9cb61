"""Tests of untrusted checkpoint files: no code runs, no path leaves the directory, nothing hangs, memory is bounded.

Invalid names, sizes and counts are refused with a printable message before they cost anything.
"""

import json
import os
import pathlib
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import main
from shardwise.core.checkpoint import native_format as native
from shardwise.core.checkpoint.formats.deepspeed import find_step
from shardwise.core.checkpoint.formats.native import NativeSource, verify, write_native
from shardwise.core.checkpoint.formats.registry import open_checkpoint
from shardwise.core.checkpoint.input_checks import checked_name
from shardwise.core.checkpoint.save import agree
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError
from shardwise.deepspeed.checkpoint_engine import tag_directory
from tests.faults.fuzz.changes import apply_change
from tests.support.formats_setup import odd_source
from tests.support.on_ranks import raises

# ---- pickles


def nested_tuples(levels: int) -> bytes:
    """Return pickle opcodes for a tuple that stands for 2**levels values."""
    return b")" + b"".join(b"\x94" + b"h" + bytes([level]) + b"\x86" for level in range(levels))


def dcp(folder: Path, code: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(b"\x80\x04" + code + b".")
    return folder


def test_index_cannot_change_a_class(tmp_path: Path) -> None:
    before = pathlib.PurePosixPath.is_absolute, dict(vars(pathlib.PurePosixPath))
    for module, name in (("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath")):
        # BUILD on the class itself: the second part of the pair would be set attribute by attribute.
        code = f"c{module}\n{name}\n".encode() + b"N}\x8c\x0bis_absoluteK\x00s\x86b"
        raises(CheckpointError, None, open_checkpoint, dcp(tmp_path / "d", code))
        assert (pathlib.PurePosixPath.is_absolute, dict(vars(pathlib.PurePosixPath))) == before


def test_exponentially_nested_keys_are_refused(tmp_path: Path) -> None:
    code = b"}" + nested_tuples(200) + b"K\x01s"
    raises(CheckpointDamage, r"more than .* values", lambda: open_checkpoint(dcp(tmp_path / "d", code)))
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + code + b".")
        archive.writestr("m/version", "3\n")
    raises(CheckpointDamage, r"more than .* values", lambda: open_checkpoint(tmp_path / "m.pt"))


@pytest.mark.parametrize("plant", [".t.output-replaced-0123456789abcdef", ".t.output-saving-0123456789abcdef"])
def test_conversion_does_not_follow_planted_links(saved: Path, tmp_path: Path, plant: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").write_text("mine")
    target = tmp_path / "out" / "t"
    target.parent.mkdir()
    for way in (victim, victim / "mine"):
        (target.parent / plant).symlink_to(way)
        assert main(["checkpoint", "convert", str(saved), str(target), "--to", "huggingface"]) == 0
        assert not target.is_symlink() and (target / "model.safetensors").is_file()
        assert [path.name for path in victim.iterdir()] == ["mine"] and (victim / "mine").read_text() == "mine"
        assert sorted(path.name for path in target.parent.iterdir()) == ["t"]
        shutil.rmtree(target)


def test_failed_conversion_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    piece = next(saved.glob("pieces-*"))
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for to in ("colossalai", "dcp", "native", "huggingface"):
        target = tmp_path / f"to-{to}"
        assert main(["checkpoint", "convert", str(saved), str(target), "--to", to]) in (0, 2)
        assert to == "huggingface" or not target.exists()


def test_exponentially_nested_values_are_refused(tmp_path: Path) -> None:
    shared: Any = [0]
    for _ in range(60):
        shared = [shared, shared]
    optimizer = {"state": {}, "param_groups": [], "more": shared}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "m.pt")
    raises(CheckpointDamage, "inside each other", lambda: open_checkpoint(tmp_path / "m.pt"))


def test_a_compressed_torch_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "m.pt")
    deflated = zipfile.ZipFile(tmp_path / "n.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "m.pt") as old, deflated as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    raises(CheckpointDamage, "compressed", lambda: open_checkpoint(tmp_path / "n.pt"))


# ---- the native format


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write_native(odd_source(), tmp_path / "root" / "tag")


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the manifest and write it with a valid checksum."""
    path = folder / native.MANIFEST
    data = json.loads(path.read_text())
    del data["checksum"]
    edit(data)
    head = {key: data.pop(key) for key in ("format", "version", "tag", "serial", "step") if key in data}
    text = json.dumps(head)[:-1] + ",\n" + json.dumps(data)[1:-1] + ",\n"
    path.write_bytes(text.encode() + native._last_line(text.encode()))


def first_tensor(data: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in data["tensors"].values() if each["pieces"])


def put(data: dict[str, Any], *path: Any) -> None:
    *places, last, value = path
    for place in places:
        data = data[place]
    data[last] = value


def renamed(data: dict[str, Any], name: str) -> None:
    data["tensors"][name] = data["tensors"].pop(next(iter(data["tensors"])))


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "absolute": lambda data: put(data, "files", 0, 0, "/etc/hostname"),
    "parent": lambda data: put(data, "files", 0, 0, "../x"),
    "device": lambda data: put(data, "files", 0, 0, "/dev/zero"),
    "escape in a file": lambda data: put(data, "files", 0, 0, "\x1b[2J"),
    "size": lambda data: put(data, "files", 0, 1, 2**45),
    "negative header": lambda data: put(data, "files", 0, 2, -1),
    "no files": lambda data: put(data, "files", {}),
    "infinite shape": lambda data: put(first_tensor(data), "shape", [float("inf")]),
    "negative shape": lambda data: put(first_tensor(data), "shape", [-1]),
    "huge shape": lambda data: put(first_tensor(data), "shape", [2**62, 2**62]),
    "dtype": lambda data: put(first_tensor(data), "dtype", "load"),
    "huge piece": lambda data: put(first_tensor(data), "pieces", 0, 3, 2**45),
    "negative offset": lambda data: put(first_tensor(data), "pieces", 0, 1, -8),
    "short piece": lambda data: put(first_tensor(data), "pieces", 0, [0]),
    "escape": lambda data: renamed(data, "model/\x1b[2Jx"),
    "serial": lambda data: put(data, "serial", "newest"),
    "version": lambda data: put(data, "version", {}),
    "optimizers": lambda data: put(data, "state", "optimizers", [None]),
    "groups": lambda data: put(data, "state", "optimizers", [{"groups": [{"params": "ab"}]}]),
    "deep": lambda data: put(data, "state", "user_state", deep(900)),
}


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("what", EDITS)
def test_invalid_manifests(saved: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify(saved) == []
    change(saved, EDITS[what])
    caught = raises((CheckpointError, ValueError), None, lambda: NativeSource(saved).close())
    assert "\x1b" not in caught
    assert verify(saved)
    for command in (["inspect", saved], ["verify", saved], ["diff", saved, saved], ["inspect", saved.parent]):
        assert main(["checkpoint", *map(str, command)]) in (1, 2)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err and "\x1b" not in out + err


def test_deeply_nested_json(saved: Path, tmp_path: Path) -> None:
    text = '{"format": "shardwise checkpoint", "version": 1, "tag": "t", "serial": 1, "step": 1,\n"x": ' + "[" * 100_000
    body = (text + "]" * 100_000 + ",\n").encode()
    (saved / native.MANIFEST).write_bytes(body + native._last_line(body))
    assert len(verify(saved)) == 1
    for name in ("model.safetensors.index.json", "adapter_config.json"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        (folder / name).write_text("[" * 100_000)
        assert main(["checkpoint", "inspect", str(folder)]) == 2
    header = b'{"a":' + b"[" * 100_000
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert main(["checkpoint", "inspect", str(tmp_path / "m.safetensors")]) == 2


def test_pipes_are_refused(saved: Path, tmp_path: Path) -> None:
    piece = next(saved.glob("pieces-*"))
    piece.unlink()
    os.mkfifo(piece)
    assert any("not a regular file" in line for line in verify(saved))
    manifest = saved / native.MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    assert main(["checkpoint", "inspect", str(saved)]) == 2
    assert main(["checkpoint", "inspect", str(saved.parent)]) == 2
    names = ("model.safetensors", "model.safetensors.index.json", ".metadata", "latest", "adapter_config.json", "a.pt")
    for name in names:
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        os.mkfifo(folder / name)
        assert main(["checkpoint", "inspect", str(folder)]) == 2
        assert main(["checkpoint", "verify", str(folder / name)]) == 2


def test_saving_does_not_follow_planted_links(tmp_path: Path) -> None:
    from shardwise.core.checkpoint.directory import CheckpointRoot

    victim = tmp_path / "victim"
    victim.write_text("mine")
    root = tmp_path / "root"
    root.mkdir()
    (root / ".latest.partial").symlink_to(victim)
    write_native(odd_source(), root / "tag")
    CheckpointRoot(str(root)).point_latest("tag")
    assert victim.read_text() == "mine" and (root / "latest").read_text() == "tag\n"
    assert not (root / "latest").is_symlink()


def test_a_sparse_piece_is_not_allocated(saved: Path) -> None:
    # The pieces of a real checkpoint are small; a manifest may not ask for a larger one, however long the file is.
    with next(saved.glob("pieces-*")).open("r+b") as file:
        file.truncate(12 << 30)

    def edit(data: dict[str, Any]) -> None:
        data["files"][0][1] = 12 << 30
        piece = [0, 4096, 0, 11 << 30, "0" * 16]
        data["tensors"] = {"model/w": {"dtype": "uint8", "shape": [11 << 30], "pieces": [piece]}}

    change(saved, edit)
    assert len(verify(saved)) == 1 and "piece" in verify(saved)[0].lower()


# ---- safetensors


def safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: float, start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [shape], "data_offsets": [start, end]}


HEADERS: dict[str, Any] = {
    "no JSON": b"{not json",
    "short": {"a": entry(2, 0, 4)},
    "negative": {"a": entry(-2, 0, 8)},
    "unknown dtype": {"a": entry(2, 0, 8, "Q4")},
    "gap": {"a": entry(2, 4, 12)},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "overlap": {"a": entry(2, 0, 8), "b": entry(2, 0, 8)},
    "infinite": {"a": entry(float("inf"), 0, 4)},
    "huge": {"a": entry(2**45, 0, 2**47)},
    "escape": {"\x1b]0;x": entry(1, 0, 4)},
    "our header": {"__metadata__": {"shardwise": '{"aliases": {"b": ["a"]}}'}, "a": entry(1, 0, 4)},
}


@pytest.mark.parametrize("what", HEADERS)
def test_invalid_safetensors_headers(tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = safetensors(tmp_path / "m.safetensors", HEADERS[what], b"\0" * 4)
    raises(CheckpointError, r"m\.safetensors", lambda: open_checkpoint(path))
    for action in ("inspect", "verify"):
        assert main(["checkpoint", action, str(path)]) in (1, 2)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err and "\x1b" not in out + err


# ---- names and messages


LONG = ["a" * 256, "ä" * 200, "a/" * 600 + "a", "x" * 100_000]
"""Names that are too long in bytes for any file."""


@pytest.mark.parametrize("name", LONG, ids=[0, 1, 2, 3])
def test_too_long_file_names(tmp_path: Path, name: str) -> None:
    raises(CheckpointDamage, "not a plain name", lambda: checked_name(name, "an index"))
    shards, parts = tmp_path / "shards", tmp_path / "parts"
    for folder in (shards, parts):
        folder.mkdir()
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    index = {"weight_map": {}, "metadata": {"param_groups": name}}
    (parts / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    saved = write_native(odd_source(), tmp_path / "saved")
    edit = {"op": "tree", "file": "manifest.json", "do": "set", "path": ["files", 0, 0], "value": name}
    apply_change(saved, edit)
    for folder in (shards, parts, saved):
        raises(CheckpointDamage, r"not a plain name|does not name a file", open_checkpoint, folder)
    step = tmp_path / "step"
    step.mkdir()
    (step / "latest").write_text(name)
    assert find_step(step) is None


def test_latest_stays_in_its_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    (root / "mine").mkdir(parents=True)
    latest = root / "latest"
    assert tag_directory(root, None, "latest") is None
    latest.write_text("mine\n")
    assert tag_directory(root, None, "latest") == str(root / "mine")
    for name in ("../outside", str(outside), "a\0b", *LONG, "\x1b[2J"):
        latest.write_text(name)
        message = raises(CheckpointDamage, r"not a plain name|no name has", tag_directory, root, None, "latest")
        assert len(message) < 1000 and message.isprintable()
    latest.write_bytes(b"\xff\xfe")
    raises(CheckpointDamage, None, lambda: tag_directory(root, None, "latest"))


def test_errors_are_printable() -> None:
    def raising() -> None:
        raise ValueError("a\0b\x1b[2J\nand more")

    raises(ValueError, r"a\\x00b\\x1b\[2J\nand more", lambda: agree(lambda value: [value], "load it", raising))
