"""Options of ``shardwise demo`` about memory beyond the device, and the size of a model that needs it."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.checked import MOST_NUMEL, share
from shardwise.cli.errors import BadInput, option

__all__ = [
    "MEMORY_MARKER",
    "Shape",
    "TierOptions",
    "add_options",
    "batch_for",
    "check_tiers",
    "context_for",
    "parse_count",
    "shape_for",
    "shape_for_device",
]

# fp32: parameter, gradient and Adam's two moments, 4 bytes each. Mixed: 2 + 2, and 4 each for master and moments.
ADAM_BYTES_PER_PARAMETER = 16
TIMES_LARGER = 4
"""Unsharded training state of a model that is chosen by itself, as a multiple of one device's memory."""
PARAM_SHARE = 1 / 3
"""Parameter shards stay on the device where they take at most this share of it."""
ACTIVATION_SHARE, SEQUENCE_SHARE = 1 / 4, 0.6
ACTIVATION_VALUES = 26
"""What a block keeps for its backward pass, a position and feature: about 20 values, and what is passing."""
BYTE_VALUES = 256
LARGEST_BATCH = 4
MEMORY_MARKER = ".device-memory"
"""Made in the run's folder by the first rank whose device is too small, so that only one of them says so."""
GROUP = "memory beyond the device (any of these trains with gemini)"
GIVEN = ("device_memory", "offload_optim", "offload_params", "placement", "nvme_dir", "nvme_optim")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A byte-level GPT: features, blocks, attention heads."""

    width: int
    depth: int
    heads: int

    @property
    def parameters(self) -> int:
        """Blocks, their norms and biases, the embedding (tied to the head) and the last norm."""
        return self.depth * (12 * self.width**2 + 13 * self.width) + (BYTE_VALUES + 2) * self.width


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Where state is to be. Shares are in [0, 1]; ``device_bytes`` ``None``: what the device has; ``params_host``
    ``None``: see :meth:`for_model`. The three shares mean nothing under the placement ``auto``."""

    device_bytes: int | None
    placement: str
    optim_host: float
    optim_disk: float
    params_host: float | None
    disk_directory: str | None

    def for_model(self, parameter_bytes: float) -> TierOptions:
        """With a share of parameters on the host: as given, or what makes a rank's ``parameter_bytes`` fit."""
        if self.params_host is not None:
            return self
        fits = self.device_bytes is None or parameter_bytes <= PARAM_SHARE * self.device_bytes
        return replace(self, params_host=0.0 if fits else 1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the group to the demo's parser."""
    plain = argparse.SUPPRESS  # what is not given is absent, so that a default can depend on the rest
    add = parser.add_argument_group(GROUP).add_argument
    add("--device-memory", metavar="SIZE", default=plain, help="memory of each device, such as 64MiB, enforced; the "
        "model is then chosen so that its unsharded training state is 4 times that")  # fmt: skip
    add("--offload-optim", metavar="SHARE", type=float, default=plain, help="share of masters and optimizer state at "
        "home on the host (default: what is not on disk)")  # fmt: skip
    add("--offload-params", metavar="SHARE", type=float, default=plain, help="the same for parameters (default: 0 "
        "where they take up to a third of the device, otherwise 1)")  # fmt: skip
    add("--placement", choices=["static", "auto"], default=plain, help="static: by these shares (default); auto: by a "
        "trace of the first step")  # fmt: skip
    add("--nvme-dir", metavar="DIR", type=Path, default=plain, help="folder on a disk for optimizer state")
    add("--nvme-optim", metavar="SHARE", type=float, default=plain, help="share of optimizer state in --nvme-dir "
        "(default 1)")  # fmt: skip


def parse_count(text: str) -> int:
    """``'20M'``, ``'1.5B'``, ``'400K'`` or ``'12345'`` parameters.

    Raises:
        BadInput: something else, or none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmb]?)", text.strip().lower())
    count = round(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]]) if match else 0
    if not 1 <= count <= MOST_NUMEL:
        raise BadInput(f"--size {text}: give a number of parameters such as 20M, 1.5B or 400K")
    return count


def shape_for(parameters: int) -> Shape:
    """The GPT of at least that many parameters with about 64 features a block, at least about six blocks deep."""
    width = min((64 * parameters / 12) ** (1 / 3), math.sqrt(parameters / 72))
    step = 64 if width >= 128 else 16
    width = max(step * int(width / step), 16)
    heads = max(width // 64, 1)
    one = Shape(width=width, depth=1, heads=heads).parameters
    two = Shape(width=width, depth=2, heads=heads).parameters
    return Shape(width=width, depth=1 + max(0, math.ceil((parameters - one) / (two - one))), heads=heads)


def shape_for_device(device_bytes: int) -> Shape:
    """The one whose unsharded training state is :data:`TIMES_LARGER` times that."""
    return shape_for(math.ceil(TIMES_LARGER * device_bytes / ADAM_BYTES_PER_PARAMETER))


def _position_bytes(shape: Shape, value_bytes: int) -> int:
    return shape.depth * shape.width * ACTIVATION_VALUES * value_bytes


def context_for(shape: Shape, most: int, value_bytes: int, device_bytes: int) -> int:
    """At most ``most`` positions of one sequence, so that its activations take about 0.6 of the device; at least 16."""
    fits = int(SEQUENCE_SHARE * device_bytes / _position_bytes(shape, value_bytes))
    return min(most, max(16, fits // 16 * 16))


def batch_for(shape: Shape, context: int, value_bytes: int, device_bytes: int) -> int:
    """Sequences a step whose activations take about a quarter of the device: 1 to :data:`LARGEST_BATCH`."""
    one = _position_bytes(shape, value_bytes) * context
    return min(LARGEST_BATCH, max(1, int(ACTIVATION_SHARE * device_bytes / one)))


def check_tiers(options: argparse.Namespace) -> TierOptions | None:
    """The options of the group, but for defaults that depend on the model; ``None`` where none is given.

    Raises:
        BadInput: naming the option, its value and what to do.
    """
    given = {name: getattr(options, name) for name in GIVEN if hasattr(options, name)}
    if not given:
        return None
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if options.plugin not in (None, "gemini"):
        raise BadInput(f"--plugin {options.plugin} with {flags}: leave one of them out; gemini is what offloads")
    for name in ("offload_optim", "offload_params", "nvme_optim"):
        if name in given:
            option(f"--{name.replace('_', '-')}", share, given[name])
    disk = _disk_share(given)
    host = given.get("offload_optim", 1.0 - disk)
    if host + disk > 1.0:
        raise BadInput(f"--offload-optim {host} and --nvme-optim {disk} are more than 1 together; lower one of them")
    placement = given.get("placement", "static")
    if placement == "auto" and len(given) > 1 + ("device_memory" in given):
        raise BadInput(f"--placement auto with {flags}: auto decides the shares; leave them out, or use static")
    return TierOptions(
        device_bytes=_device_bytes(given.get("device_memory")),
        placement=placement,
        optim_host=host,
        optim_disk=disk,
        params_host=0.0 if placement == "auto" else given.get("offload_params"),
        disk_directory=str(given["nvme_dir"].absolute()) if "nvme_dir" in given else None,
    )


def _disk_share(given: dict[str, Any]) -> float:
    if "nvme_dir" not in given:
        if given.get("nvme_optim", 0.0) > 0:
            raise BadInput(f"--nvme-optim {given['nvme_optim']}: name a folder on the disk with --nvme-dir")
        return 0.0
    folder: Path = given["nvme_dir"]
    if not folder.is_dir():
        raise BadInput(f"--nvme-dir {folder}: no such folder; make it, or give another")
    return float(given.get("nvme_optim", 1.0 - given.get("offload_optim", 0.0)))


def _device_bytes(text: str | None) -> int | None:
    from shardwise.sizes import parse_size

    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as problem:
        raise BadInput(f"--device-memory: {problem}") from None
