"""``zero_to_fp32`` of directories that DeepSpeed 0.19.8 wrote and of our own, as functions and as a program."""

from __future__ import annotations

import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.core.checkpoint.source import CheckpointError
from shardwise.deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)
from shardwise.testing import assert_close
from tests.support.ds_setup import Recorded, close, ds_config, optimizer_block, start


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Directories of checkpoints, each with what the model is in fp32."""
    folder = tmp_path_factory.mktemp("zero_to_fp32")
    with tarfile.open(Path(__file__).parent.parent / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    found = {}
    for case in ("zero2-2ranks-bf16", "zero3-2ranks-bf16", "zero1-1ranks-fp32"):
        truth = load_file(folder / "ds" / case / "truth.safetensors")
        model = {n.removeprefix("model/"): v for n, v in truth.items() if n.startswith("model/")}
        found[case] = (folder / "ds" / case, model)
    engine = start(Recorded(), ds_config(3, bf16={"enabled": True}, optimizer=optimizer_block("AdamW", lr=0.1)))
    for step in range(2):
        engine.backward(engine(torch.tensor([step, 2])))
        engine.step()
        engine.save_checkpoint(str(folder / "ours"), client_state={"tensor": torch.ones(2)})
    found["ours"] = (folder / "ours", {n: v for n, v in close(engine).items() if n != "head.weight"})
    return found


CASES = ("zero2-2ranks-bf16", "zero3-2ranks-bf16", "zero1-1ranks-fp32", "ours")


@pytest.mark.parametrize("case", CASES)
def test_the_model_in_fp32(case: str, places: Any, tmp_path: Path) -> None:
    place, truth = places[case]
    wanted = {n: v.float() if v.is_floating_point() else v for n, v in truth.items()}
    wanted["head.weight"] = wanted["embed.weight"]
    found = get_fp32_state_dict_from_zero_checkpoint(place)
    assert_close(found, wanted, 0.0, case)
    assert found["head.weight"] is found["embed.weight"] and found["count"].dtype == torch.int64
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(place), lazy_mode=True)
    assert_close({name: each.contiguous() for name, each in lazy.items()}, wanted, 0.0, case)
    trained = get_fp32_state_dict_from_zero_checkpoint(place, exclude_frozen_parameters=True)
    assert set(wanted) - set(trained) == {"frozen"}
    model = load_state_dict_from_zero_checkpoint(Recorded(), place)
    assert_close(dict(model.state_dict()), wanted, 0.0, case)
    with pytest.warns(UserWarning, match=r"not in it nothing; not in the model .*embed.weight.* and \d more"):
        load_state_dict_from_zero_checkpoint(nn.ReLU(), place)
    # As files: one, and several with an index; both names of the tied weight are in one of them.
    for size, safe in ((None, False), ("100B", False), (100, True)):
        out = tmp_path / f"{size}{safe}"
        out.mkdir()
        (out / "tokenizer.json").write_text("{}")
        convert_zero_checkpoint_to_state_dict(place, out, "bf16", size, safe)
        files = sorted(path.name for path in out.iterdir())
        assert "tokenizer.json" in files and (files == ["pytorch_model.bin", "tokenizer.json"]) == (size is None)
        parts = [p for p in out.iterdir() if p.suffix in (".bin", ".safetensors")]
        assert (len(parts) > 1) == (size is not None)
        read = load_file if safe else (lambda path: torch.load(path, weights_only=True))
        together = {name: value for path in parts for name, value in read(path).items()}
        half = {n: v.bfloat16() if v.is_floating_point() else v for n, v in wanted.items()}
        assert_close(together, half, 0.0, case)


def test_the_program_that_lies_beside_the_checkpoints(places: Any, tmp_path: Path, monkeypatch: Any) -> None:
    place, truth = places["ours"]
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", ".", str(tmp_path / "out"), "--safe_serialization"])
    runpy.run_path("zero_to_fp32.py", run_name="__main__")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["middle.weight"], truth["middle.weight"])
    main([".", str(tmp_path / "first"), "-t", "global_step1", "--exclude_frozen_parameters"])
    first = torch.load(tmp_path / "first" / "pytorch_model.bin", weights_only=True)
    assert not torch.equal(first["middle.weight"], truth["middle.weight"]) and "frozen" not in first
    # What latest names is taken, not the newest.
    (place / "latest").write_text("global_step1")
    again = get_fp32_state_dict_from_zero_checkpoint(".")
    assert torch.equal(again["middle.weight"], first["middle.weight"])
    (place / "latest").write_text("global_step2")


def test_what_cannot_be_converted_says_so(places: Any, tmp_path: Path, capsys: Any) -> None:
    place, _ = places["ours"]
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), str(tmp_path / "out")])
    assert ended.value.code == 1 and "zero_to_fp32.py: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileNotFoundError):
        get_fp32_state_dict_from_zero_checkpoint(place, "global_step7")
    with pytest.raises(ValueError, match="dtype='int8': give one of fp32"):
        convert_zero_checkpoint_to_state_dict(place, tmp_path / "out", "int8")
    with pytest.raises(ValueError, match="'many' is not a size"):
        convert_zero_checkpoint_to_state_dict(place, tmp_path / "out", max_shard_size="many")
    torch.save(Recorded().state_dict(), tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="does not say which parameters were frozen"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "model.bin", exclude_frozen_parameters=True)
