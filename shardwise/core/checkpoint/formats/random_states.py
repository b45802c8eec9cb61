"""Random number generators as Hugging Face's Trainer saves them (``rng_state*.pth``), made into what
:mod:`shardwise.core.checkpoint.randomness` restores.

They are files of ``torch.save`` with an array of numpy; records without behaviour stand in for its three functions.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.checkpoint.bounds import reading
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.source import CheckpointDamage

__all__ = ["read_random_states"]


class _Array:
    """Holds what a pickle says of an array."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def words(self) -> np.ndarray[Any, Any]:
        """Its 32-bit numbers."""
        _, shape, dtype, _, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.name not in ("u4", "uint32") or not isinstance(content, bytes):
            raise ValueError(f"no array of 32-bit numbers: {dtype!r:.40}, {shape!r:.40}")
        values = np.frombuffer(content, dtype=f"{'>' if dtype.order == '>' else '<'}u4").astype(np.uint32)
        if shape != values.shape:
            raise ValueError(f"an array of shape {shape} has {len(values)} numbers")
        return values


class _Dtype:
    """Holds what a pickle says of a type of numbers."""

    def __init__(self, *arguments: Any) -> None:
        self.name, self.order = str(arguments[0]) if arguments else "", "<"

    def __setstate__(self, state: Any) -> None:
        self.order = str(state[1]) if isinstance(state, tuple) and len(state) > 1 else "<"


class _Reconstruct:
    """The call that a pickle of an array begins with."""

    def __new__(cls, *_: Any) -> Any:
        return _Array()


STAND_INS: tuple[tuple[type, str], ...] = (
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    (_Reconstruct, "numpy._core.multiarray._reconstruct"),
    (_Reconstruct, "numpy.core.multiarray._reconstruct"),
)


def read_random_states(path: Path) -> dict[str, Any]:
    """The generators of one rank: Python's, numpy's, torch's on the CPU and, where it was saved, on a GPU.

    Raises:
        CheckpointDamage: the file does not hold them, or in another form.
        RefusedPickle: it holds objects of other classes.
    """
    content = load_torch(path, STAND_INS)
    if not isinstance(content, Mapping):
        raise CheckpointDamage(f"{path} holds a {type(content).__name__}, not random number generators")
    with reading(path):
        version, words, gauss = content["python"]
        kind, keys, position, has_gauss, cached = content["numpy"]
        array = keys.words() if isinstance(keys, _Array) else np.asarray(keys, dtype=np.uint32)
        state: dict[str, Any] = {
            "python": {
                "version": version,
                "words": torch.from_numpy(np.array(words, dtype=np.uint32)),
                "gauss": None if gauss is None else float(gauss),
            },
            "numpy": {
                "name": str(kind),
                "keys": torch.from_numpy(array),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": content["cpu"],
        }
        # Tried on generators of our own: what is refused later would be refused after weights were loaded.
        random.Random().setstate((version, tuple(words), gauss))
        np.random.RandomState().set_state((str(kind), array, int(position), int(has_gauss), float(cached)))
        torch.Generator().set_state(content["cpu"])
        gpu = content.get("cuda")
        if isinstance(gpu, list | tuple) and gpu:  # one process with all GPUs: it trains on the first
            gpu = gpu[0]
        if isinstance(gpu, torch.Tensor) and gpu.dtype == torch.uint8 and gpu.dim() == 1:
            state["cuda"] = gpu
    return state
