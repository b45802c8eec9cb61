"""The random number generators of one rank as plain data, and back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from shardwise.core.base.device import random_state, set_random_state
from shardwise.core.memory.disk.checksum import checksum

__all__ = ["check_generators", "read_generators", "restore_generators", "spread_generators"]


def read_generators(device: torch.device) -> dict[str, Any]:
    """Python's, numpy's, torch's on the CPU and, where ``device`` is a GPU, on it. Tensors and numbers only."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.from_numpy(np.array(words, dtype=np.uint32)), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.array(keys, dtype=np.uint32)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    state["torch"], on_gpu = random_state(device)
    return state if on_gpu is None else {**state, "cuda": on_gpu}


def check_generators(state: dict[str, Any]) -> None:
    """Whether all generators on the CPU would take ``state``, tried on fresh ones.

    Raises:
        TypeError, ValueError, KeyError, RuntimeError: one would not.
    """
    python, numpy = state["python"], state["numpy"]
    random.Random(0).setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = (numpy["name"], numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"])
    np.random.RandomState(0).set_state(keys)
    torch.Generator().set_state(state["torch"])
    if "cuda" in state and not isinstance(state["cuda"], torch.Tensor):
        raise TypeError(f"the state of a GPU's generator is a {type(state['cuda']).__name__}")


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """What :func:`read_generators` gave; without a GPU's where it was saved on a CPU, or the other way round."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state((numpy["name"], numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"]))
    set_random_state(device, (state["torch"], state.get("cuda") if device.type == "cuda" else None))


def spread_generators(state: dict[str, Any], rank: int) -> None:
    """For a rank that the checkpoint does not have: seeds that depend on rank 0's ``state`` and on ``rank``."""
    seed = (checksum(state["torch"].numpy()) + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
