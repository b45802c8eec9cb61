"""Small blocks in a row: what they compute is nothing beside what a rank does around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Blocks"]


class Block(nn.Module):
    """Two layers and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """``count`` blocks and a head: (rows, width) -> (rows, 2)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(count)), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)
