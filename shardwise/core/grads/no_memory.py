"""The storage of a tensor that has no memory."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["NoMemory", "without_memory"]


class NoMemory(torch.UntypedStorage):
    """Of no bytes: tools that count, and the compiler, may have it. Its elements are an error, and no empty list."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(without_memory("the storage", "a gradient of a sharded parameter"))

    tolist = data_ptr = clone = cpu = cuda = copy_ = resize_ = _refuse
    __getitem__ = __setitem__ = __iter__ = _refuse


def without_memory(what: str, of: object) -> str:
    """What ``what`` says."""
    return f"{what} of {of}: it has no memory of its own; call clone() on every rank first"
