"""Engine work while the program is in a transform of torch: gathers are no part of what is transformed or recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from shardwise.core.base.torch_internals import in_transform, without_transforms

__all__ = ["outside_transforms"]


def outside_transforms() -> AbstractContextManager[None]:
    """Inside the block tensors are made and written as if there were no transform."""
    return without_transforms() if in_transform() else nullcontext()
