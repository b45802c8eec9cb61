"""How fast the machine is now: a virtual machine may slow down and recover while nothing of its own runs."""

from __future__ import annotations

import time

import torch

__all__ = ["machine_pace"]

SIDE = 1024
COPIED_BYTES = 1 << 27
ROUNDS = 5


def machine_pace() -> float:
    """Of products and copies on all cores, the geometric mean of their speeds (about 1 second); only ratios matter."""
    left = torch.ones(SIDE, SIDE)
    source, target = torch.ones(COPIED_BYTES // 4), torch.zeros(COPIED_BYTES // 4)
    speeds = []
    for work in (lambda: torch.mm(left, left), lambda: target.copy_(source)):
        work()
        began = time.perf_counter()
        for _ in range(ROUNDS):
            work()
        speeds.append(ROUNDS / (time.perf_counter() - began))
    return float((speeds[0] * speeds[1]) ** 0.5)
