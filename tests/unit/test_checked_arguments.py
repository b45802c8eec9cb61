"""Every number and switch of every plan, plugin, strategy and configuration refuses what is none, by name and value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from shardwise.booster import FP16TorchMixedPrecision
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.core.base.sizes import parse_size
from shardwise.core.base.validate import MOST_BYTES, short_repr
from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.deepspeed import to_plan
from shardwise.deepspeed.schema import KEYS
from shardwise.plan import AutoPlan, ByModule, ByNumel, BySearch, ByTensor, DiskPlan, Plan, zero
from shardwise.strategies.colossalai import ColossalAIArguments
from shardwise.strategies.deepspeed_config import DeepSpeedArguments
from shardwise.strategies.fully_sharded import FullyShardedArguments
from shardwise.zero.arguments import ModelArguments, OptimizerArguments
from shardwise.zero.sharded_model.reduce_scatter import ReduceScatterBucketer

HUGE = 10**40
PLAN: Plan = zero(2, torch.float16)
PARTS: list[Any] = [
    PLAN,
    PLAN.mesh,
    PLAN.shard,
    PLAN.precision,
    PLAN.precision.scaler,
    PLAN.grad,
    PLAN.comm,
    PLAN.tiers,
    ByNumel(chunk_numel=8),
    ByTensor(persist_numel=8),
    ByModule(unit_classes=()),
    BySearch(search_range_numel=8, interval_numel=1, min_chunk_numel=1),
    DiskPlan(directory="/tmp"),
    AutoPlan(warmup_non_model_ratio=0.5, steady_capacity_ratio=0.5, margin_ratio=0.5),
]
PUBLISHED: dict[type, type] = {
    GeminiPlugin: GeminiPlugin,
    LowLevelZeroPlugin: LowLevelZeroPlugin,
    TorchDDPPlugin: TorchDDPPlugin,
    TorchFSDPPlugin: TorchFSDPPlugin,
    ColossalAIArguments: ColossalAIArguments,
    FullyShardedArguments: FullyShardedArguments,
    ModelArguments: ModelArguments,
    OptimizerArguments: OptimizerArguments,
}
UNBOUNDED = {"max_norm", "norm_type"}
"""Any finite size means something; and of the second, infinity."""


@dataclass(frozen=True)
class Field:
    name: str
    kinds: frozenset[type]
    optional: bool

    def wrong(self) -> Iterator[Any]:
        """Values that the field cannot have, whatever its range."""
        if bool in self.kinds:
            yield from (2, "false", math.nan, *(() if self.optional else (None,)))
            return
        yield from (math.nan, -math.inf, True, [1], *(() if self.optional else (None,)))
        if self.name != "norm_type":
            yield math.inf
        if self.name not in UNBOUNDED:
            yield HUGE
        if float not in self.kinds:
            yield 10**5000  # too long to be printed
            yield 1.5


def numeric(cls: type) -> list[Field]:
    found = []
    for name, hint in get_type_hints(cls).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        numbers = frozenset(kind for kind in kinds if kind in (bool, int, float))
        if numbers and name in {field.name for field in fields(cls)}:
            found.append(Field(name, numbers, type(None) in kinds))
    return found


def refused(make: Any, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        make(**{name: value})
    said = str(error.value)
    texts = {short_repr(value), f"{value:g}" if value == HUGE else short_repr(value)}  # 1e40
    assert name in said and any(text in said for text in texts), (name, texts, said)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_plans_refuse_what_is_no_number_or_switch(part: Any) -> None:
    assert is_dataclass(part)
    for field in numeric(type(part)):
        for value in field.wrong():
            refused(lambda **changes: replace(part, **changes), field.name, value)


FRACTIONS = {"search_range_m", "reduce_bucket_size_in_m", "min_chunk_size_m"}  # published as whole numbers


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda cls: cls.__name__)
def test_published_arguments_refuse_what_is_no_number_or_switch(published: type) -> None:
    checked = 0
    for field in numeric(published):
        for value in field.wrong():
            if value == 1.5 and (field.name in FRACTIONS or field.name.endswith("memory")):
                continue
            refused(PUBLISHED[published], field.name, value)
            checked += 1
    assert checked > 5


def _config(path: str, value: Any) -> dict[str, Any]:
    tree: Any = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    return tree  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.kind in ("int", "float", "bool")])
def test_every_key_of_deepspeed_refuses_what_is_no_number_or_switch(path: str) -> None:
    wrong = [2, "perhaps", math.nan] if KEYS[path].kind == "bool" else [math.nan, math.inf, -math.inf, True, HUGE, "x"]
    if path in ("zero_optimization.stage", "gradient_clipping") or KEYS[path].role != "used":
        wrong = [value for value in wrong if value is not True and value != HUGE]  # stage: an old form of 1
    if path == "steps_per_print":
        wrong.remove(math.inf)  # accelerate's word for never
    for value in [*wrong, 10**5000]:
        with pytest.raises((ValueError, NotImplementedError)) as error:
            to_plan(_config(path, value), 2)
        assert path in str(error.value), (path, str(error.value))


def test_numbers_of_optimizers_and_schedules_in_a_configuration_are_finite() -> None:
    for block, params in (("optimizer", {"lr": math.nan}), ("optimizer", {"betas": [0.9, math.nan]})):
        with pytest.raises(ValueError, match=rf"{block}\.params\.\w+=.*nan.*: give finite numbers"):
            to_plan({block: {"type": "Adam", "params": params}}, 2)
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": math.inf}}
    with pytest.raises(ValueError, match=r"scheduler\.params\.warmup_max_lr=inf: give finite numbers"):
        to_plan({"scheduler": schedule}, 2)


@pytest.mark.parametrize("cls", [CPUAdam, FusedAdam, HybridAdam])
def test_optimizers_of_ours_take_numbers_alone(cls: type[torch.optim.Optimizer]) -> None:
    for name, given in (("lr", 1.0), ("eps", 1.0), ("weight_decay", 1.0), ("betas", (0.9, 0.9))):
        for value in (math.nan, math.inf, -1.0, True):
            wrong = (0.9, value) if isinstance(given, tuple) else value
            with pytest.raises((TypeError, ValueError), match=name):
                cls([torch.nn.Parameter(torch.ones(2))], **{name: wrong})  # type: ignore[call-arg]


def test_the_rest() -> None:
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        for value in (math.nan, math.inf, True, -1, HUGE):
            refused(FP16TorchMixedPrecision, name, value)
    for value in (math.nan, math.inf, True):
        refused(ReduceScatterBucketer, "bucket_size_mb", value)
    for name in ("zero_optimization", "offload_optimizer", "offload_parameters"):
        refused(DeepSpeedArguments, name, "false")
    for name, value in (("reduce_bucket_size", HUGE), ("initial_scale_power", 10**6), ("loss_scale", math.nan)):
        with pytest.raises(ValueError, match=name):
            DeepSpeedArguments(**{name: value})
    with pytest.raises(ValueError, match="more than 4096 PiB"):
        parse_size("9" * 40)
    assert parse_size("4096PiB") == MOST_BYTES
