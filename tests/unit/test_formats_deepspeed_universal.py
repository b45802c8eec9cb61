"""Universal checkpoints that DeepSpeed's own program made (tests/data/make_deepspeed_universal.py)."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_setup import tensor
from safetensors.torch import load_file

from shardwise.core.checkpoint.formats import RefusedPickle, open_checkpoint
from shardwise.core.checkpoint.formats.deepspeed import sub_groups
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError

CASES = ("zero1-2ranks-bf16", "zero2-2ranks-fp16", "zero3-2ranks-fp16")
DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ds`` as ``save_checkpoint`` wrote it, ``universal`` as DeepSpeed converted it."""
    folder = tmp_path_factory.mktemp("universal")
    for name in ("deepspeed", "deepspeed_universal"):
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


def same_state(got: Any, expected: Any) -> None:
    """All that a run takes over of two checkpoints is the same."""
    assert got.tensors() == expected.tensors()
    for name, fact in expected.tensors().items():
        assert torch.equal(got.read(name, 0, fact.numel), expected.read(name, 0, fact.numel)), name
    ours, theirs = got.state(), expected.state()
    (optimizer,), (other,) = ours.pop("optimizers"), theirs.pop("optimizers")
    assert optimizer["groups"] == other["groups"] and optimizer["small"] == other["small"]
    assert sorted(optimizer["keys"]) == sorted(other["keys"])
    for state in (ours, theirs):
        state["other"]["loss_scaler"].pop("dynamic", None)
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_what_deepspeed_converted_is_what_it_saved(case: str, written: Path) -> None:
    truth = load_file(written / "universal" / case / "truth.safetensors")
    for inside in ("", "global_step3_universal"):
        source = open_checkpoint(written / "universal" / case / inside)
        assert set(source.tensors()) == set(truth) and len(truth) == 18
        for name, expected in truth.items():
            assert torch.equal(tensor(source, name).float(), expected.float()), name
    same_state(source, open_checkpoint(written / "ds" / case / "global_step3"))
    assert open_checkpoint(written / "universal" / case).state()["other"]["skipped_steps"] == 0


def loaded(file: Path) -> Any:
    from shardwise.core.checkpoint.formats.deepspeed import STAND_INS
    from shardwise.core.checkpoint.formats.torch_file import load_torch

    return load_torch(file, STAND_INS)


def broken(written: Path, tmp_path: Path, case: str) -> Path:
    shutil.copytree(written / "universal" / case, tmp_path / case)
    return tmp_path / case / "global_step3_universal"


def test_what_is_not_whole_or_not_known_is_named(written: Path, tmp_path: Path) -> None:
    step = broken(written, tmp_path / "a", CASES[0])
    (step / "zero" / "back.bias" / "fp32.pt").unlink()
    with pytest.raises(CheckpointDamage, match=r"back\.bias is trained, and has no fp32\.pt in zero"):
        open_checkpoint(step)
    step = broken(written, tmp_path / "b", CASES[2])
    torch.save(torch.zeros(4), step / "zero" / "back.bias" / "exp_avg.pt")
    with pytest.raises(CheckpointDamage, match=r"exp_avg\.pt has 4 elements, the parameter's shape is \(3,\)"):
        open_checkpoint(step)
    step = broken(written, tmp_path / "c", CASES[0])
    torch.save({"param": torch.zeros(3), "is_expert_param": True}, step / "zero" / "back.bias" / "fp32.pt")
    with pytest.raises(CheckpointError, match="expert parallelism"):
        open_checkpoint(step)
    step = broken(written, tmp_path / "d", CASES[0])
    (step / "zero" / "of another stage").mkdir()
    with pytest.raises(CheckpointError, match="of another stage belong to pipeline or expert parallelism"):
        open_checkpoint(step)
    step = broken(written, tmp_path / "e", CASES[0])
    torch.save({"param": Path("x")}, step / "zero" / "back.bias" / "fp32.pt")
    with pytest.raises(RefusedPickle, match="pathlib"):
        open_checkpoint(step)
    step = broken(written, tmp_path / "f", CASES[0])
    (step / "mp_rank_00_model_states.pt").rename(step / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointDamage, match="no model file of mp_rank_00"):
        open_checkpoint(step)


def test_a_parameter_is_never_looked_for_outside(written: Path, tmp_path: Path) -> None:
    step = broken(written, tmp_path, CASES[0])
    (tmp_path / "elsewhere").mkdir()
    torch.save({"param": torch.zeros(3)}, tmp_path / "elsewhere" / "fp32.pt")
    content = loaded(step / "mp_rank_00_model_states.pt")
    content["param_shapes"][1]["../../../elsewhere"] = torch.Size([3])
    torch.save(content, step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointDamage, match=r"elsewhere is trained, and has no fp32\.pt"):
        open_checkpoint(step)


def test_parts_of_tensor_parallelism_are_whole_already(written: Path, tmp_path: Path) -> None:
    """Merged tensors have shapes of their own; the model's files are those of the parts."""
    step = broken(written, tmp_path, CASES[0])
    content = loaded(step / "mp_rank_00_model_states.pt")
    content["param_shapes"][1]["back.bias"] = torch.Size([2])
    for rank in (0, 1):
        torch.save(content, step / f"mp_rank_0{rank}_model_states.pt")
    source = open_checkpoint(step)
    assert source.tensors()["model/back.bias"].shape == (3,)


def test_sub_groups_belong_to_the_group_that_numbers_them() -> None:
    shapes = [{"a": (1,)}, {"b": (2,)}, {"c": (3,)}]
    listed = [{"lr": 1, "params": [0, 2]}, {"lr": 2, "params": [1]}]
    assert sub_groups(listed, shapes) == [(listed[0], {"a": (1,), "c": (3,)}), (listed[1], {"b": (2,)})]
    assert sub_groups([{"lr": 1, "params": [0]}], shapes)[2] == ({}, {"c": (3,)}), "numbers that do not fit say nothing"
