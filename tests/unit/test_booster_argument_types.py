"""Every published argument of every plugin refuses what it cannot be, by name and with the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from shardwise.booster import Booster
from shardwise.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

PLUGINS: tuple[Any, ...] = (GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin)
NEEDED: dict[type[Plugin], dict[str, Any]] = {HybridParallelPlugin: {"tp_size": 2, "pp_size": 1}}


class Odd:
    """Nothing that anybody asks for."""

    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_every_argument_names_a_value_that_it_cannot_have(plugin: type[Plugin]) -> None:
    names = [field.name for field in fields(plugin)]
    assert len(names) > 5
    for name in names:
        with pytest.raises((TypeError, ValueError)) as error:
            plugin(**NEEDED.get(plugin, {}) | {name: Odd()})
        assert str(error.value).startswith(name) and "<odd>" in str(error.value), (name, str(error.value))


ODD: list[tuple[type[Plugin], dict[str, Any], str]] = [
    (GeminiPlugin, {"pin_memory": "false"}, "pin_memory='false': give True or False"),
    (GeminiPlugin, {"max_norm": None}, "max_norm=None: give a number"),
    (GeminiPlugin, {"max_norm": "1.0"}, "max_norm='1.0': give a number"),
    (GeminiPlugin, {"max_prefetch": -1}, "max_prefetch=-1: give a number of chunks >= 0"),
    (GeminiPlugin, {"max_prefetch": 1.5}, "max_prefetch=1.5: give a whole number"),
    (GeminiPlugin, {"hidden_dim": 7.5}, "hidden_dim=7.5: give a whole number, or None"),
    (GeminiPlugin, {"search_range_m": math.inf}, "search_range_m=inf"),
    (GeminiPlugin, {"min_chunk_size_m": math.nan}, "min_chunk_size_m=nan: give a size > 0"),
    (GeminiPlugin, {"growth_interval": 0.5}, "growth_interval=0.5: give a whole number"),
    (GeminiPlugin, {"extra_dp_size": True}, "extra_dp_size=True: give a whole number"),
    (GeminiPlugin, {"norm_type": math.nan}, "norm_type=nan: give p > 0"),
    (GeminiPlugin, {"chunk_init_device": "gpu"}, "chunk_init_device='gpu': give torch.device, or None"),
    (GeminiPlugin, {"chunk_config_dict": {}}, "chunk_config_dict={}: give {ranks: "),
    (GeminiPlugin, {"chunk_config_dict": [8]}, "chunk_config_dict=[8]: give Mapping"),
    (GeminiPlugin, {"chunk_config_dict": {"2": {"chunk_size": 8}}}, "chunk_config_dict['2']={'chunk_size': 8}: give a"),
    (GeminiPlugin, {"chunk_config_dict": {0: {"chunk_size": 8}}}, "chunk_config_dict[0]={'chunk_size': 8}: give a num"),
    (GeminiPlugin, {"chunk_config_dict": {2: 8}}, "chunk_config_dict[2]=8: give 'chunk_size'"),
    (GeminiPlugin, {"chunk_config_dict": {1: {"chunk_size": 8}, 2: {}}}, "chunk_config_dict[2]={}: give 'chunk_size'"),
    (GeminiPlugin, {"chunk_config_dict": {2: {"chunk_size": "8"}}}, "chunk_config_dict[2]={'chunk_size': '8'}: give a"),
    (GeminiPlugin, {"chunk_config_dict": {2: {"chunk_size": 8, "keep_gathered": "no"}}}, "chunk_config_dict[2]={"),
    (LowLevelZeroPlugin, {"communication_dtype": "bf16"}, "communication_dtype='bf16': give a torch.dtype, or None"),
    (LowLevelZeroPlugin, {"communication_dtype": torch.int8}, "communication_dtype=torch.int8: give a float"),
    (LowLevelZeroPlugin, {"cpu_offload": 2}, "cpu_offload=2: give True or False"),
    (LowLevelZeroPlugin, {"reduce_bucket_size_in_m": math.nan}, "reduce_bucket_size_in_m=nan: give a size > 0"),
    (LowLevelZeroPlugin, {"initial_scale": -1}, "initial_scale=-1.0: give a loss scale > 0"),
    (LowLevelZeroPlugin, {"device_memory": True}, "device_memory=True"),
    (TorchDDPPlugin, {"bucket_cap_mb": "25"}, "bucket_cap_mb='25': give a whole number"),
    (TorchFSDPPlugin, {"sharding_strategy": "FULL_SHARD"}, "sharding_strategy='FULL_SHARD': give ShardingStrategy, or"),
    (TorchFSDPPlugin, {"cpu_offload": True}, "cpu_offload=True: give CPUOffload, or None"),
    (TorchFSDPPlugin, {"mixed_precision": "bf16"}, "mixed_precision='bf16': give MixedPrecision, or None"),
    (TorchFSDPPlugin, {"backward_prefetch": "pre"}, "backward_prefetch='pre': give BackwardPrefetch, or None"),
    (TorchFSDPPlugin, {"auto_wrap_policy": {torch.nn.Linear}}, "auto_wrap_policy={<class"),
]


@pytest.mark.parametrize(("plugin", "given", "message"), ODD, ids=[str(given) for _, given, _ in ODD])
def test_odd_values_are_named(plugin: type[Plugin], given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        plugin(**given)
    assert str(error.value).startswith(message), str(error.value)


def test_what_means_the_same_is_taken() -> None:
    numbers = {"max_prefetch": np.int64(2), "max_norm": np.float32(1.0), "growth_interval": 10.0, "verbose": 0}
    chunks = {np.int64(2): {"chunk_size": 8.0, "keep_gathered": np.bool_(True)}}
    other = GeminiPlugin(**numbers, chunk_config_dict=chunks)
    numbers = {"max_prefetch": 2, "max_norm": 1.0, "growth_interval": 10, "verbose": False}
    usual = GeminiPlugin(**numbers, chunk_config_dict={2: {"chunk_size": 8, "keep_gathered": True}})
    assert other.plan(2) == usual.plan(2) != GeminiPlugin(**numbers).plan(2)
    other = GeminiPlugin(search_range_m=0.5, chunk_init_device="cpu", offload_optim_frac=0)  # type: ignore[arg-type]
    usual = GeminiPlugin(search_range_m=0.5, chunk_init_device=torch.device("cpu"), offload_optim_frac=0.0)
    assert other.plan(2) == usual.plan(2)
    low = LowLevelZeroPlugin(reduce_bucket_size_in_m=0.5, norm_type=math.inf)  # type: ignore[arg-type]
    assert low.plan(2).grad.norm_type == math.inf
    for policy in (ModuleWrapPolicy({torch.nn.Linear}), CustomPolicy(lambda module: False), lambda *given: True):
        fsdp = TorchFSDPPlugin(auto_wrap_policy=policy, ignored_modules=(m for m in ()))
        assert fsdp.auto_wrap_policy is policy
    strategy, prefetch = ShardingStrategy.SHARD_GRAD_OP, BackwardPrefetch.BACKWARD_PRE
    fsdp = TorchFSDPPlugin(sharding_strategy=strategy, backward_prefetch=prefetch, cpu_offload=CPUOffload(True))
    assert (fsdp.sharding_strategy, fsdp.backward_prefetch) == (strategy, prefetch)


OpenOptions = tuple[Booster, torch.nn.Module, torch.optim.Optimizer, Path]
CALLS: list[tuple[Callable[[OpenOptions], Any], str]] = [
    (lambda given: Booster(device="gpu"), "device='gpu': give"),
    (lambda given: Booster(mixed_precision=16), "mixed_precision=16: give"),  # type: ignore[arg-type]
    (lambda given: GeminiPlugin().prepare_dataloader([1, 2], 1, seed="x"), "seed='x': give a whole number"),
    (lambda given: _save(given, keep="2"), "keep='2': give how many"),
    (lambda given: _save(given, keep=1.5), "keep=1.5: give how many"),
    (lambda given: _save(given, keep=True), "keep=True: give how many checkpoints remain (None: all), >= 1"),
    (lambda given: _save(given, keep=0), "keep=0: give how many"),
    (lambda given: _save(given, step=True), "step=True: give a whole number"),
    (lambda given: _save(given, step=-1), "step=-1: give a whole number >= 0"),
    (lambda given: _save(given, use_async="no"), "use_async='no': give True or False"),
    (lambda given: GeminiPlugin().prepare_dataloader([1, 2], 1, seed=10**22), "seed=10000000000000000000000: give a"),
    (lambda given: GeminiPlugin().prepare_dataloader([1, 2], True), "batch_size=True: give a number of samples"),
    (lambda given: GeminiPlugin().prepare_dataloader([1, 2], 1, shuffle="no"), "shuffle='no': give True or False"),
    (lambda given: given[0].save_model(given[1], given[3] / "m", size_per_shard=math.nan), "size_per_shard=nan: give"),
    (lambda given: given[0].save_model(given[1], given[3] / "m", shard="false"), "shard='false': give True or False"),
    (lambda given: given[0].load_model(given[1], given[3] / "m", num_threads=True), "num_threads=True: give a number"),
    (lambda given: _save(given, step="x"), "step='x': give a whole number"),
    (lambda given: _save(given, tag=5), "tag=5 is not a valid name; use a plain file name"),
    (lambda given: _save_model(given, size_per_shard="5GB"), "size_per_shard='5GB': give a size in MB"),
    (lambda given: _save_model(given, prefix="a/b"), "prefix='a/b': give a part of the files' names"),
]


def _save(given: OpenOptions, **options: Any) -> None:
    booster, model, optimizer, folder = given
    booster.save_checkpoint(folder, model, optimizer, **options)


def _save_model(given: OpenOptions, **options: Any) -> None:
    booster, model, _, folder = given
    booster.save_model(model, folder / "model", shard=True, **options)


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_odd_values_of_the_booster_are_named(call: Callable[[OpenOptions], Any], message: str, tmp_path: Path) -> None:
    model, booster = torch.nn.Linear(4, 4), Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises((TypeError, ValueError)) as error:
        call((booster, boosted, optimizer, tmp_path))
    assert str(error.value).startswith(message) and list(tmp_path.iterdir()) == []
