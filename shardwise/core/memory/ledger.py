"""Accounts of one device's memory, and the error that lists them if memory is insufficient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.core.base.sizes import size_text
from shardwise.core.memory.trace.stats import NON_MODEL
from shardwise.core.memory.trace.tracker import Tracker

IDLE_ARRAYS = "idle arrays"

ADVICE = {
    "parameter shards": "store more of the parameters in host memory or on a disk (offload, param_host_fraction)",
    "gathered parameters": "gather fewer parameters at a time (smaller units, gathered_fraction, prefetch)",
    "gradients": "use smaller units; store more of the gradients with optimizer state (offload, state_host_fraction)",
    "masters and optimizer state": "store more of the state in host memory or on a disk (offload, state_host_fraction)",
    "buffers": "compute large masks and tables where they are used instead of keeping them (register_buffer)",
    NON_MODEL: "use activation checkpointing or a smaller micro-batch",
}


class DeviceMemoryError(RuntimeError):
    """The device has too little memory. The message lists the bytes by kind.

    Attributes:
        announced: whether every rank of the gathering group raises this error, too.

    Examples:
        >>> try:
        ...     session.optimizer.step()
        ... except shardwise.DeviceMemoryError as error:
        ...     print(error)  # bytes by kind
    """

    announced = False


class Ledger:
    """Accounts of one device's memory. Owners compute them on request, so that no count can drift.

    Args:
        device: the device.
        capacity_bytes: the limit; ``None``: unlimited.
    """

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device, self.capacity_bytes = device, capacity_bytes
        self._holders: dict[str, Callable[[], int]] = {}
        self._caches: list[Callable[[], None]] = []
        self._tracker: Tracker | None = None
        self.peak_bytes = 0
        """The highest peak of all checks. It is counted only if there is a capacity."""

    def account(self, kind: str, current_bytes: Callable[[], int]) -> None:
        """Add an account: ``current_bytes()`` returns the current bytes of ``kind`` on the device."""
        self._holders[kind] = current_bytes

    def measure_non_model(self, tracker: Tracker) -> None:
        """Let ``tracker`` measure memory that is not model data; see :meth:`charge`."""
        self._tracker = tracker
        self.account(NON_MODEL, lambda: tracker.live_bytes)

    def expire(self) -> None:
        """Invalidate the measurement of memory that is not model data; the next query measures again.

        On a GPU, a measurement calls the allocator, so there is a bounded number of them per step: one per gather, one
        for each unit in each pass, and one at the end of each pass. In between, only the accounts of model data change;
        other growth is detected at the next measurement.
        """
        if self._tracker is not None:
            self._tracker.expire()

    def charge(self, tensor: torch.Tensor | None) -> None:
        """Count ``tensor`` only as model data, which its owner accounts for."""
        if self._tracker is not None and tensor is not None:
            self._tracker.exclude(tensor)

    def reclaimable(self, release: Callable[[], None]) -> None:
        """Add a callback that frees cached memory; it is called before an error is raised for too little memory."""
        self._caches.append(release)

    def bytes_by_kind(self) -> Mapping[str, int]:
        """Return the current bytes by kind."""
        return {kind: ask() for kind, ask in self._holders.items()}

    def model_bytes_by_kind(self) -> dict[str, int]:
        """Return the current bytes of all kinds except :data:`NON_MODEL`, without kinds that have none."""
        return {kind: size for kind, size in self.bytes_by_kind().items() if kind != NON_MODEL and size}

    def model_bytes(self) -> int:
        """Return the bytes of all kinds except :data:`NON_MODEL`."""
        return sum(ask() for kind, ask in self._holders.items() if kind != NON_MODEL)

    def free_bytes(self) -> int | None:
        """Return the bytes that may still be allocated; ``None`` without a limit.

        Memory that is not model data was measured at the first query after the last :meth:`expire`; the rest is
        current.
        """
        return None if self.capacity_bytes is None else self.capacity_bytes - sum(self.bytes_by_kind().values())

    def fits(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more can be allocated now."""
        free = self.free_bytes()
        return free is None or nbytes <= free

    def require(self, nbytes: int, what: str) -> None:
        """Check that ``nbytes`` more for ``what`` can be allocated; with 0, that the present contents fit.

        Raises:
            DeviceMemoryError: they do not fit, even after all caches were freed.
        """
        if self.capacity_bytes is None:
            return
        if not self.make_room(nbytes):
            total = sum(self.bytes_by_kind().values()) + nbytes
            cause = f"{what} needs {size_text(nbytes)} more" if nbytes else f"there is no room for {what}"
            raise DeviceMemoryError(self._message(cause, total))

    def make_room(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more can be allocated, after freeing caches if necessary."""
        if self.capacity_bytes is None:
            return True
        total = sum(self.bytes_by_kind().values()) + nbytes
        if total > self.capacity_bytes:
            for release in self._caches:
                release()
            total = sum(self.bytes_by_kind().values()) + nbytes
        if total <= self.capacity_bytes:
            self.peak_bytes = max(self.peak_bytes, total)
        return total <= self.capacity_bytes

    def check_peak(self, non_model_bytes: int, when: str, total_bytes: int = 0) -> None:
        """Check a measured peak against the capacity.

        Args:
            non_model_bytes: peak of memory that is not model data since the last check.
            when: position in the step, for the message.
            total_bytes: all memory, if known.

        Raises:
            DeviceMemoryError: the peak and the present model data together exceed the capacity.
        """
        if self.capacity_bytes is None:
            return
        # Memory that is only cached for reuse would have been freed, as an allocator's cache.
        model = (size for kind, size in self.bytes_by_kind().items() if kind not in (NON_MODEL, IDLE_ARRAYS))
        total = sum(model) + non_model_bytes
        if total_bytes > self.capacity_bytes:
            total = max(total, total_bytes)
        if total > self.capacity_bytes:
            cause = f"{when}, {NON_MODEL} took up to {size_text(non_model_bytes)}"
            raise DeviceMemoryError(self._message(cause, total))
        self.peak_bytes = max(self.peak_bytes, total)

    def short_elsewhere(self, group: str, ranks: Sequence[int]) -> DeviceMemoryError:
        """Return the error of this rank if other ``ranks`` of ``group`` have too little memory."""
        error = DeviceMemoryError(
            f"ranks {list(ranks)} of {group} have not enough device memory for this pass; see their messages "
            f"(this rank's {self.device} has {size_text(self.free_bytes() or 0)} left)"
        )
        error.announced = True
        return error

    def _message(self, cause: str, total: int) -> str:
        capacity = self.capacity_bytes or 0
        sizes = sorted(self.bytes_by_kind().items(), key=lambda item: -item[1])
        accounts = "".join(f"\n  {kind}: {size_text(size)}" for kind, size in sizes if size)
        advice = "".join(f"\n  {ADVICE[kind]}" for kind, size in sizes if size and kind in ADVICE)
        return (
            f"the device {self.device} is {size_text(total - capacity)} too small: {size_text(total)} needed, capacity "
            f"{size_text(capacity)}. {cause[0].upper()}{cause[1:]}. The device holds:{accounts or ' nothing'}\n"
            f"To reduce it, largest first:{advice or ' a larger capacity (device_capacity_bytes)'}"
        )
