"""What each of four ranks on two hosts runs: ZeRO-1, 2 and 3 against plain PyTorch, and a rank that goes other ways."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from engine_setup import data, one_mesh, run_plain, run_sharded
from torch import Tensor, nn
from wander_setup import Wanderer, wander

from shardwise.comm import GlooGroup
from shardwise.mesh import init_distributed
from shardwise.plan import zero
from shardwise.testing import assert_close

STEPS = 3


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)])


def several(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    for index in range(2):
        yield model(data(rank, step, index)).square().mean(), False


def main() -> None:
    torch.set_num_threads(1)
    init_distributed()
    for stage in (1, 2, 3):
        plan = zero(stage)  # type: ignore[arg-type]
        with one_mesh(plan) as mesh:
            assert isinstance(mesh.shard, GlooGroup), mesh
            found = run_sharded(layers, several, plan, STEPS, mesh)
            assert_close(found, run_plain(layers, several, mesh.size, STEPS), 1e-11, f"stage {stage}")
            if stage == 3:
                found = run_sharded(Wanderer, wander, plan.but(prefetch=2), STEPS, mesh)
                # In one process the ranks' own collectives are not made.
                wandered = found
    dist.destroy_process_group()
    assert_close(wandered, run_plain(Wanderer, wander, 4, STEPS), 1e-9, "ranks that wander")
    print(f"on {socket.gethostname()}: equal to plain PyTorch", flush=True)


if __name__ == "__main__":
    main()
