"""Optimizers whose step replaces a parameter's memory (``.data``, ``set_``, ``swap_tensors``), compared with plain
PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.comm import PeerError
from shardwise.plan import ByNumel, Plan, zero
from tests.support.early_setup import counting
from tests.support.engine_setup import OwnOptimizer, check, data, one_mesh, plain_steps, seeded, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.steps import train_sharded
from tests.support.tier_setup import small_tiles, tiers

STEPS = 3
Group = dict[str, Any]
State = dict[str, Any]
Update = Callable[[nn.Parameter, Group, State], None]


class Own(OwnOptimizer):
    """An optimizer with a function that updates a parameter."""

    whole_tensors = False

    def __init__(self, params: Any, function: Update) -> None:
        super().__init__(params)
        self.function = function

    def update(self, param: Any, group: dict[str, Any]) -> None:
        self.function(param, group, self.state[param])


def new(param: nn.Parameter, group: Group) -> Tensor:
    assert param.grad is not None
    return param - group["lr"] * param.grad


def assigned(param: nn.Parameter, group: Group, _state: State) -> None:
    param.data = new(param, group)


def filled(param: nn.Parameter, group: Group, _state: State) -> None:
    param.set_(new(param, group))  # type: ignore[call-overload]


def swapped(param: nn.Parameter, group: Group, _state: State) -> None:
    other = nn.Parameter(new(param, group))
    torch.utils.swap_tensors(param, other)


def in_turn(param: nn.Parameter, group: Group, state: State) -> None:
    """Update in place and by new memory, in turn."""
    state["count"] = state.get("count", 0) + 1
    if state["count"] % 2:
        param.add_(param.grad, alpha=-group["lr"])  # type: ignore[arg-type]
    else:
        param.data = new(param, group)


def turned(param: nn.Parameter, group: Group, _state: State) -> None:
    """Give a square matrix a transposed view of its memory."""
    param.copy_(new(param, group))
    if param.dim() == 2 and param.shape[0] == param.shape[1]:
        param.data = param.data.t()


UPDATES: dict[str, Update] = {each.__name__: each for each in (assigned, filled, swapped, in_turn, turned)}
WHOLE = ("turned",)
"""Updates that need full tensors."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    made = Own(model.parameters(), UPDATES[name])
    made.whole_tensors = name in WHOLE
    return made


def plans(directory: str) -> dict[str, Plan]:
    return {
        "zero2": zero(2),
        "straddling": zero(3).but(packing=ByNumel(chunk_numel=50)),
        "disk": zero(3).but(tiers=tiers("s_disk", directory)),
        "early_host": zero(2).but(update="backward", tiers=tiers("s_host", directory)),
    }


@on_ranks(2, timeout=300.0)
def test_shards_follow_replaced_memory(tmp_path: Path) -> None:
    """Run each update under two plans, except full-tensor updates with a disk."""
    names, chosen = list(UPDATES), plans(str(tmp_path))
    cases = [(name, plan) for at, name in enumerate(names) for plan in (list(chosen) * 2)[at % 4 :][:2]]
    cases = [(name, plan) for name, plan in cases if name not in WHOLE or plan != "disk"]
    with small_tiles(30), one_mesh(zero(3)) as mesh, counting() as counts:
        for name, plan in cases:
            model, plain = seeded(net), seeded(net)
            state = train_sharded(model, optimizer(model, name), chosen[plan], STEPS, mesh=mesh)
            check([state], plain_steps(plain, optimizer(plain, name), STEPS), f"{name}, {plan}", 1e-11)
        assert counts["updates"]


def grows(param: nn.Parameter, group: Group, _state: State) -> None:
    param.data = new(param, group).repeat(2)


@on_ranks(2)
def test_update_of_another_shape_is_an_error_on_every_rank() -> None:
    model = seeded(net)
    with sharded(model, Own(model.parameters(), grows), zero(2)) as session:
        session.backward(session.module(data(0, 0)).square().mean())
        raises((RuntimeError, PeerError), r"gives [02]\.weight values of shape \(", session.optimizer.step)
