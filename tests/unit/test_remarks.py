"""Warnings stand at the user's line, whatever lies between: context managers, base classes, threads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import deepspeed
from shardwise.booster.plugin import GeminiPlugin
from shardwise.core.base.warnings import warn_user

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1, "reduce_bucket_size": 7}}


def _engine() -> Any:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False)[0]


@contextlib.contextmanager
def _in_context() -> Iterator[Any]:
    engine = _engine()
    yield engine
    engine.destroy()


class _Plugin(GeminiPlugin):
    """As programs derive one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)


def _use_context() -> None:
    with _in_context():
        pass


def _use_stack() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_context())


def _use_partial() -> None:
    functools.partial(_engine)().destroy()


def _derive() -> None:
    _Plugin(placement_policy="auto", shard_param_frac=0.5)


@pytest.mark.parametrize(
    ("program", "line_of"),
    [(_use_context, _engine), (_use_stack, _engine), (_use_partial, _engine), (_derive, _Plugin.__init__)],
)
def test_a_warning_stands_at_the_users_line(program: Callable[[], None], line_of: Callable[..., Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    ours = [each for each in caught if "DeepSpeed configuration" in str(each.message) or "effect" in str(each.message)]
    lines, first = inspect.getsourcelines(line_of)
    assert ours, [str(each.message) for each in caught]
    for each in ours:
        assert each.filename == __file__, f"{each.filename}:{each.lineno}"
        assert first <= each.lineno < first + len(lines)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    warn_user("on entry")
    yield


def test_frames_of_libraries_are_passed_over_and_a_line_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with _telling():
                pass
    assert len(caught) == 1 and caught[0].filename == __file__
