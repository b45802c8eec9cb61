"""Devices that are told what to do and not waited for."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.base.device.streams import copy_ahead, page_locked, record_event

__all__ = ["Later", "runs_ahead"]


def runs_ahead(device: torch.device) -> bool:
    """Whether the host is ahead of ``device``: reading a value there waits for all that was queued before."""
    return device.type != "cpu"


class Later:
    """A value on its way from a device to the host, where it is read when it has long arrived.

    Args:
        value: of one element; what is written to it later does not count.
    """

    def __init__(self, value: Tensor) -> None:
        on_gpu = value.is_cuda
        self._host = (
            page_locked(value.shape, value.dtype)
            if on_gpu
            else torch.empty(value.shape, dtype=value.dtype, device="cpu")
        )
        copy_ahead(self._host, value)
        self._arrived = record_event(value.device) if on_gpu else None

    def value(self) -> bool | float:
        """The value; waits for what was queued before it was asked for, and nothing later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.item()
