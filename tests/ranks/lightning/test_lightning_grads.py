"""What programs for Lightning do with ``.grad``: its report of norms, logging, and torch's clipping in hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from lightning_cases import STOCK, Ended, Recipe, check_same, kinds, run

from shardwise.testing import run_ranks
from tests.support.lightning_setup import Toy, toy

RANKS = 2


class _Reporting(Toy):
    """Logs the norms of its gradients, clips them by torch, and looks at one before it is dropped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)  # type: ignore[arg-type]
        self.log_dict(norms)  # type: ignore[attr-defined]
        clipped = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)  # type: ignore[attr-defined]
        self.log("clipped", clipped)  # type: ignore[attr-defined]

    def on_after_backward(self) -> None:
        largest = torch.stack([p.grad.abs().max() for p in self.parameters()])  # type: ignore[attr-defined]
        self.log("largest", largest.max())  # type: ignore[attr-defined]


def reported(kind: str) -> Ended:
    return run(kind, Recipe(batches=4, epochs=1, optimizer="sgd"), toy(body=_Reporting))


@pytest.fixture(scope="module")
def expected() -> list[Ended]:
    return run_ranks(RANKS, reported, STOCK, timeout=120.0)


@pytest.mark.parametrize("kind", kinds("deepspeed_3"))
def test_norms_are_reported_and_clipped(kind: str, expected: list[Ended]) -> None:
    assert all(each.metrics["clipped"] > 0.05 and "grad_2.0_norm_total" in each.metrics for each in expected)
    check_same(run_ranks(RANKS, reported, kind, timeout=120.0), expected, most=1e-5)
