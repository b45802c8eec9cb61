"""Tests of the native checkpoint directory.

- Every byte is checked, and the reader in the documentation reads it.
- Tensors stored as shards of several ranks are read with little overhead; an invalid cut is found.
- ``sample_words`` gives tensors with different values different words.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.base.fingerprint import WORD, sample_words, word_of
from shardwise.core.checkpoint import CheckpointDamage, Checkpointer, TensorInfo
from shardwise.core.checkpoint import native_format as form
from shardwise.core.checkpoint.atomic import DISK
from shardwise.core.checkpoint.formats import native, open_checkpoint
from shardwise.core.checkpoint.formats.native import NativeSource, verify, write_native
from shardwise.core.checkpoint.native_format import MANIFEST, Head, Manifest, PieceLayout
from shardwise.core.engine.checkpoint_state import Fragment, split
from shardwise.core.parallel.tensor import Part, ShardSpec
from shardwise.core.parallel.tensor.stored_order import StoredCut, own_runs
from shardwise.plan import replicated
from shardwise.session import Session, build
from tests.support.formats_setup import flip
from tests.support.on_ranks import raises
from tests.support.sets import campaign

DOCUMENT = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"


class Small(nn.Module):
    """A model with several dtypes, a tied weight, a buffer, an empty parameter, and optionally one larger than a
    piece.
    """

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)
        self.b.weight = self.a.weight
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.tensor([7, 8]))
        if large:
            self.large = nn.Parameter(torch.randn(1100, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.b(self.a(x).sum() + x).sum() + self.narrow.float().sum() + self.nothing.sum()
        return loss + self.large.square().sum() if hasattr(self, "large") else loss


@contextmanager
def training(model: nn.Module) -> Iterator[Session]:
    session = build(model, torch.optim.Adam(model.parameters(), lr=0.1), replicated())
    yield session
    session.close()


def saved(root: Path, large: bool = False, tags: tuple[str, ...] = ("one",), **given: Any) -> Small:
    """Train, and save a checkpoint for each tag."""
    model = Small(large)
    with training(model) as session:
        session.backward(session.module(torch.ones(2, 3)))
        session.optimizer.step()
        for tag in tags:
            Checkpointer(session).save(root, tag, **given)
    return model


def load(root: Path, tag: str | None = None) -> Any:
    with training(Small()) as session:
        return Checkpointer(session).load(root, tag)


def flip_bytes(directory: Path, stride: int) -> int:
    """Flip one bit of every ``stride``-th byte of each file, and of the first and last bytes of pieces and headers, in
    turn.

    Each flip must be found.

    Returns:
        The number of flips.
    """
    count = 0
    with NativeSource(directory) as source:
        manifest, names = source.manifest, set(source.tensors())
    (fact,) = manifest.files
    ends = {0, 7, 8, fact.header_bytes - 1}
    for name, pieces in manifest.pieces.items():
        size = manifest.tensors[name].dtype.itemsize
        ends |= {at for piece in pieces if piece.numel for at in (piece.offset, piece.offset + piece.numel * size - 1)}
    for file in sorted(directory.iterdir()):
        of_pieces = file.suffix == ".safetensors"
        for at in sorted({*range(0, file.stat().st_size, stride), *(ends if of_pieces else ())}):
            flip(file, at)
            problems = verify(directory)
            assert len(problems) == 1 and str(file) in problems[0], (file.name, at, problems)
            assert not of_pieces or any(name in problems[0] for name in names), (at, problems)
            flip(file, at)
            count += 1
    assert verify(directory) == []
    return count


@pytest.mark.parametrize("stride", [43, *campaign(1)])
def test_every_flipped_byte_is_found_and_named(tmp_path: Path, stride: int) -> None:
    """By default every 43rd byte and the ends of each region are flipped; the campaign flips all."""
    saved(tmp_path)
    assert [file.name for file in sorted((tmp_path / "one").iterdir())] == ["manifest.json", "pieces-0.safetensors"]
    assert flip_bytes(tmp_path / "one", stride) > 17000 // stride


def test_load_finds_every_flipped_byte(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "one" / "pieces-0.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    with training(Small()) as session:
        saver = Checkpointer(session)
        for at in [0, 8, 100, header - 1, *range(header, len(content), 97), len(content) - 1]:
            flip(file, at)
            raises(CheckpointDamage, re.escape(str(file)), saver.load, tmp_path)
            flip(file, at)
        assert saver.load(tmp_path) is not None


def test_missing_truncated_and_longer_files_are_found(tmp_path: Path) -> None:
    saved(tmp_path, tags=("one", "two"))
    one = tmp_path / "one" / "pieces-0.safetensors"
    good = one.read_bytes()
    for content in (good[:-1], good[:1000], b"", good + b"\0"):
        one.write_bytes(content)
        assert re.search(r"has \d+ bytes instead of the \d+", verify(tmp_path / "one")[0])
        raises(CheckpointDamage, "it holds", lambda: load(tmp_path, "one"))
    one.unlink()
    assert "is missing" in verify(tmp_path / "one")[0]
    (tmp_path / "two" / "manifest.json").unlink()
    assert "manifest.json is missing" in verify(tmp_path / "two")[0]
    raises(CheckpointDamage, r"two/manifest.json is missing", lambda: load(tmp_path))
    raises(FileNotFoundError, None, lambda: verify(tmp_path))


def test_auto_skips_damaged_checkpoints_with_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(tmp_path, "auto") is None
    saved(tmp_path, tags=("one", "two", "three", "four"))
    for name in ("four/manifest.json", "three/pieces-0.safetensors"):
        flip(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    raises(CheckpointDamage, "four", lambda: load(tmp_path))
    restored = load(tmp_path, "auto")
    assert restored.tag == "two" and [Path(p).name for p in restored.skipped] == ["four", "three"]
    notices = capsys.readouterr().out.splitlines()
    assert len(notices) == 2 and "four" in notices[0] and "pieces-0.safetensors" in notices[1]
    for tag in ("one", "two"):
        (tmp_path / tag / "pieces-0.safetensors").unlink()
    raises(CheckpointDamage, "every checkpoint", lambda: load(tmp_path, "auto"))


def _documented_reader() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.S)
    assert len(code.splitlines()) <= 50
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_documented_reader(tmp_path: Path) -> None:
    model = saved(tmp_path, large=True, user_state={"numbers": torch.arange(4)})
    reader = _documented_reader()
    with NativeSource(tmp_path / "one") as source:
        assert len(source.manifest.pieces["model/large"]) == 2
        for name, fact in source.tensors().items():
            values = torch.from_numpy(reader["read"](tmp_path / "one", name).copy())
            expected = source.read(name, 0, fact.numel).reshape(fact.shape)
            assert torch.equal(values.to(expected.dtype), expected), name
        assert torch.equal(source.read("model/large", 0, 1100000).reshape(1100, 1000), model.large)
        state = reader["manifest"](tmp_path / "one")["state"]
        assert state["aliases"] == {"b.weight": "a.weight"}
        assert state["optimizers"][0]["small"]["a.weight"] == {"step": {"dtype": "float32", "value": 1.0}}
        assert state["user_state"] == {"numbers": {"$tensor": "user_state/numbers"}}
    flip(tmp_path / "one" / "pieces-0.safetensors", -1)
    with pytest.raises(AssertionError, match="damaged"):
        for name in source.tensors():
            reader["read"](tmp_path / "one", name)


def test_other_versions_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "one" / "manifest.json"
    content = file.read_bytes().replace(b'"version": 1', b'"version": 3')
    body = content[: content.rfind(b"\n", 0, -1) + 1]
    file.write_bytes(body + f'"checksum": "{_documented_reader()["checksum"](body)}"}}\n'.encode())
    raises(ValueError, "version 3", lambda: load(tmp_path))
    assert json.loads(file.read_bytes())["version"] == 3


RANKS = 6


def written(directory: Path, whole: torch.Tensor, cut: ShardSpec) -> None:
    """Write the tensor as the ranks of an axis save it, one file for each rank."""
    directory.mkdir()
    stored, files, pieces = StoredCut.of(whole.shape, cut), [], []
    for rank in range(cut.ranks):
        part = Part(whole.shape, cut, rank)
        local = part.of(whole).reshape(-1)
        values, parts = [], []
        for run in own_runs(part, 0, local.numel()):
            fragment = Fragment("model/w", tuple(whole.shape), whole.dtype, run.stored, run.numel, stored)
            for piece in split(fragment, form.PIECE_BYTES):
                at = run.local + piece.start - run.stored
                values.append(local[at : at + piece.numel])
                parts.append(piece)
        path = os.fspath(directory / f"pieces-{rank}.safetensors")
        file, own = form.write_pieces(DISK, path, PieceLayout(parts), map(form.as_bytes, values))
        files.append(file)
        pieces.append({name: [piece._replace(file=rank) for piece in each] for name, each in own.items()})
    facts = {"model/w": TensorInfo(tuple(whole.shape), whole.dtype)}
    cuts = {"model/w": stored} if stored is not None else {}
    manifest = Manifest(Head("one", 1, 0), tuple(files), facts, form.merge_pieces(pieces), {"step": 0}, cuts)
    (directory / MANIFEST).write_bytes(form.encode_manifest(manifest))


def changed(directory: Path, change: Any, version: int = 2) -> None:
    """Replace the tensor's cut in the manifest, with a valid checksum."""
    file = directory / MANIFEST
    data = json.loads(file.read_bytes())
    head = {key: data[key] for key in ("format", "tag", "serial", "step")} | {"version": version}
    body = {key: data[key] for key in ("files", "tensors", "state")}
    body["tensors"]["model/w"]["cut"] = change
    content = (json.dumps(head)[:-1] + ",\n" + json.dumps(body)[1:-1] + ",\n").encode()
    file.write_bytes(content + f'"checksum": "{form.hexadecimal(content)}"}}\n'.encode())


