"""``booster.Accelerator``: a device by its name, and models that are moved there."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Accelerator"]


class Accelerator:
    """Moves models to a device.

    Args:
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: another one.
    """

    def __init__(self, device: str) -> None:
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r}: give 'cpu' or 'cuda'")
        self.device = device

    def bind(self) -> None:
        """This process' device is the one that it was launched for: nothing to do."""

    def configure_model(self, model: nn.Module) -> nn.Module:
        """The model, on the device."""
        return model.to(torch.device(self.device))
