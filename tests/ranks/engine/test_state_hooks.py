"""Models whose hooks change their ``state_dict()``: states and loads as in plain torch, or an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.core.checkpoint import Checkpointer, TorchRun
from shardwise.core.mesh import init_distributed
from shardwise.testing import run_ranks
from tests.support.sets import full

State = dict[str, Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


class Adapted(nn.Module):
    """Saves its adapter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.register_state_dict_post_hook(Adapted.drop)

    @staticmethod
    def drop(_: nn.Module, state: State, prefix: str, _metadata: Any) -> None:
        for name in ("base.weight", "base.bias"):
            state.pop(prefix + name)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.base(x))


def adapted(seed: int) -> Adapted:
    torch.manual_seed(seed)
    return Adapted()


def values(model: nn.Module) -> State:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def left_out(stage: int) -> list[State]:
    init_distributed()
    found, pretrained = [], values(adapted(7))
    for strict in (True, False):
        model = adapted(1)
        with pytest.raises(RuntimeError, match=r"base.weight"):  # as plain torch, which misses it, too
            model.load_state_dict(model.state_dict())
        session = shardwise.shard(model, sgd(model), stage=stage)
        state = session.module.state_dict()
        assert sorted(state) == ["adapter.bias", "adapter.weight"]
        with pytest.raises(RuntimeError, match=r"missing \['base.weight', 'base.bias'\]"):
            session.module.load_state_dict(state)
        assert session.module.load_state_dict(state, strict=False).missing_keys == ["base.weight", "base.bias"]
        keys = session.module.load_state_dict(pretrained, strict=strict)
        assert not keys.missing_keys and not keys.unexpected_keys
        with pytest.raises(RuntimeError, match=r"base.weight: \(3, 4\) instead of \(4, 4\)"):
            session.module.load_state_dict(pretrained | {"base.weight": torch.ones(3, 4)})
        with session.module.gathered():
            found.append(values(model))
        session.close()
    return found


@pytest.mark.parametrize("stage", [3, *full(1)])
def test_parameters_that_a_hook_leaves_out_can_be_loaded(stage: int) -> None:
    """By the names that they have in the model; strict loading misses them."""
    plain = adapted(1)
    plain.load_state_dict(values(adapted(7)))
    for states in run_ranks(2, left_out, stage):
        for state in states:
            assert state.keys() == values(plain).keys()
            assert all(torch.equal(value, state[name]) for name, value in values(plain).items())


class Counts(nn.Linear):
    """Makes a number of its own into a tensor for each state, and takes it back; what it has beside comes with it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.count, self.pair = 0, torch.zeros(2)
        self.register_buffer("bank", torch.zeros(3))

    def state_dict(self, *args: Any, **kwargs: Any) -> State:
        found: State = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        found |= {prefix + "count": torch.tensor(self.count), prefix + "pair": self.pair.clone()}
        return found

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        if prefix + "count" in state:
            self.count, self.pair = int(state.pop(prefix + "count")), state.pop(prefix + "pair").clone()
            assert prefix + "bank" in state
        super()._load_from_state_dict(state, prefix, *rest)


def counting(taken: bool, count: int) -> nn.Sequential:
    """``taken``: by the module's own method, and by a hook of the whole; otherwise a state has what nobody takes."""
    torch.manual_seed(count)
    layer = Counts() if taken else nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    model.total = layer.count = count  # type: ignore[assignment]
    if taken:
        layer.pair, layer.bank = layer.pair + count, layer.bank + count

    def save(_: nn.Module, state: State, prefix: str, _metadata: Any) -> None:
        state[prefix + "1.total"] = torch.tensor([float(model.total)])

    def take(_: nn.Module, state: State, prefix: str, *_rest: Any) -> None:
        if prefix + "1.total" in state:
            model.total = int(state.pop(prefix + "1.total"))  # type: ignore[assignment]

    model.register_state_dict_post_hook(save)
    if taken:
        model.register_load_state_dict_pre_hook(take)
    return model


def resumed(stage: int, directory: str) -> None:
    init_distributed()
    for taken in (True, False):
        model = counting(taken, 5)
        path = f"{directory}/{stage}/{taken}"
        session = shardwise.shard(model, sgd(model), stage=stage)
        state = {name: value.clone() for name, value in session.module.state_dict().items()}
        session.checkpoints.save(path, "a")
        session.close()
        for way in ("state", "checkpoint", "torch"):
            model = counting(taken, 1)
            if way == "torch":
                saver = Checkpointer(TorchRun(model, sgd(model)))
                load: Any = saver.load
            else:
                session = shardwise.shard(model, sgd(model), stage=stage)
                load = session.checkpoints.load
            before = session.module.state_dict() if way != "torch" else {}
            if taken:
                session.module.load_state_dict(state) if way == "state" else load(path, "a")
                layer = model[1]
                assert (layer.count, layer.pair.tolist(), layer.bank.tolist()) == (5, [5.0] * 2, [5.0] * 3), way
                assert model.total == 5, way
            else:
                with pytest.raises(ValueError, match=r"1.total.*(is recomputed|a hook of the model saves this)"):
                    session.module.load_state_dict(state) if way == "state" else load(path, "a")
            after = session.module.state_dict() if way != "torch" else {}
            for name, value in after.items():  # a load that is refused has changed nothing
                assert torch.equal(value, state[name] if taken else before[name]), (way, name)
            if way != "torch":
                session.close()


@pytest.mark.parametrize("stage", [3, *full(1)])
def test_what_modules_make_for_a_state_is_given_back_to_them(tmp_path: Path, stage: int) -> None:
    run_ranks(2, resumed, stage, str(tmp_path))
