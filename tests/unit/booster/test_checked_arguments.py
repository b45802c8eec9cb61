"""Tests of argument checks in all plans, plugins, strategies and configurations.

- Each number and switch refuses invalid values, such as NaN or a bool, with its name and the value in the error.
- Objects of the wrong type raise an error that shows them, and nothing changes.
- Docstrings describe each argument in order, annotations can be resolved, and scaler defaults differ as documented.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import test_booster_signatures
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import shardwise.lightning
import shardwise.pytorch_lightning
from shardwise import deepspeed
from shardwise.booster import Booster, FP16TorchMixedPrecision
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardwise.compat.arguments import names_of
from shardwise.core.base.sizes import parse_size
from shardwise.core.base.validate import MOST_BYTES, short_repr
from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.deepspeed import to_plan
from shardwise.deepspeed.schema import KEYS
from shardwise.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shardwise.plan import AutoPlan, ByModule, ByNumel, BySearch, ByTensor, DiskPlan, Plan, zero
from shardwise.plan.scaler_arguments import PublishedDefault, ScalerArguments, scaler_plan
from shardwise.session import Session, build
from shardwise.strategies.colossalai import ColossalAIArguments
from shardwise.strategies.deepspeed_config import DeepSpeedArguments
from shardwise.strategies.fully_sharded import FullyShardedArguments
from shardwise.zero import ShardedOptimizerV2
from shardwise.zero.arguments import ModelArguments, OptimizerArguments
from shardwise.zero.sharded_model.reduce_scatter import ReduceScatterBucketer
from tests.support.on_ranks import raises

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
PUBLISHED: list[type] = [GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin]
PUBLISHED += [ColossalAIArguments, FullyShardedArguments, ModelArguments, OptimizerArguments]
UNBOUNDED = {"max_norm", "norm_type"}
"""Any finite value is valid, and infinity for the second."""


def wrong(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield names of numbers and switches with values that are invalid for every range."""
    for name, hint in get_type_hints(cls).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not {bool, int, float}.intersection(kinds) or name not in {field.name for field in fields(cls)}:
            continue
        values = [2, "false", math.nan] if bool in kinds else [math.nan, -math.inf, True, [1]]
        if type(None) not in kinds:
            values.append(None)
        if bool not in kinds:
            values += [] if name == "norm_type" else [math.inf]
            values += [] if name in UNBOUNDED else [HUGE]
            values += [] if float in kinds else [10**5000, 1.5]  # the first has too many digits to be printed
        yield from ((name, value) for value in values)


def refused(make: Any, name: str, value: Any) -> None:
    said = raises((TypeError, ValueError, NotImplementedError), None, make, **{name: value})
    texts = {short_repr(value), f"{value:g}" if value == HUGE else short_repr(value)}  # printed as 1e40
    assert name in said and any(text in said for text in texts), (name, texts, said)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_plans_refuse_invalid_numbers_and_switches(part: Any) -> None:
    for name, value in wrong(type(part)):
        refused(partial(replace, part), name, value)


FRACTIONS = {"search_range_m", "reduce_bucket_size_in_m", "min_chunk_size_m"}  # ints in ColossalAI


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda cls: cls.__name__)
def test_published_arguments_refuse_invalid_numbers_and_switches(published: type) -> None:
    rows = list(wrong(published))
    assert len(rows) > 5
    for name, value in rows:
        if value != 1.5 or (name not in FRACTIONS and not name.endswith("memory")):
            refused(published, name, value)


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.kind in ("int", "float", "bool")])
def test_deepspeed_keys_refuse_invalid_numbers_and_switches(path: str) -> None:
    wrong = [2, "perhaps", math.nan] if KEYS[path].kind == "bool" else [math.nan, math.inf, -math.inf, True, HUGE, "x"]
    if path in ("zero_optimization.stage", "gradient_clipping") or KEYS[path].role != "used":
        wrong = [value for value in wrong if value is not True and value != HUGE]  # True is an old form of stage 1
    if path == "steps_per_print":
        wrong.remove(math.inf)  # accelerate writes inf for "never"
    for value in [*wrong, 10**5000]:
        for name in reversed(path.split(".")):
            value = {name: value}
        raises((ValueError, NotImplementedError), re.escape(path), to_plan, value, 2)


