"""What holds how much of one device's memory, and the error that says so when it is not enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.core.base.sizes import size_text
from shardwise.core.memory.trace.tracker import Tracker

__all__ = ["KEPT", "REST", "DeviceMemoryError", "Ledger"]

REST = "activations and the rest"
KEPT = "idle arrays"

ADVICE = {
    "parameter shards": "let parameters be at home on the host (param_host_fraction, offload_param_frac)",
    "gathered parameters": "keep less gathered (shard_param_frac=1.0), in smaller units, and prefetch less",
    "gradients": "use smaller chunks, and keep state, with it reduced gradients, on the host (state_host_fraction)",
    "masters and optimizer state": "keep it on the host or disk (state_host_fraction, offload_optim_frac, cpu_offload)",
    "buffers": "make large masks and tables where they are used, and do not keep them (register_buffer)",
    REST: "use activation checkpointing or a smaller micro-batch",
}


class DeviceMemoryError(RuntimeError):
    """The device's memory does not suffice. The message holds the accounts.

    Attributes:
        told: every rank of the group that gathers together raises one, too.
    """

    told = False


class Ledger:
    """Accounts of one device's memory, asked from those who hold it, so that nothing can drift.

    Args:
        device: the device.
        capacity_bytes: how much may be held; ``None``: unlimited.
    """

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device, self.capacity_bytes = device, capacity_bytes
        self._holders: dict[str, Callable[[], int]] = {}
        self._spare: list[Callable[[], None]] = []
        self._rest: Tracker | None = None
        self.peak_bytes = 0
        """The most that was held at any check; only counted where there is a capacity."""

    def watch(self, kind: str, held_bytes: Callable[[], int]) -> None:
        """``held_bytes()`` tells at any time what ``kind`` holds on the device."""
        self._holders[kind] = held_bytes

    def measure_rest(self, tracker: Tracker) -> None:
        """``tracker`` sees what is no model data; see :meth:`claim`."""
        self._rest = tracker
        self.watch(REST, lambda: tracker.live_bytes)

    def expire(self) -> None:
        """What is no model data may have changed: the next question finds it anew.

        On a GPU that asks the allocator, so it is called where much depends on the answer, and bounded a step: once a
        gather, once for each unit in each pass, and at the ends of passes. In between only model data changes the
        accounts, which holders know, and whatever else grew is found at the next such place.
        """
        if self._rest is not None:
            self._rest.expire()

    def claim(self, tensor: torch.Tensor | None) -> None:
        """``tensor`` is model data that a holder accounts for, so that it is not counted with the rest as well."""
        if self._rest is not None and tensor is not None:
            self._rest.exclude(tensor)

    def spare(self, release: Callable[[], None]) -> None:
        """``release()`` frees what is only kept for speed; called before memory is found to be too small."""
        self._spare.append(release)

    def held(self) -> Mapping[str, int]:
        """Bytes by kind, now."""
        return {kind: ask() for kind, ask in self._holders.items()}

    def model_bytes(self) -> int:
        """Bytes of everything but :data:`REST`."""
        return sum(ask() for kind, ask in self._holders.items() if kind != REST)

    def free_bytes(self) -> int | None:
        """What may still be taken; ``None`` without a limit. What is no model data is as old as the last
        :meth:`expire` that was followed by a question, and all else as it is."""
        return None if self.capacity_bytes is None else self.capacity_bytes - sum(self.held().values())

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more can be taken as things are."""
        free = self.free_bytes()
        return free is None or nbytes <= free

    def require(self, nbytes: int, what: str) -> None:
        """``nbytes`` more are about to be taken for ``what``; 0: what is there must fit.

        Raises:
            DeviceMemoryError: they do not fit, even after all that is kept for speed was freed.
        """
        if self.capacity_bytes is None:
            return
        if not self.make_room(nbytes):
            total = sum(self.held().values()) + nbytes
            needs = f" needs {size_text(nbytes)} more on {self.device}, which makes"
            raise DeviceMemoryError(self._message(what + (needs if nbytes else f": {self.device} holds"), total))

    def make_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more can be taken, if need be after all that is kept for speed was freed."""
        if self.capacity_bytes is None:
            return True
        total = sum(self.held().values()) + nbytes
        if total > self.capacity_bytes:
            for release in self._spare:
                release()
            total = sum(self.held().values()) + nbytes
        if total <= self.capacity_bytes:
            self.peak_bytes = max(self.peak_bytes, total)
        return total <= self.capacity_bytes

    def check_peak(self, rest_bytes: int, when: str, total_bytes: int = 0) -> None:
        """At the highest moment since the last look, what is no model data took ``rest_bytes``, and everything
        ``total_bytes`` where that is known.

        Raises:
            DeviceMemoryError: with the model data of now that was more than the capacity.
        """
        if self.capacity_bytes is None:
            return
        # What is only kept for reuse would have made room, as an allocator's cache does.
        total = sum(size for kind, size in self.held().items() if kind not in (REST, KEPT)) + rest_bytes
        if total_bytes > self.capacity_bytes:
            total = max(total, total_bytes)
        if total > self.capacity_bytes:
            what = f"{when} {REST} took up to {size_text(rest_bytes)} on {self.device}, which makes"
            raise DeviceMemoryError(self._message(what, total))
        self.peak_bytes = max(self.peak_bytes, total)

    def short_elsewhere(self, group: str, ranks: Sequence[int]) -> DeviceMemoryError:
        """What this rank raises where others, ``ranks`` of ``group``, have too little."""
        error = DeviceMemoryError(
            f"ranks {list(ranks)} of {group} have not enough device memory for this pass; see their messages "
            f"(this rank's {self.device} has {size_text(self.free_bytes() or 0)} left)"
        )
        error.told = True
        return error

    def _message(self, what: str, total: int) -> str:
        capacity = self.capacity_bytes or 0
        held = sorted(self.held().items(), key=lambda item: -item[1])
        accounts = "".join(f"\n  {kind}: {size_text(size)}" for kind, size in held if size)
        advice = "".join(f"\n  {ADVICE[kind]}" for kind, size in held if size and kind in ADVICE)
        return (
            f"{what} {size_text(total)} of a capacity of "
            f"{size_text(capacity)}: {size_text(total - capacity)} too much. It holds:{accounts or ' nothing'}\n"
            f"What would help, the largest first:{advice or ' a larger capacity (device_capacity_bytes)'}"
        )
