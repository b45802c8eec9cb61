"""What each of four ranks on two hosts runs behind a wire that is late: how long what they do together takes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise.build import Session, build
from shardwise.comm import HostsGroup
from shardwise.mesh import Mesh, init_distributed
from shardwise.plan import zero

ROUNDS, UNITS, WIDTH = 4, 12, 64


def quickest(act: Callable[[], object], ahead_s: float) -> float:
    """Seconds of the quickest of some rounds, which the ranks, of one machine, begin at one time."""
    seconds = []
    for _ in range(ROUNDS):
        at = torch.tensor([time.time() + ahead_s], dtype=torch.float64)
        dist.broadcast(at, 0)
        time.sleep(max(at.item() - time.time(), 0.0))
        act()
        seconds.append(time.time() - at.item())
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.min().item()


def step(session: Session) -> None:
    session.backward(session.module(torch.ones(2, WIDTH)).square().mean())
    session.optimizer.step()
    session.optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    init_distributed()
    mesh = Mesh.create(zero(3).mesh, torch.device("cpu"), zero(3).comm)
    group = mesh.shard
    assert isinstance(group, HostsGroup), mesh
    (full,) = group.buffers([(group.size * 1000, torch.float32)])
    out = torch.empty(1000)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS)])
    session = build(model, torch.optim.AdamW(model.parameters()), zero(3), mesh)
    acts: dict[str, Callable[[], object]] = {
        "a meeting": lambda: group.exchange([1.0], "a test"),
        "a longer meeting": lambda: group.exchange([1.0] * 600, "a test"),
        "a reduce_scatter": lambda: (full.wait_writable(), group.reduce_scatter(out, full, 1.0).wait()),
        "an all_reduce": lambda: (full.wait_writable(), group.all_reduce(full, 1.0).wait()),
        "a step": lambda: step(session),
    }
    for act in acts.values():  # where places are kept, they are from now on
        for _ in range(3):
            act()
    folder, way_s = Path(sys.argv[1]), float(sys.argv[2])
    (folder / f"ready{dist.get_rank()}").touch()
    while not (folder / "late").exists():
        time.sleep(0.1)
    found = {what: quickest(act, 6.0 * way_s) for what, act in acts.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    session.close()
    mesh.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
