"""Checkpoints without the parameters that nobody trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shardwise.build import Session
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats.detect import open_checkpoint
from shardwise.checkpoint.match import Match, Wanted
from shardwise.deepspeed.parts import PartRun
from shardwise.engine.engine import Engine
from shardwise.engine.fragments import Block, Held, TensorShape
from shardwise.engine.optimizer import ShardedOptimizer

__all__ = ["WithoutFrozen", "frozen_ones_are_missing"]


class WithoutFrozen(PartRun):
    """A session to be saved without parameters that do not require gradients (those that an optimizer has stay)."""

    def held(self) -> Held:
        """What is saved."""
        return _Trained(self._session.engine, self._session.optimizers)


class _Trained(Held):
    def __init__(self, engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
        super().__init__(engine, optimizers)
        self.left_out = set()
        for chunk in engine.chunks:
            if chunk.spec.index not in self._positions:
                frozen = (slot.param for slot in chunk.spec.slots if not engine.params[slot.param].requires_grad)
                self.left_out |= {self.names[param][0] for param in frozen}

    def aliases(self) -> dict[str, str]:
        return {other: name for other, name in super().aliases().items() if name not in self.left_out}

    def model_shapes(self) -> dict[str, TensorShape]:
        return {name: shape for name, shape in super().model_shapes().items() if name not in self.left_out}

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, dtype in super().compute_dtypes().items() if name not in self.left_out}

    def _blocks(self) -> Iterator[Block]:
        names = {f"model/{name}" for name in self.left_out}
        for block in super()._blocks():
            yield replace(block, parts=tuple(part for part in block.parts if part[0].name not in names))


def frozen_ones_are_missing(session: Session, path: str, wanted: Wanted = "all") -> bool:
    """Whether what is wanted fits but for frozen parameters that the checkpoint lacks: they stay as they are."""
    held = _Trained(session.engine, session.optimizers)
    if not held.left_out:
        return False
    try:
        source = open_checkpoint(path)
    except (CheckpointError, OSError, ValueError):
        return False  # whoever loads it says what is wrong, on every rank
    try:
        match = Match(source, Held(session.engine, session.optimizers), False, wanted)
    except ValueError:
        return False
    finally:
        source.close()
    return bool(match.missing) and held.left_out.issuperset(match.missing) and not match.unexpected
