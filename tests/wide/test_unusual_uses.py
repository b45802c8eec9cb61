"""Unusual uses of PyTorch under every plan, on two ranks in fp64: they train as in plain PyTorch, or raise an error
that names them.

The losses, gradients and norms of every step, and the parameters, are compared. Other files test what autograd saves
and transforms (tests/ranks/shards/test_saved_parameters), activation checkpointing
(tests/ranks/shards/test_engine_checkpointing), and modules that write to tensors in forward
(tests/ranks/checks/test_parameter_edits).

Quick: every use under one of two plans. Full: every use under both. Campaign: under every plan.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint_sequential

from shardwise.session import Session, build
from shardwise.testing import PlainRun, run_ranks, train_plain
from tests.parity import sharded
from tests.parity.sharded import OPTIMIZERS, Run, Setting, Tolerance, check_runs, train_case
from tests.support.engine_setup import one_mesh
from tests.support.models import Batch, ModelCase, make_batches
from tests.support.sets import campaign, full
from tests.wide.architectures import PLANS, plan_of

WIDTH, STEPS, RANKS = 6, 3, 2


class Net(nn.Module):
    """A first layer, four blocks with a normalization, a head; ``reentrant``: how the blocks are checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.reentrant is None:
            return self.head(self.blocks(x))
        return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.reentrant))


def normalized() -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.first)
    parametrizations.orthogonal(net.head)
    return net


def square(value: Tensor) -> Tensor:
    return value.square().mean()


def hooks_on_modules(model: Net) -> None:
    model.blocks.register_forward_hook(lambda _, args, out: out * 2 + args[0])
    model.blocks.register_full_backward_hook(lambda _, into, out: (into[0] * 3,))
    model.head.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))


def hook_after_accumulation(model: Net) -> None:
    def half(p: Tensor) -> None:
        p.grad = None if p.grad is None else p.grad * 0.5

    model.first.weight.register_post_accumulate_grad_hook(half)


@dataclass(frozen=True)
class Use:
    """One unusual use.

    Attributes:
        build: builds the module.
        loss: of the sharded module or the user's own, and a batch.
        prepare: called with the user's own module, once, after sharding.
        refused: words that have to be in the error, which the use may raise instead of training; empty: it has to
            train.
    """

    build: Callable[[], nn.Module] = Net
    loss: Callable[[Any, Tensor], Tensor] = lambda model, x: square(model(x))
    prepare: Callable[[Any], object] = lambda model: None
    refused: tuple[str, ...] = ()

    def prepared_loss(self, model: Any, batch: Batch) -> Tensor:
        own = model.unwrap() if hasattr(model, "unwrap") else model
        if not hasattr(own, "is_prepared"):
            own.is_prepared = True
            self.prepare(own)
        return self.loss(model, *batch["args"])


USES: dict[str, Use] = {
    "sequential": Use(lambda: Net(reentrant=False)),
    "sequential reentrant": Use(lambda: Net(reentrant=True)),
    "hook on a parameter": Use(
        prepare=lambda model: model.first.weight.register_hook(lambda gradient: gradient * 2), refused=("first.weight",)
    ),
    "hook after accumulation": Use(prepare=hook_after_accumulation, refused=("grad",)),
    "hooks on modules": Use(prepare=hooks_on_modules),
    "parametrized": Use(normalized),
}


def _inputs(generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return {"args": (torch.randn(4, WIDTH, generator=generator, dtype=dtype),)}


def case_of(name: str) -> ModelCase:
    use = USES[name]
    return ModelCase(name, lambda dtype: use.build().to(dtype), _inputs, use.prepared_loss, "an odd use")


def setting_of(name: str, plan: str, directory: str = "") -> Setting:
    given = plan_of(plan, directory)
    return Setting(model=name, plan=given, world_size=RANKS, steps=STEPS, dtype=torch.float64)


@functools.cache
def plainly(name: str) -> PlainRun:
    case = case_of(name)
    batches = make_batches(case, RANKS, STEPS, 1, torch.float64)
    return train_plain(lambda: case.factory(torch.float64), case.loss, OPTIMIZERS["adamw"], batches)


def train_uses(names: list[str], plan: str, directory: str) -> list[Run | str]:
    """Run the uses one after the other on this rank, each on its own mesh, since an error may leave one unusable."""
    found: list[Run | str] = []
    sessions: list[Session] = []

    def built(*given: Any) -> Session:
        sessions.append(build(*given))
        return sessions[-1]

    torch.set_num_threads(1)
    for name in names:
        setting = setting_of(name, plan, directory)
        ignored, recorded = warnings.catch_warnings(action="ignore"), mock.patch.object(sharded, "build", built)
        with ignored, recorded, one_mesh(setting.plan) as mesh:
            try:
                found.append(train_case(case_of(name), setting, mesh))
            except Exception as error:  # the caller decides which errors are allowed
                found.append(f"{type(error).__name__}: {error}")
                sessions[-1].close()
    return found


FIRST, OTHERS = list(USES)[::2], list(USES)[1::2]


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        pytest.param("zero2", FIRST, id="zero2-first"),
        pytest.param("zero3", OTHERS, id="zero3-others"),
        *full(pytest.param("zero2", OTHERS, id="zero2-others"), pytest.param("zero3", FIRST, id="zero3-first")),
        *campaign(*(pytest.param(p, list(USES), id=p) for p in PLANS if p not in ("zero2", "zero3"))),
    ],
)
def test_unusual_uses_train_as_plain_or_are_refused(plan: str, names: list[str], tmp_path: Path) -> None:
    results = run_ranks(RANKS, train_uses, names, plan, str(tmp_path), timeout=60.0 + 4.0 * len(names))
    for name, *runs in zip(names, *results, strict=True):
        errors = [run for run in runs if isinstance(run, str)]
        if errors:
            assert len(errors) == RANKS and USES[name].refused, (name, errors)
            assert all(word in error for error in errors for word in USES[name].refused), (name, errors)
        else:
            check_runs(runs, plainly(name), setting_of(name, plan), Tolerance(rtol=1e-10, share=1e-3))
