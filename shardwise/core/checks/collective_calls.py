"""A decorator for rare calls that every rank has to make, so that errors of waiting ranks can name them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from shardwise.core.base.tensors import ordinary_tensors

F = TypeVar("F", bound=Callable[..., Any])


# See shardwise.core.comm.activity: the call is published in a store, since ranks that are out of sync cannot exchange
# it.
def collective(what: str, mesh_of: Callable[[Any], Any] = attrgetter("_mesh")) -> Callable[[F], F]:
    """Decorate a method, so that ``what`` is this rank's activity while it runs.

    See :meth:`shardwise.core.mesh.Mesh.doing`. The results are ordinary tensors, also in inference mode.

    Args:
        what: the call, for messages.
        mesh_of: returns the mesh of the method's object.
    """

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with ordinary_tensors(), mesh_of(self).doing(what):
                return method(self, *args, **kwargs)

        return called  # type: ignore[return-value]

    return wrap
