"""Tests of the translation of a DeepSpeed configuration into a ``Plan``, one row for each key.

Keys may be used, ignored, refused, unknown or "auto"; files may be JSON or Hjson.
"""

# The tables are wider than a line.
# ruff: noqa: E501

import copy
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.deepspeed.config import batch_of, load_config, read_config
from shardwise.deepspeed.plan import to_plan
from shardwise.deepspeed.schema import ALIASES, BLOCKS, KEYS
from shardwise.plan import ByNumel, ByTensor, DiskPlan, MeshPlan, Plan, replicated, zero
from tests.support.ds_setup import scaler
from tests.support.on_ranks import raises

Tree = dict[str, Any]


def plan(stage: int) -> Plan:
    """Return the plan of ``{"zero_optimization": {"stage": stage}, "gradient_clipping": 0}``."""
    if stage < 3:
        begun = zero(stage) if stage else replicated()
        return begun.but(packing=ByNumel(chunk_numel=500_000_000, min_chunks=8))
    return zero(3).but(packing=ByTensor(persist_numel=100_000), gathered_budget_bytes=4_000_000_000, prefetch=1)


def tree_of(path: str, value: Any, stage: int = 0) -> Tree:
    """Return a configuration with one key, and with the blocks around it enabled, so that the key has an effect."""
    tree: Tree = {"gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    around = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    place, *names = tree, *path.split(".")
    for name in names[:-1]:
        place = place.setdefault(name, dict(around.get(name, {})))
    place[names[-1]] = value
    return tree


def merged(tree: Tree, more: Tree) -> Tree:
    result = dict(tree)
    for name, value in more.items():
        result[name] = merged(result.get(name, {}), value) if isinstance(value, dict) else value
    return result


def constant(scale: float) -> Any:
    return scaler(initial_scale=scale, min_scale=scale, max_scale=scale, hysteresis=1, growth_delay=0)


FP16 = {"param_dtype": torch.float16, "scaler": scaler()}
BF16 = {"param_dtype": torch.bfloat16, "scaler": constant(1.0)}
DISK = DiskPlan(directory="/fast", threads=1, state_buffers=4)
NVME: Tree = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/fast", "pin_memory": False}}}
ON_NVME = {"disk": DISK, "state_disk_fraction": 1.0}  # order matters: the fraction needs the disk
ZERO, OPTIM, PARAM = "zero_optimization.", "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."
CPU_OPTIM: Tree = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
GROUPS = MeshPlan(dp_shard=2, dp_replicate=-1)
CPU_PARAM: Tree = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
NVME_PARAM: Tree = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/fast"}}}
NUMELS = (10, 100, 1000, 1000, 50)


def disk(**changes: Any) -> dict[str, Any]:
    return {**ON_NVME, "disk": replace(DISK, **changes)}


# (path, value, stage, more configuration, difference from the plan of the stage)
USED: list[tuple[str, Any, int, Tree, dict[str, Any]]] = [
    ("zero_optimization.stage", 1, 1, {}, {}),
    ("zero_optimization.stage", "2", 2, {}, {}),
    ("zero_optimization.stage", 3, 3, {}, {}),
    ("gradient_clipping", 0.5, 2, {}, {"max_norm": 0.5}),
    ("gradient_allreduce_op", "sum", 2, {}, {"over_ranks": "sum"}),
    ("communication_data_type", "bf16", 2, {}, {"reduce_dtype": torch.bfloat16}),
    ("fp16.enabled", True, 1, {}, FP16),
    ("fp16.auto_cast", True, 1, {}, {**FP16, "cast_inputs": True}),
    ("fp16.loss_scale", 128, 1, {}, {**FP16, "scaler": constant(128.0)}),
    ("fp16.initial_scale_power", 10, 1, {}, {**FP16, "scaler": scaler(initial_scale=1024.0)}),
    ("fp16.loss_scale_window", 7, 1, {}, {**FP16, "scaler": scaler(growth_interval=7)}),
    ("fp16.hysteresis", 4, 1, {}, {**FP16, "scaler": scaler(hysteresis=4)}),
    ("fp16.min_loss_scale", 2, 1, {}, {**FP16, "scaler": scaler(min_scale=2.0)}),
    ("fp16.fp16_master_weights_and_grads", True, 1, {}, {**FP16, "master_weights": False}),
    ("bf16.enabled", True, 1, {}, BF16),
    ("bf16.check_grad_overflow", False, 1, {}, {**BF16, "scaler": None}),
    ("bf16.bf16_master_weights_and_grads", True, 1, {}, {**BF16, "master_weights": False}),
    ("bf16.bf16_optimizer_states", True, 1, {"bf16": {"bf16_master_weights_and_grads": True}}, {**BF16, "master_weights": False}),
    ("data_types.grad_accum_dtype", "fp32", 1, {"bf16": {"enabled": True}}, {**BF16, "accumulate_dtype": torch.float32}),
    ("data_types.buffer_dtype", "bf16", 1, {"bf16": {"enabled": True}}, {**BF16, "buffer_dtype": torch.bfloat16}),
    ("data_types.param_dtype", "bf16", 1, {"bf16": {"enabled": True}}, BF16),
    (ZERO + "reduce_bucket_size", 2e8, 2, {}, {"packing": ByNumel(chunk_numel=200_000_000, min_chunks=8)}),
    (ZERO + "allgather_bucket_size", 1000, 1, {}, {"packing": ByNumel(chunk_numel=1000, min_chunks=8)}),
    (ZERO + "overlap_comm", False, 2, {}, {"overlap": False}),
    (ZERO + "stage3_prefetch_bucket_size", 0, 3, {}, {"prefetch": 0}),
    (ZERO + "stage3_param_persistence_threshold", 10, 3, {}, {"packing": ByTensor(persist_numel=10)}),
    (ZERO + "stage3_model_persistence_threshold", 0, 3, {}, {"packing": ByTensor(persist_numel=0)}),
    (ZERO + "stage3_max_live_parameters", 1e6, 3, {}, {"gathered_budget_bytes": 4_000_000}),
    (ZERO + "stage3_max_reuse_distance", 100, 3, {"fp16": {"enabled": True}}, {**FP16, "gathered_budget_bytes": 200}),
    (ZERO + "zero_hpz_partition_size", 2, 3, {}, {"secondary": 2}),
    (ZERO + "zero_hpz_partition_size", 64, 3, {}, {"secondary": 4}), (ZERO + "zero_hpz_partition_size", 1, 3, {}, {}),
    (ZERO + "zero_quantized_weights", True, 3, {}, {"compress_weights": "int8"}),
    (ZERO + "zero_quantized_gradients", True, 3, {}, {"compress_gradients": "int4"}),
    (ZERO + "zero_quantized_nontrainable_weights", True, 3, {}, {"compress_frozen": "int8"}),
    *((f"{ZERO}leaf_module.{n}", ["x"], 3, {}, {"same_order": False}) for n in ("classes", "names", "name_suffixes")),
    (ZERO + "mics_shard_size", 1, 3, {}, {"mesh": MeshPlan(dp_shard=1, dp_replicate=-1)}),
    (ZERO + "mics_shard_size", 2, 3, {}, {"mesh": GROUPS}),
    (ZERO + "stage3_gather_16bit_weights_on_model_save", True, 3, {}, {}),
    (OPTIM + "device", "cpu", 1, {}, {"state_host_fraction": 1.0, "pin_memory": True}),
    (OPTIM + "pin_memory", False, 2, CPU_OPTIM, {"state_host_fraction": 1.0}),
    (OPTIM + "ratio", 0.25, 3, CPU_OPTIM, {"state_host_fraction": 0.25, "pin_memory": True}),
    (OPTIM + "nvme_path", "/fast", 3, NVME, ON_NVME),
    (OPTIM + "buffer_count", 6, 3, NVME, disk(state_buffers=6)),
    (PARAM + "device", "cpu", 3, {}, {"param_host_fraction": 1.0, "pin_memory": True}),
    (PARAM + "pin_memory", False, 3, CPU_PARAM, {"param_host_fraction": 1.0}),
    (PARAM + "nvme_path", "/fast", 3, NVME_PARAM, {"disk": DISK, "param_disk_fraction": 1.0, "pin_memory": True}),
    (PARAM + "max_in_cpu", 0, 3, NVME_PARAM, {"disk": DISK, "param_disk_fraction": 1.0, "pin_memory": True}),
    (PARAM + "buffer_count", 7, 3, merged(NVME, NVME_PARAM), {**disk(param_buffers=7), "param_disk_fraction": 1.0, "pin_memory": True}),
    ("aio.block_size", 8192, 3, NVME, disk(block_bytes=8192)),
    ("aio.block_size", 5000, 3, NVME, disk(block_bytes=8192)),
    ("aio.queue_depth", 3, 3, NVME, disk(queue_depth=3)),
    ("aio.intra_op_parallelism", 2, 3, NVME, disk(threads=2)),
    ("aio.thread_count", 2, 3, NVME, disk(threads=2)),
    ("aio.single_submit", True, 3, NVME, disk(single_submit=True)),
    ("aio.overlap_events", False, 3, NVME, disk(overlap_events=False)),
    ("bfloat16.enabled", True, 1, {}, BF16),
    (ZERO + "cpu_offload", True, 2, {}, {"state_host_fraction": 1.0, "pin_memory": True}),
    (ZERO + "cpu_offload", False, 2, {}, {}),
    (ZERO + "cpu_offload_param", True, 3, {}, {"param_host_fraction": 1.0, "pin_memory": True}),
    ("tensor_parallel.autotp_size", 2, 2, {}, {"tp": 2}),
    ("tensor_parallel.tp.tp_size", 4, 0, {}, {"tp": 4}),
    ("sequence_parallel_size", 2, 3, {"tensor_parallel": {"autotp_size": 2}}, {"tp": 2, "sp": 2}),
    ("data_parallel_size", 2, 1, {"sequence_parallel_size": 2}, {"sp": 2}),
]  # fmt: skip
USED += [
    (alias, *row) for alias, path in ALIASES.items() if alias.startswith(ZERO) for key, *row in USED if key == path
]


@pytest.mark.parametrize(
    ("path", "value", "stage", "more", "changes"), USED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_key_changes_the_plan(path: str, value: Any, stage: int, more: Tree, changes: dict[str, Any]) -> None:
    tree = merged(tree_of(path, value, stage), more)
    tree = merged(tree, tree_of(path, value, stage)) if path != "zero_optimization.stage" else tree_of(path, value)
    found, report = to_plan(tree, 4)
    assert found == plan(stage).but(**changes)
    assert path.replace("bfloat16", "bf16") in report.used and not report.ignored


def test_every_alias_has_a_row() -> None:
    """Each alias has a row here. test_ds_key_effects_and_zero_to_fp32.py checks that each key has one."""
    of_used = {alias for alias, path in ALIASES.items() if path not in KEYS or KEYS[path].role == "used"}
    assert {alias for alias in of_used if "." in alias} <= {path for path, *_ in USED}


OTHER: dict[str, Any] = {"int": 12345, "float": 0.123, "text": "x", "map": {"a": 1}, "list": ["x"]}
IGNORED = sorted(path for path, key in KEYS.items() if key.role == "ignored")
REFUSED = sorted(path for path, key in KEYS.items() if key.role == "refused")


def other(path: str) -> Any:
    """Return a value that differs from the default of the key."""
    key = KEYS[path]
    return not (key.exact and key.exact[0]) if key.kind == "bool" else OTHER.get(key.kind, True)


@pytest.mark.parametrize("path", IGNORED)
def test_ignored_keys_are_listed_once_with_the_reason(path: str) -> None:
    stage = 3 if "offload_param" in path else 1
    tree = tree_of(path, other(path), stage)
    if "offload_" in path:
        tree = merged(tree, {"zero_optimization": {path.split(".")[1]: {"device": "cpu"}}})
    tree = merged(tree, NVME if path.startswith("aio.") else {})
    found, report = to_plan(tree, 4)
    assert report.ignored == {path: KEYS[path].reason} and path not in report.used
    with pytest.warns(UserWarning, match="DeepSpeed configuration") as caught:
        report.warn()
    assert len(caught) == 1 and str(caught[0].message).count(path) == 1
    for value in KEYS[path].exact:
        exact = to_plan(merged(tree, tree_of(path, value, stage)), 4)
        assert exact[0] == found and not exact[1].ignored and path in exact[1].used


def test_deprecated_cpu_offload_is_noted() -> None:
    report = to_plan(tree_of(ZERO + "cpu_offload", True, 2), 4)[1]
    told = f"Config parameter {ZERO}cpu_offload is deprecated: give {ZERO}offload_optimizer={{'device': 'cpu'}}"
    assert report.notes == [told]


@pytest.mark.parametrize("path", REFUSED)
def test_unavailable_keys_are_refused(path: str) -> None:
    refusal = rf"{path}=.*{KEYS[path].reason[:20]}"
    raises(NotImplementedError, refusal, to_plan, tree_of(path, other(path), 1), 4)
    assert path in to_plan(tree_of(path, KEYS[path].default, 1), 4)[1].used


@pytest.mark.parametrize("path", sorted(path for path, block in BLOCKS.items() if block.role != "refused"))
def test_ignored_blocks_are_listed_if_enabled(path: str) -> None:
    """Refused blocks are tested in test_ds_optimizers_and_utilities.py."""
    name = BLOCKS[path].switch or "anything"
    assert to_plan(tree_of(path, {name: 4}, 1), 4)[1].ignored == {path: BLOCKS[path].reason}
    off = to_plan(tree_of(path, {name: False}, 1), 4)
    assert off[0] == plan(1) and not off[1].ignored and path in off[1].used


WRONG: list[tuple[Tree, str]] = [
    ({"tensor_parallel": {"autotp_size": 3}}, "autotp_size=3 x sequence_parallel_size=1 does not divide the 4 ranks"),
    ({"sequence_parallel_size": 2, "data_parallel_size": 4}, "data_parallel_size=4: .* are 2 x 1 x 2; give 2"),
    ({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}}, "both give the number of ranks that hold one layer"),
    ({"sequence_parallel_size": 2, "train_batch_size": 3, "gradient_accumulation_steps": 1}, "x 2 ranks = 2"),
    ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'"),
    ({"reduce_bucket_size": 5}, "'reduce_bucket_size' belongs in 'zero_optimization'"),
    ({"aio": {"qqq": 1}}, "known keys of 'aio': block_size"),
    ({"optimizer": {"tipe": "Adam"}}, "did you mean 'type'"),
    ({"max_grad_norm": 1.0}, "did you mean 'gradient_clipping'"),
    ({"learning_rate": 0.1}, "did you mean 'optimizer.params.lr'"),
    ({"loss_scales": 2}, "did you mean 'fp16.loss_scale'"),
    ({"zero_optimization": {"stage": 7}}, "stage=7: give 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}}, "reduce_bucket_size=0: give a finite number >= 1"),
    ({"zero_optimization": 3}, "zero_optimization=3: give a block"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enable one of them"),
    ({"fp16": {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 2}}, "min_loss_scale=2"),
    ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16=.* mean the same"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_optimizer_states=True without"),
    ({"data_types": {"param_dtype": "bf16"}}, "param_dtype=torch.bfloat16 with fp32"),
    ({"communication_data_type": "int8"}, "communication_data_type='int8'"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "disk"}}}, "give one of 'none', 'cpu', 'nvme'"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "nvme_path=None"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}}, "give a fraction"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "mics_shard_size=3.*divides the 4 ranks"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 4}}, "=4 with .*=2: .*one"),
    (merged(NVME, {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}), "_gradients=True with offload"),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "partition_size=3.*divides the 4 ranks"),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "nvme", "nvme_path": "/f"}}},
        "zero_hpz_partition_size=2 with .*offload_param.device='nvme'",
    ),
    ({"train_batch_size": 9, "gradient_accumulation_steps": 2}, "train_batch_size=9 is not .* 4 ranks = 8"),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, "train_batch_size=8 is not"),
    ({"checkpoint": {"tag_validation": "maybe"}}, "tag_validation='maybe'"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr='auto'"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "warmup_num_steps='auto'"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "message"), WRONG, ids=[message for _, message in WRONG])
def test_invalid_configurations(tree: Tree, message: str) -> None:
    raises(ValueError, message, lambda: to_plan(tree, 4))


BATCHES = [
    ({"train_batch_size": 32}, (32, 8, 1)),
    ({"train_micro_batch_size_per_gpu": 2}, (8, 2, 1)),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (32, 2, 4)),
    ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, (32, 4, 2)),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
    ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, (8, 2, 1)),
    ({"gradient_accumulation_steps": 3}, None),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "expected"), BATCHES)
