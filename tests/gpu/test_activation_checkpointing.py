"""deepspeed.checkpointing with a GPU: activations leave it, come back, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.deepspeed import checkpointing

WIDTH, ROWS, LAYERS = 256, 4096, 6
ONE = WIDTH * ROWS * 4


def step(device: torch.device, checkpoint: Any) -> tuple[list[Tensor], int]:
    """Output and gradients, and the bytes that the forward pass left on the GPU (0 on a CPU)."""
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()).to(device) for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH, device=device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    for block in blocks:
        x = checkpoint(block, x)
    left = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
    x.square().mean().backward()
    grads = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
    return [x.detach(), *grads, torch.rand(3, device=device)], left


@pytest.mark.parametrize("contiguous", [False, True])
def test_activations_wait_on_the_host(device_type: str, contiguous: bool) -> None:
    device = torch.device(device_type)
    expected, _ = step(device, lambda block, x: block(x))
    try:
        checkpointing.configure(None, contiguous_checkpointing=contiguous, synchronize=True)
        kept, on_device = step(device, checkpointing.checkpoint)
        checkpointing.configure(None, contiguous_checkpointing=contiguous, checkpoint_in_cpu=True)
        for _ in range(2):
            moved, on_host = step(device, checkpointing.checkpoint)
            assert checkpointing.held_bytes()["host"] == 0
        assert checkpointing.held_bytes()["to_host"] == 2 * LAYERS * ONE
    finally:
        checkpointing._PRESENT.__init__()  # type: ignore[misc]
    assert len(expected) == 2 + 2 * LAYERS
    for name, found in (("kept", kept), ("moved", moved)):
        assert all(map(torch.equal, found, expected)), name
    if device.type == "cuda":
        # One output is there in both cases; the other activations are on the device, or not.
        assert on_device - on_host >= (LAYERS - 1) * ONE - 2**20
        assert on_host <= 3 * ONE
