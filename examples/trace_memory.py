"""Draw the memory of one training step, with and without activation checkpointing: ``python examples/trace_memory.py``.

``shardwise trace examples/trace_memory.py:build --optimizer AdamW`` draws the same from the command line.
"""

from functools import partial
from pathlib import Path

import torch
from demo.model import ByteGPT, ModelSize
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from shardwise import draw, dump_memory_stats, timeline_text, trace_memory


def build() -> tuple[nn.Module, Tensor, object]:
    """A model, a batch, and the loss of both."""
    model = ByteGPT(ModelSize(width=128, depth=4, heads=4, context=128))
    return model, torch.randint(256, (8, 129)), loss


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


if __name__ == "__main__":
    model, batch, _ = build()
    optimizer = torch.optim.AdamW(model.parameters())
    plain = trace_memory(model, batch, loss, optimizer=optimizer)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    frugal = trace_memory(model, batch, loss, optimizer=optimizer)

    print(timeline_text(plain))
    print(f"peak {plain.peak_bytes / 2**20:.1f} MiB, with checkpointing {frugal.peak_bytes / 2**20:.1f} MiB")
    Path("trace.svg").write_text(draw(plain, "ByteGPT, one step"), encoding="utf-8")
    dump_memory_stats(plain, "trace.txt")