def test_batch_sizes_are_derived(tree: Tree, expected: tuple[int, int, int] | None) -> None:
    batch = batch_of(read_config(tree), 4)
    assert (None if batch is None else (batch.train, batch.micro, batch.accumulation)) == expected


def test_auto_is_the_default() -> None:
    tree = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "auto"}},
    }
    before = copy.deepcopy(tree)
    assert to_plan(tree, 4)[0] == plan(2).but(**BF16)
    assert read_config(tree)["scheduler.params"]["warmup_max_lr"] is None
    assert tree == before
    given = {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}}
    settings = read_config(given)
    given["optimizer"]["params"]["betas"].append(3)  # type: ignore[index]
    assert settings["optimizer.params"] == {"betas": [0.9, 0.99]}


def test_files_comments_and_deprecated_forms(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 1, "_why": 0, "offload_param": None}
    tree = {"_comment": "x", "//": 1, "gradient_clipping": 0, "zero_optimization": zero}
    path.write_text(json.dumps(tree))
    assert to_plan(path, 4)[0] == to_plan(str(path), 4)[0] == to_plan(tree, 4)[0] == plan(1)
    assert to_plan({"gradient_clipping": 0, "zero_optimization": True}, 4)[0] == plan(1)
    assert to_plan({"gradient_clipping": 0, "zero_optimization": {"stage": True}}, 4)[0] == plan(1)
    path.write_text('{"gradient_clipping": 0, "gradient_clipping": 1}')
    raises(ValueError, "'gradient_clipping' occurs twice", lambda: to_plan(path, 4))
    path.write_text("{")
    raises(ValueError, r"ds\.json: .*line 1 column 2", lambda: to_plan(path, 4))
    raises(FileNotFoundError, "No such file", lambda: to_plan(tmp_path / "none.json", 4))
    raises(TypeError, "give a dict", lambda: to_plan(3, 4))


