"""The part of a plan that says which memory is the home of what."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.base.checked import MOST_BYTES, share, switch, whole

__all__ = [
    "MOST_BLOCK_BYTES",
    "MOST_QUEUED",
    "MOST_THREADS",
    "PAGE_BYTES",
    "AutoPlan",
    "DiskPlan",
    "TierPlan",
    "on_device",
]

MOST_BLOCK_BYTES, MOST_QUEUED, MOST_THREADS = 2**40, 2**16, 2**10
PAGE_BYTES = 4096  # what unbuffered disk access wants offsets, lengths and addresses to be multiples of


@dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """How shards and optimizer state travel to and from a disk (the ``aio`` arguments of ZeRO-Infinity).

    Attributes:
        directory: per-run directories are made in it; what else it means another ``medium`` says.
        block_bytes: largest single request, a multiple of 4096.
        queue_depth: requests in flight for each thread.
        threads: submitting threads; while one makes checksums the others' requests go on.
        single_submit: submit requests one by one, not up to ``queue_depth`` at once.
        overlap_events: collect completions while further requests are in flight.
        state_buffers: host buffers for optimizer tiles; three overlap a read, an update and a write.
        param_buffers: host buffers for parameter shards.
        medium: what keeps the bytes: ``"file"``, or a name that was registered (``shardwise.register_medium``).
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
        whole("block_bytes", self.block_bytes, PAGE_BYTES, MOST_BLOCK_BYTES, "bytes")
        if self.block_bytes % PAGE_BYTES:
            raise ValueError(f"block_bytes={self.block_bytes}: give a multiple of {PAGE_BYTES}")
        for name in ("queue_depth", "threads", "state_buffers", "param_buffers"):
            whole(name, getattr(self, name), 1, MOST_THREADS if name == "threads" else MOST_QUEUED)
        for name in ("single_submit", "overlap_events"):
            switch(name, getattr(self, name))
        if not isinstance(self.medium, str) or not self.medium:
            raise ValueError(f"medium={self.medium!r}: give 'file', or the name of a medium that is registered")


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """Placement from the memory trace (Gemini's ``auto``); shares of the device's capacity, in [0, 1].

    Attributes:
        warmup_non_model_ratio: what the first step leaves free for everything that is not model data.
        steady_capacity_ratio: what later steps use at most, traced non-model data included.
        margin_ratio: share of what then remains that optimizer state moves into.
    """

    warmup_non_model_ratio: float
    steady_capacity_ratio: float
    margin_ratio: float

    def __post_init__(self) -> None:
        for name in ("warmup_non_model_ratio", "steady_capacity_ratio", "margin_ratio"):
            share(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """Which memory is the home of what: the device, the host's memory, or a disk.

    Attributes:
        param_host_fraction: share of the bytes of parameter shards whose home is the host.
        param_disk_fraction: the same for the disk; what neither has is the device's.
        state_host_fraction: share of fp32 masters, optimizer state and reduced gradients whose home is the host.
        state_disk_fraction: share of masters and state whose home is the disk (their gradients are the host's).
        device_capacity_bytes: memory of the device that may be used; ``None``: no limit, under ``auto`` all a GPU has.
        pin_memory: host memory is page-locked (where there is CUDA).
        disk: how to reach the disk, where a disk share is not 0; ``None`` where both are.
        auto: place by the memory trace; ``None`` for the fixed shares above.
    """

    param_host_fraction: float
    param_disk_fraction: float
    state_host_fraction: float
    state_disk_fraction: float
    device_capacity_bytes: int | None
    pin_memory: bool
    disk: DiskPlan | None
    auto: AutoPlan | None

    def __post_init__(self) -> None:
        for kind in ("param", "state"):
            names = (f"{kind}_host_fraction", f"{kind}_disk_fraction")
            host, disk = (share(name, getattr(self, name)) for name in names)
            shares = f"{names[0]}={host}, {names[1]}={disk}"
            if host + disk > 1.0 + 1e-9:
                raise ValueError(f"{shares}: give shares in [0, 1] whose sum is at most 1")
            if disk > 0.0 and self.disk is None:
                raise ValueError(f"{shares} with disk={self.disk}: give a DiskPlan")
        if self.disk is not None and self.param_disk_fraction == self.state_disk_fraction == 0.0:
            raise ValueError(
                f"disk={self.disk!r:.80} with param_disk_fraction={self.param_disk_fraction}, state_disk_fraction="
                f"{self.state_disk_fraction}: nothing would go there; give a share, or disk=None"
            )
        if self.device_capacity_bytes is not None:
            whole("device_capacity_bytes", self.device_capacity_bytes, 1, MOST_BYTES, "bytes, or None,")
        switch("pin_memory", self.pin_memory)

    @property
    def all_on_device(self) -> bool:
        """Whether nothing is at home elsewhere."""
        params = self.param_host_fraction + self.param_disk_fraction
        return self.auto is None and params + self.state_host_fraction + self.state_disk_fraction == 0.0


def on_device() -> TierPlan:
    """Everything on the device, without a limit."""
    return TierPlan(
        param_host_fraction=0.0,
        param_disk_fraction=0.0,
        state_host_fraction=0.0,
        state_disk_fraction=0.0,
        device_capacity_bytes=None,
        pin_memory=False,
        disk=None,
        auto=None,
    )
