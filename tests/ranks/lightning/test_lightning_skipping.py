"""A ``training_step`` that returns ``None``: right on one device, refused by Lightning on several.

ColossalAI and DeepSpeed refused it on one as well.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning_cases import STOCK, TWO, Ended, Recipe, check_same, run
from torch import Tensor

from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, since, toy
from tests.support.sets import full

RANKS = 2


class Skipping(Toy):
    """Leaves out every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 2 else self.loss(batch)


def skipped(kind: str) -> list[Ended]:
    """Lightning calls the optimizer for those, too, which has no gradients then; also within an accumulation."""
    found = []
    for accumulate in (1, 2):
        recipe = Recipe(accumulate=accumulate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(run(kind, recipe, toy(body=Skipping)))
    return found


@pytest.mark.parametrize("kind", ["colossalai", *full("deepspeed_1", "fully_sharded")])
def test_a_training_step_may_return_none_on_one_device(kind: str) -> None:
    (expected,), (found,) = (run_ranks(1, skipped, each) for each in (STOCK, kind))
    for ours, plain in zip(found, expected, strict=True):
        check_same([ours], [plain])


def skipped_by_one(kind: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        run(kind, Recipe(), toy(body=Skipping))
    return str(caught.value)


def test_a_training_step_may_not_return_none_on_several() -> None:
    """Lightning's own rule, since 2.3."""
    if not since(2, 3):
        pytest.skip("Lightning 2.2 has no such rule")
    assert all("returning None in distributed training" in text for text in run_ranks(RANKS, skipped_by_one, TWO[1]))
