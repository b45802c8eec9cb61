"""State with shapes of its own, in one process: moved away and back, asked for by parameter; and what modules save.

State in lists, tuples and dicts: flat and back without loss, and what cannot be told to other ranks.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.core.checkpoint import Checkpointer, TorchRun
from shardwise.core.optim.nested_state import flat, mapped, misfits, nested, outline, tensors_of
from shardwise.nn.optimizer import Lamb
from shardwise.plan import zero


def trained(make: Any, away_before: int | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    session = shardwise.shard(model, make(model.parameters()), plan=zero(2, torch.bfloat16))
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        if step == away_before:
            session.offload_states()
            session.reload_states()
        session.backward(session.module(x).float().square().mean())
        assert session.optimizer is not None
        session.optimizer.step()
    found = dict(session.module.state_dict())
    session.close()
    return found


@pytest.mark.parametrize("make", [Lamb, torch.optim.Adafactor])
def test_matrices_are_matrices_again(make: Any) -> None:
    straight = trained(make, None)
    for step in (0, 1):
        moved = trained(make, step)
        assert all(torch.equal(value, straight[name]) for name, value in moved.items())


@pytest.mark.parametrize(("make", "matrix"), [(Lamb, True), (torch.optim.Adafactor, False)])
def test_state_of_one_parameter(make: Any, matrix: bool) -> None:
    model = nn.Linear(6, 8)
    session = shardwise.shard(model, make(model.parameters()), plan=zero(2))
    session.backward(session.module(torch.randn(4, 6)).square().mean())
    assert session.optimizer is not None
    session.optimizer.step()
    one = session.one(session.params[0])
    assert one is not None and one.state("step") == 1
    if matrix:
        one.set_state("exp_avg", torch.ones(8, 6))
        assert torch.equal(one.state("exp_avg"), torch.ones(8, 6))  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match=r"'row_var' .* another shape than the parameter"):
            one.state("row_var")
    session.close()


class Metric(nn.Module):
    """A tensor and a list that the module saves as copies, a number, and two that only go together."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen, self.count = torch.tensor(0.0), list[torch.Tensor](), 0
        self.low, self.high = torch.zeros(2), torch.zeros(2)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name in ("total", "seen", "count", "low", "high"):
            found[prefix + name] = copy.deepcopy(getattr(self, name))
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "total" in state:
            self.total, self.seen = state.pop(prefix + "total"), state.pop(prefix + "seen")
            self.count, self.low, self.high = (state.pop(prefix + name) for name in ("count", "low", "high"))
        super()._load_from_state_dict(state, prefix, *rest)


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.metric = nn.Linear(3, 2), Metric()
        self.scale = torch.zeros(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale  # no buffer, and nothing of the module's takes it back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def test_what_modules_save_is_loaded(tmp_path: Path) -> None:
    """As plain torch loads it, by a state dict and from a checkpoint."""
    model = Measured()
    session = shardwise.shard(model, torch.optim.SGD(model.layer.parameters(), lr=0.1), stage=2)
    metric = model.metric
    metric.total, metric.seen, metric.count = torch.tensor(7.0), [torch.ones(2), torch.ones(3)], 5
    metric.low, metric.high = torch.ones(2), torch.full((2,), 2.0)
    model.scale.fill_(3.0)
    state = copy.deepcopy(dict(session.module.state_dict()))
    session.checkpoints.save(str(tmp_path))
    session.close()
    for way in ("state", "checkpoint", "torch"):
        model = Measured()
        optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
        if way == "torch":
            Checkpointer(TorchRun(model, optimizer)).load(str(tmp_path))
        else:
            session = shardwise.shard(model, optimizer, stage=2)
        if way == "state":
            session.module.load_state_dict(state)
        elif way == "checkpoint":
            session.checkpoints.load(str(tmp_path))
        found = model.metric
        assert model.scale.tolist() == [3, 3], way
        assert (found.total.item(), found.count, [each.tolist() for each in found.seen]) == (7, 5, [[1, 1], [1, 1, 1]])
        assert (found.low.tolist(), found.high.tolist()) == ([1, 1], [2, 2])
        session.close()


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
