"""Steps of an engine: which of them update, what they count, and what they tell monitors and the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.deepspeed.asserted import AssertedError
from shardwise.deepspeed.config import Batch
from shardwise.deepspeed.facts import Facts
from shardwise.deepspeed.logs import LOG
from shardwise.deepspeed.monitors import Monitor
from shardwise.deepspeed.stepping import PassesApart, watched_step

__all__ = ["Steps"]


class Steps(Facts):
    """Of one engine; calls of ``step`` are counted, and made an update at the accumulation boundary."""

    module: nn.Module
    lr_scheduler: Any
    monitor: Monitor
    _apart: PassesApart

    def _start_counting(self, batch: Batch) -> None:
        self._batch = batch
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._passes = 0  # calls of step since the last update
        self._unmanaged = 0  # backward passes that the gradients held now are made of
        self._losses: list[Tensor] = []  # of these passes, where a monitor wants them
        self._boundary: bool | None = None
        self._applied, self._stepping = False, False
        events = self.session.events
        events.gradients_dropped.listen(self._gradients_dropped)
        events.passes_lost.listen(self._passes_lost)

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
        self._losses.clear()

    def _lost(self, loss: Tensor) -> None:
        """A pass was made of ``loss``, which was divided by the number of passes of its step."""
        if self.monitor.enabled:
            self._losses.append(loss.detach())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients at stages 0 and 1; sums at 2 and 3 stay, as those of DeepSpeed. Managed counts of passes go
        on, but after a pass that failed they start anew."""
        self.session.drop_failed()
        if self.settings.stage < 2:
            self.module.zero_grad()
            self._losses.clear()

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

    @deferred_interrupts("step()")
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """After every backward pass: updates the parameters at the accumulation boundary. Every rank calls it, and
        Ctrl-C waits for its end.

        One that raised before its update may be called again.

        Args:
            lr_kwargs: arguments of the schedule's ``step``.

        Raises:
            RuntimeError: there is no optimizer; a gradient was not finite at the lowest loss scale.
            AssertedError: inside of :meth:`no_sync`.
        """
        optimizer = self._required("step")
        self._apart.check_step()
        self._stepping, self._applied = True, False
        try:
            if not self.is_gradient_accumulation_boundary():
                self._passes += 1
                self.micro_steps += 1
                return
            ended, passes = optimizer.steps_ended, self._passes_of_step()
            try:
                with watched_step(optimizer, self.settings):
                    optimizer.step()
            finally:
                if optimizer.steps_ended > ended:  # whatever was raised behind the update: it counts
                    self._count_step(passes)
                    self.module.zero_grad()  # of .grad nothing is left, as under DeepSpeed
                    if self._applied and self.lr_scheduler is not None:
                        self.lr_scheduler.step(**(lr_kwargs or {}))
        finally:
            self._stepping = False
        self._tell()

    def _passes_of_step(self) -> int:
        """How many passes the step that is due is made of."""
        if self._boundary is not None:  # who sets it may call step once for all passes, or after each
            return max(self._passes + 1, self._unmanaged)
        return self._passes + 1 if self.settings["managed_gradient_accumulation"] else self._unmanaged

    def _count_step(self, passes: int) -> None:
        skipped = bool(self.optimizer.last_step_skipped)
        self._applied, self._passes = not skipped, 0  # what was accumulated is used up
        self.global_steps += 1
        self.micro_steps += 1
        self.global_samples += self._batch.micro * self.dp_world_size * passes
        self.skipped_steps += int(skipped)

    def _tell(self) -> None:
        every = self.settings["steps_per_print"]
        if every is not None and self.global_steps % every == 0 and self.global_rank == 0:
            LOG.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())
        if self.monitor.enabled:
            values = {"lr": (self.get_lr() or [0.0])[0]}
            if self._losses:
                values["train_loss"] = float(sum(float(loss) for loss in self._losses))
            if self.settings["fp16.enabled"]:
                values["loss_scale"] = float(self.optimizer.loss_scale)
            samples = self.global_samples
            self.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in values.items()])
        self._losses.clear()

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the parameters."""
        return self._applied

    def _counters(self) -> dict[str, int]:
        names = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}

    def _take_counters(self, counters: dict[str, int]) -> None:
        vars(self).update({name: int(counters.get(name, 0)) for name in self._counters()})
