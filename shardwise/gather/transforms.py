"""Engine work while a ``torch.func`` transform runs the model: gathers are no part of what is transformed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from shardwise.torch_internals import in_transform, without_transforms

__all__ = ["outside_transforms"]


def outside_transforms() -> AbstractContextManager[None]:
    """Inside the block tensors are made and written as if there were no transform."""
    return without_transforms() if in_transform() else nullcontext()
