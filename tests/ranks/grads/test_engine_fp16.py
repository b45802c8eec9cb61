"""fp16 with a dynamic loss scale: when the scale changes, what a skipped step leaves unchanged, and unscaled norms."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan import Plan, ScalerPlan, replicated, zero
from shardwise.testing import run_ranks
from tests.support.engine_setup import scaler as any_scaler
from tests.support.engine_setup import sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.tier_setup import digest

SEQUENCE = [1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1]
SCALES = [1024.0, 512, 256, 256, 256, 128, 128, 128, 128, 256, 256, 128]
"""Scale after each step (1: overflow) with hysteresis 2 and a growth interval of 4."""

PLANS = {
    "ddp": replicated(torch.float16),
    "zero1": zero(1, torch.float16),
    "zero2": zero(2, torch.float16),
    "zero3": zero(3, torch.float16),
    "zero3_gloo": zero(3, torch.float16).but(shared_memory=False),
}


def scaler(**changes: float) -> ScalerPlan:
    return any_scaler(**({"growth_interval": 4, "hysteresis": 2} | changes))


class Pair(nn.Module):
    """A module whose gradient of ``b.weight`` is its input's mean, independent of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x).sum(-1).float().mean() + self.b(y).sum(-1).float().mean()


@dataclass
class Step:
    scale: float
    skipped: bool
    because: str | None
    norm: float | None
    state: dict[str, Tensor]
    optimizer: str


def inputs(overflow: bool, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs with an infinity on the last rank, which only the gradient of ``b.weight`` sees."""
    x, y = torch.full((2, 4), 0.5), torch.full((2, 4), 0.25)
    if overflow and rank == 1:
        y[:, 2] = math.inf
    return x, y


def follow(plan: Plan, overflows: list[int], adam: bool = False) -> list[Step]:
    torch.manual_seed(0)
    model = Pair()
    kind = torch.optim.Adam if adam else torch.optim.SGD
    steps = []
    with sharded(model, kind(model.parameters(), lr=0.125), plan) as session:
        for overflow in overflows:
            session.backward(session.module(*inputs(bool(overflow), session.mesh.rank)))
            session.optimizer.step()
            own = session.optimizer
            steps.append(
                Step(
                    own.scaler.scale,
                    own.last_step_skipped,
                    own.skipped_because,
                    own.get_grad_norm(),
                    session.module.state_dict(),
                    digest(own.state_dict()["state"]),
                )
            )
    return steps


@pytest.mark.parametrize("name", ["ddp", *full("zero1"), "zero2", "zero3", *full("zero3_gloo")])
def test_loss_scale_and_skipped_steps(name: str) -> None:
    plan = PLANS[name].but(scaler=scaler())
    ranks = run_ranks(2, follow, plan, SEQUENCE, True)
    torch.manual_seed(0)
    start = Pair().state_dict()
    for steps in ranks:
        assert [step.scale for step in steps] == SCALES
        assert [step.skipped for step in steps] == [bool(overflow) for overflow in SEQUENCE]
        before, digests = start, [step.optimizer for step in steps]
        for at, step in enumerate(steps):
            if step.skipped:
                assert step.because is not None and "b.weight" in step.because
                assert all(torch.equal(step.state[n], before[n]) for n in before)
                assert at == 0 or digests[at] == digests[at - 1]
            else:
                assert step.because is None
                assert all(not torch.equal(step.state[n], before[n]) for n in before)
                assert digests[at] not in digests[:at]
            before = step.state


def gradient() -> dict[str, Tensor]:
    """Return the mean gradient over the ranks, which is the same in all steps."""
    return {
        "a.weight": torch.full((3, 4), 0.5),
        "a.bias": torch.ones(3),
        "b.weight": torch.full((3, 4), 0.25),
        "b.bias": torch.ones(3),
    }


@pytest.mark.parametrize("name", [*full("ddp"), "zero1", *full("zero2", "zero3"), "zero3_gloo"])
def test_defect_1_gradients_are_unscaled_before_the_scale_grows(name: str) -> None:
    """The scale grows in every second step; the original halves the update there."""
    plan = PLANS[name].but(scaler=scaler(growth_interval=2))
    for steps in run_ranks(2, follow, plan, [0] * 6):
        assert [step.scale for step in steps] == [1024, 2048, 2048, 4096, 4096, 8192]
        torch.manual_seed(0)
        expected = Pair().state_dict()
        for step in steps:
            expected = {n: value - 0.125 * gradient()[n] for n, value in expected.items()}
            for key, value in expected.items():
                torch.testing.assert_close(step.state[key], value, rtol=0, atol=1e-6)


@on_ranks(2)
def test_defect_10_the_scale_and_its_counters_are_part_of_the_state() -> None:
    model, plan = Pair(), PLANS["zero2"].but(scaler=scaler())
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), plan) as session:
        for overflow in (1, 1, 0):
            session.backward(session.module(*inputs(bool(overflow), session.mesh.rank)))
            session.optimizer.step()
        state = session.optimizer.state_dict()
        assert state["scaler"] == {"scale": 512.0, "overflows": 2.0, "good_steps": 1.0}
    model = Pair()
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), plan) as session:
        session.optimizer.load_state_dict(state)
        session.backward(session.module(*inputs(True, session.mesh.rank)))
        session.optimizer.step()
        own = session.optimizer.scaler
        # The third overflow lowers the scale at once, since the state has the count of overflows.
        assert own.state_dict() == {"scale": 256.0, "overflows": 3.0, "good_steps": 0.0}
        raises(ValueError, "loss scale -1", own.load_state_dict, state["scaler"] | {"scale": -1.0})


@pytest.mark.parametrize("name", ["ddp", *full("zero2"), "zero3"])
@on_ranks(2)
def test_direct_backward_under_a_scale_is_an_error(name: str) -> None:
    model = Pair()
    with sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), PLANS[name]) as session:
        for _ in range(2):
            loss = session.module(*inputs(False, session.mesh.rank))
            raises(RuntimeError, r"Call backward\(loss\) of the optimizer", loss.backward)
