"""Steps of an engine: which of them update, what they count, and what an interrupt leaves of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from shardwise.deepspeed.asserted import AssertedError
from shardwise.deepspeed.clock import StepClock
from shardwise.deepspeed.config import Batch
from shardwise.deepspeed.facts import Facts
from shardwise.deepspeed.recording import StepRecorder
from shardwise.deepspeed.stepping import PassesApart, check_all_used, watched_step

__all__ = ["Steps"]


class Begun(NamedTuple):
    """What a step that updates is to count, and what optimizer, engine and schedule had counted before it."""

    ended: int
    passes: int
    counters: dict[str, int]
    schedule: int | None
    lr_kwargs: dict[str, Any]


# [Note: A step that was interrupted]
# Behind an update an interrupt must not hide it: with the passes still counted, the next micro-batch alone would make
# an update. So the step is noted before, with all numbers as they were, and the optimizer says whether it has ended
# (``steps_ended``, which changes with the update). Whoever comes next, step() called again or the next pass, counts it
# from these numbers, which may be done twice, and steps the schedule. A step that raises before the update has counted
# nothing.
class Steps(Facts):
    """Of one engine; calls of ``step`` are counted, and made an update at the accumulation boundary."""

    module: nn.Module
    lr_scheduler: Any
    _apart: PassesApart
    _clock: StepClock
    _recorder: StepRecorder

    def _start_counting(self, batch: Batch) -> None:
        self._batch = batch
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._passes = 0  # calls of step since the last update
        self._unmanaged = 0  # backward passes that the gradients held now are made of
        self._boundary: bool | None = None
        self._applied, self._stepping, self._samples = False, False, 0  # samples of the last step
        self._begun: Begun | None = None
        """See [Note: A step that was interrupted]."""
        events = self.session.events
        events.gradients_dropped.listen(self._gradients_dropped)
        events.passes_lost.listen(self._passes_lost)
        events.forward_began.listen(lambda trains: self._finish_step() if trains else None)
        events.backward_asked.listen(lambda: self._finish_step(in_pass=True))

    def _required(self, what: str) -> Any:
        if self.optimizer is None:
            raise RuntimeError(
                f"{what}() with optimizer={self.optimizer}: name one in the configuration, or give one to initialize"
            )
        return self.optimizer

    # ---- passes

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        """Where whole gradients are kept (stages 0 and 1) only the last pass of a step exchanges them."""
        managed = self.settings["managed_gradient_accumulation"]
        if managed and self.session.plan.shard.reduce == "last" and not self.is_gradient_accumulation_boundary():
            with self.session.no_sync():
                yield
        else:
            yield

    def _gradients_dropped(self, optimizer: int | None) -> None:
        self._unmanaged = 0  # whoever drops them

    def _passes_lost(self) -> None:
        self._passes = 0  # the program is told to make all of them again
        self._recorder.forgets()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients at stages 0 and 1; sums at 2 and 3 stay, as those of DeepSpeed. Managed counts of passes go
        on, but after a pass that failed they start anew."""
        self.session.drop_failed()
        if not self._apart.keep_sums():
            self.module.zero_grad()
            self._recorder.forgets()

    # ---- steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings["managed_gradient_accumulation"]:
            return self._stepping
        return self._passes + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide :meth:`is_gradient_accumulation_boundary` from here on, before the pass that it is about.

        Raises:
            AssertedError: with ``managed_gradient_accumulation=false``, where every step is one.
        """
        if not self.settings["managed_gradient_accumulation"]:
            raise AssertedError(
                f"set_gradient_accumulation_boundary({is_boundary}) without managed_gradient_accumulation: leave it out"
            )
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """After every backward pass: updates the parameters at the accumulation boundary. Every rank calls it.

        One that raised before its update may be called again. One that an interrupt (Ctrl-C) ended behind it is
        finished by the next call, or the next pass.

        Args:
            lr_kwargs: arguments of the schedule's ``step``.

        Raises:
            RuntimeError: there is no optimizer; a gradient was not finite at the lowest loss scale.
            AssertedError: inside of :meth:`no_sync`; or an unused parameter without ``ignore_unused_parameters``.
        """
        self._required("step")
        self._apart.check_step()
        if self._made():
            self._finish_step()
            return
        self._stepping, self._applied = True, False
        try:
            if not self.is_gradient_accumulation_boundary():
                # In one call, in which no interrupt comes: nn.Module has a function of Python for each attribute.
                vars(self).update(_passes=self._passes + 1, micro_steps=self.micro_steps + 1)
                return
            self._take_step(lr_kwargs or {})
        finally:
            self._stepping = False
        self._finish_step()

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer = self._required("step")
        check_all_used(self.session, self.settings)
        passes = self._passes + 1 if self.settings["managed_gradient_accumulation"] else self._unmanaged
        if self._boundary is not None:  # who sets it may call step once for all passes, or after each
            passes = max(self._passes + 1, self._unmanaged)
        self._begun = Begun(optimizer.steps_ended, passes, self._counters(), self._scheduled(), lr_kwargs)
        with self._clock.timed("step"), watched_step(optimizer, self.settings):
            optimizer.step()
            self._count_step(self._begun)

    def _made(self) -> bool:
        """Whether the update of the step that was begun last has been made, or skipped, and the step is not over."""
        return self._begun is not None and self.optimizer.steps_ended > self._begun.ended

    def _finish_step(self, in_pass: bool = False) -> None:
        """What is left to do of a step behind its update, if anything is.

        Args:
            in_pass: a backward pass runs, which has taken the used gradients away itself.
        """
        begun = self._begun
        if begun is None or not self._made():
            return
        with self._clock.timed("step"):
            self._count_step(begun)
            if not in_pass:
                self.module.zero_grad()  # of .grad nothing is left, as under DeepSpeed
            if self._applied and self.lr_scheduler is not None and self._scheduled() in (None, begun.schedule):
                self.lr_scheduler.step(**begun.lr_kwargs)
        vars(self)["_begun"] = None  # at once; what follows tells of the step, and may raise
        times = self._clock.step_ended(self.global_steps, self._samples, self._progress)
        scale = float(self.optimizer.loss_scale) if self.fp16_enabled() else None
        self._recorder.step_ended(self.global_samples, (self.get_lr() or [0.0])[0], scale, times)
        self._recorder.print_profile(self.global_steps)

    def _scheduled(self) -> int | None:
        """Steps of the schedule, as torch's and DeepSpeed's count them; ``None``: it does not say."""
        schedule = self.lr_scheduler
        return getattr(schedule, "last_epoch", getattr(schedule, "last_batch_iteration", None))

    def _count_step(self, begun: Begun) -> None:
        # What was accumulated is used up, whatever happens next.
        skipped = bool(self.optimizer.last_step_skipped)
        self._applied, self._passes = not skipped, 0
        self._samples = self._batch.micro * self.dp_world_size * begun.passes
        more = {"global_steps": 1, "micro_steps": 1, "global_samples": self._samples, "skipped_steps": int(skipped)}
        self._take_counters({name: begun.counters[name] + count for name, count in more.items()})

    def _progress(self) -> str:
        return f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}"

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the parameters."""
        return self._applied

    def _counters(self) -> dict[str, int]:
        names = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}

    def _take_counters(self, counters: dict[str, int]) -> None:
        vars(self).update({name: int(counters.get(name, 0)) for name in self._counters()})
