"""Updates during backward: a chunk's masters and state are updated as soon as its gradient is reduced, beside the rest.

The update is made in place, so nothing that comes later may change it: plans refuse clipping and a loss scale with it,
each step is one backward pass, and what was updated cannot be put back. The gradient's memory is used again at once:
gradients stream. Parameters change at ``step()`` only, since backward still reads them.

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
from shardwise.core.grads.grads import ChunkGrads
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
        tiles: all of the optimizer's in memory; on a GPU those on it are left to ``step()``.
        disk: those on a disk, by chunk index.
        visits: brings these into memory.
        new_shards: by chunk index, memory for new parameters that are at home in memory, of tiles on a disk.
        norm_type: p of the norm that ``step()`` reports.
        device: where the model computes; the current one of the thread that updates, where it is a GPU.

    Attributes:
        updated: chunks whose masters are those of the next step already.
        pending: whether a pass has reached the optimizer since its last step; the same on all ranks.
        norms: of gradients whose memory has been used again.
        failure: what an update raised; those after it are not made.
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
        # A new thread's current GPU is the first one, where torch's optimizers would ask about streams.
        self._worker = ThreadPoolExecutor(1, "shardwise-update", initializer=make_current, initargs=(device,))
        self._jobs: deque[Future[None]] = deque()
        self._options: list[dict[str, Any]] = []
        self.updated: set[int] = set()
        self.pending = False
        self.norms: list[float] = []
        self.failure: Exception | None = None

    def begin_pass(self) -> None:
        """A pass begins; its updates are made with the options of now.

        Raises:
            ValueError: one of them is no number that a step can be made with.
        """
        self._stepper.param_groups.check()
        self._options = self._read_options()

    def _read_options(self) -> list[dict[str, Any]]:
        # Copies: a learning rate may be a tensor that is changed in place.
        groups = self._stepper.param_groups.now
        return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups]

    def takes(self, state: ChunkGrads) -> bool:
        """Whether the chunk's update can be made now: all of its parameters are known to have a gradient."""
        if len(state.arrived | state.used_globally) < len(state.spec.slots):
            return False
        if self._disk.get(state.spec.index):
            return True
        tiles = self._tiles.get(state.spec.index)
        # State may have moved to a GPU since.
        return tiles is not None and tiles[0].pieces[0].value.device.type == "cpu"

    def update(self, state: ChunkGrads, factor: float) -> None:
        """Begin to update a chunk with ``factor`` times its gradient, which is reduced."""
        while len(self._jobs) >= PENDING:
            self._jobs[0].result()
            self._jobs.popleft()  # after the wait, so that an interrupt does not forget one
        self.updated.add(state.spec.index)
        self._jobs.append(self._worker.submit(self._run, state, factor))

    def _run(self, state: ChunkGrads, factor: float) -> None:
        if self.failure is not None:
            return
        try:
            reduced = state.reduced  # this thread waits for its copy to the host, autograd's does not
            if reduced is None:
                raise RuntimeError(f"chunk {state.spec.index} has no gradient ({reduced}); report this")
            self._update_chunk(state.chunk, reduced, factor)
            self.norms.append(shard_norm(reduced, self._norm_type))
            state.release()
        except Exception as error:
            self.failure = error
        except BaseException as error:  # as SystemExit of a user's optimizer: waiting for the worker must not raise it
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
                    self._visits.visit(each, lambda one: step(one.tile, shard))

    def catch_up(self) -> None:
        """Wait for all that was begun; what it raised is in :attr:`failure`."""
        if self.updated:
            # Behind all that was begun, also what an interrupt has kept from being noted down.
            self._worker.submit(int).result()
        self._jobs.clear()
        if self.failure is None:
            try:
                self._visits.drain()
            except DiskError as error:
                self.failure = error

    def check_options(self) -> None:
        """Raises:
        RuntimeError: updates were made with other options than those of now.
        """
        options = self._read_options()
        if self.pending and not same_value(self._options, options):
            raise RuntimeError(
                f"step() with {options} after updates during backward with {self._options}: change learning rates "
                "before backward, or use update='step'"
            )

    @torch.no_grad()
    def take_over(self, chunks: Sequence[Chunk]) -> None:
        """What was updated counts: ``chunks`` get their new parameters. Committing a disk is the caller's."""
        for chunk in [chunk for chunk in chunks if chunk.spec.index in self.updated]:
            index = chunk.spec.index
            tiles = self._tiles.get(index)
            memory = self._new_shards.get(index) if tiles is None else tiles[0].state.master
            if memory is not None:
                self._stepper.slots.copy(chunk.shard, memory)

    def lose(self) -> None:
        """Give up what was updated: no step will follow."""
        self.catch_up()
        self._visits.end_step()
        self.forget()

    def forget(self) -> None:
        """The step is over."""
        self.updated.clear()
        self.norms.clear()
        self.failure, self.pending = None, False

    def close(self) -> None:
        """Wait for what was begun and end the worker."""
        self._worker.shutdown()
        self.updated.clear()


class EarlyObserver:
    """Hands reduced gradients to the early updates of their optimizers.

    Args:
        grads: by index of the chunk.
        counts: of the steps under way.
        broken: values that cannot be used any more are marked here.
        store: the disk, or ``None``.
    """

    def __init__(
        self, grads: Mapping[int, ChunkGrads], counts: StepCounts, broken: Broken, store: DiskStore | None
    ) -> None:
        self._grads, self._counts, self._broken, self._store = grads, counts, broken, store
        self.by_optimizer: dict[int, EarlyUpdates] = {}
        """Filled by the optimizers that update early."""

    @property
    def active(self) -> bool:
        """Whether any optimizer updates during backward."""
        return bool(self.by_optimizer)

    @property
    def pending(self) -> list[int]:
        """The optimizers that a pass has reached since their last step; the same on all ranks."""
        return [index for index, each in self.by_optimizer.items() if each.pending]

    def begin_pass(self) -> None:
        """An outermost pass is about to begin.

        Raises:
            RuntimeError: the step has had its pass.
        """
        if used := self.pending:
            raise RuntimeError(
                "a second backward pass before step() under update='backward': the first has updated the state of "
                f"optimizers {used}. Call step() before it, or use update='step' to accumulate gradients"
            )
        for each in self.by_optimizer.values():
            each.begin_pass()

    def check_current(self, what: str) -> None:
        """``what`` reads or writes values.

        Raises:
            RuntimeError: some are those of the next step already.
        """
        if self.pending:
            raise RuntimeError(
                f"{what} between backward() and step() under update='backward': masters and state are partly updated. "
                "Call step() first, or use update='step'"
            )

    def result_added(self, chunk: int) -> None:
        """Update the chunk if that can be done now."""
        state = self._grads[chunk]
        early = self.by_optimizer.get(state.spec.optimizer)
        if early is not None and early.takes(state):
            early.update(state, 1.0 / self._counts.loss_scale)

    def catch_up(self) -> None:
        """Wait until no update runs any more."""
        for each in self.by_optimizer.values():
            each.catch_up()

    def end_pass(self) -> None:
        """A reduced pass is over on all ranks."""
        self.catch_up()
        for index, each in self.by_optimizer.items():
            each.pending = self._counts.reduced.get(index, 0) > 0

    def lose(self, optimizers: Collection[int] | None = None) -> None:
        """Break the session: what these optimizers (``None``: all) updated can be neither used nor undone."""
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
        """Gradients are dropped.

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
