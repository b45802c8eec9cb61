"""Changes to the files of a checkpoint, each as a small JSON object, so that a list of them is a recipe."""

import contextlib
import io
import json
import os
import pickle
import random
import re
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.checkpoint import native_format as native
from shardwise.core.checkpoint.formats import deepspeed
from tests.faults.fuzz.pickles import change_pickle, draw_pickle_change
from tests.faults.fuzz.values import SECRET, Stale, change_tree, draw_path, draw_value, made, renamed, without, written

Change = dict[str, Any]
NAMES = ("../" + SECRET, "a\0b", "\x1b[2Jx", "", "model/x", "other", "a" * 5000, "state/rng/0/torch", "_extra_state")
PARSED = "(parsed)"
"""An element of a path: the string there is itself JSON."""
SPARSE_BYTES = 1 << 30
OF_AN_ARRAY = (np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype("uint32")))
"""The globals in pickles of the random states of Trainer and accelerate."""


# ---- files as trees


def _kind(content: bytes, name: str) -> str:
    if name == native.MANIFEST:
        return "manifest"
    if name.endswith(".json"):
        return "json"
    if name.endswith(".safetensors"):
        return "safetensors"
    if content[:2] == b"PK":
        return "text" if name.endswith(".distcp") else "zip"  # several, one after the other
    return "pickle" if content[:1] == b"\x80" else "text"


def _torch_tree(content: bytes) -> Any:
    with torch.serialization.safe_globals([*deepspeed.STAND_INS, *OF_AN_ARRAY]):
        return _plain(torch.load(io.BytesIO(content), weights_only=True))


def _plain(value: Any) -> Any:
    """Return the tree without objects of classes that are not installed."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if type(value).__module__.startswith("shardwise"):
        return int(value) if isinstance(value, int) else dict(vars(value))
    return value


def _read_tree(content: bytes, kind: str) -> Any:
    if kind == "safetensors":
        length = struct.unpack("<Q", content[:8])[0]
        tree = json.loads(content[8 : 8 + length])
    elif kind in ("manifest", "json"):
        tree = json.loads(content)
    elif kind == "pickle" and b"torch.distributed.checkpoint" in content[:4000]:
        return pickle.loads(content)  # written by shardwise
    else:
        return _torch_tree(content)
    own = tree.get("__metadata__", {}) if isinstance(tree, dict) else {}
    for key in own if kind == "safetensors" else ():
        if own[key][:1] == "{":
            own[key] = {PARSED: json.loads(own[key])}
    return tree


class _Text:
    """Strings that stand for values, until the tree is JSON."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, text: str) -> str:
        token = f"<<{len(self.texts)}>>"
        self.texts[json.dumps(token)] = text
        return token

    def write(self, tree: Any) -> str:
        own = tree.get("__metadata__") if isinstance(tree, dict) else None
        if isinstance(own, dict):
            inner = {k: self.write(v[PARSED]) if isinstance(v, dict) and PARSED in v else v for k, v in own.items()}
            tree = {**tree, "__metadata__": inner}
        text = json.dumps(tree)
        for token, real in self.texts.items():
            text = text.replace(token, real)
        return text


def _write_tree(before: bytes, kind: str, tree: Any, texts: _Text) -> bytes:
    if kind in ("zip", "pickle"):
        buffer = io.BytesIO()
        try:
            if kind == "pickle" and b"torch.distributed.checkpoint" in before[:4000]:
                return pickle.dumps(tree)
            torch.save(tree, buffer, _use_new_zipfile_serialization=kind == "zip")
        except Exception as error:  # classes of torch check their constructor's arguments
            raise Stale(f"nobody can write that ({type(error).__name__}: {error!s:.100})") from error
        return buffer.getvalue()
    if kind == "manifest" and isinstance(tree, dict):
        tree = {key: value for key, value in tree.items() if key != "checksum"}
        head = {k: v for k, v in tree.items() if k in ("format", "version", "tag", "serial", "step")}
        body = {key: value for key, value in tree.items() if key not in head}
        text = texts.write(head)[:-1] + ",\n" + texts.write(body)[1:-1] + ",\n"
        return _with_checksum(text.encode("utf-8", "surrogatepass"))
    content = texts.write(tree).encode("utf-8", "surrogatepass")
    if kind != "safetensors":
        return content
    return struct.pack("<Q", len(content)) + content + before[8 + struct.unpack("<Q", before[:8])[0] :]


def _with_checksum(body: bytes) -> bytes:
    return body + native._last_line(body)


