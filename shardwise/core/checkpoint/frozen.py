"""What is held without the parameters that nobody trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shardwise.core.engine.engine import Engine
from shardwise.core.engine.fragments import FragmentBlock, Held, TensorShape
from shardwise.core.engine.optimizer import ShardedOptimizer

__all__ = ["TrainedOnly"]


class TrainedOnly(Held):
    """What the engine holds but for parameters that do not require gradients (those that an optimizer has stay).

    Attributes:
        left_out: their names.
    """

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

    def _blocks(self) -> Iterator[FragmentBlock]:
        names = {f"model/{name}" for name in self.left_out}
        for block in super()._blocks():
            yield replace(block, parts=tuple(part for part in block.parts if part[0].name not in names))
