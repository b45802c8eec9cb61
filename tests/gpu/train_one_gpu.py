"""A program that trains on one device, given as its argument or ``auto``, and prints backend, device and losses."""

import sys

import torch
import torch.distributed as dist

from shardwise.core.mesh.launch import init_distributed, shutdown
from shardwise.plan import zero
from shardwise.session import build


def main() -> None:
    """Train a small classifier in bf16 for twenty steps."""
    device = init_distributed(None if sys.argv[1] == "auto" else sys.argv[1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    session = build(model, torch.optim.AdamW(model.parameters(), lr=1e-2), zero(3, torch.bfloat16), device=device)
    rows, labels = torch.randn(64, 16, device=device), torch.randint(4, (64,), device=device)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(session.module(rows).float(), labels)
        session.backward(loss)
        session.optimizer.step()
        session.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print(dist.get_backend() if dist.is_initialized() else "alone", device.type, losses[0], losses[-1])
    session.close()
    shutdown()


if __name__ == "__main__":
    main()