def test_default_clipping_is_noted() -> None:
    found, report = to_plan({"zero_optimization": {"stage": 1}}, 4)
    assert found == plan(1).but(max_norm=1.0) and "0.0 is off" in report.notes[0]
    with warnings.catch_warnings(action="error"):
        to_plan({"gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}, 4)[1].warn()


ASIDE = [
    ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}}, ZERO + "stage3_max_live_parameters"),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, PARAM + "device"),
    ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, OPTIM + "device"),
    ({"zero_optimization": {"stage": 3, "reduce_bucket_size": 5}}, ZERO + "reduce_bucket_size"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "nvme_path": "/x"}}}, OPTIM + "nvme_path"),
    ({"zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_prefetch_bucket_size": 5}}, ZERO + "stage3_prefetch_bucket_size"),
    ({"fp16": {"loss_scale": 5}}, "fp16.loss_scale"),
    ({"fp16": {"enabled": True, "loss_scale": 5, "hysteresis": 3}}, "fp16.hysteresis"),
    ({"aio": {"queue_depth": 5}}, "aio.queue_depth"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "path"), ASIDE)
def test_keys_without_effect_next_to_other_values_are_ignored(tree: Tree, path: str) -> None:
    report = to_plan({"gradient_clipping": 0.0, **tree}, 4)[1]
    assert list(report.ignored) == [path] and path not in report.used


