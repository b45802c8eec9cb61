"""What the tests of DeepSpeedStrategy share. Called inside a rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from shardwise.strategies.deepspeed import DeepSpeed
from shardwise.strategies.namespace import LIGHTNING, Namespace, build

RANKS = 2
BUCKET = 60  # elements, so that the small model has several chunks
Options = dict[str, Any]


def strategy(ns: Namespace = LIGHTNING, **arguments: Any) -> Any:
    if "config" not in arguments:
        arguments = {"reduce_bucket_size": BUCKET, **arguments}
    return build(ns, DeepSpeed, "strategies.ddp.DDPStrategy", "DeepSpeedStrategy")(**arguments)


def rank() -> int:
    return torch.distributed.get_rank()


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """The texts of warnings inside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]
