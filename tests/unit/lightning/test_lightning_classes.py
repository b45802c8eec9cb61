"""Tests of the classes of the Lightning front-end.

- The strategies' published signatures, methods, properties and names, for both packages of Lightning.
- Precision plugins, the plans of ``DDPFullyShardedStrategy``, ``wrap``, and refused callbacks.
- Lightning's own entries of a checkpoint: what is restored, refused or left out.
"""

import argparse
import importlib.util
import inspect
import json
import pickle
import sys
from collections import Counter
from contextlib import nullcontext
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise.lightning
import shardwise.pytorch_lightning
from shardwise.core.base import tree
from shardwise.plan import ByModule, ByNumel, ByTensor
from shardwise.strategies.checkpoint_entries import CLASS, left_out, pack, unpack
from shardwise.strategies.fully_sharded import FullyShardedArguments, auto_wrap, enable_wrap, to_plan, unit_names, wrap
from shardwise.strategies.lightning_packages import LIGHTNING, PYTORCH_LIGHTNING, Namespace
from shardwise.strategies.precision import PRECISIONS, format_of
from shardwise.strategies.trainer import REFUSED, check_callbacks
from tests.support.on_ranks import raises

PACKAGES: dict[Namespace, Any] = {LIGHTNING: shardwise.lightning, PYTORCH_LIGHTNING: shardwise.pytorch_lightning}
NAMES = {ns.pytorch: ns for ns in PACKAGES}

PLUGINS = ("ShardedPrecision", "ColossalAIPrecisionPlugin")
PUBLISHED = {
    "DDPFullyShardedStrategy": (
        "accelerator=None, cpu_offload=False, flatten_parameters=True, reshard_after_forward=True, "
        "move_grads_to_cpu=None, fp32_reduce_scatter=None, compute_dtype=None, bucket_cap_mb=25, "
        "min_num_params=100000000, state_dict_to_cpu=True, parallel_devices=None, cluster_environment=None, "
        "checkpoint_io=None, precision_plugin=None, process_group_backend=None"
    ),
    "ColossalAIStrategy": (
        "use_chunk=True, chunk_size=None, enable_distributed_storage=True, placement_policy='auto', "
        "force_outputs_fp32=False, gpu_margin_mem_ratio=0.0, chunk_search_range=67108864, chunk_search_n_grids=4096, "
        "min_chunk_size=33554432, initial_scale=65536, min_scale=1, growth_factor=2, backoff_factor=0.5, "
        "growth_interval=1000, hysteresis=2, max_scale=4294967296, accelerator=None, parallel_devices=None, "
        "cluster_environment=None, checkpoint_io=None, precision_plugin=None"
    ),
    "DeepSpeedStrategy": (
        "accelerator=None, zero_optimization=True, stage=2, remote_device=None, offload_optimizer=False, "
        "offload_parameters=False, offload_params_device='cpu', nvme_path='/local_nvme', params_buffer_count=5, "
        "params_buffer_size=100000000, max_in_cpu=1000000000, offload_optimizer_device='cpu', "
        "optimizer_buffer_count=4, block_size=1048576, queue_depth=8, single_submit=False, overlap_events=True, "
        "thread_count=1, pin_memory=False, sub_group_size=1000000000000, contiguous_gradients=True, "
        "overlap_comm=True, allgather_partitions=True, reduce_scatter=True, allgather_bucket_size=200000000, "
        "reduce_bucket_size=200000000, zero_allow_untested_optimizer=True, logging_batch_size_per_gpu='auto', "
        "config=None, logging_level=30, parallel_devices=None, cluster_environment=None, loss_scale=0, "
        "initial_scale_power=16, loss_scale_window=1000, hysteresis=2, min_loss_scale=1, partition_activations=False, "
        "cpu_checkpointing=False, contiguous_memory_optimization=False, synchronize_checkpoint_boundary=False, "
        "load_full_weights=False, precision_plugin=None, process_group_backend=None"
    ),
}