def test_limits_in_elements_depend_on_the_model_size() -> None:
    def three(**zero: Any) -> Plan:
        tree = {"gradient_clipping": 0.0, "zero_optimization": {"stage": 3, **zero}}
        return to_plan(tree, 4, numels=NUMELS)[0]

    assert three(stage3_param_persistence_threshold=0).shard.prefetch == len(NUMELS)
    assert three(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=2050).shard.prefetch == 2
    assert three(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=20).shard.prefetch == 1
    for model, persistent in ({"stage3_model_persistence_threshold": 159}, 99), ({}, 100):
        found = three(stage3_param_persistence_threshold=100, **model).shard.packing
        assert found == ByTensor(persist_numel=persistent)
    tiers = three(offload_param={"device": "nvme", "nvme_path": "/fast", "max_in_cpu": 54}).tiers
    assert (tiers.param_host_fraction, tiers.param_disk_fraction) == (pytest.approx(0.1), pytest.approx(0.9))


HAND = """
{
  // what people write by hand
  train_batch_size: 8   # eight
  'gradient_clipping': -0.5e1
  /* over
     lines */
  zero_optimization: {"stage": 3, offload_param: {device: "cpu",},}, // a comma too many
  optimizer:
  {
    type: AdamW   # no quotes: up to the end of the line
    params: {lr: 1e-3, "betas": [0.9
      0.99], fused: null}
  }
  x: [true false
  'it\\'s "so"', [], {}]
}
"""
PARAMS = {"lr": 1e-3, "betas": [0.9, 0.99], "fused": None}
AS_JSON = {
    "train_batch_size": 8,
    "gradient_clipping": -5.0,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW   # no quotes: up to the end of the line", "params": PARAMS},
    "x": ["true false", 'it\'s "so"', [], {}],
}


def test_hjson_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HAND)
    assert load_config(path) == load_config(str(path)) == AS_JSON
    path.write_text(HAND.strip().removeprefix("{").removesuffix("}"))
    assert load_config(path) == AS_JSON
    faults = {
        "a: 1\na: 2": "'a' occurs twice",
        "{a: {b: [1, 2}}": "",
        "{a 1}": "",
        "[1,]  #:": "holds a list; give a file with one JSON object",
        '{"a": ' + 100_000 * "[": "nested too deeply",
        "a: " + 10_000 * "[" + 10_000 * "]" + "#": "nested too deeply",
    }
    for text, message in faults.items():
        path.write_text(text)
        raises(ValueError, f"ds.hjson.*{message}", lambda: load_config(path))
    for text in ("ds_config.json", "x" * 5000):
        raises(FileNotFoundError, r"cannot be read .*; give a dict", load_config, text)


def test_hjson_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HAND)
    monkeypatch.setitem(sys.modules, "hjson", None)
    raises(ValueError, r"it is not JSON: .* Install the package hjson", lambda: load_config(path))
