"""Updates during backward: masters and state of a chunk are updated as soon as its gradient is reduced.

The update overlaps with the rest of backward. It is made in place, so later events must not change it: plans refuse
clipping and a loss scale, each step is one backward pass, and an update cannot be undone. The memory of the gradient is
reused at once (gradients stream). Parameters change at ``step()`` only, since backward still reads them.

Source: fused backward and optimizer steps (LOMO, arXiv 2306.09782); for tiles on a disk the pipelined optimizer swapper
of ZeRO-Infinity (arXiv 2104.07857, section 6.3), begun before the step.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from shardwise.core.base.device import make_current
from shardwise.core.checks.broken import PARAMETERS, Broken, state_of
from shardwise.core.checks.param_groups import same_value
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.norm import shard_norm
from shardwise.core.grads.reducer import StepCounts
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.store import DiskStore
from shardwise.core.shards.chunk import Chunk
from shardwise.core.update.disk_tiles import DiskTile, TileVisits
from shardwise.core.update.tiles import PendingTile, TileStepper, UpdateTile

PENDING = 4  # chunks whose update may wait, each with its gradient
BY = "updates during backward (update='backward')"


# See [Note: Updates during backward].
class EarlyUpdates:
    """Updates of one optimizer's chunks that run ahead of its ``step()``.

    Args:
        stepper: updates tiles.
        tiles: all tiles of the optimizer in memory; on a GPU, ``step()`` updates the tiles that are on the device.
        disk: the tiles on a disk, by chunk index.
        visits: brings these into memory.
        new_shards: memory, by chunk index, for new parameters of tiles on a disk whose parameters have their home in
            memory.
        norm_type: p of the norm that ``step()`` reports.
        device: the device of the model. A GPU becomes the current device of the update thread.

    Attributes:
        updated: chunks whose masters are those of the next step already.
        pending: whether a pass has reached the optimizer since its last step; the same on all ranks.
        norms: norms of gradients whose memory has been reused.
        failure: the error that an update raised; later updates are skipped.
    """

    def __init__(
        self,
        stepper: TileStepper,
        tiles: Sequence[UpdateTile],
        disk: Mapping[int, Sequence[DiskTile]],
        visits: TileVisits,
        new_shards: Mapping[int, torch.Tensor],
        norm_type: float,
        device: torch.device,
    ) -> None:
        self._stepper, self._disk, self._visits, self._new_shards = stepper, disk, visits, new_shards
        self._norm_type = norm_type
        self._tiles: dict[int, list[UpdateTile]] = {}
        for tile in tiles:
            if tile.pieces[0].value.device.type == "cpu" and tile.state.master is not None:
                self._tiles.setdefault(tile.chunk.spec.index, []).append(tile)
        # The current GPU of a new thread is GPU 0, and torch's optimizers would query its streams.
        self._worker = ThreadPoolExecutor(1, "shardwise-update", initializer=make_current, initargs=(device,))
        self._jobs: deque[Future[None]] = deque()
        self._options: list[dict[str, Any]] = []
        self.updated: set[int] = set()
        self.pending = False
        self.norms: list[float] = []
        self.failure: Exception | None = None

    def begin_pass(self) -> None:
        """Begin a pass, whose updates use the present options.

        Raises:
            ValueError: an option is not a number that a step can use.
        """
        self._stepper.param_groups.check()
        self._options = self._read_options()

    def _read_options(self) -> list[dict[str, Any]]:
        # Copies: a learning rate may be a tensor that is changed in place.
        groups = self._stepper.param_groups.now
        return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups]

    def takes(self, state: ChunkGrads) -> bool:
        """Return whether the chunk can be updated now, because all of its parameters are known to have a gradient."""
        if len(state.arrived | state.used_globally) < len(state.spec.slots):
            return False
        if self._disk.get(state.spec.index):
            return True
        tiles = self._tiles.get(state.spec.index)
        # State may have moved to a GPU since then.
        return tiles is not None and tiles[0].pieces[0].value.device.type == "cpu"

    def update(self, state: ChunkGrads, factor: float) -> None:
        """Begin to update a chunk with ``factor`` times its gradient, which is reduced."""
        while len(self._jobs) >= PENDING:
            self._jobs[0].result()
            self._jobs.popleft()  # after the wait, so that an interrupt does not lose a tile
        self.updated.add(state.spec.index)
        self._jobs.append(self._worker.submit(self._run, state, factor))

    def _run(self, state: ChunkGrads, factor: float) -> None:
        if self.failure is not None:
            return
        try:
            reduced = state.reduced  # this thread waits for the copy to the host; autograd's thread does not
            assert reduced is not None
            self._update_chunk(state.chunk, reduced, factor)
            self.norms.append(shard_norm(reduced, self._norm_type))
            state.release()
        except Exception as error:
            self.failure = error
        except BaseException as error:  # such as SystemExit of an optimizer; catch_up() must not raise it
            self.failure = RuntimeError(f"an update during backward was ended by {error!r}")
            self.failure.__cause__ = error

    @torch.no_grad()
    def _update_chunk(self, chunk: Chunk, reduced: torch.Tensor, factor: float) -> None:
        index = chunk.spec.index
        with self._stepper.groups() as groups:

            def step(tile: UpdateTile, shard: torch.Tensor | None) -> None:
                self._stepper.step_tiles([PendingTile(tile, tile.pieces, reduced, shard)], factor, groups)

            if index not in self._disk:
                for tile in self._tiles[index]:
                    step(tile, None)
                return
            memory = self._new_shards.get(index)
            with chunk.renewing() if memory is None else nullcontext(memory) as shard:
                for each in self._disk[index]:
                    with self._visits.visit(each):
                        step(each.tile, shard)

    def catch_up(self) -> None:
        """Wait for all updates that have begun; :attr:`failure` has their error."""
        if self.updated:
            # Behind all of them, including those that an interrupt kept from being recorded.
            self._worker.submit(int).result()
        self._jobs.clear()
        if self.failure is None:
            try:
                self._visits.drain()
            except DiskError as error:
                self.failure = error

    def check_options(self) -> None:
        """Check that the options did not change after updates were made with them.

        Raises:
            RuntimeError: an option has changed.
        """
        options = self._read_options()
        if self.pending and not same_value(self._options, options):
            raise RuntimeError(
                f"step() with {options} after updates during backward with {self._options}: change learning rates "
                "before backward, or use update='step'"
            )

    @torch.no_grad()
    def take_over(self, chunks: Sequence[Chunk]) -> None:
        """Accept the updates: ``chunks`` get their new parameters. The caller commits the disk."""
        for chunk in [chunk for chunk in chunks if chunk.spec.index in self.updated]:
            index = chunk.spec.index
            tiles = self._tiles.get(index)
            memory = self._new_shards.get(index) if tiles is None else tiles[0].state.master
            if memory is not None:
                self._stepper.slots.copy(chunk.shard, memory)

    def lose(self) -> None:
        """Discard the updates, because no step will follow."""
        self.catch_up()
        self._visits.end_step()
        self.forget()

    def forget(self) -> None:
        """End the step."""
        self.updated.clear()
        self.norms.clear()
        self.failure, self.pending = None, False

    def close(self) -> None:
        """Wait for all updates that have begun, and end the worker."""
        self._worker.shutdown()
        self.updated.clear()


class EarlyObserver:
    """Passes reduced gradients to the early updates of their optimizers.

    Args:
        grads: the gradients of chunks, by index of the chunk.
        counts: the pass counts of the steps under way.
        broken: marks values that cannot be used any more.
        store: the disk, or ``None``.
    """

    def __init__(
        self, grads: Mapping[int, ChunkGrads], counts: StepCounts, broken: Broken, store: DiskStore | None
    ) -> None:
        self._grads, self._counts, self._broken, self._store = grads, counts, broken, store
        self.by_optimizer: dict[int, EarlyUpdates] = {}
        """The early updates by optimizer. Optimizers that update early add themselves."""

    @property
    def active(self) -> bool:
        """Whether any optimizer updates during backward."""
        return bool(self.by_optimizer)

    @property
    def pending(self) -> list[int]:
        """The optimizers that a pass has reached since their last step. Equal on all ranks."""
        return [index for index, each in self.by_optimizer.items() if each.pending]

    def begin_pass(self) -> None:
        """Begin an outermost pass.

        Raises:
            RuntimeError: the step has already had its pass.
        """
        if used := self.pending:
            raise RuntimeError(
                "a second backward pass before step() under update='backward': the first has updated the state of "
                f"optimizers {used}. Call step() before it, or use update='step' to accumulate gradients"
            )
        for each in self.by_optimizer.values():
            each.begin_pass()

    def check_current(self, what: str) -> None:
        """Check before the operation ``what`` reads or writes values.

        Raises:
            RuntimeError: some values are those of the next step already.
        """
        if self.pending:
            raise RuntimeError(
                f"{what} between backward() and step() under update='backward': masters and state are partly updated. "
                "Call step() first, or use update='step'"
            )

    def result_added(self, chunk: int) -> None:
        """Update the chunk if this is possible now."""
        state = self._grads[chunk]
        early = self.by_optimizer.get(state.spec.optimizer)
        if early is not None and early.takes(state):
            early.update(state, 1.0 / self._counts.loss_scale)

    def catch_up(self) -> None:
        """Wait until no update is running."""
        for each in self.by_optimizer.values():
            each.catch_up()

    def end_pass(self) -> None:
        """End a reduced pass, which has ended on all ranks."""
        self.catch_up()
        for index, each in self.by_optimizer.items():
            each.pending = self._counts.reduced.get(index, 0) > 0

    def lose(self, optimizers: Collection[int] | None = None) -> None:
        """Break the session: the updates of these optimizers (``None``: all) can be neither used nor undone."""
        for index in self.by_optimizer if optimizers is None else optimizers:
            self._broken.mark(BY, PARAMETERS, state_of(index))
            self.by_optimizer[index].lose()
            for state in self._grads.values():
                if state.spec.optimizer == index:
                    state.clear()
            self._counts.forget([index])
            if self._store is not None:
                self._store.rollback(index)

    def dropped(self, optimizer: int | None) -> None:
        """Check before gradients are dropped.

        Raises:
            RuntimeError: they have been used already.
        """
        used = [index for index in self.pending if optimizer in (None, index)]
        if used:
            self.lose(used)
            raise RuntimeError(
                "gradients were dropped before step() under update='backward', after they had updated the state of "
                f"optimizers {used}: load a checkpoint, and use update='step' where steps are skipped"
            )
