"""A backward pass fails inside a gradient accumulation: that the passes before it go with it is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, Breaks, adam, check, data, one_mesh, run_plain, seeded, sharded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = Breaks.apply(torch.tanh(self.layers[1](x)))
        return self.layers[2](x)


def two_passes(model: nn.Module, rank: int, step: int):  # type: ignore[no-untyped-def]
    for index in range(2):
        yield model(data(rank, step, index)).square().mean(), False


def said_of(name: str, good: int, then: str, direct: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Warnings of a step in which a pass fails after ``good`` ones, and is made again; the state after it."""
    model, found = seeded(Net), list[str]()
    with one_mesh(PLANS[name]) as mesh, sharded(model, adam(model), PLANS[name], mesh) as session:

        def one(index: int) -> None:
            loss = session.module(data(mesh.rank, 0, index)).square().mean()
            loss.backward() if direct else session.backward(loss)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index in range(good):
                one(index)
            Breaks.armed = True
            with pytest.raises(ArithmeticError, match="on purpose"):
                one(5)
            Breaks.armed = False
            if then == "zero_grad":
                session.optimizer.zero_grad()
            for index in range(2):
                one(index)
            session.optimizer.step()
            found += [str(each.message) for each in caught if "backward pass failed" in str(each.message)]
        return found, session.module.state_dict()


CASES = [
    (name, good, then, direct, ranks)
    for place, name in enumerate(("ddp", "zero1", "zero2", "zero3"))
    for turn, (good, then) in enumerate([(0, "forward"), (1, "forward"), (2, "forward"), (2, "zero_grad")])
    for direct, ranks in [((place + turn) % 2 == 0, 1 + (place + turn // 2) % 2)]
]


@pytest.mark.parametrize(("name", "good", "then", "direct", "ranks"), CASES)
def test_passes_that_go_with_a_failed_one_are_told(name: str, good: int, then: str, direct: bool, ranks: int) -> None:
    found = run_ranks(ranks, said_of, name, good, then, direct)
    for said, _ in found:
        if good and then == "forward":
            (only,) = said
            assert f"those of {good} earlier pass{'es' * (good > 1)} of this step" in only
            assert "Make all passes of the step again" in only
        else:
            assert said == []
    # Both passes were made again, and nothing of those before is left.
    check([state for _, state in found], run_plain(Net, two_passes, ranks, 1), name)
