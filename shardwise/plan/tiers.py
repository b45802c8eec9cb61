"""The part of a plan about offload: which memory parameters and optimizer state are in."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.base.validate import MOST_BYTES, check_flags, fraction, integer

MOST_BLOCK_BYTES, MOST_QUEUED, MOST_THREADS = 2**40, 2**16, 2**10
PAGE_BYTES = 4096  # O_DIRECT needs offsets, lengths and addresses that are multiples of it


@dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """How shards and optimizer state are read from and written to a disk (the ``aio`` arguments of ZeRO-Infinity).

    Attributes:
        directory: parent of the directory that each run creates. Another ``medium`` may interpret it differently.
        block_bytes: largest single request, a multiple of 4096.
        queue_depth: requests in flight for each thread.
        threads: submitting threads; while one computes checksums the others' requests continue.
        single_submit: submit requests one by one instead of up to ``queue_depth`` at once.
        overlap_events: collect completions while further requests are in flight.
        state_buffers: host buffers for optimizer tiles; three overlap a read, an update and a write.
        param_buffers: host buffers for parameter shards.
        medium: the kind of storage: ``"file"``, or a registered name (``shardwise.register_medium``).

    Examples:
        >>> from shardwise.plan import DiskPlan, zero
        >>> plan = zero(3).but(state_disk_fraction=1.0, disk=DiskPlan(directory="/tmp", threads=4))
    """

    directory: str
    block_bytes: int = 2**20
    queue_depth: int = 8
    threads: int = 2
    single_submit: bool = False
    overlap_events: bool = True
    state_buffers: int = 8
    param_buffers: int = 5
    medium: str = "file"

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError(f"directory={self.directory!r}: name a directory on the disk to use")
        integer("block_bytes", self.block_bytes, PAGE_BYTES, MOST_BLOCK_BYTES, "bytes")
        if self.block_bytes % PAGE_BYTES:
            raise ValueError(f"block_bytes={self.block_bytes}: give a multiple of {PAGE_BYTES}")
        for name in ("queue_depth", "threads", "state_buffers", "param_buffers"):
            integer(name, getattr(self, name), 1, MOST_THREADS if name == "threads" else MOST_QUEUED)
        check_flags(self)
        if not isinstance(self.medium, str) or not self.medium:
            raise ValueError(f"medium={self.medium!r}: give 'file', or the name of a registered medium")


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """Placement by the memory trace (Gemini's ``auto``). All values are fractions in [0, 1].

    Attributes:
        warmup_non_model_ratio: fraction of the device's capacity that the first step leaves free for non-model data.
        steady_capacity_ratio: fraction of the capacity that later steps use at most, non-model data included.
        margin_ratio: fraction of the remaining memory to which optimizer state is moved.

    Examples:
        >>> from shardwise.plan import AutoPlan, zero
        >>> plan = zero(3).but(auto=AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=0.0))
    """

    warmup_non_model_ratio: float
    steady_capacity_ratio: float
    margin_ratio: float

    def __post_init__(self) -> None:
        for name in ("warmup_non_model_ratio", "steady_capacity_ratio", "margin_ratio"):
            fraction(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """In which memory parameters and optimizer state are kept: the device, host memory, or a disk.

    Attributes:
        param_host_fraction: fraction of the bytes of parameter shards that are kept in host memory.
        param_disk_fraction: the fraction that is kept on the disk; the rest is kept on the device.
        state_host_fraction: fraction of fp32 masters, optimizer state and reduced gradients kept in host memory.
        state_disk_fraction: fraction of masters and state kept on the disk, with their gradients in host memory.
        device_capacity_bytes: limit of device memory; ``None``: no limit (under ``auto`` the memory of the GPU).
        pin_memory: page-lock the host memory, with CUDA.
        disk: how to use the disk; required if a disk fraction is above 0, otherwise ``None``.
        auto: chooses placement from the memory trace. With ``None`` the fixed fractions above decide.

    Examples:
        >>> from shardwise.plan import TierPlan, zero
        >>> plan = zero(3).but(tiers=TierPlan(param_host_fraction=0.5, state_host_fraction=1.0))
    """

    param_host_fraction: float = 0.0
    param_disk_fraction: float = 0.0
    state_host_fraction: float = 0.0
    state_disk_fraction: float = 0.0
    device_capacity_bytes: int | None = None
    pin_memory: bool = False
    disk: DiskPlan | None = None
    auto: AutoPlan | None = None

    def __post_init__(self) -> None:
        for kind in ("param", "state"):
            names = (f"{kind}_host_fraction", f"{kind}_disk_fraction")
            host, disk = (fraction(name, getattr(self, name)) for name in names)
            shares = f"{names[0]}={host}, {names[1]}={disk}"
            if host + disk > 1.0 + 1e-9:
                raise ValueError(f"{shares}: their sum is above 1; give fractions whose sum is at most 1")
            if disk > 0.0 and self.disk is None:
                raise ValueError(f"{shares} with disk={self.disk}: give a DiskPlan")
        if self.disk is not None and self.param_disk_fraction == self.state_disk_fraction == 0.0:
            raise ValueError(
                f"disk={self.disk!r:.80} with param_disk_fraction={self.param_disk_fraction}, state_disk_fraction="
                f"{self.state_disk_fraction}: nothing would be kept there; give a disk fraction above 0, or disk=None"
            )
        if self.device_capacity_bytes is not None:
            integer("device_capacity_bytes", self.device_capacity_bytes, 1, MOST_BYTES, "bytes, or None,")
        check_flags(self)

    @property
    def all_on_device(self) -> bool:
        """Whether everything is kept on the device."""
        params = self.param_host_fraction + self.param_disk_fraction
        return self.auto is None and params + self.state_host_fraction + self.state_disk_fraction == 0.0


def on_device() -> TierPlan:
    """Return the plan that keeps everything on the device, without a limit.

    Examples:
        >>> from shardwise.plan import on_device, zero
        >>> plan = zero(3).but(state_host_fraction=1.0).but(tiers=on_device())  # no offload again
    """
    return TierPlan()
