"""Small functions and classes of DeepSpeed's that programs call around training, in one process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed


def found(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"shardwise.deepspeed.{path}".rstrip(".")), name)


def test_one_process_is_all_of_its_groups() -> None:
    groups = importlib.import_module("shardwise.deepspeed.utils.groups")
    assert groups.get_tensor_model_parallel_src_rank() == groups.get_sequence_parallel_rank() == 0
    comm = importlib.import_module("shardwise.deepspeed.comm")
    assert comm.get_world_group() is None and comm.get_global_rank(None, 0) == 0
    constants = importlib.import_module("shardwise.deepspeed.constants")
    assert constants.TORCH_DISTRIBUTED_DEFAULT_PORT == 29500
    assert comm.default_pg_timeout is constants.default_pg_timeout and comm.default_pg_timeout.total_seconds() == 600


def test_marks_of_parameters() -> None:
    weight, leaf = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)
    is_divided = found("runtime.utils", "is_model_parallel_parameter")
    assert not is_divided(weight)
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert is_divided(weight)
    utils = importlib.import_module("shardwise.deepspeed.utils")
    model = nn.Sequential(leaf, nn.ReLU())
    assert utils.set_z3_leaf_modules(model, ["Linear"]) == [leaf] == utils.set_z3_leaf_modules(model, [nn.Linear])
    assert utils.set_z3_leaf_modules(model, [nn.Conv1d], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="no module of the model is one of"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d])
    assert utils.unset_z3_leaf_modules(model, [nn.Linear]) == [leaf] and utils.get_z3_leaf_modules(model) == []
    for setter, name in ((utils.set_z3_leaf_modules_by_name, "0"), (utils.set_z3_leaf_modules_by_suffix, "0")):
        assert setter(model, [name, "x"]) == ([leaf], ["x"]) and utils.get_z3_leaf_modules(model) == [leaf]
        assert setter(model, [name], flag=False) == ([leaf], []) and not utils.z3_leaf_module(leaf)
        with pytest.raises(ValueError, match="no module of the model is one of"):
            setter(model, ["x"])
    utils.set_z3_leaf_module(leaf, True)
    assert utils.get_z3_leaf_modules(model) == [leaf]


def test_files_of_deepspeeds_checkpoints_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for kind, pattern in (
        ("get_optim_files", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
        ("get_model_state_files", "mp_rank_{:02d}_model_states.pt"),
    ):
        files = found("utils.zero_to_fp32", kind)
        with pytest.raises(FileNotFoundError, match=r"has no \*_"):
            files(str(tmp_path))
        expected = [tmp_path / pattern.format(number) for number in (0, 2, 10, 100)]
        for path in reversed(expected):
            path.touch()
        assert files(str(tmp_path)) == [str(path) for path in expected]
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    first = found("utils.zero_to_fp32", "get_model_state_file")
    for stage, name in ((2, "mp_rank_00"), (3, "zero_pp_rank_0_mp_rank_00")):
        assert first(str(tmp_path), stage) == str(tmp_path / f"{name}_model_states.pt")


class Sharing(nn.Module):
    """Its forward pass reads a parameter of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.reader = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.reader(x) @ self.owner.weight
        return value


def test_a_parameter_that_another_module_reads() -> None:
    zero = importlib.import_module("shardwise.deepspeed.zero")
    model, x = Sharing(), torch.ones(2, 3)
    plain = model(x).detach()
    weights = [param.detach().clone() for param in model.parameters()]
    zero.register_external_parameter(model.reader, model.owner.weight)
    zero_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization": zero_3}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert torch.equal(engine(x), plain)
    kind = zero.ZeroParamType
    assert {param.ds_param_type for param in engine.parameters()} == {kind.PARTITIONED} != {kind.NORMAL, kind.REMOTE}
    zero.unregister_external_parameter(model.reader, model.owner.weight)
    assert torch.equal(engine(x), plain)
    with zero.unwrap_model_for_generation(engine) as whole:
        assert whole is model
        assert all(torch.equal(*pair) for pair in zip(whole.parameters(), weights, strict=True))
        assert torch.equal(whole(x), plain)
    with zero.unwrap_model_for_generation(model.reader) as same:
        assert same is model.reader
    engine.destroy()


def test_tensors_are_made_with_a_dtype() -> None:
    zero = importlib.import_module("shardwise.deepspeed.zero")
    ones = zero.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.float16)
    assert torch.equal(ones(2), torch.ones(2).half()) and ones(2, dtype=torch.float64).dtype == torch.float16
    assert ones(2).dtype == torch.float16 and ones(2, dtype=torch.int64).dtype == torch.int64


def test_gradients_are_clipped_as_torchs() -> None:
    assert found("runtime.utils", "clip_grad_norm_") is torch.nn.utils.clip_grad_norm_
