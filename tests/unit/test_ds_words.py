"""What programs ask of DeepSpeed before they train: builders, words of configurations, blocks of their own."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.op_builders import BUILDERS, COMPATIBLE
from shardwise.worlds import NotHere


def found(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"shardwise.deepspeed.{path}".rstrip(".")), name)


def test_builders_say_what_can_be_used_and_what_to_use() -> None:
    compatible = deepspeed.ops.__compatible_ops__  # type: ignore[attr-defined]
    usable = {name for name, builder in BUILDERS.items() if compatible[builder.NAME]}
    adam = {"CPUAdamBuilder", "FusedAdamBuilder", "CPULionBuilder", "FusedLionBuilder", "CPUAdagradBuilder"}
    assert usable == adam | {"AsyncIOBuilder"} and set(compatible) == {each.NAME for each in BUILDERS.values()}
    assert compatible is COMPATIBLE and found("ops.aio", "AsyncIOBuilder") is BUILDERS["AsyncIOBuilder"]
    for name, builder in BUILDERS.items():
        made = found("ops.op_builder", name)()
        assert isinstance(made, found("ops.op_builder", "OpBuilder")) and builder.BUILD_VAR.startswith("DS_BUILD_")
        assert made.is_compatible(verbose=True) is compatible[made.NAME] is (made.error_log is None)
        assert made.absolute_name() == f"deepspeed.ops.{made.NAME}" and made.name == made.NAME
        with pytest.raises(NotHere, match=name):
            made.load()
    with pytest.raises(NotHere, match="offload_optimizer and offload_param"):
        BUILDERS["AsyncIOBuilder"]().load()
    assert set(found("ops.op_builder.all_ops", "ALL_OPS")) == set(compatible)


def test_words_are_those_of_the_schema() -> None:
    names = importlib.import_module("shardwise.deepspeed.runtime.constants")
    assert names.GRADIENT_CLIPPING == "gradient_clipping" and names.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert names.FP16_INITIAL_SCALE_POWER == "initial_scale_power" and names.FP16_INITIAL_SCALE_POWER_DEFAULT == 16
    assert (names.OPTIMIZER, names.TYPE, names.SCHEDULER_PARAMS) == ("optimizer", "type", "params")
    assert found("runtime.config", "ADAM_OPTIMIZER") in found("runtime.config", "DEEPSPEED_OPTIMIZERS")
    files = importlib.import_module("shardwise.deepspeed.checkpoint.constants")
    assert (files.OPTIMIZER_STATE_DICT, files.ZERO_FILE_PREFIX) == ("optimizer_state_dict", "zero_pp_rank_")
    assert found("checkpoint.utils", "get_zero_ckpt_name_for_rank")("", 1, 2).startswith(files.ZERO_FILE_PREFIX)
    with pytest.raises(AttributeError, match="NO_SUCH"):
        found("runtime.constants", "NO_SUCH")


def test_files_of_checkpoints_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for kind, pattern in (
        ("optim_files", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
        ("model_state_files", "mp_rank_{}_model_states.pt"),
    ):
        files = found("utils.zero_to_fp32", f"get_{kind}")
        with pytest.raises(FileNotFoundError, match=r"has no \*_"):
            files(str(tmp_path))
        expected = [tmp_path / pattern.format(number) for number in (1, 2, 10, 21)]
        for path in reversed(expected):
            path.touch()
        assert files(str(tmp_path)) == [str(path) for path in expected]


@pytest.mark.parametrize(("stage", "name"), [(2, "mp_rank_00"), (3, "zero_pp_rank_0_mp_rank_00")])
def test_the_first_file_of_a_model_follows_the_stage(stage: int, name: str, tmp_path: Path) -> None:
    first = found("utils.zero_to_fp32", "get_model_state_file")
    with pytest.raises(FileNotFoundError, match=f"has no {name}_model_states"):
        first(str(tmp_path), stage)
    for each in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_00"):
        (tmp_path / f"{each}_model_states.pt").touch()
    assert first(str(tmp_path), stage) == str(tmp_path / f"{name}_model_states.pt")


def test_blocks_of_number_formats_are_read_alone() -> None:
    half = found("runtime.precision_config", "DeepSpeedFP16Config")
    assert half(enabled=True, initial_scale_power=4).initial_dynamic_scale() == 16.0
    assert half().hysteresis == 2 and half(loss_scale="3").loss_scale == 3.0
    with pytest.raises(ValueError, match=r"fp16\.loss_scale=-1"):
        half(loss_scale=-1)
    bfloat, float16 = (found("runtime.precision_config", f"get_{kind}_config") for kind in ("bfloat16", "float16"))
    for name in ("bf16", "bfloat16"):
        assert bfloat({name: {"enabled": True}, "train_batch_size": 1}).enabled is True
    assert bfloat({}).enabled is False and float16({"fp16": {"loss_scale": 2}}).loss_scale == 2.0
    assert found("runtime.config", "get_gradient_clipping")({"gradient_clipping": 0.5}) == 0.5
    zero = found("runtime.zero.config", "DeepSpeedZeroConfig")
    assert [zero(stage=stage).overlap_comm for stage in range(4)] == [False, False, False, True]
    assert zero(stage=3, overlap_comm=False).overlap_comm is False
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 1, "bf16": {"enabled": True}}).bfloat16_config.enabled  # type: ignore[attr-defined]


def test_blocks_of_programs_derive_from_the_model_of_configurations() -> None:
    pydantic = pytest.importorskip("pydantic")
    base: Any = found("runtime.config_utils", "DeepSpeedConfigModel")

    class Inner(base):  # type: ignore[misc]
        depth: int = 1

    class Block(base):  # type: ignore[misc]
        count: int = 0
        names: list[str] | None = None
        name: str | None = pydantic.Field(
            None,
            json_schema_extra={"deprecated": True, "new_param": "names", "new_param_fn": lambda name: [name]},
        )
        inner: Inner = Inner()
        depth: int | None = pydantic.Field(
            None, json_schema_extra={"deprecated": True, "new_param": "inner.depth", "deprecated_msg": "Since long."}
        )
        kept: int = pydantic.Field(3, json_schema_extra={"deprecated": True})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Block(count="auto").count == 0 and Block(inner={"depth": 2}).inner.depth == 2
    with pytest.warns(UserWarning, match=r"Block\.name is deprecated: give names"):
        assert Block(name="a").names == ["a"]
    with pytest.warns(UserWarning, match="Since long"):
        assert Block(depth=4).inner.depth == 4
    with pytest.warns(UserWarning, match="kept is deprecated"):
        assert Block(kept=5).kept == 5
    with pytest.warns(UserWarning, match="name"), pytest.raises(AssertionError, match="give one of them"):
        Block(name="a", names=["b"])
    for wrong in ({"count": "many"}, {"cuont": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Block(**wrong)
    with pytest.raises(ValueError, match="valid integer"):
        Block(strict=True, count="auto")
    with pytest.raises(ValueError, match="valid integer"):
        Block().count = "many"


def test_releases_of_what_is_below_are_told() -> None:
    info = found("git_version_info", "torch_info")
    assert info["bf16_support"] is True
    assert all(info[f"{each}_version"].replace(".", "").isdigit() for each in ("cuda", "nccl", "hip"))
    assert (deepspeed.__git_hash__, deepspeed.__git_branch__) == ("", "")  # type: ignore[attr-defined]


BLOCKS_OF_CONFIGURATIONS = [
    ("runtime.precision_config", "DeepSpeedFP16Config", {"loss_scale": -1}, "fp16.loss_scale=-1: give a finite number"),
    ("runtime.precision_config", "DeepSpeedBF16Config", {"enabled": "perhaps"}, "bf16.enabled='perhaps': give true"),
    ("runtime.zero.config", "DeepSpeedZeroConfig", {"stagge": 2}, "did you mean 'stage'"),
    ("runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig", {"device": "disk"}, "give one of 'none', 'cpu'"),
]


@pytest.mark.parametrize(("path", "name", "keys", "message"), BLOCKS_OF_CONFIGURATIONS)
def test_wrong_blocks_are_errors_of_pydantic_where_that_is_installed(
    path: str, name: str, keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pydantic, make = pytest.importorskip("pydantic"), found(path, name)
    with pytest.raises(pydantic.ValidationError, match=message):
        make(**keys)
    monkeypatch.setitem(sys.modules, "pydantic_core", None)
    with pytest.raises(ValueError, match=message) as caught:
        make(**keys)
    assert type(caught.value) is ValueError
