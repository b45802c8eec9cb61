"""Updates during backward: a chunk's masters and state are updated as soon as its gradient is reduced, beside the rest.

The parameters themselves change at ``step()`` only, since backward still reads them. Without clipping and loss scale
nothing about the update depends on other chunks, so it is made in place, and the gradient's memory is used again at
once: gradients stream. Otherwise it is a guess, that the gradients are finite and the norm is within bounds, and that
the step has as many passes as the one before; it is made in the last of them. Old values are kept until ``step()``
knows, and put back, exactly, if it was wrong. Where a disk is in use it is always a guess, that the disk does not fail,
and gradients are kept.

Source: fused backward and optimizer steps (LOMO, arXiv 2306.09782, without its two passes) and the speculative steps of
SuperOffload (arXiv 2509.21271), with copies in place of its approximate inverse.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shardwise.checks.param_groups import same_value
from shardwise.device import make_current
from shardwise.disk.store import DiskError
from shardwise.memory.tier import Tier
from shardwise.reduce.counts import StepCounts
from shardwise.reduce.grads import ChunkGrads
from shardwise.reduce.norm import shard_norm
from shardwise.update.early_disk import EarlyDisk
from shardwise.update.tiles import Due, Tile, TileStepper

__all__ = ["EarlyObserver", "EarlyUpdates"]

PENDING = 4  # chunks whose update in place may wait, each with its gradient


# See [Note: Guesses and their undoing].
class EarlyUpdates:
    """Updates of one optimizer's chunks that run ahead of its ``step()``.

    Args:
        stepper: updates tiles.
        tiles: all of the optimizer's in memory; on a GPU those on it are left to ``step()``.
        disk: its tiles on a disk, or ``None``.
        in_place: nothing needs to be undone: no clipping, no loss scale, no disk.
        norm_type: p of the norm that ``step()`` reports.
        device: where the model computes; the current one of the thread that updates, where it is a GPU.
        fits: tells whether so many bytes of copies may be kept on the device.
    """

    def __init__(
        self,
        stepper: TileStepper,
        tiles: Sequence[Tile],
        disk: EarlyDisk | None,
        *,
        in_place: bool,
        norm_type: float,
        device: torch.device,
        fits: Callable[[int], bool],
    ) -> None:
        self._fits = fits
        self._stepper, self.in_place, self._norm_type = stepper, in_place, norm_type
        self._disk = disk
        self._tiles: dict[int, list[Tile]] = {}
        for tile in tiles:
            if tile.pieces[0].value.device.type == "cpu" and tile.state.master is not None:
                self._tiles.setdefault(tile.chunk.spec.index, []).append(tile)
        # A new thread's current GPU is the first one, where torch's optimizers would ask about streams.
        self._worker = ThreadPoolExecutor(1, "shardwise-update", initializer=make_current, initargs=(device,))
        self._jobs: deque[Future[None]] = deque()
        self._undo: list[Callable[[], None]] = []
        self._kept_bytes = 0
        self._factor: float | None = None
        self._options: list[dict[str, Any]] = []
        self._done: set[int] = set()
        """What of :attr:`updated` the worker has finished."""
        self._undoing = False
        """What was updated is being put back; an interrupt may have come in between."""
        self._broken = False
        """Updates in place can be neither used nor put back."""
        self._failure: BaseException | None = None
        self._stopped = False
        """Set by the worker: an update failed, the others that wait are not made."""
        self.passes = 1
        """Of this step, the running one included."""
        self._expected_passes: int | None = None
        """Those of the step before."""
        self.updated: set[int] = set()
        """Chunks whose masters are those of the next step already."""
        self.anywhere = False
        """Whether any rank has such chunks, once the ranks have agreed on it (in place only)."""
        self.norms: list[float] = []
        """Norms of gradients whose memory has been used again."""

    # ---- the passes of a step

    def begin_pass(self, done: int) -> None:
        """A pass begins; ``done`` of this step have reached parameters of this optimizer."""
        self.passes = done + 1

    def begin_step(self, passes: int) -> None:
        """The gradients of a step's ``passes`` have been used or dropped."""
        if passes > 0:  # otherwise they were dropped once more
            self._expected_passes = passes
            if self._disk is not None:
                self._disk.end_step()

    def expects_no_other(self, first: bool) -> bool:
        """Whether the running pass is likely to be the step's last. ``first``: nothing is added to the gradient."""
        if self.in_place or self._expected_passes is None:  # in place it must be: a second one is refused
            return first
        return self.passes == self._expected_passes

    # ---- updates

    def takes(self, state: ChunkGrads) -> bool:
        """Whether the chunk's update can be made now: all of its parameters are known to have a gradient."""
        index = state.spec.index
        whole = len(state.fired | state.touched) == len(state.spec.slots) and not state.late_filled
        if not whole or index in self.updated:
            return False
        if self._disk is not None and self._disk.holds(index):
            return self._disk.ready
        tiles = self._tiles.get(index)
        # State may have moved to a GPU since.
        if tiles is None or tiles[0].pieces[0].value.device.type != "cpu":
            return False
        return self.in_place or tiles[0].state.tier is not Tier.DEVICE or self._fits(self._size(tiles))

    def _size(self, tiles: Sequence[Tile]) -> int:
        """Bytes of values and state."""
        state = self._stepper.optimizer.state
        held = [value for tile in tiles for piece in tile.pieces for value in list(state.get(piece.value, {}).values())]
        values = sum(piece.value.nbytes for tile in tiles for piece in tile.pieces)
        return values + sum(value.nbytes for value in held if isinstance(value, torch.Tensor))

    @property
    def failed(self) -> bool:
        """Whether something has to be loaded, if updates are made in place."""
        return self._broken or self._failure is not None

    @property
    def pending(self) -> bool:
        """Whether something was updated ahead of its step here, or in place on any rank."""
        return bool(self.updated) or self.anywhere or self._undoing

    @property
    def device_bytes(self) -> int:
        """Copies of what is on the device, to go back to."""
        return self._kept_bytes

    def update(self, state: ChunkGrads, factor: float) -> None:
        """Begin to update a chunk, whose gradient is reduced, with ``factor`` times it."""
        self._note_options(factor)
        reduced = state.reduced
        if reduced is None:
            raise RuntimeError(f"chunk {state.spec.index} has no gradient ({reduced}) to be updated with; report this")
        while self.in_place and len(self._jobs) >= PENDING:
            self._wait_for_one()
        if self._failure is not None:
            return  # step() raises it
        self.updated.add(state.spec.index)  # before the worker has it: an interrupt may come in between
        tiles = self._tiles.get(state.spec.index, ())
        if not self.in_place and tiles and tiles[0].state.tier is Tier.DEVICE:
            self._kept_bytes += self._size(tiles)
        self._jobs.append(self._worker.submit(self._run, state, reduced, factor))

    def _note_options(self, factor: float) -> None:
        if self._factor is None:
            self._factor, self._options = factor, self._read_options()

    def agree(self, anywhere: bool, factor: float) -> None:
        """A pass is over. ``anywhere``: some rank updated in place; one that did not must stop where that one does."""
        self.anywhere = anywhere
        if anywhere:
            self._note_options(factor)

    def _read_options(self) -> list[dict[str, Any]]:
        # Copies: a learning rate may be a tensor that is changed in place.
        groups = self._stepper.param_groups.now
        return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups]

    def _run(self, state: ChunkGrads, reduced: torch.Tensor, factor: float) -> None:
        if self._stopped:
            return
        try:
            self._update_chunk(state, reduced, factor)
            if self.in_place:
                self.norms.append(shard_norm(reduced, self._norm_type))
                state.release()
        except BaseException as error:
            self._failure, self._stopped = self._failure or error, True
            return
        self._done.add(state.spec.index)

    @torch.no_grad()
    def _update_chunk(self, state: ChunkGrads, reduced: torch.Tensor, factor: float) -> None:
        with self._stepper.groups() as groups:

            def step(tile: Tile, shard: torch.Tensor | None) -> None:
                self._stepper.step_tiles([Due(tile, tile.pieces, reduced, shard)], factor, groups)

            if self._disk is not None and self._disk.holds(state.spec.index):
                self._disk.update(state.chunk, step)
                return
            for tile in self._tiles[state.spec.index]:
                if not self.in_place:
                    self._undo.append(self._keep(tile))
                step(tile, None)

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

    @property
    def disk_failure(self) -> DiskError | None:
        """The disk failed; ``step()`` raises it on every rank, unless all was taken back before."""
        return self._failure if isinstance(self._failure, DiskError) else None

    def settle(self) -> None:
        """Wait for all updates that were begun; raises what one of them raised, after all are put back or for good.

        What happened on a disk is kept instead (:attr:`disk_failure`), because all ranks have to learn of it.
        """
        self.catch_up()
        if self._broken:
            raise RuntimeError(self._lost)
        if self._undoing:
            self.rollback()
        failure = self._failure
        if failure is not None and self.disk_failure is None:
            if not self.in_place:
                self.rollback()
            raise failure

    def catch_up(self) -> None:
        """Wait for them; what one of them raised is kept for :meth:`settle`. May be called again if interrupted."""
        if self.updated:
            # Not for the jobs that are noted: an interrupt may have come before one of them was.
            self._worker.submit(_nothing).result()
            self._jobs.clear()
            missing = self.updated - self._done
            if missing and self._failure is None:
                self._failure = RuntimeError(
                    f"the updates of chunks {sorted(missing)} were interrupted before they began"
                )
        if self._disk is not None and self._failure is None:
            try:
                self._disk.drain()
            except DiskError as error:
                self._failure = error

    def _wait_for_one(self) -> None:
        self._jobs[0].result()
        self._jobs.popleft()

    def confirm(self, factor: float) -> bool:
        """Whether the updates that were made are those of a step with ``factor`` and the options of now.

        If not they are undone.

        Raises:
            RuntimeError: they are not, and were made in place.
        """
        self.settle()
        if not self.updated and not self.anywhere:
            return False
        if factor == self._factor and same_value(self._options, self._read_options()):
            return bool(self.updated)
        if self.in_place:
            raise RuntimeError(
                f"{len(self.updated)} chunks were updated during backward with gradients times {self._factor} and "
                f"{self._options}, but step() now wants {factor} and {self._read_options()}: change learning rates "
                "before backward, or use update='step'"
            )
        self.take_back()
        return False

    def take_back(self) -> None:
        """The guess was wrong: :meth:`rollback`, and make fewer of them on the disk."""
        self.catch_up()
        if self._disk is not None and self.disk_failure is None:
            self._disk.was_wrong()
        self.rollback()

    def rollback(self) -> None:
        """Put everything back as it was before this pass.

        Raises:
            RuntimeError: updates were made in place.
        """
        self.catch_up()
        if self.in_place and (self.updated or self.anywhere):
            self._broken = True
            raise RuntimeError(self._lost)
        # Before the first value: an interrupt from here on is noticed by settle(), which comes here again.
        self._undoing = True
        if self._disk is not None:
            self._disk.rollback()
        with torch.no_grad():
            for restore in reversed(self._undo):
                restore()
        self._stepper.state_changed()
        self.forget()

    def step_failed(self) -> None:
        """``step()`` raises: :meth:`rollback`, or later calls say that there is none."""
        if self.in_place and self.pending:
            self._broken = True
        else:
            self.rollback()

    @property
    def _lost(self) -> str:
        return (
            f"{len(self.updated)} chunks were updated during a backward pass that was not completed, whose gradients "
            "are dropped, or that gave a parameter a second gradient (nested passes), and cannot be put back: load a "
            "checkpoint, and use update='step' to be safe"
        )

    def undo_for(self, what: str) -> None:
        """``what`` reads or writes all values between backward and step: they become those of the last step again.

        Raises:
            RuntimeError: updates were made in place.
        """
        self.catch_up()
        if self.in_place and (self.updated or self.anywhere):
            advice = "call step() first" if self._failure is None else f"{self._failure!r}: load a checkpoint"
            raise RuntimeError(
                f"{what} between backward() and step(): {len(self.updated)} chunks have the next step's values already "
                f"(update='backward'); {advice}"
            )
        self.take_back()

    def discard(self) -> None:
        """Masters, or state, are about to be replaced: what was updated ahead of its step no longer matters. In place,
        what is not replaced is half that of the next step."""
        self.catch_up()
        if self.in_place:
            self.forget()
        else:
            self.rollback()

    def forget(self) -> None:
        """The step is over."""
        self._undo.clear()
        if self._disk is not None:
            self._disk.forget()
        self._kept_bytes = 0
        self.updated.clear()
        self._done.clear()
        self.norms.clear()
        self._factor, self._failure, self.anywhere, self._stopped = None, None, False, False
        self._undoing = self._broken = False

    def close(self) -> None:
        """Wait for what was begun and end the worker."""
        self._worker.shutdown()


