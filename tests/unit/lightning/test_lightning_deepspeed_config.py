"""Tests of the arguments of ``DeepSpeedStrategy``: the DeepSpeed configuration and the ``Plan`` that they make.

Each argument has a row. The Trainer completes the configuration with its precision, clipping and accumulation.
"""

# The tables are wider than a line.
# ruff: noqa: E501

import copy
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.plan import ByNumel, ByTensor, DiskPlan, MeshPlan, Plan
from shardwise.strategies import deepspeed_config
from shardwise.strategies.deepspeed import DeepSpeed
from shardwise.strategies.deepspeed_config import DeepSpeedArguments, TrainerFacts, complete, read, to_plan
from tests.support.ds_setup import scaler
from tests.support.on_ranks import raises

Tree = dict[str, Any]
RANKS = 4
NUMELS = [10, 200_000, 50]

CHECKPOINTING = (
    *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
    "synchronize_checkpoint_boundary",
)
# The configuration of the defaults as Lightning 2.4 printed it, and the two blocks of its offload.
PRINTED: Tree = {
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        **dict.fromkeys(("contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter"), True),
        **dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size"), 200_000_000),
        "sub_group_size": 1_000_000_000_000,
    },
    "activation_checkpointing": dict.fromkeys(CHECKPOINTING, False),
    "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1},
}
OPTIM = {"device": "cpu", "nvme_path": "/local_nvme", "buffer_count": 4, "pin_memory": False}
PARAM = {**OPTIM, "buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000}


class Misconfigured(Exception):
    pass


def completed(tree: Tree, precision: str = "32-true", given: DeepSpeedArguments | None = None, **changes: Any) -> Tree:
    """Return ``tree`` completed with the Trainer's values."""
    facts = {"accumulation": 1, "micro_batch": 4, "clip": 0.0, "precision": precision, **changes}
    return complete(tree, given or DeepSpeedArguments(), TrainerFacts(**facts), Misconfigured)


def plan_of(precision: str = "32-true", **arguments: Any) -> Plan:
    given = DeepSpeedArguments(**arguments)
    tree = completed(given.to_config(), precision, given)
    return to_plan(read(tree, RANKS), RANKS, NUMELS, clip_outside=True)[0]


def test_configuration_matches_lightnings() -> None:
    assert DeepSpeedArguments().to_config() == PRINTED
    offloaded = DeepSpeedArguments(stage=3, offload_optimizer=True, offload_parameters=True).to_config()
    assert offloaded["zero_optimization"] == {**PRINTED["zero_optimization"], "stage": 3, "offload_optimizer": OPTIM, "offload_param": PARAM}  # fmt: skip
    without = DeepSpeedArguments(zero_optimization=False, stage=7, logging_batch_size_per_gpu=6).to_config()
    assert without == {"train_micro_batch_size_per_gpu": 6, **{k: PRINTED[k] for k in ("activation_checkpointing", "aio")}}  # fmt: skip


def test_signature_and_defaults_of_the_strategy() -> None:
    parameters = list(inspect.signature(DeepSpeed.__init__).parameters.values())[1:]
    named = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert list(named)[:2] == ["timeout", "exclude_frozen_parameters"] and named["exclude_frozen_parameters"] is False
    own = {field.name: field.default for field in dataclasses.fields(DeepSpeedArguments)}
    assert {name: inspect.signature(DeepSpeed.__init__).parameters[name].default for name in own} == own


def disk(**changes: Any) -> DiskPlan:
    fields = {"directory": "/local_nvme", "block_bytes": 2**20, "queue_depth": 8, "threads": 1, "single_submit": False}
    rest = {"overlap_events": True, "state_buffers": 4, "param_buffers": 5}
    return DiskPlan(**{**fields, **rest, **changes})


HOST = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
NVME = {**HOST, "offload_optimizer_device": "nvme", "offload_params_device": "nvme"}
ON_DISK = {"disk": disk(), "state_disk_fraction": 1.0}
# 100 of the model's 200060 elements stay in host memory on each of four ranks.
IN_CPU = {"param_host_fraction": pytest.approx(400 / 200_060), "param_disk_fraction": pytest.approx(1 - 400 / 200_060)}

# (argument, arguments, precision, arguments of the plan to compare with, difference)
ROWS: list[tuple[str, Tree, str, Tree, Tree]] = [
    ("zero_optimization", {"zero_optimization": False}, "32-true", {"stage": 0}, {"packing": ByNumel(chunk_numel=500_000_000, min_chunks=8)}),
    ("stage", {"stage": 0}, "32-true", {}, {"mesh": MeshPlan(dp_shard=1, dp_replicate=-1), "reduce": "last"}),
    ("stage", {"stage": 1}, "32-true", {}, {"reduce": "last"}),
    ("stage", {"stage": 3}, "32-true", {}, {"packing": ByTensor(persist_numel=100_000), "gathered_fraction": 0.0, "gathered_budget_bytes": 4_000_000_000, "prefetch": 1}),
    ("offload_optimizer", {"offload_optimizer": True}, "32-true", {}, {"state_host_fraction": 1.0}),
    ("offload_parameters", {"offload_parameters": True, "stage": 3}, "32-true", {"stage": 3}, {"param_host_fraction": 1.0}),
    ("offload_parameters", {"offload_parameters": True, "stage": 2}, "32-true", {}, {}),
    ("offload_optimizer_device", {"stage": 3, "offload_optimizer": True, "offload_optimizer_device": "nvme"}, "32-true", {"stage": 3}, ON_DISK),
    ("offload_params_device", {"stage": 3, "offload_parameters": True, "offload_params_device": "nvme", "max_in_cpu": 0}, "32-true", {"stage": 3}, {"disk": disk(), "param_disk_fraction": 1.0}),
    ("nvme_path", {**NVME, "nvme_path": "/fast"}, "32-true", NVME, {"disk": disk(directory="/fast")}),
    ("params_buffer_count", {**NVME, "params_buffer_count": 2}, "32-true", NVME, {"disk": disk(param_buffers=2)}),
    ("params_buffer_size", {**NVME, "params_buffer_size": 7}, "32-true", NVME, {}),
    ("max_in_cpu", {**NVME, "max_in_cpu": 100}, "32-true", NVME, IN_CPU),
    ("optimizer_buffer_count", {**NVME, "optimizer_buffer_count": 3}, "32-true", NVME, {"disk": disk(state_buffers=3)}),
    ("block_size", {**NVME, "block_size": 8192}, "32-true", NVME, {"disk": disk(block_bytes=8192)}),
    ("queue_depth", {**NVME, "queue_depth": 2}, "32-true", NVME, {"disk": disk(queue_depth=2)}),
    ("single_submit", {**NVME, "single_submit": True}, "32-true", NVME, {"disk": disk(single_submit=True)}),
    ("overlap_events", {**NVME, "overlap_events": False}, "32-true", NVME, {"disk": disk(overlap_events=False)}),
    ("thread_count", {**NVME, "thread_count": 3}, "32-true", NVME, {"disk": disk(threads=3)}),
    ("pin_memory", {**HOST, "pin_memory": True}, "32-true", HOST, {"pin_memory": True}),
    ("overlap_comm", {"overlap_comm": False}, "32-true", {}, {"overlap": False}),
    ("allgather_bucket_size", {"allgather_bucket_size": 1000}, "32-true", {}, {"packing": ByNumel(chunk_numel=1000, min_chunks=8)}),
    ("reduce_bucket_size", {"reduce_bucket_size": 2000}, "32-true", {}, {"packing": ByNumel(chunk_numel=2000, min_chunks=8)}),
    ("loss_scale", {"loss_scale": 128}, "16-mixed", {}, {"scaler": scaler(initial_scale=128, min_scale=128, max_scale=128, hysteresis=1, growth_delay=0)}),
    ("initial_scale_power", {"initial_scale_power": 4}, "16-mixed", {}, {"scaler": scaler(initial_scale=16.0)}),
    ("loss_scale_window", {"loss_scale_window": 5}, "16-mixed", {}, {"scaler": scaler(growth_interval=5)}),
    ("hysteresis", {"hysteresis": 3}, "16-mixed", {}, {"scaler": scaler(hysteresis=3)}),
    ("min_loss_scale", {"min_loss_scale": 2}, "16-mixed", {}, {"scaler": scaler(min_scale=2.0)}),
    *((name, {name: value}, "32-true", {}, {}) for name, value in (
        ("remote_device", "cpu"), ("sub_group_size", 10), ("contiguous_gradients", False),
        ("allgather_partitions", False), ("reduce_scatter", False), ("zero_allow_untested_optimizer", False),
        ("logging_batch_size_per_gpu", 16), *((name, True) for name in CHECKPOINTING),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "precision", "base", "changes"), ROWS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_an_argument_changes_the_plan(name: str, arguments: Tree, precision: str, base: Tree, changes: Tree) -> None:
    expected = plan_of(precision, **base)
    found = plan_of(precision, **arguments)
    if IN_CPU is changes:
        assert (found.tiers.param_host_fraction, found.tiers.param_disk_fraction) == tuple(IN_CPU.values())
        found, changes = found.but(param_disk_fraction=0.5, param_host_fraction=0.5), {}
        expected = expected.but(param_disk_fraction=0.5, param_host_fraction=0.5)
    assert found == expected.but(**changes)


def test_every_argument_has_a_row() -> None:
    assert {field.name for field in dataclasses.fields(DeepSpeedArguments)} == {name for name, *_ in ROWS}


STILL = scaler(initial_scale=1.0, min_scale=1.0, max_scale=1.0, hysteresis=1, growth_delay=0)
PRECISIONS = {
    **dict.fromkeys(("32-true", "64-true"), (None, False, None)),
    **dict.fromkeys(("16-mixed", "16-true"), (torch.float16, True, scaler())),
    **dict.fromkeys(("bf16-mixed", "bf16-true"), (torch.bfloat16, True, STILL)),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_of_the_trainer(precision: str) -> None:
    found = plan_of(precision).precision
    assert (found.param_dtype, found.cast_inputs, found.scaler) == PRECISIONS[precision] and found.master_weights


def test_config_takes_precedence_over_the_precision() -> None:
    tree = {"fp16": {"enabled": False}, "zero_optimization": {"stage": 1}}
    assert completed(tree, "16-mixed")["fp16"] == {"enabled": False}
    on = {"fp16": {"enabled": True, "loss_scale": 8}}
    assert completed(on, "16-mixed", DeepSpeedArguments(loss_scale=4))["fp16"] == on["fp16"] == completed(on)["fp16"]
    auto = {"fp16": {"enabled": "auto"}, "bfloat16": {"enabled": "auto"}}
    for precision, expected in (("16-true", (True, False)), ("bf16-mixed", (False, True)), ("32-true", (False, False))):
        found = completed(auto, precision)
        assert (found["fp16"]["enabled"], found["bfloat16"]["enabled"]) == expected


def test_fp16_and_bf16_together_raise() -> None:
    for name, precision in (("bf16", "16-mixed"), ("bfloat16", "16-true"), ("fp16", "bf16-mixed")):
        told = f"enables {name.replace('bfloat', 'bf')} and Trainer has precision='{precision}'.*cannot both"
        raises(Misconfigured, told, completed, {name: {"enabled": True}}, precision)


def test_the_users_dict_is_not_changed() -> None:
    """Lightning changed the user's dict, so that a second strategy with the same dict failed (its issue 19891)."""
    tree: Tree = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    before = copy.deepcopy(tree)
    for _ in range(2):
        chosen = deepspeed_config.chosen_config(tree, None, "VARIABLE", Misconfigured)
        assert chosen == tree and chosen is not tree
        found = completed(chosen, "bf16-mixed", accumulation=3, clip=0.5)
        assert tree == before == chosen
    filled = {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
    assert found == {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **filled}


def test_precedence_of_argument_and_environment(tmp_path: Path) -> None:
    one, two, none = (tmp_path / f"{name}.json" for name in ("one", "two", "none"))
    one.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    two.write_text(json.dumps({"zero_optimization": {"stage": 3}}))

    def chosen(config: Any, variable: Path | None) -> Any:
        return deepspeed_config.chosen_config(config, variable and str(variable), "VARIABLE", Misconfigured)

    assert chosen(one, two) == chosen(str(one), two) == json.loads(one.read_text())
    assert chosen(None, two) == json.loads(two.read_text()) and chosen(None, None) is None
    given = {"zero_optimization": {"stage": 2}}
    assert chosen(given, two) == given and chosen({}, two) == {}, "an empty dict is a configuration"
    missing = re.escape(str(none))
    raises(Misconfigured, rf"the path does not exist: {missing}$", chosen, none, two)
    raises(Misconfigured, rf"{missing} \(it is the value of VARIABLE", chosen, None, none)
    raises(TypeError, "give a dict", chosen, 3, None)


def test_accumulation_must_match_the_trainer() -> None:
    for value in (2, "auto", None):
        found = completed({"gradient_accumulation_steps": value}, accumulation=2)
        assert found["gradient_accumulation_steps"] == 2
    told = r"gradient_accumulation_steps=4 .*accumulate_grad_batches=2"
    raises(Misconfigured, told, completed, {"gradient_accumulation_steps": 4}, accumulation=2)


def test_auto_values_are_resolved_from_trainer() -> None:
    """DeepSpeed itself accepts ``"auto"`` in some blocks only, but configurations for other trainers use it
    everywhere.
    """
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    tree = {
        **dict.fromkeys(sizes, "auto"),
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    }
    found = completed(tree, "bf16-mixed", accumulation=2, clip=0.25)
    settings = read(found, RANKS)
    assert (settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]) == (4, 2)
    assert settings["gradient_clipping"] == 0.25 and settings["bf16.enabled"] and not settings["fp16.enabled"]
    plan, report = to_plan(settings, RANKS, NUMELS, clip_outside=True)
    assert plan.grad.max_norm == 0.0 and plan.precision.param_dtype is torch.bfloat16
    assert plan.shard.packing == ByTensor(persist_numel=100_000) and "auto" not in str(report.ignored.values())
    found["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    raises(ValueError, r"optimizer.params.lr='auto'", read, found, RANKS)


WRONG: list[tuple[Tree, str]] = [
    ({"stage": 7}, "stage=7"),
    ({"remote_device": "foo"}, "remote_device='foo'"),
    ({"offload_params_device": "disk"}, "offload_params_device='disk'"),
    ({"offload_optimizer_device": "gpu"}, "offload_optimizer_device='gpu'"),
    ({"reduce_bucket_size": 2.5}, "reduce_bucket_size=2.5"),
    ({"reduce_bucket_size": 0}, "reduce_bucket_size=0"),
    ({"queue_depth": 0, **NVME}, "queue_depth=0"),
    ({"logging_batch_size_per_gpu": 0}, "logging_batch_size_per_gpu=0"),
    ({"logging_batch_size_per_gpu": "many"}, "logging_batch_size_per_gpu='many'"),
    ({"loss_scale": -1}, "loss_scale=-1"),
    ({"initial_scale_power": 0, "min_loss_scale": 2}, "min_loss_scale=2"),
    ({"hysteresis": 0}, "hysteresis=0"),
    ({"nvme_path": "", **NVME}, "nvme_path='' with"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_arguments(arguments: Tree, message: str) -> None:
    raises((TypeError, ValueError), re.escape(message), lambda: DeepSpeedArguments(**arguments))


ON_DISK_3 = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}
UNUSED: list[tuple[Tree, Tree | None, list[str]]] = [
    ({"stage": 3}, None, []),
    ({"stage": 3, "remote_device": "cpu"}, None, ["remote_device"]),
    ({**HOST, "remote_device": "cpu"}, None, []),
    ({**HOST, "remote_device": "nvme"}, None, ["remote_device"]),
    ({**NVME, "remote_device": "nvme"}, None, []),
    ({"remote_device": "cpu"}, None, ["remote_device"]),
    ({"remote_device": "cpu"}, ON_DISK_3, ["remote_device"]),
    ({"nvme_path": "/x", "optimizer_buffer_count": 9}, None, ["optimizer_buffer_count", "nvme_path"]),
    ({"offload_optimizer": True, "nvme_path": "/x", "max_in_cpu": 3}, None, ["max_in_cpu"]),
    ({"zero_optimization": False, "stage": 3, "offload_optimizer": True}, None, ["stage", "offload_optimizer"]),
    ({"stage": 2, "offload_parameters": True}, None, ["offload_parameters"]),
    ({"stage": 0, "offload_optimizer": True, "offload_parameters": True}, None, ["offload_optimizer", "offload_parameters"]),
    ({"stage": 3, "cpu_checkpointing": True, "loss_scale": 3}, {}, ["stage", "cpu_checkpointing"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "config", "names"), UNUSED)
def test_arguments_without_effect(arguments: Tree, config: Tree | None, names: list[str]) -> None:
    found = deepspeed_config.without_effect(DeepSpeedArguments(**arguments), config)
    assert [name for each in found.values() for name in each] == names


WITHOUT_EFFECT: dict[str, tuple[Any, str, Tree]] = {
    "sub_group_size": (5, "tiles of 2**20 elements", {}),
    "params_buffer_size": (5, "buffers are as large as the largest shard", NVME),
    "reduce_scatter": (False, "the same sums", {}),
    "allgather_partitions": (False, "the same values", {}),
    "contiguous_gradients": (False, "share one array", {}),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_ignored_arguments_are_listed_once_with_the_reason(name: str) -> None:
    value, reason, more = WITHOUT_EFFECT[name]
    given = DeepSpeedArguments(**{"stage": 3, **more, name: value})
    report = to_plan(read(completed(given.to_config(), given=given), RANKS), RANKS, NUMELS, True)[1]
    told = {path: why for path, why in report.ignored.items() if path not in deepspeed_config.quiet_paths(given)}
    (path,) = told
    assert path.endswith(name.replace("params_", "offload_param.")) and reason in told[path]
    assert str(report).count(path) == 1 and path not in report.used and not report.notes
    assert not any(name in names for names in deepspeed_config.without_effect(given, None).values())


def test_loss_scale_without_effect() -> None:
    changed = DeepSpeedArguments(loss_scale=3.0)
    for tree, precision, expected in (({}, "16-mixed", ""), ({}, "32-true", "loss_scale=3.0"), ({"fp16": {"enabled": True}}, "16-true", "loss_scale=3.0")):  # fmt: skip
        assert deepspeed_config.scale_without_effect(changed, completed(tree, precision, changed)) == expected


def test_torch_autocast_block_is_refused() -> None:
    given = {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    told = r"torch_autocast\.enabled=True .* is not available under Lightning"
    raises(NotImplementedError, told, deepspeed_config.read_lightning_config, given)
    assert (
        deepspeed_config.read_lightning_config({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}).stage == 0
    )