def _change_tree(content: bytes, name: str, change: Change, secret: str) -> bytes:
    kind = _kind(content, name)
    tree, texts = _read_tree(content, kind), _Text()
    pickled = kind in ("zip", "pickle")
    path, do = change["path"], change["do"]
    if do == "set":
        value = change["value"]
        new = made(value, secret) if pickled else texts.put(written(value, secret))
        tree = change_tree(tree, path, lambda _: new)
    elif do == "twice":  # two values under one key, which JSON allows
        second = written(change["value"], secret)
        tree = change_tree(tree, path, lambda old: texts.put(f"{json.dumps(old)}, {json.dumps(path[-1])}: {second}"))
    elif do == "drop":
        tree = without(tree, path)
    elif do == "rename":
        tree = renamed(tree, path, change["value"])
    else:
        found: list[Any] = []
        change_tree(tree, change["other"], lambda old: found.append(old) or old)
        tree = change_tree(tree, path, lambda _: found[0])
    return _write_tree(content, kind, tree, texts)


def _draw_tree(random: random.Random, file: str, content: bytes) -> Change:
    kind = _kind(content, file)
    tree = _read_tree(content, kind)
    path = draw_path(random, tree)
    do = random.choice(("set", "set", "set", "set", "set", "drop", "rename", "copy", "twice"))
    if not path or not isinstance(path[-1], str):
        do = "drop" if path and do == "drop" else "set"
    pickled = kind in ("zip", "pickle")
    if do == "twice" and (pickled or path[-1] == PARSED):
        do = "drop"
    change: Change = {"op": "tree", "file": file, "do": do, "path": path}
    if do in ("set", "twice"):
        change["value"] = draw_value(random, pickled)
    elif do == "rename":
        change["value"] = random.choice(NAMES)
    elif do == "copy":
        change["other"] = draw_path(random, tree)
    return change


# ---- bytes, pickles, archives


def _change_bytes(content: bytes, name: str, change: Change, secret: str) -> bytes:
    do, at = change["do"], change["at"] % (len(content) + 1)
    end = min(at + change.get("n", 1), len(content))
    new = bytes.fromhex(change.get("new", ""))
    simple: dict[str, Callable[[], bytes]] = {
        "flip": lambda: content[:at] + bytes(each ^ new[0] for each in content[at : at + 1]) + content[at + 1 :],
        "put": lambda: content[:at] + new + content[at + len(new) :],
        "insert": lambda: content[:at] + new + content[at:],
        "delete": lambda: content[:at] + content[end:],
        "twice": lambda: content[:end] + content[at:],
        "zeros": lambda: content[:at] + bytes(end - at) + content[end:],
        "cut": lambda: content[:at],
        "grow": lambda: content + bytes(change["n"]),
    }
    result = simple[do]()
    if change.get("checksum"):  # an attacker can write the checksum of a changed manifest as well
        result = _with_checksum(result[: result.rfind(b"\n", 0, -1) + 1])
    return result


def _draw_bytes(random: random.Random, file: str, content: bytes) -> Change:
    do = random.choice(("flip", "flip", "flip", "put", "put", "insert", "delete", "twice", "zeros", "cut", "grow"))
    near = random.random() < 0.5  # most formats begin with what describes the other bytes
    at = random.randrange(min(len(content), 400) if near else len(content) or 1)
    change: Change = {"op": "bytes", "file": file, "do": do, "at": at}
    if do == "flip":
        change["new"] = f"{random.choice((1, 2, 4, 8, 16, 32, 64, 128, 255)):02x}"
    elif do in ("put", "insert"):
        new = [struct.pack("<Q", each) for each in (0, 1, 2**31, 2**45, 2**62, 2**64 - 1)]
        new += [b"\0", b"\xff" * 4, b'"', b"}", b"\n", b"../", random.randbytes(3)]
        change["new"] = random.choice(new).hex()
        if random.random() < 0.3:
            change["at"] = 0
    else:
        change["n"] = random.choice((1, 4, 8, 64, 512, 4096))
    if file.endswith(native.MANIFEST) and random.random() < 0.8:
        change["checksum"] = True
    return change


