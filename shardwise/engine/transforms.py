"""Engine work while a ``torch.func`` transform runs the model: gathers are no part of what is transformed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = ["in_transform", "outside_transforms"]


def in_transform() -> bool:
    """Whether ``torch.func`` (vmap, grad, jvp, ...) transforms what runs in this thread now."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[None]:
    """Inside the block tensors are made and written as if there were no transform."""
    return _suspended() if in_transform() else nullcontext()


@contextmanager
def _suspended() -> Iterator[None]:
    with temporarily_clear_interpreter_stack():
        yield