def _nothing() -> None:
    """Whoever waits for it has waited for all that the worker was given before."""


def _copied(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in state.items()}


class EarlyObserver:
    """Hands reduced gradients to the early updates of their optimizers.

    Args:
        grads: by index of the chunk.
        counts: of the steps under way.
        average: over the passes of a step, as in :class:`~shardwise.plan.GradPlan`.
    """

    def __init__(self, grads: Mapping[int, ChunkGrads], counts: StepCounts, average: str) -> None:
        self._grads, self._counts, self._divides = grads, counts, average == "mean"
        self.by_optimizer: dict[int, EarlyUpdates] = {}
        """Filled by the optimizers that update early."""
        self._is_first = False
        """Whether the result that is about to be added is the chunk's first since the last step."""

    def _factor(self, early: EarlyUpdates) -> float:
        """What ``step()`` multiplies gradients by if the running pass is its last and nothing is clipped."""
        return 1.0 / (self._counts.loss_scale * (early.passes if self._divides else 1))

    def check_pass(self) -> None:
        """Raises:
        RuntimeError: updates were made in place, to which another pass cannot add.
        """
        for each in self.by_optimizer.values():
            if each.in_place and (each.updated or each.anywhere):
                raise RuntimeError(
                    f"{len(each.updated)} chunks were updated during the last backward pass (update='backward'): call "
                    "step() before the next one, or use update='step' to accumulate gradients"
                )

    def begin_pass(self) -> None:
        """An outermost pass begins."""
        for index, each in self.by_optimizer.items():
            each.settle()  # a new pass writes where gradients of the last one may be
            if each.disk_failure is not None:
                each.rollback()  # step() meets the disk again
            each.begin_pass(self._counts.so_far(index))

    def before_result(self, chunk: int) -> None:
        """A second result for a chunk that is updated already: the guess was wrong."""
        state = self._grads[chunk]
        self._is_first = state.held is None  # asked so, it need not have landed
        early = self.by_optimizer.get(state.spec.optimizer)
        if early is not None and chunk in early.updated:
            early.take_back()

    def after_result(self, chunk: int) -> None:
        """Update the chunk if that can be done now."""
        state = self._grads[chunk]
        early = self.by_optimizer.get(state.spec.optimizer)
        if early is not None and early.expects_no_other(self._is_first) and early.takes(state):
            early.update(state, self._factor(early))

    def catch_up(self) -> list[float]:
        """After a pass: nothing runs beside the caller any more. For each optimizer, whether something of it was
        updated in place on this rank."""
        for each in self.by_optimizer.values():
            each.catch_up()
        return [float(each.in_place and bool(each.updated)) for each in self.by_optimizer.values()]

    def device_bytes(self) -> int:
        """Copies on the device to undo updates with."""
        return sum(each.device_bytes for each in self.by_optimizer.values())

    @property
    def active(self) -> bool:
        """Whether anybody wants reduced gradients as soon as they are there."""
        return bool(self.by_optimizer)

    @property
    def must_agree(self) -> bool:
        """Whether updates are made in place: then all ranks have to know what :meth:`catch_up` says, and chunks are not
        reduced before each parameter has its gradient, since no second result can be taken."""
        # No generator: Python loses an interrupt that comes while one is given up.
        return True in [each.in_place for each in self.by_optimizer.values()]

    def agreed(self, anywhere: Sequence[bool]) -> None:
        """What any rank said."""
        for each, some in zip(self.by_optimizer.values(), anywhere, strict=True):
            each.agree(some, self._factor(each))

    def dropped(self, optimizer: int | None) -> None:
        """Gradients that were used already are dropped: undo what was done with them."""
        for index, each in self.by_optimizer.items():
            if optimizer in (None, index) and each.pending:
                each.take_back()
