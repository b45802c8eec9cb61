"""Tests of ``gather_for_references``: callbacks that mix a model into its reference model get gathered parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

pytest.importorskip("transformers")


class Callback:
    """A callback as TRL's ``SyncRefModelCallback``."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def sync_target_model(self, model: Any, target_model: Any, alpha: float) -> None:
        self.seen.append([*OPEN, f"{alpha}"])


OPEN: list[str] = []


class Sharded:
    def __init__(self, name: str) -> None:
        self.module, self.name = self, name

    @contextmanager
    def gathered(self, write_back: bool) -> Iterator[None]:
        OPEN.append(f"{self.name} {write_back}")
        yield
        OPEN.pop()


def gather_in(callback: Any, session_of: Any) -> None:
    from shardwise.huggingface.trainer import gather_for_references

    gather_for_references([callback], session_of)


def sessions(name: str, *models: nn.Module) -> Any:
    """Return a ``session_of`` for an accelerator with these models."""
    return {model: Sharded(f"{name}{index}") for index, model in enumerate(models)}.get


def test_callback_gathers_the_models_of_the_current_trainer() -> None:
    (a, b), (c, d) = ([nn.Linear(1, 1) for _ in range(2)] for _ in range(2))
    first, second = sessions("first", a, b), sessions("second", c, d)
    callback = Callback()
    for session_of, model, target in ((first, a, b), (second, c, d), (second, c, d), (first, a, b)):
        gather_in(callback, session_of)
        callback.sync_target_model(model, target, 0.5)
    one, two = ([f"{name}0 False", f"{name}1 True", "0.5"] for name in ("first", "second"))
    assert callback.seen == [one, two, two, one]


def test_method_set_on_the_callback_is_wrapped() -> None:
    model, target = nn.Linear(1, 1), nn.Linear(1, 1)
    callback: Any = Callback()
    seen: list[list[str]] = []
    for _ in range(2):  # the callback may replace its method again
        callback.sync_target_model = lambda model, target_model, alpha: seen.append([*OPEN, f"{alpha}"])
        gather_in(callback, sessions("it", model, target))
        callback.sync_target_model(model, target, alpha=0.25)
    assert seen == [["it0 False", "it1 True", "0.25"]] * 2 and callback.seen == []
