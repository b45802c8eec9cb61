"""torchrun, NCCL and one GPU: what a user's script does first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.testing import RankPool

ROOT = Path(__file__).resolve().parents[2]


def nccl_collectives() -> None:
    """The group over the backend's own collectives, with one rank and with several."""
    import torch.distributed as dist

    from shardwise.core.comm import NativeGroup
    from shardwise.core.comm.control import Control

    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
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
        handle.wait()
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
    dist.destroy_process_group(gather)
    dist.destroy_process_group(reduce)


@pytest.mark.gpus(1)
def test_native_collectives(pool: RankPool) -> None:
    pool.run(nccl_collectives, timeout=120.0)


def test_torchrun_with_one_process(device_type: str) -> None:
    """init_distributed chooses NCCL and the GPU; the loss falls."""
    # Without an address ranks are given the host's name, which nothing may resolve where there is no network.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += ["--nproc-per-node=1", str(Path(__file__).with_name("train_one_gpu.py")), device_type]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    backend, device, first, last = done.stdout.split()[-4:]
    assert (backend, device) == (("nccl", "cuda") if device_type == "cuda" else ("gloo", "cpu"))
    assert float(last) < float(first)


@pytest.mark.gpus(1)
def test_attention_kernels_of_a_ring() -> None:
    from tests.unit.test_sequence_tiles import kernels_of

    assert None not in kernels_of("cuda", torch.float32, 1e-3) | kernels_of("cuda", torch.bfloat16, 0.1)
