"""Lightning's own entries as data of a native checkpoint: what comes back as it was, what is refused or left out."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.core.base import tree
from shardwise.strategies.entries import CLASS, left_out, pack, unpack


def stored(checkpoint: dict[str, Any]) -> Any:
    """The user state of a checkpoint, after it was on a disk."""
    tensors: dict[str, torch.Tensor] = {}
    data = json.loads(json.dumps(tree.encode(pack(checkpoint), tensors, "user_state"), allow_nan=False))
    return tree.decode(data, tensors)


def restored(value: Any) -> Any:
    return unpack(stored({"own": {"a": [value]}}))["own"]["a"][0]


def test_state_beside_the_weights() -> None:
    given = {
        "epoch": 3,
        "loops": {"a": {1: (2, float("inf"))}},
        "callbacks": {"best": torch.tensor(0.5)},
        "state_dict": {"w": torch.ones(3)},
        "optimizer_states": [{}],
    }
    state = stored(given)
    assert left_out(state) == []
    assert unpack(state) == {key: value for key, value in given.items() if key in ("epoch", "loops", "callbacks")}
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
def test_other_classes_come_back_as_they_were(value: Any) -> None:
    found = restored(value)
    assert type(found) is type(value) and found == value


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "float64", "int16", "bool", "complex64"])
def test_arrays(kind: str, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    found = restored(value)
    assert type(found) is np.ndarray and found.dtype == value.dtype and found.shape == shape
    assert np.array_equal(found, value)


class Odd(Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Odd.ONE, "Odd"),
        (nn.Linear(1, 1), "Linear"),
        (lambda: None, "function"),
        (nn.ReLU, "type"),
        (object(), "object"),
    ],
    ids=["enum", "module", "function", "class", "object"],
)
def test_what_is_no_data_is_refused_or_left_out(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"entry callbacks/mine/a/1 is a \S*{named} .*checkpoint_io"):
        pack({"callbacks": {"mine": {"a": [0, value]}}})
    with pytest.raises(TypeError, match=r"entry own is a builtins\.dict"):
        pack({"own": {(1, value): 2}})
    state = stored({"epoch": 1, "hyper_parameters": {"deep": {"odd": value}, "width": 3}, "hparams_type": Odd})
    assert unpack(state) == {"epoch": 1, "hyper_parameters": {"width": 3}}
    assert left_out(state) == ["hyper_parameters/deep", "hparams_type"]


@pytest.mark.parametrize(
    "entry",
    [
        {CLASS: "os.system", "value": "true"},
        {CLASS: "type", "value": "subprocess.Popen"},
        {CLASS: "torch.dtype", "value": "load"},
    ],
    ids=str,
)
def test_a_checkpoint_cannot_name_other_classes(entry: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown to this"):
        unpack({"lightning": {"plain": {"epoch": [entry]}}})
