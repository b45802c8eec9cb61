"""Hooks that torch keeps where Python's garbage collector does not look."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["weakly"]


# [Note: What keeps an engine alive]
# The model holds its hooks, these hold the engine, and the engine the model: a cycle that Python's collector finds when
# nobody uses any of it. It does not look at the post-accumulate hooks of a parameter: these refer to the engine weakly,
# as does what stands in ``.grad``, or the model would never be freed. Whoever uses the model keeps the engine by its
# other hooks, so the weak ones find it.
def weakly(method: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """``method(*arguments, parameter)``, without keeping the method's object; nothing, once that is gone.

    No collector sees a parameter's post-accumulate hooks: one that refers to the parameter's engine (``arguments``
    included) would keep both for ever.
    """
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(param: Any) -> Any:
        found = owner()
        return None if found is None else function(found, *arguments, param)

    return hook