METHODS = {
    "DDPFullyShardedStrategy": {"connect": "model", "model_sharded_context": ""},
    "ColossalAIStrategy": {
        "all_gather": "tensor, group=None, sync_grads=False",
        "lightning_module_state_dict": "rank_zero_only=False",
        "model_sharded_context": "",
        "optimizer_step": "optimizer, opt_idx, closure, model=None, **kwargs",
        "reduce": "tensor, group=None, reduce_op='sum'",
        "teardown": "",
        "validation_step": "*args, **kwargs",
    },
    "DeepSpeedStrategy": {
        "model_sharded_context": "",
        "save_checkpoint": "checkpoint, filepath, storage_options=None",
        "setup": "trainer",
    },
}
# Published calls work; arguments that Lightning 2 omits, or passes by name, are optional.
MORE_DEFAULTS = {("ColossalAIStrategy", "optimizer_step"): {"opt_idx": None, "closure": None}}


@pytest.mark.parametrize("package", NAMES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_signatures(package: str, name: str) -> None:
    cls = getattr(PACKAGES[NAMES[package]], name)
    found = list(inspect.signature(cls).parameters.values())
    published = [p for p in found if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert ", ".join(f"{p.name}={p.default!r}" for p in published) == PUBLISHED[name]
    assert {p.name for p in found[len(published) :]} >= {"timeout", "start_method"}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in found[len(published) :])
    assert issubclass(cls, NAMES[package].load("strategies.ddp.DDPStrategy"))


@pytest.mark.parametrize("package", NAMES)
@pytest.mark.parametrize(("name", "method"), [(name, method) for name in METHODS for method in METHODS[name]])
def test_published_methods(package: str, name: str, method: str) -> None:
    cls = getattr(PACKAGES[NAMES[package]], name)
    assert callable(inspect.getattr_static(cls, method))
    found = list(inspect.signature(getattr(cls, method)).parameters.values())[1:]
    more = dict(MORE_DEFAULTS.get((name, method), {}))
    plain = []
    for each in found:
        if each.name in more:
            assert each.default == more.pop(each.name) is None
            each = each.replace(default=inspect.Parameter.empty)
        plain.append(str(each.replace(annotation=inspect.Parameter.empty)))
    assert ", ".join(plain) == METHODS[name][method] and not more


@pytest.mark.parametrize("package", NAMES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_properties(package: str, name: str) -> None:
    """``handles_gradient_accumulation`` is False: two published strategies had True and counted differently from
    Lightning.
    """
    cls = getattr(PACKAGES[NAMES[package]], name)
    made = cls()
    values = {"handles_gradient_accumulation": False, "restore_checkpoint_after_setup": True}
    values |= {"root_device": torch.device("cpu")} if name == "ColossalAIStrategy" else {}
    assert {each: getattr(made, each) for each in values} == values
    assert all(isinstance(inspect.getattr_static(cls, each), property) for each in values)


@pytest.mark.parametrize("package", NAMES)
@pytest.mark.parametrize("name", [*PUBLISHED, *PLUGINS])
def test_strategies_and_plugins_can_be_pickled(package: str, name: str) -> None:
    """Spawned processes unpickle a strategy by the name of its class."""
    home = PACKAGES[NAMES[package]]
    made = getattr(home, name)()
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is getattr(home, name) and type(made).__module__ == home.__name__
    assert pickle.loads(pickle.dumps(type(made))) is type(made)


@pytest.mark.parametrize("package", NAMES)
def test_registered_strategy_names(package: str) -> None:
    home = PACKAGES[NAMES[package]]
    registry = NAMES[package].load("strategies.StrategyRegistry")
    for name in ("colossalai", "shardwise_colossalai"):
        assert isinstance(registry.get(name), home.ColossalAIStrategy)
    assert isinstance(registry.get("ddp_fully_sharded"), home.DDPFullyShardedStrategy)
    for stage in ("1", "2", "2_offload", "3", "3_offload"):
        made = registry.get(f"shardwise_deepspeed_stage_{stage}")
        assert isinstance(made, home.DeepSpeedStrategy)
        zero = made.config["zero_optimization"]
        found = (zero["stage"], "offload_optimizer" in zero, "offload_param" in zero)
        assert found == (int(stage[0]), stage.endswith("offload"), stage == "3_offload")
    assert registry["shardwise_deepspeed_stage_3_offload_nvme"]["init_params"]["offload_params_device"] == "nvme"
    # FairScale's strategy was also named "fsdp"; the name now belongs to FSDPStrategy.
    assert registry["fsdp"]["strategy"] is NAMES[package].load("strategies.FSDPStrategy")
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    made = NAMES[package].load("Trainer")(strategy="ddp_fully_sharded", **options)
    assert isinstance(made.strategy, home.DDPFullyShardedStrategy)


def test_take_over_deepspeed_names() -> None:
    registry = LIGHTNING.load("strategies.StrategyRegistry")
    before = dict(registry)
    stages = ("", "_stage_1", "_stage_2", "_stage_2_offload", "_stage_3", "_stage_3_offload", "_stage_3_offload_nvme")
    names = [f"deepspeed{stage}" for stage in stages]
    ours = shardwise.lightning.DeepSpeedStrategy
    assert not any(registry[name]["strategy"] is ours for name in names)
    try:
        shardwise.lightning.take_over_deepspeed_names()
        assert all(registry[name]["strategy"] is ours for name in names)
        assert registry.get("deepspeed_stage_3").config["zero_optimization"]["stage"] == 3
        assert registry.get("deepspeed").config["zero_optimization"]["stage"] == 2
        assert PYTORCH_LIGHTNING.load("strategies.StrategyRegistry")["deepspeed"]["strategy"] is not ours
    finally:
        registry.clear()
        registry.update(before)


def test_unsupported_lightning_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch

    for version, fits in (("2.1.4", False), ("2.2.0", True), ("2.6.5", True), ("2.7.0", False)):
        monkeypatch.setattr(lightning.pytorch, "__version__", version)
        with nullcontext() if fits else pytest.raises(ImportError, match=version):
            LIGHTNING.check_version()


# ---- precision


def test_precision_plugin_of_lightning_is_replaced() -> None:
    strategy = shardwise.lightning.DDPFullyShardedStrategy()
    assert strategy._precision_plugin is None  # otherwise Lightning would ignore the Trainer's precision
    assert strategy.precision_plugin.precision == "32-true" and strategy._precision_plugin is None
    strategy.precision_plugin = LIGHTNING.load("plugins.precision.HalfPrecision")("bf16-true")
    assert type(strategy.precision_plugin) is shardwise.lightning.ShardedPrecision
    assert strategy.format == PRECISIONS["bf16-true"]


def test_custom_precision_plugins_are_refused() -> None:
    mixed = LIGHTNING.load("plugins.precision.MixedPrecision")
    half = LIGHTNING.load("plugins.precision.HalfPrecision")
    strategy = shardwise.lightning.DDPFullyShardedStrategy
    own = type("Own", (half,), {})()
    raises(TypeError, "precision plugin Own: sharded strategies", strategy, precision_plugin=own)
    scaled = mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    raises(ValueError, r"'init_scale': 4\.0", strategy, precision_plugin=scaled)
    given = strategy(precision_plugin=mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    assert given.format.name == "16-mixed"


def test_short_forms_of_precisions() -> None:
    names = {16: "16-mixed", "bf16": "bf16-mixed", 32: "32-true", "16-true": "16-true"}
    assert {given: format_of(given).name for given in names} == names
    raises(ValueError, "transformer-engine", format_of, "transformer-engine")


# ---- DDPFullyShardedStrategy's arguments


def plan(precision: str = "32-true", units: tuple[str, ...] = (), **arguments: Any) -> Any:
    return to_plan(FullyShardedArguments(**arguments), format_of(precision), units)


def test_precisions_of_fully_sharded() -> None:
    for precision, compute, expected in (
        ("bf16-mixed", None, (torch.bfloat16, True, None)),
        ("16-mixed", None, (torch.float16, True, 2000)),
        ("16-true", None, (torch.float16, False, None)),
        ("32-true", torch.bfloat16, (torch.bfloat16, True, None)),
        ("16-mixed", torch.bfloat16, (torch.bfloat16, True, None)),
    ):
        found = plan(precision, compute_dtype=compute).precision
        growth = found.scaler and found.scaler.growth_interval
        assert (found.param_dtype, found.master_weights, growth) == expected and found.reduce_dtype is None
    plain = plan().precision
    assert plain.param_dtype is None and not plain.cast_inputs


def test_offload_arguments() -> None:
    for params, grads, state in ((False, None, 0.0), (True, None, 1.0), (True, False, 0.0), (False, True, 1.0)):
        tiers = plan(cpu_offload=params, move_grads_to_cpu=grads).tiers
        assert (tiers.param_host_fraction, tiers.state_host_fraction) == (float(params), state)


def test_packing_arguments() -> None:
    assert plan().shard.packing == ByNumel(chunk_numel=25 * 2**18, min_chunks=8)
    assert plan("bf16-mixed", bucket_cap_mb=1).shard.packing == ByNumel(chunk_numel=2**19, min_chunks=8)
    assert plan(bucket_cap_mb=0).shard.packing == ByModule(unit_classes=())
    assert plan(flatten_parameters=False).shard.packing == ByTensor(persist_numel=0)
    wrapped = plan(units=("net.0",), bucket_cap_mb=1).shard.packing
    assert wrapped == ByModule(unit_classes=(), unit_names=("net.0",), rest_numel=2**18)
    assert plan(units=("net.0",), bucket_cap_mb=-1).shard.packing.rest_numel is None


def test_invalid_arguments() -> None:
    for name, value in (("compute_dtype", torch.int64), ("compute_dtype", 16), ("min_num_params", -1)):
        raises(ValueError, f"{name}=", shardwise.lightning.DDPFullyShardedStrategy, **{name: value})


# ---- wrap


def net() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
    return nn.Sequential(nn.Linear(4, 4), inner, nn.MultiheadAttention(8, 2), nn.ModuleList())


def test_wrap_marks_inside_the_context_only() -> None:
    model = net()
    assert wrap(model[0]) is model[0] and unit_names(model) == ()
    with enable_wrap():
        assert wrap(model[1][0]) is model[1][0]
    wrap(model[0])
    assert unit_names(model) == ("1.0",)
    assert next(iter(model.state_dict())) == "0.weight"  # names are unchanged


def test_auto_wrap_follows_the_policy() -> None:
    model = net()
    assert auto_wrap(model) is model and unit_names(model) == ()
    with enable_wrap(auto_wrap_policy=lambda module, recurse, unwrapped_params: unwrapped_params >= 200):
        auto_wrap(model)
    assert unit_names(model) == ("1.0", "1.1", "2")
    second = net()
    with enable_wrap():
        auto_wrap(second)  # the default is 1e8 elements
    assert unit_names(second) == ()


def test_arguments_of_wrappers_warn() -> None:
    wrapping = enable_wrap(wrapper_cls=object, reshard_after_forward=False)
    with pytest.warns(UserWarning, match="reshard_after_forward"), wrapping:
        pass
    with pytest.warns(UserWarning, match="flatten_parameters"):
        wrap(nn.Linear(1, 1), flatten_parameters=False)


# ---- callbacks and Lightning's own state


@pytest.mark.parametrize("path", REFUSED)
def test_refused_callbacks(path: str) -> None:
    cls = LIGHTNING.find(path)
    if cls is None:
        pytest.skip(f"this version of Lightning has no {path}")
    made = cls.__new__(cls)
    made.finetune_function = lambda module, *_: made.make_trainable(module)  # it is abstract in BaseFinetuning
    trainer = SimpleNamespace(state=SimpleNamespace(fn=LIGHTNING.load("trainer.states.TrainerFn").FITTING))
    trainer.callbacks, trainer.strategy = [made], shardwise.lightning.DDPFullyShardedStrategy()
    raises(NotImplementedError, f"{cls.__name__} with DDPFullyShardedStrategy: ", check_callbacks, LIGHTNING, trainer)
    trainer.state.fn = LIGHTNING.load("trainer.states.TrainerFn").TESTING
    check_callbacks(LIGHTNING, trainer)


def test_lightning_colossalai_uses_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published package chooses the same way; each Trainer refuses classes of the other package."""
    from shardwise.lightning_colossalai.precision import ColossalAIPrecisionPlugin
    from shardwise.lightning_colossalai.strategy import ColossalAIStrategy

    from shardwise import lightning, pytorch_lightning

    assert ColossalAIStrategy is lightning.ColossalAIStrategy and ColossalAIPrecisionPlugin().precision == "16-mixed"
    raises(ValueError, "precision='8-mixed'", lambda: ColossalAIPrecisionPlugin("8-mixed"))
    strategy = ColossalAIStrategy(precision_plugin=ColossalAIPrecisionPlugin())
    assert type(strategy.precision_plugin) is ColossalAIPrecisionPlugin and strategy.format.scaled
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightning" else find(name))
    monkeypatch.delitem(sys.modules, "shardwise.lightning_colossalai")
    assert import_module("shardwise.lightning_colossalai").ColossalAIStrategy is pytorch_lightning.ColossalAIStrategy


def stored(checkpoint: dict[str, Any]) -> Any:
    """Return the user state of a checkpoint after a round trip through JSON."""
    tensors: dict[str, torch.Tensor] = {}
    data = json.loads(json.dumps(tree.encode(pack(checkpoint), tensors, "user_state"), allow_nan=False))
    return tree.decode(data, tensors)


def restored(value: Any) -> Any:
    return unpack(stored({"own": {"a": [value]}}))["own"]["a"][0]


def test_state_without_the_weights() -> None:
    given = {"epoch": 3, "loops": {"a": {1: (2, float("inf"))}}, "callbacks": {"best": torch.tensor(0.5)}}
    state = stored({**given, "state_dict": {"w": torch.ones(3)}, "optimizer_states": [{}]})
    assert left_out(state) == [] and unpack(state) == given
    assert unpack({"something": "else"}) == {} == unpack(None)


VALUES = [
    {1, (2, "a"), frozenset({3})},
    frozenset({"x"}),
    Path("runs/one"),
    b"\x00\xffone",
    b"",
    torch.bfloat16,
    torch.device("cuda", 1),
    argparse.Namespace(lr=0.1, sizes=[1, (2,)], path=Path("x")),
    SimpleNamespace(a={"b": {3}}),
    Counter({"a": 2, 7: 3}),
    {2: "b", None: {(1, "c"): 4}},
    {"$tensor": "a"},
]


@pytest.mark.parametrize("value", VALUES, ids=[f"{type(value).__name__}-{n}" for n, value in enumerate(VALUES)])
def test_values_of_other_classes_are_restored(value: Any) -> None:
    found = restored(value)
    assert type(found) is type(value) and found == value


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "float64", "int16", "bool", "complex64"])
def test_arrays(kind: str, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    np.testing.assert_array_equal(restored(value), value, strict=True)


class Odd(Enum):
    ONE = 1


NO_DATA = {"Odd": Odd.ONE, "Linear": nn.Linear(1, 1), "function": lambda: None, "type": nn.ReLU, "object": object()}


@pytest.mark.parametrize("named", NO_DATA)
def test_objects_are_refused_or_left_out(named: str) -> None:
    value = NO_DATA[named]
    told = rf"entry callbacks/mine/a/1 is a \S*{named} .*checkpoint_io"
    raises(TypeError, told, pack, {"callbacks": {"mine": {"a": [0, value]}}})
    raises(TypeError, r"entry own is a builtins\.dict", pack, {"own": {(1, value): 2}})
    state = stored({"epoch": 1, "hyper_parameters": {"deep": {"odd": value}, "width": 3}, "hparams_type": Odd})
    assert unpack(state) == {"epoch": 1, "hyper_parameters": {"width": 3}}
    assert left_out(state) == ["hyper_parameters/deep", "hparams_type"]


def test_a_checkpoint_cannot_name_other_classes() -> None:
    for name, value in (("os.system", "true"), ("type", "subprocess.Popen"), ("torch.dtype", "load")):
        entry = {CLASS: name, "value": value}
        raises(ValueError, "unknown to this", unpack, {"lightning": {"plain": {"epoch": [entry]}}})
