"""What ColossalAI's names are given that they cannot take: each says what it was given, in words of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
from torch import nn

from shardwise.colossalai import shardformer
from shardwise.compat import UnsupportedName, alias_table
from shardwise.core.engine.module import ShardedModule

NOT_OURS = {id(ShardedModule), id(nn.LayerNorm)}
"""A plugin makes the one, for ``isinstance`` of programs; the other is torch's."""
BARE = "^'(NoneType|object)' object|has no attribute|argument must be|argument after|not supported between"
"""What Python says where something inside could not use a value."""


def required(found: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    seen = set[int]()
    for module, entries in alias_table("colossalai").names.items():
        if module.startswith("legacy"):
            continue
        home = import_module(".".join(filter(None, ("shardwise.colossalai", module))))
        for name in entries:
            try:
                found = getattr(home, name)
            except (UnsupportedName, ImportError):
                continue
            if callable(found) and id(found) not in seen | NOT_OURS and required(found):
                seen.add(id(found))
                yield f"{module}.{name}", found


@pytest.mark.parametrize("value", [None, object()], ids=["none", "object"])
def test_no_name_fails_inside_for_what_it_was_given(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    tried, bare = 0, {}
    for name, function in functions():
        tried += 1
        parameters = required(function)
        args = [value for each in parameters if each.kind is not each.KEYWORD_ONLY]
        try:
            function(*args, **{each.name: value for each in parameters if each.kind is each.KEYWORD_ONLY})
        except Exception as error:
            if isinstance(error, TypeError | AttributeError) and re.search(BARE, str(error)):
                bare[name] = repr(error)
    assert tried > 40 and not bare, (tried, bare)


@pytest.mark.parametrize("name", sorted(name for name in shardformer.layer.__all__ if name[0].isupper()))
def test_layers_by_themselves(name: str) -> None:
    kind = getattr(shardformer.layer, name)
    try:
        make = kind.from_native_module
    except UnsupportedName as error:
        assert name in str(error)
        return
    with pytest.raises(TypeError, match=r"module=None: give the layer, an nn\.Module"):
        make(None, process_group=None)
    layer = nn.LayerNorm(4)
    if name in ("LayerNorm", "RMSNorm", "DropoutForParallelInput", "DropoutForReplicatedInput"):
        assert make(layer, process_group=None) is layer
        with pytest.raises(NotImplementedError, match="skip_bias_add=True is not available yet"):
            make(layer, skip_bias_add=True)
        return
    with pytest.raises(NotImplementedError, match=rf"{name}\.from_native_module\(LayerNorm\) makes no layer by itself"):
        make(layer, None)
    with pytest.raises(NotImplementedError, match=rf"{name}\(\.\.\.\) makes no layer by itself: name the class in a"):
        kind(4, 4)
