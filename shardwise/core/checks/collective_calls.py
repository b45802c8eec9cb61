"""A decorator for rare calls that every rank has to make, so that errors of waiting ranks can name them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shardwise.core.base.tensors import ordinary_tensors

F = TypeVar("F", bound=Callable[..., Any])


# See shardwise.core.comm.activity: the call is published in a store, since ranks that are out of sync cannot exchange
# it.
def collective(what: str) -> Callable[[F], F]:
    """Decorate a method of an object with ``_mesh`` or ``sharded_values``, so that ``what`` is this rank's activity
    while it runs.

    See :meth:`shardwise.core.mesh.Mesh.doing`. The results are ordinary tensors, also in inference mode.
    """

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = vars(self).get("sharded_values")
            with ordinary_tensors(), (self._mesh if values is None else values.shards.mesh).doing(what):
                return method(self, *args, **kwargs)

        return called  # type: ignore[return-value]

    return wrap
