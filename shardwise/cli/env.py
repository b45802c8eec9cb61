"""Print versions, devices and limits of this machine, for a bug report. It warns of what will not work.

examples:
  shardwise env
  shardwise env > env.txt
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from shardwise import __version__
from shardwise.cli.parser import texts
from shardwise.cli.run import threads_per_rank
from shardwise.core.base.sizes import size_text

PACKAGES = (
    *("numpy", "safetensors", "transformers", "accelerate", "peft", "lightning", "pytorch-lightning", "trl"),
    *("bitsandbytes", "triton", "deepspeed"),
)
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "PYTORCH_ALLOC_CONF"),
)
NEEDED_FILES = 1024


def add_parser(commands: Any) -> None:
    """Add ``env`` to the command's subparsers."""
    commands.add_parser("env", **texts(__doc__)).set_defaults(main=main)


def main(_options: argparse.Namespace) -> int:
    """Print the report; return 0."""
    sections, warnings = report()
    for title, rows in sections.items():
        print(title)
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            print(f"  {name:{width}}  {value}")
    print("Verdict")
    for warning in warnings or ["no problem is known"]:
        print(f"  {warning}")
    return 0


def report() -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return rows by section, and sentences that say what will not work and what to do."""
    import torch

    sections = {
        "Versions": dict(_versions(torch)),
        "Devices": dict(_devices(torch)),
        "Communication": dict(_communication(torch)),
        "Limits": dict(_limits()),
        "Environment": {name: os.environ[name] for name in VARIABLES if name in os.environ}
        or {"variables": "none set"},
    }
    return sections, list(_warnings(torch, os.environ))


def _versions(torch: Any) -> Iterator[tuple[str, str]]:
    yield "shardwise", __version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _devices(torch: Any) -> Iterator[tuple[str, str]]:
    from shardwise.core.base.device import runtime

    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        yield str(device), f"{runtime().identity(index)[0]}, {size_text(runtime().total_bytes(device))}"
    if not torch.cuda.device_count():
        yield "GPUs", "none that torch can use"
    yield "cores", f"{threads_per_rank(1)} usable of {os.cpu_count()}"
    yield "host memory", f"{size_text(_memory_bytes('MemTotal'))}, {size_text(_memory_bytes('MemAvailable'))} free"


def _communication(torch: Any) -> Iterator[tuple[str, str]]:
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    yield "backends", ", ".join(backends) or "none"
    yield "host name", f"{socket.gethostname()} at {_address() or 'no address'}"
    yield "interfaces", ", ".join(name for _, name in socket.if_nameindex()) or "none"


def _limits() -> Iterator[tuple[str, str]]:
    shared = _shared_bytes()
    yield "/dev/shm", "none" if shared is None else f"{size_text(shared[0])}, {size_text(shared[1])} free"
    for name, number in (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK)):
        limit = resource.getrlimit(number)[0]
        if limit == resource.RLIM_INFINITY or limit < 0:
            yield name, "unlimited"
        else:
            yield name, size_text(limit) if number == resource.RLIMIT_MEMLOCK else str(limit)


def _warnings(torch: Any, environment: Mapping[str, str]) -> Iterator[str]:
    if not torch.distributed.is_gloo_available():
        yield "torch was built without gloo: several ranks cannot exchange messages; install torch from its own index."
    if torch.version.cuda and not torch.cuda.device_count():
        yield "torch is built for CUDA and finds no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
    if torch.cuda.device_count() and not torch.distributed.is_nccl_available():
        yield "torch was built without NCCL: GPUs exchange data over gloo, which is slow."
    address = _address()
    if (address is None or address.startswith(("127.", "::1"))) and "GLOO_SOCKET_IFNAME" not in environment:
        yield (
            f"The host name {socket.gethostname()} resolves to {address or 'no address'}: one host works; for several "
            "hosts set GLOO_SOCKET_IFNAME to the network interface that connects them."
        )
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NEEDED_FILES:
        yield f"Fewer than {NEEDED_FILES} files may be open: raise the limit (ulimit -n {NEEDED_FILES})."
    if "WORLD_SIZE" in environment and "RANK" not in environment:
        yield f"WORLD_SIZE={environment['WORLD_SIZE']} is set without RANK: unset it, or start with `shardwise run`."


def _memory_bytes(field: str) -> int:
    """Return a field of /proc/meminfo in bytes; 0 if the system has none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:")), 0)
    except OSError:
        return 0


def _shared_bytes() -> tuple[int, int] | None:
    """Return the size of shared memory and what is free of it; ``None`` if the system has none."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.total, usage.free


def _address() -> str | None:
    """Return the address of the host's name; ``None`` if it has none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
