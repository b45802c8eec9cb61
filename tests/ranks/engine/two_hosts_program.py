"""Program of four ranks on two hosts: ZeRO-1, 2 and 3 against plain PyTorch."""

import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.comm import GlooGroup
from shardwise.core.mesh import init_distributed
from shardwise.plan import zero
from shardwise.testing import assert_close
from tests.support.engine_setup import data, one_mesh, run_plain, run_sharded

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
    dist.destroy_process_group()
    print(f"on {socket.gethostname()}: equal to plain PyTorch", flush=True)


if __name__ == "__main__":
    main()
