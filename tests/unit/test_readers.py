"""Whoever holds a parameter is seen, however Python and torch count, and no longer than it holds it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.shards.chunk import is_read, python_holders

WARM = 3000
"""Calls after which an interpreter that specialises code while it runs has done so."""


def _suspended(held: object) -> Iterator[object]:
    yield None
    yield held


def _begun(held: object) -> Iterator[object]:
    generator = _suspended(held)
    next(generator)
    return generator


def _closed_over(held: object) -> Callable[[], object]:
    return lambda: held


HOLD: dict[str, Callable[[nn.Parameter], Any]] = {
    "list": lambda param: [param],
    "dict": lambda param: {"a": param},
    "attribute": lambda param: SimpleNamespace(kept=param),
    "closure": _closed_over,
    "partial": lambda param: functools.partial(print, param),
    "generator": _begun,
    "itself": lambda param: param,
    "graph": lambda param: (param * param).sum(),
    "graph of a view": lambda param: (param.view(2) ** 3).sum(),
}


@pytest.mark.parametrize("way", HOLD)
@pytest.mark.parametrize("warm", [False, True])
def test_who_holds_a_parameter_is_seen_as_long_as_it_does(way: str, warm: bool) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    holders = python_holders(params)
    for _ in range(WARM if warm else 1):
        assert not is_read(params, holders, False)
    held = HOLD[way](params[1])
    assert is_read(params, holders, False)
    del held
    assert not is_read(params, holders, False)


def test_an_argument_and_a_variable_of_a_function_that_runs_are_seen() -> None:
    params = [nn.Parameter(torch.ones(2))]
    holders = python_holders(params)

    def keeps(param: nn.Parameter) -> bool:
        return is_read(params, holders, False)

    def passes() -> bool:
        mine = params[0]
        return keeps(mine)

    # An assertion would hold what it shows.
    found = {(keeps(params[0]), passes(), is_read(params, holders, False)) for _ in range(WARM)}
    assert found == {(True, True, False)}
