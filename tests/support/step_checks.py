"""Comparisons after a step of tensor-parallel and pipeline models: numbers by name, and a rank's parts of
parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.session import Session
from shardwise.testing import assert_close


def assert_numbers(found: Mapping[str, float | None], expected: Mapping[str, float], rtol: float, what: str) -> None:
    wide = [{key: torch.tensor(n, dtype=torch.float64) for key, n in each.items()} for each in (found, expected)]
    assert_close(*wide, rtol, what)


def assert_parts(
    session: Session, values: Mapping[str, Tensor], what: str, name_of: Callable[[Any], str] | None = None
) -> set[str]:
    """Assert that this rank has its part of each of ``values``, by parameter name; return the names."""
    facts = session._engine.shards.layout.facts
    names = [fact.names[0] if name_of is None else name_of(p) for fact, p in zip(facts, session.params, strict=True)]
    with session.module.gathered():
        held = {name: param.detach() for name, param in zip(names, session.params, strict=True)}
        parts = {n: values[n] if f.part is None else f.part.of(values[n]) for n, f in zip(names, facts, strict=True)}
        assert_close(held, parts, 1e-9, what)
    return set(names)
