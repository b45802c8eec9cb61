"""What one model's optimizers hold, or will hold, in each tier: asked from those who hold it."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.core.engine.storage import Storage
from shardwise.core.memory.tier import Tier

__all__ = ["StateAccounts"]


class StateAccounts:
    """Masters, optimizer state and scratch memory of one model on this rank; the device's part goes to its ledger.

    Args:
        storage: has the masters.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._state: list[Callable[[Tier], int]] = []
        self._scratch: list[Callable[[Tier], int]] = []
        self._expected_bytes = 0
        storage.ledger.watch("masters and optimizer state", self._device_bytes)
        storage.ledger.watch("update scratch", lambda: self.scratch_bytes(Tier.DEVICE))

    def hold(self, state_bytes: Callable[[Tier], int], scratch_bytes: Callable[[Tier], int]) -> None:
        """An optimizer tells how many bytes of state and of scratch memory it has in a tier."""
        self._state.append(state_bytes)
        self._scratch.append(scratch_bytes)

    def expect(self, nbytes: int) -> None:
        """An optimizer will keep that many bytes of state on the device from its first step on.

        Raises:
            DeviceMemoryError: with all else that the plan keeps there for good, that is more than the device has.
        """
        self._expected_bytes += nbytes
        self._storage.ledger.require(0, "the model and its optimizers")

    def _device_bytes(self) -> int:
        masters, state = self.state_bytes(Tier.DEVICE)
        # What steps will make counts from the beginning: a first step that does not fit would come too late.
        return masters + max(state, self._expected_bytes)

    def foreseen_bytes(self) -> int:
        """Optimizer state on the device that is accounted for and not made yet."""
        return max(self._expected_bytes - self.state_bytes(Tier.DEVICE)[1], 0)

    def state_bytes(self, tier: Tier) -> tuple[int, int]:
        """Bytes of masters and of optimizer state in ``tier``."""
        return self._storage.master_bytes(tier), sum(ask(tier) for ask in self._state)

    def scratch_bytes(self, tier: Tier) -> int:
        """Bytes that updates of state in ``tier`` keep for gradients."""
        return sum(ask(tier) for ask in self._scratch)