def test_sharded_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor has six shards of several pieces each; no byte is read twice, with one cached piece for each shard."""
    monkeypatch.setattr(native, "CACHED_PIECES", 0)
    whole = torch.randn(1024, 6 * 1100)
    written(tmp_path / "one", whole, ShardSpec.even(1, whole.shape[1], RANKS))
    with NativeSource(tmp_path / "one") as source:
        assert min(len(source.manifest.pieces["model/w"]), 99) >= 2 * RANKS
        flat, step = whole.view(-1), 70_001
        for start in range(0, whole.numel(), step):
            numel = min(step, whole.numel() - start)
            assert torch.equal(source.read("model/w", start, numel), flat[start : start + numel])
        assert source.bytes_read <= sum(file.nbytes for file in source.manifest.files), "something is read twice"
    # A rank with the same shard reads only that; other ranks read only the shards that overlap theirs.
    for ranks, rank in ((RANKS, 3), (2, 1)):
        part = Part(whole.shape, ShardSpec.even(1, whole.shape[1], ranks), rank)
        with NativeSource(tmp_path / "one") as source:
            out = torch.full((part.shape.numel(),), float("nan"))
            source.read_part("model/w", part, 0, out)
            assert torch.equal(out.view(part.shape), part.of(whole))
            assert source.bytes_read < 1.1 * out.nbytes


def test_sharded_tensor_is_read_unsharded(tmp_path: Path) -> None:
    whole = torch.randn(6, 10, 3)
    written(tmp_path / "one", whole, ShardSpec.even(1, 10, 3))
    assert form.read_head(str(tmp_path / "one")).tag == "one" and verify(tmp_path / "one") == []
    with open_checkpoint(tmp_path / "one") as source:
        assert torch.equal(source.read("model/w", 0, 180).view(6, 10, 3), whole)
        write_native(source, tmp_path / "copy")
    with NativeSource(tmp_path / "copy") as source:
        assert torch.equal(source.read("model/w", 7, 99), whole.view(-1)[7:106]) and not source.manifest.cuts
    manifests = [(tmp_path / name / MANIFEST).read_bytes() for name in ("one", "copy")]
    assert [json.loads(each)["version"] for each in manifests] == [2, 1]
    again = form.decode_manifest(manifests[0], "it")
    assert again.cuts == {"model/w": StoredCut.of((6, 10, 3), ShardSpec.even(1, 10, 3))}


@pytest.mark.parametrize(
    "cut",
    [
        [3, [[[0, 10]]]], [1, [[[0, 4]], [[5, 10]]]], [1, [[[0, 6]], [[5, 10]]]], [1, [[[0, 10]], [[10, 10]]]],
        [1, [[[0, 10**30]]]], [True, [[[0, 10]]]], [1, [[0, 10]]], [1, [[["0", "10"]]]], [1], {"dim": 1}, None,
        [1, [[[0, 10]], *([[]] * (1 << 15))]], [1, []],
    ],
)  # fmt: skip
def test_invalid_cut_names_the_manifest(tmp_path: Path, cut: Any) -> None:
    written(tmp_path / "one", torch.randn(6, 10, 3), ShardSpec.even(1, 10, 3))
    changed(tmp_path / "one", cut)
    raises(CheckpointDamage, r"one/manifest\.json", lambda: NativeSource(tmp_path / "one"))


def small(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (small(1.0), small(2.0)), (small(1.0, 0.0, 1.0), small(1.0, 1.0, 1.0)), (small(0.5), small(-0.5)),
        (torch.randn(100), -torch.randn(100)), (torch.arange(4.0), torch.arange(4.0) * 2),
        (torch.arange(4), torch.arange(4).flip(0)), (torch.arange(4), -torch.arange(4)),
        (small(float("nan")), small(float("inf"))), (small(0.0), small(-0.0)),
    ],
)  # fmt: skip
def test_different_values_have_different_words(one: Tensor, other: Tensor) -> None:
    """The words also differ for values that differ in sign or exponent only, such as masks and step counts."""
    assert int(word_of(one)) % WORD != int(word_of(other)) % WORD
    assert sample_words([one]) != sample_words([other])
    assert sample_words([one]) == sample_words([one.clone()])
