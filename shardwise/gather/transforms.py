"""Engine work while the program is in a mode of torch: gathers are no part of what is transformed or recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardwise.torch_internals import in_transform, without_transforms

__all__ = ["ordinary_tensors", "outside_transforms"]

_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[None]:
    """Inside the block tensors are made and written as if there were no transform."""
    return without_transforms() if in_transform() else nullcontext()


class _OutsideInference:
    """Neither inference mode nor a graph."""

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for each in self._modes:
            each.__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in reversed(self._modes):
            each.__exit__(*error)


def ordinary_tensors() -> AbstractContextManager[None]:
    """Inside the block no graph is made, and what is made can be written and trained anywhere: made in inference mode,
    arrays and parameters could not be, outside it. Where that is so already, as in most backward passes, it costs
    nothing."""
    if torch.is_inference_mode_enabled():
        return _OutsideInference()
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
