"""What stands for a value that its rank has not says so whatever it is read by."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.utils.dlpack

from shardwise.core.checks.state_dict_guard import AbsentTensor

READS: dict[str, Callable[[AbsentTensor], object]] = {
    "an operation": lambda value: value + 1,
    "a copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "numpy": lambda value: value.numpy(),
    "asarray": np.asarray,
    "its storage": lambda value: value.untyped_storage(),
    "from_dlpack": torch.from_dlpack,
    "numpy's from_dlpack": np.from_dlpack,  # type: ignore[dict-item]
}


@pytest.mark.parametrize("read", READS)
def test_every_read_says_why(read: str) -> None:
    with pytest.raises(RuntimeError, match="another rank has it"):
        READS[read](AbsentTensor.of(torch.zeros(3, 4), "another rank has it"))


def test_one_in_c_is_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(AbsentTensor.of(torch.zeros(3, 4), ""))
