"""``register_load_state_dict_post_hook`` of the user's modules: called by every load as plain torch calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardwise
from shardwise.core.mesh import init_distributed
from shardwise.core.parallel.tensor import Architecture, Mlp
from shardwise.plan import TensorPlan, zero
from shardwise.testing import assert_close, run_ranks
from tests.support.sets import full

State = dict[str, Tensor]
LR = 0.5


class Scaled(nn.Module):
    """Keeps the sums of its rows in a buffer that is not saved, and its weight below a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(5, 5)), list[str]()
        self.register_buffer("bound", torch.tensor(9.0))
        self.register_buffer("sums", torch.zeros(5), persistent=False)
        self.register_load_state_dict_post_hook(Scaled.renew)

    def renew(self, _keys: Any) -> None:
        self.calls.append("scaled")
        with torch.no_grad():
            self.weight.clamp_(max=self.bound.item())
            self.sums.copy_(self.weight.float().sum(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.sums.to(x.dtype)


def forgive(model: nn.Module, keys: Any) -> None:
    """Of the whole: behind the layers'."""
    model[1].calls.append("whole")
    for names in keys:
        names[:] = [name for name in names if "forgiven" not in name]


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 5), Scaled())
    model[1].sums.copy_(model[1].weight.detach().sum(1))
    model.register_load_state_dict_post_hook(forgive)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def given(dtype: torch.dtype) -> State:
    """What is loaded: its bound is below some of its weights."""
    model = net(7).to(dtype)
    model[1].bound.fill_(0.5)
    return dict(model.state_dict())


def plain(state: State) -> tuple[State, Tensor, State]:
    """Weights and sums behind the load, the outputs, and weights one step later."""
    model = net(1)
    model.load_state_dict(state)
    assert model[1].calls == ["scaled", "whole"] and float(model[1].weight.detach().max()) == 0.5
    return told(model, model, lambda loss: loss.backward(), sgd(model))


def told(model: nn.Module, wrapped: nn.Module, backward: Callable[..., Any], optimizer: Any) -> Any:
    x = torch.ones(2, 5, dtype=torch.float32)
    out = wrapped(x).float()
    first = {name: value.float().clone() for name, value in wrapped.state_dict().items()}
    first["sums"] = model[1].sums.float().clone()
    backward(out.square().mean())
    optimizer.step()
    return first, out.detach(), {n: v.float().clone() for n, v in wrapped.state_dict().items()}


def sessions(directory: str, precision: str) -> dict[str, Any]:
    """By stage and way of loading; every rank has another model first."""
    state, found = given(torch.float32), dict[str, Any]()
    for stage in (1, 2, 3):
        for way in ("state", "own", "checkpoint"):
            model = net(1)
            session = shardwise.shard(model, sgd(model), stage=stage, precision=precision)
            if way == "checkpoint":
                other = net(7)
                other.load_state_dict(state)
                other[1].weight.data.copy_(state["1.weight"])  # not bounded, as it is in the state
                source = shardwise.shard(other, sgd(other), stage=stage)
                source.checkpoints.save(f"{directory}/{stage}", "a")
                source.close()
                session.checkpoints.load(f"{directory}/{stage}", "a")
            else:
                (session.module if way == "state" else model).load_state_dict(state)
            assert model[1].calls == ["scaled", "whole"], (stage, way, model[1].calls)
            found[f"{stage} {way}"] = told(model, session.module, session.backward, session.optimizer)
            wrong(session, state)
            session.close()
    return found


def wrong(session: shardwise.Session, state: State) -> None:
    """A load that is refused calls none; what hooks do to the names counts; what a hook raises is raised."""
    model = session.model
    model[1].calls.clear()
    fewer = {name: value for name, value in state.items() if name != "0.bias"} | {"forgiven": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"missing \['0.bias'\], unexpected \['forgiven'\]"):
        session.module.load_state_dict(fewer)
    assert not model[1].calls
    keys = session.module.load_state_dict(fewer, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["0.bias"], []) and len(model[1].calls) == 2
    handle = model[0].register_load_state_dict_post_hook(lambda *_: 1)
    with pytest.raises(AssertionError, match="a load_state_dict post-hook of Linear returned a value"):
        session.module.load_state_dict(state)
    handle.remove()
    if session.mesh.rank == 0:  # the other learns of it, and both go on
        model[0].register_load_state_dict_post_hook(lambda *_: {}["lost"])
    with pytest.raises(KeyError if session.mesh.rank == 0 else shardwise.core.comm.PeerError, match="lost"):
        session.module.load_state_dict(state)


def check(found: dict[str, Any], state: State, tolerance: float) -> None:
    before, out, after = plain(state)
    for what, (first, outputs, last) in found.items():
        assert_close(first, before, tolerance, what)
        assert_close({"out": outputs}, {"out": out}, max(tolerance, 1e-6), what)
        assert_close(last, after, max(tolerance, 1e-6), what)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), *full(("fp32", 0.0))])
def test_hooks_of_loads_are_called(tmp_path: Path, precision: str, tolerance: float) -> None:
    """Children first, once a load, on all ranks; at stage 3 with the module's parameters, and what they write stays."""
    for found in run_ranks(2, sessions, str(tmp_path), precision):
        check(found, given(torch.float32), tolerance)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x))


def divided() -> None:
    init_distributed()
    cut = TensorPlan(architecture=Architecture("mine", {"Block": (Mlp(columns=("first",), rows=("last",)),)}))
    small = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=2, n_head=2)
    for model, plan, why in (
        (nn.Sequential(Block(), Block()), zero(1).but(tp=2, tensor=cut), "tensor-parallel"),
        (transformers.GPT2LMHeadModel(small), zero(1).but(pp=2), "pipeline"),
    ):
        model.register_load_state_dict_post_hook(lambda *_: None)
        with pytest.raises(ValueError, match=rf"the model itself \(\w+\) has a hook for loads .*{why} ranks"):
            shardwise.shard(model, sgd(model), plan)


def test_a_hook_that_would_see_a_part_is_refused() -> None:
    run_ranks(2, divided)
