"""Universal checkpoints: those that DeepSpeed's own program made (tests/data/make_deepspeed_universal.py), and ours."""

from __future__ import annotations

import runpy
import shutil
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from formats_setup import tensor
from program_setup import forked_python, python
from safetensors.torch import load_file
from sets import campaign

from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats import RefusedPickle, open_checkpoint, write_single
from shardwise.checkpoint.formats.deepspeed_flat import sub_groups
from shardwise.checkpoint.formats.deepspeed_universal_output import write_universal
from shardwise.checkpoint.source import CheckpointDamage
from shardwise.deepspeed.ds_to_universal import main

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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ds", "universal"])
def test_what_we_convert_is_what_was_saved(case: str, kind: str, written: Path, tmp_path: Path) -> None:
    source = written / kind / case / ("global_step3" if kind == "ds" else "global_step3_universal")
    main(SimpleNamespace(input_folder=source, output_folder=tmp_path / "some" / "step_universal"))
    assert (tmp_path / "some" / "latest_universal").read_text("utf-8") == "step_universal"
    same_state(open_checkpoint(tmp_path / "some"), open_checkpoint(source))
    zero = tmp_path / "some" / "step_universal" / "zero"
    assert sorted(file.name for file in (zero / "back.bias").iterdir()) == sorted(
        f"{key}.pt" for key in ("fp32", "exp_avg", "exp_avg_sq", "step")
    )
    main(SimpleNamespace(input_folder=source, output_folder=tmp_path / "some" / "step_universal"))  # takes its place
    same_state(open_checkpoint(tmp_path / "some"), open_checkpoint(source))


def test_its_layout_is_deepspeeds(written: Path, tmp_path: Path) -> None:
    """Every file that DeepSpeed's own program writes, with its keys; DeepSpeed read ours when this was written."""
    case = "zero1-2ranks-bf16"
    write_universal(open_checkpoint(written / "ds" / case), tmp_path / "ours")
    theirs = written / "universal" / case / "global_step3_universal"
    for file in sorted(theirs.rglob("*.pt")):
        expected: Any = runpy_load(file)
        ours: Any = runpy_load(tmp_path / "ours" / file.relative_to(theirs))
        if file.stem in ("fp32", "exp_avg", "exp_avg_sq"):
            assert set(ours) == set(expected) and torch.equal(ours["param"], expected["param"]), file
        elif file.stem == "step":
            assert torch.equal(ours, expected)
        elif file.name == "optimizer_state.pt":
            assert ours["param_groups"] == expected["param_groups"] and ours["ds_version"]
        else:
            for key in ("param_shapes", "shared_params", "lr_scheduler", "global_steps", "buffer_names", "epoch"):
                assert ours[key] == expected[key], key
            assert set(ours["module"]) == set(expected["module"])


def runpy_load(file: Path) -> Any:
    from shardwise.checkpoint.formats.deepspeed import STAND_INS
    from shardwise.checkpoint.formats.torch_file import load_torch

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
    content = runpy_load(step / "mp_rank_00_model_states.pt")
    content["param_shapes"][1]["../../../elsewhere"] = torch.Size([3])
    torch.save(content, step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointDamage, match=r"elsewhere is trained, and has no fp32\.pt"):
        open_checkpoint(step)


def test_parts_of_tensor_parallelism_are_whole_already(written: Path, tmp_path: Path) -> None:
    """Merged tensors have shapes of their own; the model's files are those of the parts."""
    step = broken(written, tmp_path, CASES[0])
    content = runpy_load(step / "mp_rank_00_model_states.pt")
    content["param_shapes"][1]["back.bias"] = torch.Size([2])
    for rank in (0, 1):
        torch.save(content, step / f"mp_rank_0{rank}_model_states.pt")
    source = open_checkpoint(step)
    assert source.tensors()["model/back.bias"].shape == (3,)


def test_what_has_no_place_in_it_is_told(written: Path, tmp_path: Path) -> None:
    write_single(open_checkpoint(written / "ds" / CASES[0]), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"one optimizer, and there are 0\. zero_to_fp32 writes the model alone"):
        main(SimpleNamespace(input_folder=tmp_path / "model.safetensors", output_folder=tmp_path / "out"))
    assert not (tmp_path / "out").exists() and not (tmp_path / "latest_universal").exists()
    source = open_checkpoint(written / "ds" / CASES[0])
    source.state()["other"]["client_state.global_steps"] = 7
    source.state()["rng"] = ["of a rank"]
    assert write_universal(source, tmp_path / "out") == (
        "states of random number generators have no place in a universal checkpoint and were left out",
        "global_steps of the client state have names of DeepSpeed's own, and were left out",
    )


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_it_runs_as_a_program(whole: bool, written: Path, tmp_path: Path) -> None:
    source = written / "ds" / CASES[2] / "global_step3"
    arguments = ["--input_folder", str(source), "--output_folder", str(tmp_path / "a"), "--num_merge_workers", "1"]
    module = "shardwise.deepspeed.ds_to_universal"
    done = (python if whole else forked_python)("-m", module, *arguments)
    assert done.returncode == 0, done.stderr
    same_state(open_checkpoint(tmp_path / "a"), open_checkpoint(source))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["x", "--input_folder", str(tmp_path / "none"), "--output_folder", "b"])
        with pytest.raises(SystemExit, match=r"ds_to_universal: .*none"):
            runpy.run_module("shardwise.deepspeed.ds_to_universal", run_name="__main__")


def test_sub_groups_belong_to_the_group_that_numbers_them() -> None:
    shapes = [{"a": (1,)}, {"b": (2,)}, {"c": (3,)}]
    listed = [{"lr": 1, "params": [0, 2]}, {"lr": 2, "params": [1]}]
    assert sub_groups(listed, shapes) == [(listed[0], {"a": (1,), "c": (3,)}), (listed[1], {"b": (2,)})]
    assert sub_groups([{"lr": 1, "params": [0]}], shapes)[2] == ({}, {"c": (3,)}), "numbers that do not fit say nothing"
