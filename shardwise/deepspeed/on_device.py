"""``deepspeed.OnDevice``: modules built inside have this dtype, and are on this device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """Floating tensors that are made inside get ``dtype`` and ``device``; ``"meta"`` has no memory.

    Args:
        dtype: of modules' parameters and buffers.
        device: where they are.
        enabled: ``False`` does nothing.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            with ExitStack() as stack:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
                stack.enter_context(torch.device(self.device))
                self._stack = stack.pop_all()

    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)
