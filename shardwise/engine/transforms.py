"""Engine work while a ``torch.func`` transform runs the model: gathers are no part of what is transformed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["in_transform", "outside_transforms"]


def in_transform() -> bool:
    """Whether ``torch.func`` (vmap, grad, jvp, ...) or ``make_fx`` transforms what runs in this thread now."""
    functorch: object = torch._C._functorch.peek_interpreter_stack()
    return functorch is not None or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def outside_transforms() -> AbstractContextManager[None]:
    """Inside the block tensors are made and written as if there were no transform."""
    return _suspended() if in_transform() else nullcontext()


@contextmanager
def _suspended() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield
