"""Calls that every rank has to make and few make often: what they are is told where ranks do not meet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shardwise.core.base.tensors import ordinary_tensors

F = TypeVar("F", bound=Callable[..., Any])


# See shardwise.core.comm.activity: it is told to a store, since ranks that do not meet cannot exchange it.
def collective(what: str) -> Callable[[F], F]:
    """Decorate a method of an object with a ``_mesh``: while it runs, this rank is doing ``what``; see
    :meth:`shardwise.core.mesh.Mesh.doing`. Its results are ordinary tensors, also in inference mode."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with ordinary_tensors(), self._mesh.doing(what):
                return method(self, *args, **kwargs)

        return called  # type: ignore[return-value]

    return wrap
