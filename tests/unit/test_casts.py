"""Casting inside nested containers: floating tensors only, containers keep their class."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.core.engine.casts import cast_floats, map_tensors

Point = namedtuple("Point", "x y")


@dataclass
class Inner:
    tensor: Tensor
    label: str = "kept"
    made: int = field(default=3, init=False)


@dataclass(frozen=True)
class Frozen:
    inner: Inner
    items: list[Tensor]


class Output(OrderedDict[str, Any]):
    """Like a Hugging Face output: a mapping with attributes."""

    def __init__(self, *args: Any, note: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note


def test_only_floating_tensors_change() -> None:
    kept = [torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)]
    values = [*kept, None, 3, 2.5, "text", torch.float32, {1, 2}, torch.ones(2), torch.ones(2, dtype=torch.float64)]
    found = cast_floats(values, torch.bfloat16)
    assert all(found[i] is values[i] for i in range(len(values) - 2))
    assert [t.dtype for t in found[-2:]] == [torch.bfloat16] * 2
    same = torch.ones(2, dtype=torch.bfloat16)
    assert cast_floats(same, torch.bfloat16) is same


def test_containers_keep_their_class_and_are_not_changed() -> None:
    x = torch.ones(2)
    output = Output(a=x, b=(x, [x]), note="here")
    value = {"list": [x], "tuple": (x, 1), "named": Point(x, None), "output": output, "data": Frozen(Inner(x), [x])}
    found = cast_floats(value, torch.float64)
    assert x.dtype == torch.float32 and value["list"][0] is x and output["a"] is x
    assert type(found["tuple"]) is tuple and type(found["named"]) is Point and type(found["list"]) is list
    assert type(found["output"]) is Output and found["output"].note == "here" and list(found["output"]) == ["a", "b"]
    assert type(found["data"]) is Frozen and found["data"].inner.label == "kept" and found["data"].inner.made == 3
    tensors: list[Tensor] = []
    map_tensors(found, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    assert len(tensors) == 8 and all(t.dtype == torch.float64 for t in tensors)


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(3, requires_grad=True)
    cast_floats({"x": x}, torch.float64)["x"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 3
