"""DeepSpeed directories that DeepSpeed 0.19.8 wrote (tests/data/make_deepspeed.py) against the values it gathered."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from formats_setup import same_bits, tensor
from safetensors.torch import load_file

from shardwise.core.checkpoint.formats import RefusedPickle, open_checkpoint, open_deepspeed
from shardwise.core.checkpoint.formats.deepspeed import Flat, Place, sharded_entry
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError

CASES = [f"zero{stage}-{kind}" for stage in (1, 2, 3) for kind in ("1ranks-fp32", "2ranks-fp32", "2ranks-bf16")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(Path(__file__).parent.parent / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "ds"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inside", ["", "global_step3"])
def test_everything_is_what_deepspeed_gathered(case: str, inside: str, written: Path) -> None:
    truth = load_file(written / case / "truth.safetensors")
    source = open_checkpoint(written / case / inside)
    assert set(source.tensors()) == set(truth) and len(truth) == 18
    for name, expected in truth.items():
        got = tensor(source, name)
        assert got.shape == expected.shape and torch.equal(got.float(), expected.float()), name
        whole = got.reshape(-1)
        for cut in range(got.numel() + 1):
            assert same_bits(source.read(name, cut, got.numel() - cut), whole[cut:]), (name, cut)
    state = source.state()
    assert state["aliases"] == {"head.weight": "embed.weight"} and state["step"] == 3
    (optimizer,) = state["optimizers"]
    options = ("weight_decay", "lr")
    groups = [(group["params"], *(group["options"][key] for key in options)) for group in optimizer["groups"]]
    assert groups == [
        (["embed.weight", "middle.weight", "back.weight"], 0.1, 0.001),
        (["middle.bias", "back.bias"], 0.0, 0.001),
    ]
    assert optimizer["groups"][0]["options"]["betas"] == {"$tuple": [0.9, 0.999]}
    assert all(small == {"step": {"dtype": "float32", "value": 3.0}} for small in optimizer["small"].values())
    assert len(optimizer["small"]) == 5
    half = state.get("compute_dtype", {})
    assert set(half.values()) == ({"bfloat16"} if "bf16" in case else set()) and len(half) in (0, 5)
    assert state["other"]["client_state.epoch"] == 4 and state["other"]["lr_scheduler"]["last_epoch"] == 3
    assert source.notes == ()  # type: ignore[attr-defined]


def _copy(written: Path, case: str, place: Path) -> Path:
    shutil.copytree(written / case, place)
    return place / "global_step3"


def test_missing_and_foreign_files_are_named(written: Path, tmp_path: Path) -> None:
    step = _copy(written, "zero2-2ranks-fp32", tmp_path / "a")
    (step / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointDamage, match=r"2 ranks saved, the files are of ranks \[0\]"):
        open_deepspeed(tmp_path / "a")
    step = _copy(written, "zero3-2ranks-fp32", tmp_path / "b")
    (step / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointDamage, match=r"model files are of ranks \[0\]"):
        open_deepspeed(tmp_path / "b")
    step = _copy(written, "zero1-2ranks-fp32", tmp_path / "c")
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor parallelism"):
        open_deepspeed(tmp_path / "c")
    step = _copy(written, "zero1-2ranks-fp32", tmp_path / "d")
    content = (step / "mp_rank_00_model_states.pt").read_bytes()
    (step / "mp_rank_00_model_states.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointDamage, match="not a whole torch file"):
        open_deepspeed(tmp_path / "d")


def test_a_latest_that_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(FileNotFoundError, match="latest"):
        open_deepspeed(tmp_path)


def test_other_classes_are_refused(written: Path, tmp_path: Path) -> None:
    step = _copy(written, "zero1-1ranks-fp32", tmp_path / "a")
    file = step / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    torch.save({**content, "path": Path("x")}, file)
    with pytest.raises(RefusedPickle, match="pathlib"):
        open_deepspeed(tmp_path / "a")


def test_a_flat_array_that_is_too_short_is_damage() -> None:
    with pytest.raises(CheckpointDamage, match="weights ends before element 5"):
        Flat([torch.arange(3)], [0], "weights").read(2, 3)
    with pytest.raises(CheckpointDamage):
        Flat([torch.arange(3), torch.arange(3)], [0, 4], "a gap").read(2, 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [1, 2, 7, 10])
def test_stage_three_parts_over_several_sub_groups(ranks: int, numel: int) -> None:
    values = torch.arange(numel)
    size = -(-numel // ranks)
    padded = torch.cat([values, torch.full((size * ranks - numel,), -1)])
    before = torch.tensor([-5, -6])
    arrays = []
    for rank in range(ranks):
        own = torch.cat([before, padded[rank * size : (rank + 1) * size]])
        arrays.append(Flat([own[:1], own[1:]], [0, 1], "rank"))
    entry = sharded_entry(Place(0, (numel,), 2), arrays)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            assert torch.equal(entry.read(start, stop - start), values[start:stop])
