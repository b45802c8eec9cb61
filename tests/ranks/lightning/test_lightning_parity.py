"""Every strategy and stage against Lightning's own ``ddp`` on the same model and data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from lightning_cases import KINDS, MAIN, STOCK, Ended, Recipe, check_same, rows, run
from torch import nn

from shardwise.testing import PlainRecipe, assert_close, run_ranks, train_plain
from tests.support.lightning_setup import HIDDEN, OUT, WIDTH, Toy, toy

RANKS = 2
RECIPES: dict[str, Recipe] = {
    "accumulate_1": Recipe(),
    "accumulate_2": Recipe(accumulate=2),
    "accumulate_3": Recipe(accumulate=3, schedule=True),
    "clip_norm": Recipe(clip=0.05, optimizer="sgd"),
    "clip_value": Recipe(clip=0.01, algorithm="value", optimizer="sgd", accumulate=2),
    "accumulate_3_clip_norm": Recipe(accumulate=3, clip=0.05, algorithm="norm"),
}


@pytest.fixture(scope="module")
def oracle() -> Callable[[str], list[Ended]]:
    """Results of the stock strategy by recipe, each computed once."""

    @cache
    def result(name: str) -> list[Ended]:
        return run_ranks(RANKS, run, STOCK, RECIPES[name])

    return result


# Every place where things lie once, with accumulation and clipping together, and of the engine plans what an old
# strategy had wrong. test_lightning_deepspeed.py and test_lightning_fully_sharded.py have more of theirs.
DEFAULT = {
    "colossalai": {"accumulate_1", "accumulate_3", "clip_norm", "clip_value"},
    "deepspeed_1": {"accumulate_3", "accumulate_3_clip_norm"},
    "deepspeed_2": {"accumulate_3"},
    "deepspeed_3": {"accumulate_3", "clip_value"},
    "fully_sharded": {"accumulate_2", "clip_norm"},
}
assert set().union(*DEFAULT.values()) == set(RECIPES)
# Each engine plan, each recipe, and a plan whose parameters and state are on the host.
QUICK = [
    ("colossalai", "accumulate_1"),
    ("deepspeed_1", "accumulate_3_clip_norm"),
    ("deepspeed_2", "accumulate_3"),
    ("deepspeed_3", "clip_value"),
    ("deepspeed_3_offload", "accumulate_3_clip_norm"),
    ("fully_sharded", "accumulate_2"),
    ("fully_sharded", "clip_norm"),
]
assert {kind for kind, _ in QUICK} >= set(MAIN) and {name for _, name in QUICK} == set(RECIPES)
FULL = [(kind, name) for kind in KINDS for name in DEFAULT.get(kind, {"accumulate_3_clip_norm"})]


@pytest.mark.parametrize(("kind", "name"), rows(product(KINDS, RECIPES), QUICK, FULL))
def test_equals_stock_ddp(kind: str, name: str, oracle: Callable[[str], list[Ended]]) -> None:
    """Weights within 1e-6, as many steps, the same numbers logged.

    Uneven epochs: 5 batches, so accumulating 2 or 3 leaves some over at each epoch's end, which ddp steps on. DeepSpeed
    under Lightning lost them at stages 1 and 3 and kept them at stage 2; FairScale clipped by each rank's own norm.
    """
    recipe = RECIPES[name]
    found = run_ranks(RANKS, run, kind, recipe)
    check_same(found, oracle(name))
    steps = recipe.epochs * -(-recipe.batches // recipe.accumulate)
    assert all(one.global_step == one.expected_steps == steps for one in found)


def test_the_recipes_differ(oracle: Callable[[str], list[Ended]]) -> None:
    """So that a strategy that ignored clipping or accumulation could not pass."""
    seen = [oracle(name)[0].weights["net.0.weight"] for name in RECIPES]
    assert min(float((a - b).abs().max()) for i, a in enumerate(seen) for b in seen[:i]) > 1e-3


# ---- 16 bits: against the same arithmetic in one process


def _plain_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)
    )


def _plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = (each.to(next(model.parameters()).dtype) for each in batch)
    return nn.functional.mse_loss(model(inputs).float(), targets.float())


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class _Notes(Toy):
    """Keeps the batches that it was given."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append([each.clone() for each in batch])
        return super().training_step(batch, batch_idx)


def _noted() -> list[Any]:
    model = toy(body=_Notes)
    run(STOCK, Recipe(epochs=1), model)
    return model.batches


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    """What Lightning gives the ranks in an epoch, as ``[step][micro-batch][rank]``."""
    return [[list(ranks)] for ranks in zip(*run_ranks(RANKS, _noted), strict=True)]


def _true_bf16(batches: list[Any]) -> dict[str, torch.Tensor]:
    """Without masters: bf16 parameters, updated in bf16 by the mean of the ranks' bf16 gradients."""
    model = _plain_net().bfloat16()
    optimizer = _plain_sgd(model)
    for ((first, second),) in batches:
        sums = []
        for batch in (first, second):
            _plain_loss(model, batch).backward()  # type: ignore[no-untyped-call]
            sums.append([p.grad.float() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
        for param, one, other in zip(model.parameters(), *sums, strict=True):
            param.grad = ((one + other) / RANKS).bfloat16()
        optimizer.step()
        model.zero_grad()
    return dict(model.state_dict())


# Each plan once, and each way of the engine (with masters or without) with both.
HALVES = {("colossalai", "bf16-true"), ("deepspeed_1", "bf16-mixed"), ("deepspeed_2", "bf16-true")}
HALVES |= {("deepspeed_3", "bf16-mixed"), ("fully_sharded", "bf16-mixed"), ("fully_sharded", "bf16-true")}
assert {kind for kind, _ in HALVES} == set(MAIN)


# With masters, without, and DeepSpeed, which has them either way.
QUICK_HALVES = [("colossalai", "bf16-true"), ("deepspeed_2", "bf16-true"), ("fully_sharded", "bf16-mixed")]


@pytest.mark.parametrize(("kind", "precision"), rows(product(MAIN, ("bf16-mixed", "bf16-true")), QUICK_HALVES, HALVES))
def test_bf16_is_really_bf16(kind: str, precision: str, batches: list[Any]) -> None:
    """Under DDPFullySharded of Lightning 1.x bf16 trained in fp32, silently; "mixed" of DeepSpeed is no autocast."""
    recipe = Recipe(epochs=1, optimizer="sgd", precision=precision)
    mixed = precision == "bf16-mixed"
    if mixed:
        plain = PlainRecipe(param_dtype=torch.bfloat16)
        expected = train_plain(_plain_net, _plain_loss, _plain_sgd, batches, plain).masters[-1]
    else:
        expected = {name: value.float() for name, value in _true_bf16(batches).items()}
    for one in run_ranks(RANKS, run, kind, recipe):
        found = {name.removeprefix("net."): value for name, value in one.weights.items()}
        assert_close(found, expected, 1e-3 if mixed else 2e-2, f"{kind} {precision}")
        halves = all(torch.equal(v, v.bfloat16().float()) for v in found.values())
        # DeepSpeed's engine keeps fp32 masters in any 16-bit precision.
        assert halves is not (mixed or kind.startswith("deepspeed")), "which masters are fp32"
