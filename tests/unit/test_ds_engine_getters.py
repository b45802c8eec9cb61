"""What an engine answers of its configuration, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.deepspeed.engine import ABSENT

GETTERS: dict[str, Any] = {
    "bfloat16_enabled": False,
    "fp16_enabled": False,
    "fp16_master_weights_and_gradients": False,
    "get_model_parallel_rank": 0,
    "get_sequence_parallel_group": None,
    "get_tensor_parallel_rank": 0,
    "loss_scale": 0.0,
    "mics_shard_size": -1,
    "optimizer_params": {"lr": 0.1},
    "scheduler_name": None,
    "steps_per_print": None,
    "torch_autocast_enabled": False,
    "zero_allow_untested_optimizer": True,
    "zero_hpz_partition_size": 1,
    "zero_max_live_parameters": 1_000_000_000,
    "zero_offload_optimizer": None,
    "zero_optimization_stage": 1,
    "zero_reduce_bucket_size": 70,
}


@pytest.fixture
def engine() -> Iterator[Any]:
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 70},
    }
    made = deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]
    yield made
    made.destroy()


def test_getters_of_keys(engine: Any) -> None:
    found = {name: getattr(engine, name)() for name in GETTERS}
    assert found == GETTERS


def test_what_is_not_here_says_what_to_do(engine: Any) -> None:
    for name in ABSENT:
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"{name!r} of DeepSpeed's engine is not available: "):
            getattr(engine, name)
    for name in ("zero_nothing", "fp16_nothing"):
        with pytest.raises(AttributeError, match="nor has the Linear in it"):
            getattr(engine, name)
