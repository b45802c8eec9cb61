"""The largest norm of what a step applies, which a program may change between steps."""

from __future__ import annotations

from shardwise.core.base.checked import number
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.losses import Losses
from shardwise.core.grads.norm import LateNorm, TileNorm

__all__ = ["Limited"]


class Limited(Losses):
    """Of a sharded optimizer."""

    engine: Engine
    index: int
    _late_norm: LateNorm | TileNorm | None

    @property
    def max_norm(self) -> float:
        """What the next step clips the global norm of the averaged, unscaled gradients to; 0 is off. The plan's, until
        it is set: on every rank the same, which is compared with the next step (with replicas, behind the next pass).

        Raises:
            ValueError: set to a negative number, or one that is not finite.
            RuntimeError: set where gradients are not kept until a norm is known (``update="backward"``).
        """
        return self.engine.limits.get(self.index, self.engine.plan.grad.max_norm)

    @max_norm.setter
    def max_norm(self, norm: float) -> None:
        limit = number("max_norm", norm, "[0, inf)", "a finite norm >= 0 (0 is off)")
        self.engine.check_open(f"max_norm={norm}")
        if limit > 0.0 and self.engine.plan.grad.update == "backward":
            raise RuntimeError(
                f"max_norm={norm} with update={self.engine.plan.grad.update!r}: gradients are used before their norm "
                "is known; use update='step'"
            )
        self.engine.limits[self.index] = limit
        if isinstance(self._late_norm, TileNorm):
            self._late_norm.collects = False  # until a step asks it for a norm again
