"""What an engine answers of things that no configuration can turn on here, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.facts import ABSENT

OFF: dict[str, Any] = {
    "amp_enabled": False,
    "amp_params": False,
    "autotuning_enabled": False,
    "checkpoint_writer_enabled": False,
    "compile_zero_optimization_stage": False,
    "data_efficiency_enabled": False,
    "eigenvalue_enabled": False,
    "elasticity_enabled": False,
    "get_pld_theta": None,
    "is_deepcompile_active": False,
    "is_elastic_model_parallel_supported": None,
    "pld_enabled": False,
    "pld_params": {},
    "random_ltd_config": {},
    "swap_tensor_config": None,
    "uses_parallelization_pass_only": False,
    "zenflow_config": None,
    "zeropp_loco_param": None,
}
ALONE: dict[str, Any] = {
    "checkpoint_serialization_enabled": None,
    "get_model_parallel_rank": 0,
    "get_sequence_parallel_group": None,
    "get_tensor_parallel_rank": 0,
    "graph_harvesting": False,
    "mics_shard_size": -1,
}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


@pytest.fixture
def engine() -> Iterator[Any]:
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    made = deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]
    yield made
    made.destroy()


def test_what_is_off_and_what_one_process_has(engine: Any) -> None:
    found = {name: getattr(engine, name)() for name in OFF | ALONE}
    assert found == OFF | ALONE
    data = TensorDataset(torch.zeros(2))
    assert engine.is_map_style_dataset(data) and not engine.is_iterable_style_dataset(data)
    assert engine.is_iterable_style_dataset(Stream()) and not engine.is_map_style_dataset(Stream())


def test_what_is_not_here_says_what_to_do(engine: Any) -> None:
    for name in ("pld_theta", "eigenvalue_tol", "autotuning_metric", "zero_grad_hooks", *ABSENT):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"{name!r} of DeepSpeed's engine is not available: "):
            getattr(engine, name)
