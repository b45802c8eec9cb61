"""Small functions and classes of DeepSpeed's that programs call around training, in one process."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed import names
from shardwise.worlds import NotHere


def found(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{names.WORLD.home}.{path}".rstrip(".")), name)


def test_the_release_in_parts() -> None:
    parts = [getattr(deepspeed, f"__version_{part}__") for part in ("major", "minor")]
    assert ".".join(map(str, [*parts, deepspeed.__version_patch__])) == deepspeed.__version__  # type: ignore[attr-defined]


# What is compiled by each, and whether what it is for is done here.
BUILDERS = {
    "DeepCompileBuilder": ("dc", False),
    "EvoformerAttnBuilder": ("evoformer_attn", False),
    "FPQuantizerBuilder": ("fp_quantizer", False),
    "FusedLambBuilder": ("fused_lamb", False),
    "FusedLionBuilder": ("fused_lion", True),
    "GDSBuilder": ("gds", False),
    "InferenceBuilder": ("transformer_inference", False),
    "InferenceCoreBuilder": ("inference_core_ops", False),
    "InferenceCutlassBuilder": ("cutlass_ops", False),
    "PinMemoryBuilder": ("pin_memory", False),
    "QuantizerBuilder": ("quantizer", False),
    "RaggedOpsBuilder": ("ragged_device_ops", False),
    "RaggedUtilsBuilder": ("ragged_ops", False),
    "RandomLTDBuilder": ("random_ltd", False),
    "SparseAttnBuilder": ("sparse_attn", False),
    "SpatialInferenceBuilder": ("spatial_inference", False),
    "StochasticTransformerBuilder": ("stochastic_transformer", False),
    "TransformerBuilder": ("transformer", False),
    "UtilsBuilder": ("utils", False),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_says_whether_its_part_can_be_used(name: str) -> None:
    part, usable = BUILDERS[name]
    builder = found("ops.op_builder", name)()
    assert (builder.absolute_name(), builder.BUILD_VAR) == (f"deepspeed.ops.{part}", f"DS_BUILD_{part.upper()}")
    assert builder.is_compatible(verbose=True) is usable and (builder.error_log is None) is usable
    with pytest.raises(NotHere, match=rf"{name}.load\(\): nothing is compiled here"):
        builder.load()


def test_one_process_is_all_of_its_groups() -> None:
    groups = importlib.import_module("shardwise.deepspeed.utils.groups")
    assert groups.get_tensor_model_parallel_src_rank() == groups.get_sequence_parallel_rank() == 0
    comm = importlib.import_module("shardwise.deepspeed.comm")
    assert comm.get_world_group() is None and comm.get_global_rank(None, 0) == 0
    assert comm.has_all_reduce_coalesced() and comm.has_reduce_scatter_tensor()
    constants = importlib.import_module("shardwise.deepspeed.constants")
    assert constants.TORCH_DISTRIBUTED_DEFAULT_PORT == 29500
    assert comm.default_pg_timeout is constants.default_pg_timeout and comm.default_pg_timeout.total_seconds() == 600


def test_numbers_of_profiles_in_words() -> None:
    texts = {
        "flops_to_string": [(2.5e9, "2.5 GFLOPS"), (0, "0 FLOPS")],
        "macs_to_string": [(1234, "1.23 KMACs"), (5, "5 MACs")],
        "duration_to_string": [(0.0025, "2.5 ms"), (3, "3 s")],
    }
    for name, rows in texts.items():
        assert [found("profiling.flops_profiler", name)(number) for number, _ in rows] == [text for _, text in rows]
    assert found("profiling.flops_profiler.profiler", "macs_to_string")(2.5e9, units="M", precision=0) == "2500 MMACs"


@pytest.mark.parametrize(
    ("path", "name", "block"),
    [
        ("monitor.comet", "CometMonitor", "comet"),
        ("monitor.tensorboard", "TensorBoardMonitor", "tensorboard"),
        ("monitor.wandb", "WandbMonitor", "wandb"),
    ],
)
def test_a_monitor_that_is_off_needs_no_package(path: str, name: str, block: str, tmp_path: Path) -> None:
    config = found("monitor.config", "get_monitor_config")({block: {"enabled": False}})
    monitor = found(path, name)(getattr(config, block))
    assert isinstance(monitor, found("monitor.monitor", "Monitor")) and not monitor.enabled
    monitor.write_events([("Train/Samples/lr", 1.0, 1)])
    assert not list(tmp_path.iterdir())


def test_blocks_of_number_formats() -> None:
    block = found("runtime.precision_config", "DeepSpeedBF16Config")(enabled=True, check_grad_overflow=False)
    assert block.enabled and not block.check_grad_overflow and not block.bf16_master_weights_and_grads
    with pytest.raises(ValueError, match=r"bf16\.enabledd"):
        found("runtime.precision_config", "DeepSpeedBF16Config")(enabledd=True)
    tree = {"bfloat16": {"enabled": True}, "fp16": {"hysteresis": 3}}
    assert found("runtime.precision_config", "get_bfloat16_config")(tree).enabled
    assert found("runtime.precision_config", "get_float16_config")(tree).hysteresis == 3


def test_marks_of_parameters() -> None:
    weight, leaf = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)
    is_divided = found("runtime.utils", "is_model_parallel_parameter")
    assert not is_divided(weight)
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert is_divided(weight)
    utils = importlib.import_module("shardwise.deepspeed.utils")
    utils.set_z3_leaf_module(leaf, True)
    assert utils.z3_leaf_module(leaf) and all(utils.z3_leaf_parameter(param) for param in leaf.parameters())
    utils.set_z3_leaf_module(leaf, False)
    assert not utils.z3_leaf_module(leaf) and not utils.z3_leaf_parameter(leaf.weight)


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


def test_files_of_optimizers(tmp_path: Path) -> None:
    files = found("utils.zero_to_fp32", "get_optim_files")
    with pytest.raises(FileNotFoundError, match="optim_states"):
        files(str(tmp_path))
    for rank in (10, 2):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert [re.findall(r"rank_(\d+)_", each)[0] for each in files(str(tmp_path))] == ["2", "10"]


def test_a_table_of_memory_for_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    stage3 = importlib.import_module("shardwise.deepspeed.runtime.zero.stage3")
    stage3.estimate_zero3_model_states_mem_needs_all_cold(1_000_000, 10_000, 8, 2)
    cold = capsys.readouterr().out
    assert "1,000,000 parameters, 10,000 in the largest layer; 2 x 8 GPUs" in cold
    assert len(re.findall(r"zero_init=[01]", cold)) == 6 and "with stage3_max_live_parameters=0, in" in cold
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    stage3.estimate_zero3_model_states_mem_needs_all_live(model)
    live = capsys.readouterr().out
    stage3.estimate_zero3_model_states_mem_needs_all_cold(200, 100)
    assert capsys.readouterr().out == live


def test_gradients_are_clipped_as_torchs() -> None:
    clip, norm = found("runtime.utils", "clip_grad_norm_"), found("runtime.utils", "get_global_norm")
    ours, theirs = [[nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))] for _ in range(2)]
    for params in (ours, theirs):
        for param in params:
            param.grad = torch.ones_like(param)
    assert clip(ours, 0.1) == torch.nn.utils.clip_grad_norm_(theirs, 0.1) == pytest.approx(5**0.5)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert norm([3.0, 4.0]) == 5.0
    with pytest.raises(NotImplementedError, match="give the mpu to initialize"):
        clip(ours, 0.1, mpu=object())
