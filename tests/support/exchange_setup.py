"""A recorder of the host-side exchanges between ranks, and a rank that fails alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from shardwise.core.comm import Group
from shardwise.plan import Plan, zero
from shardwise.testing import assert_close
from tests.support.engine_setup import adam, data, run_plain, seeded, sharded

GLOO = zero(3).but(shared_memory=False)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Record the purposes of host-side exchanges inside this context."""
    purposes: list[str] = []

    def telling(name: str) -> Any:
        original = getattr(Group, name)

        def tell(group: Group, given: Any, purpose: str = "", *args: Any, **named: Any) -> Any:
            purposes.append(purpose)
            return original(group, given, purpose, *args, **named)

        return tell

    with mock.patch.multiple(Group, exchange=telling("exchange"), summarize=telling("summarize")):
        yield purposes


def fails_and_goes_on(plan: Plan) -> list[str]:
    model, ends = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])), []
    with sharded(model, adam(model), plan) as session:
        for step in range(3):
            while not ends or ends[-1] != f"made {step}":
                try:
                    session.optimizer.zero_grad()
                    out = session.module(data(session.mesh.rank, step))
                    if step == 1 and session.mesh.rank and "ArithmeticError" not in ends:
                        raise ArithmeticError("broken on purpose")
                    session.backward(out.square().mean())
                    session.optimizer.step()
                    ends.append(f"made {step}")
                except (ArithmeticError, RuntimeError) as error:
                    ends.append(type(error).__name__)
                    assert len(ends) < 9, ends
        state = session.module.state_dict()
    plain = run_plain(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), _plain_step, session.mesh.size, 3)
    assert_close(state, plain, 1e-9, "after a failure")
    return ends


def _plain_step(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    yield model(data(rank, step)).square().mean(), False
