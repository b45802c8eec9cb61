"""What holds how many bytes of model data on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.engine.engine import Engine

__all__ = ["MemoryReport", "memory_report"]


@dataclass(frozen=True)
class MemoryReport:
    """Live bytes of this rank's model data by kind."""

    parameters_bytes: int
    """Shards and, where parameters stay gathered, the whole arrays."""
    gathered_bytes: int
    """Gathered copies of sharded chunks right now."""
    peak_gathered_bytes: int
    idle_bytes: int
    """Host arrays kept for the next gather, at most two units and what is fetched ahead."""
    gradients_bytes: int
    """Exchange buffers and reduced shards."""
    master_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        kinds = (self.parameters_bytes, self.gathered_bytes, self.idle_bytes, self.gradients_bytes, self.master_bytes)
        return sum(kinds) + self.optimizer_bytes


def memory_report(engine: Engine) -> MemoryReport:
    """Count them now."""
    moments = [value for each in engine.optimizers for state in each.state.values() for value in state.values()]
    return MemoryReport(
        parameters_bytes=sum(c.exchange.local.nbytes for c in engine.chunks),
        gathered_bytes=engine.pool.gathered_bytes,
        peak_gathered_bytes=engine.pool.peak_gathered_bytes,
        idle_bytes=engine.pool.arrays.idle_bytes(),
        gradients_bytes=engine.reducer.bytes(),
        master_bytes=sum(m.nbytes for m in engine.masters.values()),
        optimizer_bytes=sum(value.nbytes for value in moments if isinstance(value, torch.Tensor)),
    )
