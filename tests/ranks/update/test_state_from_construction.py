"""Optimizers with state from their constructor, or from earlier steps, under every plugin and front-end, against plain
torch.

Adagrad creates its sums in its constructor (and in newer versions of torch again in a step). :class:`Anchored` creates
all of its state there, and one value is the parameter's at that time.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import OwnOptimizer
from tests.support.sets import full

RANKS, ROWS = 2, 6
State = dict[str, Any]


class Anchored(OwnOptimizer):
    """Momentum, and a pull towards the parameter's value when the optimizer was built; no step creates state."""

    def __init__(self, params: Any, lr: float = 0.1, pull: float = 0.3) -> None:
        super().__init__(params, lr, pull=pull)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"count": torch.tensor(0.0), "mean": torch.zeros_like(p), "home": p.detach().clone()}

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["count"] += 1
        state["mean"].mul_(0.5).add_(p.grad)
        p.add_(state["mean"] + group["pull"] * (p - state["home"]), alpha=-group["lr"])


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, initial_accumulator_value=0.2),
    "anchored": lambda m: Anchored(
        [{"params": list(m.parameters())[:2], "pull": 0.1}, {"params": list(m.parameters())[2:]}]
    ),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> State:
    """Train on all rows of each step; return the final values."""
    for step in steps:
        model(rows(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


PLUGINS: dict[str, Callable[[], Plugin | None]] = {
    "none": lambda: None,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "fsdp on the host": lambda: TorchFSDPPlugin(cpu_offload=CPUOffload(offload_params=True)),
    "zero1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", placement_policy="static"),
    "gemini auto": lambda: GeminiPlugin(precision="fp32", placement_policy="auto"),
}


def under_plugin(name: str, kind: str, before: int, root: str) -> list[State]:
    """Return the result of training, and of resuming from a checkpoint in its middle."""
    found = []
    for middle in (None, 1):
        model = net()
        optimizer = MAKERS[kind](model)
        train_plainly(model, optimizer, [50] * before)
        booster = Booster(plugin=PLUGINS[name]())
        boosted, wrapped, *_ = booster.boost(model, optimizer)
        rank, size = (0, 1) if booster.plugin is None else booster.plugin.data_parallel()
        for step in range(3):
            if step == middle:
                booster.load_checkpoint(root, boosted, wrapped)
            booster.backward(boosted(rows(step).chunk(size)[rank]).square().mean(), wrapped)
            wrapped.step()
            wrapped.zero_grad()
            if step == 0 and middle is None:
                booster.save_checkpoint(root, boosted, wrapped)
        found.append({key: value.clone() for key, value in boosted.state_dict().items()})
        booster.close()
    return found


QUICK = [(name, tuple(MAKERS)[number % 2]) for number, name in enumerate(PLUGINS)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*QUICK, *full(*((name, kind) for name in PLUGINS for kind in MAKERS if (name, kind) not in QUICK))],
)
def test_every_plugin_trains_and_resumes_as_plain_torch(name: str, kind: str, tmp_path: Path) -> None:
    for before in (0, 2) if name in ("fsdp", "zero2") else (0,):
        model = net()
        expected = train_plainly(model, MAKERS[kind](model), [*[50] * before, *range(3)])
        for found in run_ranks(
            1 if name == "none" else RANKS, under_plugin, name, kind, before, str(tmp_path / str(before))
        ):
            for state in found:
                assert_close(state, expected, 1e-5, f"{name} {kind} {before}")
