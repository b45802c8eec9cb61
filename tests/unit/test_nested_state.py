"""State in lists, tuples and dicts: flat and back without loss, and what cannot be told to other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.core.optim.nested_state import flat, mapped, misfits, nested, outline, tensors_of

ONE, TWO, THREE = torch.ones(2, 2), torch.zeros(3), torch.tensor(4.0)
ENTRIES: list[dict[str, Any]] = [
    {},
    {"step": 3, "exp_avg": ONE, "none": None, "name": "x"},
    {"GG": [ONE, [], TWO], "Q": (THREE, 1), "step": 2},
    {"deep": {"a/b": [{3: (ONE, None)}, True, 1.5], "a.b": TWO}, "GG.0": 7},
    {"empty": {}, "also": [], "no tensors": [1, (2, "x")]},
]


def plain(value: Any) -> Any:
    return mapped(value, lambda each: ("tensor", each.tolist()) if isinstance(each, torch.Tensor) else each)


@pytest.mark.parametrize("entry", ENTRIES)
def test_nested_values_go_flat_and_back(entry: dict[str, Any]) -> None:
    made = flat(entry)
    for value in made.values():
        # Beside tensors only what JSON has: no tuples, and keys that are texts.
        assert isinstance(value, torch.Tensor) or not list(tensors_of(value))
    assert [id(each) for each in tensors_of(made)] == [id(each) for each in tensors_of(entry)]
    again = nested(made)
    assert plain(again) == plain(entry) and list(again) == list(entry)
    assert flat(made) == made  # flat is flat
    assert list(outline(made)) == list(outline(entry)) == list(entry)


def test_what_is_no_plain_value_is_told_with_its_path() -> None:
    assert list(misfits({"a": [ONE, (1, {"b": {1, 2}})]}, "Q")) == ["Q['a'][1][1]['b'] is a set ({1, 2})"]
    assert not list(misfits(ENTRIES, "every"))
