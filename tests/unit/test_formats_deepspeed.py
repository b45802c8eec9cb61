"""DeepSpeed directories and universal checkpoints that DeepSpeed 0.19.8 wrote, against the values it gathered.

tests/data/make_deepspeed.py and make_deepspeed_universal.py wrote them.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_setup import same_bits, tensor
from safetensors.torch import load_file

from shardwise.core.checkpoint.formats import RefusedPickle, open_checkpoint, open_deepspeed
from shardwise.core.checkpoint.formats.deepspeed import STAND_INS, Flat
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError

CASES = [f"zero{stage}-{kind}" for stage in (1, 2, 3) for kind in ("1ranks-fp32", "2ranks-fp32", "2ranks-bf16")]
UNIVERSAL = ("zero1-2ranks-bf16", "zero2-2ranks-fp16", "zero3-2ranks-fp16")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ds`` as ``save_checkpoint`` wrote it, ``universal`` as DeepSpeed converted it."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name in ("deepspeed", "deepspeed_universal"):
        with tarfile.open(Path(__file__).parent.parent / "data" / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inside", ["", "global_step3"])
def test_everything_is_what_deepspeed_gathered(case: str, inside: str, written: Path) -> None:
    truth = load_file(written / "ds" / case / "truth.safetensors")
    source = open_checkpoint(written / "ds" / case / inside)
    assert set(source.tensors()) == set(truth) and len(truth) == 18
    for name, expected in truth.items():
        got = tensor(source, name)
        assert got.shape == expected.shape and torch.equal(got.float(), expected.float()), name
        flat = got.reshape(-1)
        for cut in range(got.numel() + 1):
            assert same_bits(source.read(name, cut, got.numel() - cut), flat[cut:]), (name, cut)
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


def same_state(got: Any, expected: Any) -> None:
    """Everything that a run loads of two checkpoints is the same."""
    assert got.tensors() == expected.tensors()
    for name in expected.tensors():
        assert torch.equal(tensor(got, name), tensor(expected, name)), name
    ours, theirs = got.state(), expected.state()
    (optimizer,), (other,) = ours.pop("optimizers"), theirs.pop("optimizers")
    assert optimizer["groups"] == other["groups"] and optimizer["small"] == other["small"]
    assert sorted(optimizer["keys"]) == sorted(other["keys"])
    for state in (ours, theirs):
        state["other"]["loss_scaler"].pop("dynamic", None)
    assert ours == theirs


@pytest.mark.parametrize("case", UNIVERSAL)
def test_a_universal_checkpoint_is_what_deepspeed_saved(case: str, written: Path) -> None:
    truth = load_file(written / "universal" / case / "truth.safetensors")
    for inside in ("", "global_step3_universal"):
        source = open_checkpoint(written / "universal" / case / inside)
        assert set(source.tensors()) == set(truth) and len(truth) == 18
        for name, expected in truth.items():
            assert torch.equal(tensor(source, name).float(), expected.float()), name
    same_state(source, open_checkpoint(written / "ds" / case / "global_step3"))
    assert open_checkpoint(written / "universal" / case).state()["other"]["skipped_steps"] == 0


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def with_another_class(step: Path) -> None:
    file = step / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=True), "path": Path("x")}, file)


def second_model(step: Path) -> None:
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")


def bias(content: object, name: str = "fp32") -> Callable[[Path], None]:
    return lambda step: torch.save(content, step / "zero" / "back.bias" / f"{name}.pt")


BROKEN: list[tuple[str, Callable[[Path], object], type[Exception], str]] = [
    (
        "ds/zero3-2ranks-fp32",
        lambda step: (step / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
        CheckpointDamage,
        r"model files of the ranks \[0\]",
    ),
    ("ds/zero1-2ranks-fp32", second_model, CheckpointError, "tensor parallelism"),
    ("ds/zero1-2ranks-fp32", lambda step: halved(step / "mp_rank_00_model_states.pt"), CheckpointDamage, "not a whole"),
    ("ds/zero1-1ranks-fp32", with_another_class, RefusedPickle, "pathlib"),
    (
        "universal/zero1-2ranks-bf16",
        lambda step: (step / "zero" / "back.bias" / "fp32.pt").unlink(),
        CheckpointDamage,
        r"zero: back\.bias is trained, and has no fp32\.pt",
    ),
    (
        "universal/zero1-2ranks-bf16",
        bias({"param": torch.zeros(3), "is_expert_param": True}),
        CheckpointError,
        "expert parallelism",
    ),
    (
        "universal/zero1-2ranks-bf16",
        lambda step: (step / "zero" / "of another stage").mkdir(),
        CheckpointError,
        "of another stage belong to pipeline or expert parallelism",
    ),
]
"""A checkpoint, what is broken in it, and what the error says."""


def copied(written: Path, case: str, place: Path) -> Path:
    shutil.copytree(written / case, place / "run")
    return place / "run" / ("global_step3_universal" if case.startswith("universal") else "global_step3")


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_missing_and_foreign_files_are_named(number: int, written: Path, tmp_path: Path) -> None:
    case, damage, error, words = BROKEN[number]
    damage(copied(written, case, tmp_path))
    with pytest.raises(error, match=words):
        open_deepspeed(tmp_path / "run")


def test_a_parameter_is_never_looked_for_outside(written: Path, tmp_path: Path) -> None:
    step = copied(written, "universal/zero1-2ranks-bf16", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    torch.save({"param": torch.zeros(3)}, tmp_path / "elsewhere" / "fp32.pt")
    content = load_torch(step / "mp_rank_00_model_states.pt", STAND_INS)
    content["param_shapes"][1]["../../../elsewhere"] = torch.Size([3])
    torch.save(content, step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointDamage, match=r"elsewhere is trained, and has no fp32\.pt"):
        open_checkpoint(step)


@pytest.mark.parametrize(("starts", "words"), [([0], "weights ends before element 5"), ([0, 4], "ends before")])
def test_a_flat_array_that_is_too_short_is_damage(starts: list[int], words: str) -> None:
    with pytest.raises(CheckpointDamage, match=words):
        Flat([torch.arange(3)] * len(starts), starts, "weights").read(2, 3)
