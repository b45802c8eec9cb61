"""Architectures of transformers with random weights, under every plan on two ranks, compared with plain PyTorch.

The losses of both ranks, every gradient, the norms, and the parameters after two steps are compared in fp64. Some
models compute parts of themselves in fp32, which a training with weights off by a rounding error shows; these agree to
that accuracy: :data:`~tests.wide.architectures.ROUNDED`.
"""

from pathlib import Path

import pytest

from tests.support.sets import full

pytest.importorskip("transformers")

from shardwise.testing import RankError, run_ranks
from tests.wide.architectures import PLANS, check_kind, oracle, train_kind
from tests.wide.zoo import TYPES

SHOWN = 700
FEW = {"llama": ("zero2", "zero3", "disk"), "t5": ("budget0", "gemini"), "mixtral": ("zero3", "gemini_auto")}


def wrong(kind: str, plans: tuple[str, ...], folder: Path) -> list[str]:
    """Return the differences from plain PyTorch; if a rank fails, run each plan alone."""
    oracle(kind)  # before the ranks, so that their time-out does not include it
    try:
        return check_kind(kind, plans, run_ranks(2, train_kind, kind, plans, str(folder), timeout=120.0))
    except RankError as error:
        if len(plans) == 1:
            return [f"{kind} under {plans[0]}: {str(error)[:SHOWN]}"]
        return [found for plan in plans for found in wrong(kind, (plan,), folder)]


@pytest.mark.parametrize("kind", [*full("llama", "t5"), "mixtral"])
def test_architecture_trains_as_plain(kind: str, tmp_path: Path) -> None:
    found = wrong(kind, FEW[kind], tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", TYPES)
def test_every_architecture_under_every_plan(kind: str, tmp_path: Path) -> None:
    found = wrong(kind, tuple(PLANS), tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.campaign
def test_most_architectures_compute_in_fp64() -> None:
    exact = [kind for kind in TYPES if oracle(kind).error < 1e-10]
    print(f"{len(exact)} of {len(TYPES)}")
    assert len(exact) > len(TYPES) / 3