def test_optimizer_and_scheduler_params_must_be_finite() -> None:
    for block, kind, name, value, said in (
        ("optimizer", "Adam", "lr", math.nan, "nan"),
        ("optimizer", "Adam", "betas", [0.9, math.nan], r"\[0.9, nan\]"),
        ("scheduler", "WarmupLR", "warmup_max_lr", math.inf, "inf"),
    ):
        refusal = rf"{block}\.params\.{name}={said}: give finite numbers"
        raises(ValueError, refusal, to_plan, {block: {"type": kind, "params": {name: value}}}, 2)


@pytest.mark.parametrize("cls", [CPUAdam, FusedAdam, HybridAdam])
def test_optimizers_refuse_invalid_numbers(cls: type[torch.optim.Optimizer]) -> None:
    for name, given in (("lr", 1.0), ("eps", 1.0), ("weight_decay", 1.0), ("betas", (0.9, 0.9))):
        for value in (math.nan, math.inf, -1.0, True):
            odd = (0.9, value) if isinstance(given, tuple) else value
            raises((TypeError, ValueError), name, cls, [nn.Parameter(torch.ones(2))], **{name: odd})


def test_other_arguments_refuse_invalid_values() -> None:
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        for value in (math.nan, math.inf, True, -1, HUGE):
            refused(FP16TorchMixedPrecision, name, value)
    for value in (math.nan, math.inf, True):
        refused(ReduceScatterBucketer, "bucket_size_mb", value)
    for name in ("zero_optimization", "offload_optimizer", "offload_parameters"):
        refused(DeepSpeedArguments, name, "false")
    for name, value in (("reduce_bucket_size", HUGE), ("initial_scale_power", 10**6), ("loss_scale", math.nan)):
        raises(ValueError, name, DeepSpeedArguments, **{name: value})
    raises(ValueError, "more than 4096 PiB", lambda: parse_size("9" * 40))
    assert parse_size("4096PiB") == MOST_BYTES


CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}


class Doors:
    """The objects and functions that take arguments from a user's program."""

    def __init__(self) -> None:
        models = [nn.Linear(3, 3) for _ in range(3)]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        self.session: Session = build(models[0], optimizers[0], zero(2))
        self.engine = self.initialize(model=models[1], optimizer=optimizers[1])[0]
        self.booster = Booster()
        self.boosted = self.booster.boost(models[2], optimizers[2])

    def initialize(self, **given: Any) -> Any:
        return deepspeed.initialize(**{"config": CONFIG, "dist_init_required": False, **given})

    def close(self) -> None:
        self.session.close()
        self.engine.destroy()


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    made = Doors()
    yield made
    made.close()


Call = Callable[[Doors, Any], object]
CALLS: dict[str, tuple[Call, str]] = {
    "session.backward": (lambda d, x: d.session.backward(x), "loss={}"),
    "optimizer.backward_by_grad": (lambda d, x: d.session.optimizers[0].backward_by_grad(x, x), "tensor={}"),
    "checkpoints.save": (lambda d, x: d.session.checkpoints.save(x), "root={}"),
    "checkpoints.load": (lambda d, x: d.session.checkpoints.load(x), "root={}"),
    "module.load_state_dict": (lambda d, x: d.session.module.load_state_dict(x), "state_dict={}"),
    "optimizer.load_state_dict": (lambda d, x: d.session.optimizers[0].load_state_dict(x), "state_dict={}"),
    "build": (lambda d, x: build(nn.Linear(3, 3), None, x), "plan={}"),
    "Plan.load": (lambda d, x: Plan.load(x), "path={}"),
    "Plan.from_dict": (lambda d, x: Plan.from_dict(x), "plan={}"),
    "Plan.save": (lambda d, x: zero(2).save(x), "path={}"),
    "Plan.differences": (lambda d, x: zero(2).differences(x), "other={}"),
    "initialize(model)": (lambda d, x: d.initialize(model=x), "model={}"),
    "engine.backward": (lambda d, x: d.engine.backward(x), r"backward(loss)={}"),
    "engine.scale": (lambda d, x: d.engine.scale(x), r"scale(loss)={}"),
    "engine.save_checkpoint": (lambda d, x: d.engine.save_checkpoint(x), "save_dir={}"),
    "engine.load_checkpoint": (lambda d, x: d.engine.load_checkpoint(x), "load_dir={}"),
    "engine.save_16bit_model": (lambda d, x: d.engine.save_16bit_model(x), "save_dir={}"),
    "engine.load_module_state_dict": (lambda d, x: d.engine.load_module_state_dict(x), "checkpoint={}"),
    "zero_to_fp32": (lambda d, x: get_fp32_state_dict_from_zero_checkpoint(x), "checkpoint_dir={}"),
    "booster.backward": (lambda d, x: d.booster.backward(x, d.boosted[1]), "loss={}"),
    "booster.save_model": (lambda d, x: d.booster.save_model(d.boosted[0], x), "checkpoint={}"),
    "booster.load_model": (lambda d, x: d.booster.load_model(d.boosted[0], x), "checkpoint={}"),
    "booster.save_optimizer": (lambda d, x: d.booster.save_optimizer(d.boosted[1], x), "checkpoint={}"),
    "booster.load_optimizer": (lambda d, x: d.booster.load_optimizer(d.boosted[1], x), "checkpoint={}"),
    "booster.save_model(model)": (lambda d, x: d.booster.save_model(x, "nowhere"), "{} is neither a model nor an"),
}


