"""The model whose checkpoints are damaged: small, with everything that a checkpoint can contain."""

import torch
from torch import nn


class Small(nn.Module):
    """A tied weight, a buffer, an empty parameter, and a parameter of dtype ``narrow``."""

    def __init__(self, narrow: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(7, 30), nn.Linear(7, 30)
        self.second.weight = self.first.weight
        self.narrow = nn.Parameter(torch.randn(5, dtype=narrow))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.tensor([7, 8]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number in the dtype of ``x``."""
        return (self.first(x) * self.second(x)).sum() + self.narrow.to(x.dtype).sum() + self.nothing.to(x.dtype).sum()
