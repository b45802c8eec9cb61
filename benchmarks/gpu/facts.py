"""``python -m benchmarks.gpu.facts DEVICE DIRECTORY``: what is here, as JSON. In a process of its own, so that the one
which runs the parts keeps no memory of the GPU."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from dataclasses import asdict

import torch

from benchmarks.gpu.results import Facts
from benchmarks.launch import available_bytes
from benchmarks.training import machine


def facts(device_type: str, directory: str) -> Facts:
    """``device_type``: ``"cuda"``, ``"cpu"``, or ``"auto"`` for CUDA where there is a GPU."""
    on_gpu = device_type == "cuda" or (device_type == "auto" and torch.cuda.is_available())
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU here; leave it out for the stand-in on the CPU")
    return Facts(
        device=torch.cuda.get_device_name(0) if on_gpu else machine(),
        device_bytes=torch.cuda.mem_get_info(0)[0] if on_gpu else 0,
        host_bytes=available_bytes(),
        disk_bytes=shutil.disk_usage(directory).free,
        gpus=torch.cuda.device_count() if on_gpu else 0,
        torch=torch.__version__,
        python=platform.python_version(),
        stand_in=not on_gpu,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(facts(*sys.argv[1:]))))
