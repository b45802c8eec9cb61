"""Tests of ``NativeGroup`` with NCCL's collectives on one and several ranks, and of CUDA's attention kernels."""

import pytest
import torch
import torch.distributed as dist

from gpu.on_device import device_of_rank
from shardwise.core.comm import NativeGroup
from shardwise.core.comm.control import Control
from shardwise.testing import RankPool


def nccl_collectives() -> None:
    """Check each collective of ``NativeGroup`` for three dtypes."""
    device = device_of_rank("cuda")
    size, rank = dist.get_world_size(), dist.get_rank()
    control = Control("test", dist.new_group(backend="gloo"))
    backend = "nccl" if torch.cuda.device_count() >= size else "gloo"
    gather, reduce = (dist.new_group(backend=backend) for _ in range(2))
    group = NativeGroup("test", device, control, gather, reduce)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        full, shard = group.buffers([(8 * size, dtype), (8, dtype)])
        shard.local.fill_(rank + 1)
        gathered = torch.empty(8 * size, dtype=dtype, device=device)
        group.all_gather(gathered, shard).wait()
        assert gathered.view(size, 8)[:, 0].tolist() == [float(r + 1) for r in range(size)]
        full.local.fill_(rank + 1)
        out = torch.empty(8, dtype=torch.float32, device=device)
        handle = group.reduce_scatter(out, full, 1.0 / size)
        for _ in range(2):
            handle.wait()
        assert out.tolist() == [(size + 1) / 2] * 8
        group.all_reduce(full, 1.0).wait()
        assert full.local.tolist() == [size * (size + 1) / 2] * full.local.numel()
        group.slice_of(full.local, rank).fill_(float(rank))
        group.all_gather_in_place(full).wait()
        assert full.local.view(size, 8)[:, 0].tolist() == [float(r) for r in range(size)]
        value = torch.full((3,), float(rank), device=device, dtype=dtype)
        group.broadcast(value, size - 1)
        assert value.tolist() == [float(size - 1)] * 3
    assert group.exchange([float(rank)]) == [[float(r)] for r in range(size)]
    for made in (gather, reduce):
        dist.destroy_process_group(made)


@pytest.mark.gpus(1)
def test_native_collectives(pool: RankPool) -> None:
    pool.run(nccl_collectives, timeout=120.0)


@pytest.mark.gpus(1)
def test_attention_kernels() -> None:
    from tests.unit.parallel.test_sequence_tiles import kernels_of

    assert None not in kernels_of("cuda", torch.float32, 1e-3) | kernels_of("cuda", torch.bfloat16, 0.1)
