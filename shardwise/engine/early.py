"""Updates during backward: a chunk's masters and state are updated as soon as its gradient is reduced, beside the rest.

The parameters themselves change at ``step()`` only, since backward still reads them. Without clipping and loss scale
nothing about the update depends on other chunks, so it is made in place, and the gradient's memory is used again at
once: gradients stream. Otherwise it is a guess, that the gradients are finite and the norm is within bounds, and that
this pass is the step's only one; old values are kept until ``step()`` knows, and put back, exactly, if it was wrong.

Source: fused backward and optimizer steps (LOMO, arXiv 2306.09782, without its two passes) and the speculative steps of
SuperOffload (arXiv 2509.21271), with copies in place of its approximate inverse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shardwise.engine.grads import ChunkGrads
from shardwise.engine.norm import shard_norm
from shardwise.engine.tiles import Tile, TileStepper
from shardwise.memory.tier import Tier

__all__ = ["EarlyObserver", "EarlyUpdates"]

PENDING = 4  # chunks whose update may wait, each with its gradient


class EarlyUpdates:
    """Updates of one optimizer's chunks that run ahead of its ``step()``.

    Args:
        stepper: updates tiles.
        tiles: all of the optimizer's; those on a disk, and on a GPU those on it, are left to ``step()``.
        in_place: nothing needs to be undone: no clipping, no loss scale.
        norm_type: p of the norm that ``step()`` reports.
    """

    def __init__(self, stepper: TileStepper, tiles: Sequence[Tile], in_place: bool, norm_type: float) -> None:
        self._stepper, self.in_place, self._norm_type = stepper, in_place, norm_type
        self._tiles: dict[int, list[Tile]] = {}
        for tile in tiles:
            on_host = tile.pieces[0].value.device.type == "cpu" and tile.state.tier is not Tier.DISK
            if on_host and tile.state.master is not None:
                self._tiles.setdefault(tile.chunk.spec.index, []).append(tile)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="shardwise-update")
        self._jobs: deque[Future[None]] = deque()
        self._undo: list[Callable[[], None]] = []
        self._factor: float | None = None
        self._options: list[dict[str, Any]] = []
        self.updated: set[int] = set()
        """Chunks whose masters are those of the next step already."""
        self.norms: list[float] = []
        """Norms of gradients whose memory has been used again."""

    def takes(self, state: ChunkGrads) -> bool:
        """Whether the chunk's update can be made now: it is whole, and this is its first pass since the last step."""
        whole = len(state.fired) == len(state.spec.slots) and not state.touched
        return whole and state.spec.index in self._tiles and state.spec.index not in self.updated

    def update(self, state: ChunkGrads, factor: float) -> None:
        """Begin to update a chunk, whose gradient is reduced, with ``factor`` times it."""
        if self._factor is None:
            self._factor, self._options = factor, self._read_options()
        while len(self._jobs) >= PENDING:
            self._jobs.popleft().result()
        self.updated.add(state.spec.index)
        self._jobs.append(self._worker.submit(self._run, state, factor))

    def _read_options(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self._stepper.optimizer.param_groups]

    @torch.no_grad()
    def _run(self, state: ChunkGrads, factor: float) -> None:
        reduced = state.reduced
        if reduced is None:
            raise RuntimeError(f"chunk {state.spec.index} has no gradient ({reduced}) to be updated with; report this")
        with self._stepper.groups() as groups:
            for tile in self._tiles[state.spec.index]:
                if not self.in_place:
                    self._undo.append(self._keep(tile))
                self._stepper.step_tile(tile, list(tile.pieces), reduced, None, factor, groups)
        if self.in_place:
            self.norms.append(shard_norm(reduced, self._norm_type))
            state.release()

    def _keep(self, tile: Tile) -> Callable[[], None]:
        """What puts a tile's masters and state back as they are now."""
        optimizer = self._stepper.optimizer
        values = [piece.value.detach().clone() for piece in tile.pieces]
        states = [_copied(optimizer.state.get(piece.value)) for piece in tile.pieces]

        def restore() -> None:
            for piece, value, state in zip(tile.pieces, values, states, strict=True):
                piece.value.data.copy_(value)
                if state is None:
                    optimizer.state.pop(piece.value, None)
                else:
                    optimizer.state[piece.value] = state

        return restore

    # ---- the step

    def settle(self) -> None:
        """Wait for all updates that were begun; raises what one of them raised."""
        while self._jobs:
            self._jobs.popleft().result()

    def confirm(self, factor: float) -> bool:
        """Whether the updates that were made are those of a step with ``factor`` and the options of now.

        If not they are undone.

        Raises:
            RuntimeError: they are not, and were made in place.
        """
        self.settle()
        if not self.updated:
            return False
        if factor == self._factor and self._options == self._read_options():
            return True
        if self.in_place:
            raise RuntimeError(
                f"{len(self.updated)} chunks were updated during backward with gradients times {self._factor} and "
                f"{self._options}, but step() now wants {factor} and {self._read_options()}: change learning rates "
                "before backward, or use update='step'"
            )
        self.rollback()
        return False

    def rollback(self) -> None:
        """Put everything back as it was before this pass.

        Raises:
            RuntimeError: updates were made in place.
        """
        self.settle()
        if self.updated and self.in_place:
            raise RuntimeError(
                f"{len(self.updated)} chunks were updated during a backward pass that was not completed or whose "
                "gradients are dropped, and cannot be put back: load a checkpoint, and use update='step' to be safe"
            )
        with torch.no_grad():
            for restore in reversed(self._undo):
                restore()
        self.forget()

    def forget(self) -> None:
        """The step is over."""
        self._undo.clear()
        self.updated.clear()
        self.norms.clear()
        self._factor = None

    def close(self) -> None:
        """Wait for what was begun and end the worker."""
        self._worker.shutdown()


def _copied(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


class EarlyObserver:
    """Hands reduced gradients to the early updates of their optimizers.

    Args:
        by_optimizer: early updates by index of the optimizer.
        factor: what gradients of a step's only pass are multiplied by, unclipped.
    """

    def __init__(self, by_optimizer: Mapping[int, EarlyUpdates], factor: Callable[[], float]) -> None:
        self._by_optimizer, self._factor = by_optimizer, factor

    def before_pass(self) -> None:
        """Raises:
        RuntimeError: updates were made in place, to which another pass cannot add.
        """
        for each in self._by_optimizer.values():
            if each.updated and each.in_place:
                raise RuntimeError(
                    f"{len(each.updated)} chunks were updated during the last backward pass (update='backward'): call "
                    "step() before the next one, or use update='step' to accumulate gradients"
                )

    def before_result(self, state: ChunkGrads) -> None:
        """A second result for a chunk that is updated already: the guess was wrong."""
        early = self._by_optimizer.get(state.spec.optimizer)
        if early is not None and state.spec.index in early.updated:
            early.rollback()

    def after_result(self, state: ChunkGrads) -> None:
        """Update the chunk if that can be done now."""
        early = self._by_optimizer.get(state.spec.optimizer)
        if early is not None and early.takes(state):
            early.update(state, self._factor())

    def dropped(self, optimizer: int | None) -> None:
        """Gradients that were used already are dropped: undo what was done with them."""
        for index, each in self._by_optimizer.items():
            if optimizer in (None, index) and each.updated:
                each.rollback()