def _change_pickle(content: bytes, name: str, change: Change, secret: str) -> bytes:
    if content[:2] != b"PK":
        return change_pickle(content, change)

    def edit(_: int, info: zipfile.ZipInfo, data: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
        return [(info, change_pickle(data, change) if info.filename.endswith("data.pkl") else data)]

    return _archive(content, edit)


Records = Callable[[int, zipfile.ZipInfo, bytes], list[tuple[zipfile.ZipInfo, bytes]]]


def _archive(content: bytes, edit: Records, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for place, info in enumerate(old.infolist()):
            for other, data in edit(place, info, old.read(info)):
                new.writestr(other, data, compress_type=other.compress_type)
        new.comment = comment
    return buffer.getvalue()


def _change_zip(content: bytes, name: str, change: Change, secret: str) -> bytes:
    do, at = change["do"], change["at"]

    def edit(place: int, info: zipfile.ZipInfo, data: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
        if place != at:
            return [(info, data)]
        other = zipfile.ZipInfo(change.get("value", info.filename))
        if do == "drop":
            return []
        if do == "deflate":
            other.compress_type = zipfile.ZIP_DEFLATED
            return [(other, data + bytes(change["n"]))]
        if do == "twice":
            return [(info, data), (zipfile.ZipInfo(info.filename), data[::-1])]
        if do == "content":
            return [(other, bytes.fromhex(change["new"]))]
        return [(other, data)]

    return _archive(content, edit, b"x" * 60_000 if do == "comment" else b"")


RECORDS = ("../outside/x", "/etc/x", "m/data.pkl", "m/.format_version", "m/byteorder", "x", "m/data/0")


def _draw_zip(random: random.Random, file: str, content: bytes) -> Change:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        number = len(archive.infolist())
    do = random.choice(("drop", "rename", "deflate", "twice", "content", "comment"))
    change: Change = {"op": "zip", "file": file, "do": do, "at": random.randrange(number)}
    if do == "rename":
        change["value"] = random.choice(RECORDS)
    elif do == "deflate":
        change["n"] = random.choice((0, 1 << 26))
    elif do == "content":
        change["new"] = random.choice((b"", b"big", b"little", b"3", b"\x80\x02}.", b"\xff" * 9)).hex()
    return change


# ---- files themselves


def _change_file(folder: Path, change: Change, secret: str) -> None:
    path, do = folder / change["file"], change["do"]
    if do in ("swap", "copy"):
        other = folder / change["to"]
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        if do == "swap":
            other.write_bytes(one)
        return
    if do == "sparse":
        os.truncate(path, SPARSE_BYTES)
        return
    if do == "extra":
        if change["to"] != path.name:
            shutil.copy(path, path.with_name(change["to"]))
        return
    path.unlink()
    places = {"device": "/dev/zero", "endless": "/dev/urandom", "dangling": "nowhere"}
    places |= {"loop": path.name, "outward": secret}
    if do == "fifo":
        os.mkfifo(path)
    elif do == "socket":
        # the path of a socket has to be short
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made_socket:
            made_socket.bind(path.name)
    elif do == "directory":
        path.mkdir()
    elif do in places:
        path.symlink_to(places[do])
    elif do == "empty":
        path.touch()


EXTRA = ("latest", ".metadata", "model.safetensors", "pytorch_model.bin", "adapter_config.json", "x.ckpt")
EXTRA += ("mp_rank_00_model_states.pt", "model.safetensors.index.json", "manifest.json", "pieces-0.safetensors")
EXTRA += ("pytorch_optim.bin.index.json",)
KINDS = ("remove", "empty", "fifo", "socket", "directory", "device", "endless", "loop", "outward", "dangling", "sparse")


def _draw_file(random: random.Random, file: str, files: list[str]) -> Change:
    do = random.choice((*KINDS, "swap", "swap", "copy", "extra"))
    change: Change = {"op": "file", "file": file, "do": do}
    if do in ("swap", "copy"):
        change["to"] = random.choice(files)
    elif do == "extra":
        change["to"] = random.choice([name for name in EXTRA if name != file.rsplit("/", 1)[-1]])
    return change


# ---- all kinds

EDITS: dict[str, Callable[[bytes, str, Change, str], bytes]] = {
    "tree": _change_tree,
    "bytes": _change_bytes,
    "pickle": _change_pickle,
    "zip": _change_zip,
}


def apply_change(folder: Path, change: Change) -> None:
    """Apply the change to the checkpoint in ``folder``.

    Raises:
        Stale: the checkpoint is not as it was when the change was made up.
    """
    secret = str((folder.parent / SECRET).resolve())
    path = folder / change["file"]
    if not os.path.lexists(path):
        raise Stale(f"no file {change['file']}")
    if change["op"] == "file":
        _change_file(folder, change, secret)
    else:
        path.write_bytes(EDITS[change["op"]](path.read_bytes(), path.name, change, secret))


def _possible(random: random.Random, folder: Path, file: str, files: list[str]) -> Iterator[Callable[[], Change]]:
    content = (folder / file).read_bytes()
    kind = _kind(content, file.rsplit("/", 1)[-1])
    if kind != "text":
        yield from [partial(_draw_tree, random, file, content)] * 8
    if kind in ("zip", "pickle"):
        inside = content
        if kind == "zip":
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                inside = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
            yield from [partial(_draw_zip, random, file, content)] * 2
        yield from [lambda: {"op": "pickle", "file": file, **draw_pickle_change(random, inside)}] * 4
    yield from [partial(_draw_bytes, random, file, content)] * 4
    yield from [partial(_draw_file, random, file, files)] * 2


def draw_changes(random: random.Random, folder: Path) -> list[Change]:
    """Return one or two random changes to the checkpoint in ``folder``, to different files.

    Files that describe others are chosen more often than those that only have values.
    """
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    weights = [1 if re.search(r"pieces-|\.distcp|truth", file) else 4 for file in files]
    found: list[Change] = []
    for _ in range(2 if random.random() < 0.2 else 1):
        (file,) = random.choices(files, weights)
        if all(file not in (each["file"], each.get("to")) for each in found):
            found.append(random.choice(list(_possible(random, folder, file, files)))())
    return found