@pytest.mark.parametrize("given", [None, 3], ids=["None", "number"])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_types_are_shown_in_the_error(doors: Doors, name: str, given: Any) -> None:
    call, words = CALLS[name]
    text = raises((TypeError, ValueError), None, call, doors, given)
    assert words.format(given) in text and "give" in text, text


def test_refused_calls_change_nothing_and_tags_may_be_numbers(doors: Doors, tmp_path: Path) -> None:
    for call, _ in CALLS.values():
        raises((TypeError, ValueError), None, call, doors, 3)
    doors.engine.backward(doors.engine(torch.ones(2, 3)).sum())
    doors.engine.step()
    doors.engine.save_checkpoint(str(tmp_path), tag=7)
    assert doors.engine.load_checkpoint(str(tmp_path), tag=7)[0] == str(tmp_path / "7")


def test_join_is_refused(doors: Doors) -> None:
    with pytest.raises(AttributeError, match=r"'join_hook'.*all ranks have to run the same number of passes"):
        Join([doors.session.module])
    assert not hasattr(doors.session.module, "join")


def test_wrong_types_of_initialize_and_save(doors: Doors, tmp_path: Path) -> None:
    no_optimizer = r"optimizer=3: give a torch\.optim\.Optimizer"
    raises(TypeError, no_optimizer, doors.initialize, model=nn.Linear(3, 3), optimizer=3)
    raises(TypeError, "model is already a DeepSpeedEngine of a Linear: ", doors.initialize, model=doors.engine)
    raises(TypeError, "client_state=3: give a dict", doors.engine.save_checkpoint, str(tmp_path), client_state=3)
    no_state = r"state_dict has \['step'\]: an optimizer's state needs 'state' and 'param_groups'"
    raises(ValueError, no_state, doors.session.optimizers[0].load_state_dict, {"step": 1})


SHOWN: tuple[type, ...] = (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    ShardedOptimizerV2,
    *(
        getattr(package, f"{name}Strategy")
        for package in (shardwise.lightning, shardwise.pytorch_lightning)
        for name in ("ColossalAI", "DDPFullySharded", "DeepSpeed")
    ),
)


def described(cls: type) -> list[str]:
    """Return the arguments in the order in which a docstring describes them."""
    rest = re.split("(?:Args|Attributes):\n", inspect.cleandoc(cls.__doc__ or ""), maxsplit=1)[1]
    lines = rest.partition("\n\n")[0].splitlines()
    return [line.strip().partition(":")[0] for line in lines if line[4] != " " and line.partition(": ")[2]]


@pytest.mark.parametrize("cls", SHOWN, ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}")
def test_docstrings_describe_each_argument_in_order(cls: type) -> None:
    assert described(cls) == list(inspect.signature(cls).parameters)


@pytest.mark.parametrize(
    "cls", [*SHOWN, *test_booster_signatures.PLUGINS], ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}"
)
def test_annotations_can_be_resolved(cls: Any) -> None:
    """An inherited dataclass may have annotations that its own module does not import."""
    for parameter in inspect.signature(cls, eval_str=True).parameters.values():
        assert not isinstance(parameter.annotation, str) and parameter.annotation is not parameter.empty, parameter


@pytest.mark.parametrize("arguments", [GeminiPlugin, LowLevelZeroPlugin, OptimizerArguments])
def test_default_initial_scale_is_lower_than_published(arguments: type) -> None:
    assert set(names_of(ScalerArguments)) < set(names_of(arguments))
    start = scaler_plan(arguments()).initial_scale
    assert start == 2.0**16 and scaler_plan(arguments(initial_scale=2.0**20)).initial_scale == 2.0**20
    high = arguments in (LowLevelZeroPlugin, OptimizerArguments)  # their published default is 2**32
    assert isinstance(arguments().initial_scale, PublishedDefault) is high
