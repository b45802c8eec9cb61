"""``on_ranks``, which runs a test's body on every rank, and helpers that assert errors."""

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.core.comm import PeerError
from shardwise.testing import run_ranks


def on_ranks(ranks: int | None = None, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test's body on each of so many ranks, with the arguments that pytest passes.

    Args:
        ranks: their number; without it, the test's argument ``ranks``.
        timeout: seconds for all of them.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            count = arguments["ranks"] if ranks is None else ranks
            run_ranks(count, _call_body, body.__module__, body.__name__, arguments, timeout=timeout)

        return test

    return decorate


def _call_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    inspect.unwrap(getattr(import_module(module), name))(**arguments)


def everywhere(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


Kinds = type[BaseException] | tuple[type[BaseException], ...]


def raises(error: Kinds, words: str | None, call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """Assert that ``call`` raises ``error`` with ``words`` (a regular expression; None: any); return its message."""
    __tracebackhide__ = True
    with pytest.raises(error, match=words) as raised:
        call(*args, **kwargs)
    message = str(raised.value)
    del raised  # this frees the frames of the call, and what they reference
    return message


def peer_error(call: Callable[[], object]) -> str:
    """Return the message of the :class:`PeerError` that ``call`` raises on this rank, after all have called it."""
    message = ""
    try:
        call()
    except PeerError as error:
        message = str(error)
    dist.barrier()
    return message


def assert_refused(*rows: tuple[Callable[[], object], str], error: Any = (TypeError, ValueError, RuntimeError)) -> None:
    """Assert that each call raises an error that contains the words next to it."""
    for call, words in rows:
        message = raises(error, None, call)
        assert words in message, (words, message)
