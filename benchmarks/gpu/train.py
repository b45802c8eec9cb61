"""``python -m benchmarks.gpu.train``: one system trains one GPT on one device, with activation checkpointing.

Speed is of steps that nothing but the next one follows: the host may run ahead, and is waited for at the end. Then the
same session takes steps of 64 tokens, which the device has done long before the host has asked for the next: what such
a step takes is the host's time for one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.counting import allocator_queries, host_waits
from benchmarks.job import SIZES, Job, Size
from benchmarks.model import GPT, batch, make_model
from benchmarks.systems import SYSTEMS, Step, prepare

__all__ = ["Checkpointed", "main", "measure"]

WARM_UP, TINY_STEPS = 3, 20
TINY = {"sequence": 64, "micro_batch": 1}
SEVERAL = 3
"""Tiny steps are timed in so many groups, of which the median counts."""


class Checkpointed(nn.Module):
    """A block whose activations are made again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def _model(size: Size, job: Job) -> GPT:
    with torch.device(job.device):
        model = make_model(size, job.dtype)
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(step: Step, given: tuple[Tensor, Tensor], count: int, device: torch.device) -> float:
    """Of one of ``count`` steps after each other, the device's work included."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        step(*given)
    _wait(device)
    return (time.perf_counter() - began) / count


def measure(system: str, size_name: str, device_type: str, steps: int, offload: bool) -> dict[str, Any]:
    """What ``python -m benchmarks.gpu.train`` writes. Bytes and seconds."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    versions = prepare(system)
    job = Job(system, size_name, 1, "bf16", False, WARM_UP, steps, 1, device=device_type, offload=offload)
    size = SIZES[size_name]
    began = time.perf_counter()
    model = _model(size, job)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = SYSTEMS[system](model, job)
    del model
    tokens, targets = batch(size, 0, 0)
    given = tokens.to(device), targets.to(device)
    built = time.perf_counter() - began
    losses = [float(step(*given)) for _ in range(WARM_UP)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = _seconds(step, given, steps, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    losses.append(float(step(*given)))
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"{system} {size_name}: the loss does not fall on a text that is repeated: {losses}")
    found: dict[str, Any] = {
        "system": system,
        "size": size_name,
        "offload": offload,
        "parameters": parameters,
        "versions": versions,
        "build_seconds": built,
        "step_seconds": seconds,
        "tokens_per_second": tokens.numel() / seconds,
        "model_flops_per_second": 6 * parameters * tokens.numel() / seconds,
        "peak_device_bytes": peak,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
    }
    if not offload:  # there a step is the update's, however few its tokens are
        found |= _host(step, size, device, 2 if device.type == "cpu" else TINY_STEPS)
    found["line"] = _line(found)
    return found


def _host(step: Step, size: Size, device: torch.device, count: int) -> dict[str, Any]:
    """Seconds of the host for a step, and what in a step it waits for."""
    tokens, targets = batch(replace(size, **TINY), 0, 0)
    given = tokens.to(device), targets.to(device)
    step(*given)
    found: dict[str, Any] = {
        "host_seconds": statistics.median(_seconds(step, given, count, device) for _ in range(SEVERAL)),
        "host_waits": None,
        "allocator_queries": None,
    }
    if device.type == "cuda":
        _wait(device)
        with host_waits() as waits, allocator_queries() as queries:
            step(*given)
        found |= {"host_waits": waits.times, "allocator_queries": queries.times}
    return found


def _line(found: dict[str, Any]) -> str:
    peak = found["peak_device_bytes"] / 2**30
    text = (
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['step_seconds'] * 1e3:,.1f} ms a step, peak {peak:.1f} GiB"
    )
    if "host_seconds" in found:
        text += f", host {found['host_seconds'] * 1e3:,.1f} ms a step"
    return text + (", state on the host" if found["offload"] else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--system", required=True, choices=list(SYSTEMS))
    parser.add_argument("--size", required=True, choices=list(SIZES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", action="store_true", help="masters and state at home on the host")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if options.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    if options.system.startswith("ds"):
        import deepspeed

        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    found = measure(options.system, options.size, options.device, options.steps, options.offload)
    options.json.write_text(json.dumps(found))
    print(found["line"], flush=True)
    os._exit(0)  # some systems leave threads that take seconds to end


if __name__ == "__main__":
    main()
