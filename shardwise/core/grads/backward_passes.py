"""Backward passes: when one begins, when it ends on every rank, and how a failed one is dropped.

A pass begins at its first gradient or gather (``note``), and ends in ``_finish``: gathers first, then
:meth:`Reducer.finish` makes the remaining reductions.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial

import torch

from shardwise.core.base.events import Events
from shardwise.core.base.torch_internals import at_end_of_backward, current_graph_task, current_node, is_transformed
from shardwise.core.base.validate import number
from shardwise.core.base.warnings import warn_user
from shardwise.core.comm import PeerError
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.shards.gather_hooks import in_backward
from shardwise.core.shards.memory_meter import MemoryMeter
from shardwise.plan.precision import HALF_DTYPES

TOKEN_UNIT = 1024.0  # token weights are counted in this unit, a power of two, to keep scaled fp16 losses small


# [Note: A pass that failed]
# If a pass fails, nothing waits for the peers: they may be in the middle of it, and would not take part in an exchange.
# The failure is noted (``_failed``) until all ranks have dropped the pass. The flag is set before the end of a pass,
# where anything can raise, and reset when the last reduction is done, so an interrupted end counts as a failure. An
# interrupted change of present gradients (``rewriting``: rescaled or clipped) counts as one, too. If autograd itself
# ended a pass with an error, it has dropped its callback (``_tasks`` has weak references). The next forward pass or
# zero_grad() recovers, on every rank: the ranks exchange how far each came, begin the reductions that any of them has
# begun, wait for them, and drop the gradients of the step. A rank that noticed no failure comes to another exchange
# instead. The purposes differ, so all ranks raise, and the pass counts as failed until they agree. Before that, step()
# and a new pass raise, because reduced gradients differ between the ranks. Earlier gradients of the step are dropped
# with the failed pass, since it may have been added to them. A forward pass or a new pass warns of that, since the
# program would then continue to its step. If gathers go in program order, a forward pass that ended in an exception
# counts as failed as well, with or without a graph: ranks that stopped at different places have issued different
# gathers.
class BackwardPasses:
    """Detects backward passes over one model and ends them on every rank.

    A pass inside :meth:`around` ends with that context. A pass that the user starts (``loss.backward()``) ends with
    autograd's callback of its outermost task; nested passes (reentrant checkpointing) end nothing by themselves.

    Args:
        pool, reducer, meter: chunk pool, reducer and memory meter of the model. Without a limit of memory ``meter`` is
            ``None``.
        events: notified of passes.
        average: how the passes of a step are combined; see :class:`~shardwise.plan.GradPlan`. Under ``"tokens"``
            gradients must come through :meth:`backward` or :meth:`weighed`, with the number of tokens.

    Attributes:
        scaled: losses have to be multiplied by a scale, so passes must go through :meth:`around`.
        takes_unscaled: passes of the program over an unscaled loss are accepted, with a warning.
        own_divisor: divisor of the gradients of passes that the program makes itself.
        sync: whether passes are reduced now.
        unreduced: whether the last pass was not reduced.
        due: the program did not ask for ``unreduced`` gradients, so a use of them reduces them first.
    """

    def __init__(
        self, pool: ChunkPool, reducer: Reducer, meter: MemoryMeter | None, events: Events, average: str
    ) -> None:
        self._pool, self._reducer, self._meter, self._events = pool, reducer, meter, events
        self._average = average
        self._counts = reducer.counts
        self.scaled, self.own_divisor = False, 1.0
        self.takes_unscaled = self._warned = False
        self.sync = True
        self._tokens = 0.0
        self._dropped: dict[int | None, float] = {}
        """By optimizer (``None``: all), the tokens of passes whose gradients were used or dropped."""
        self._around = False
        self._expected: float | None = None
        """The loss scale of the program's next pass; ``None`` if it is not known."""
        self._failed = False
        """A pass has failed, and not all ranks have dropped it yet."""
        self._before: int | None = None
        """The number of passes with gradients when the running pass began."""
        self._gathering = False
        """Whether peers may still wait for gathers of a pass that this rank has begun."""
        self.unreduced = self.due = False
        self._tasks: dict[int, weakref.ref[partial[None]]] = {}
        """Running autograd tasks and their callbacks; autograd drops the callback of a task that failed."""

    def note(self, _gradient: object = None) -> None:
        """Begin a pass, if this is its first event: a gradient of an output or of a parameter, or a gather."""
        if self._around:
            return
        task = current_graph_task()
        if task != -1 and task not in self._tasks:
            self._check_nothing_failed()
            if not self._tasks:
                self._begin()
                self._rescale(self._own_scale())
                self._gathering = True
            ending = partial(self._task_ended, task)
            # Autograd holds the callback, and drops it with a pass that fails.
            self._tasks[task] = weakref.ref(ending)
            at_end_of_backward(ending)

    def _check_nothing_failed(self) -> None:
        if self._failed or any(ending() is None for ending in self._tasks.values()):
            raise RuntimeError(
                f"a backward pass after one that failed (tasks={len(self._tasks)}, failed={self._failed}): call "
                "zero_grad() and make the step's passes again, on every rank"
            )

    def _begin(self) -> None:
        """Make all checks that may refuse the pass, then begin it."""
        self._events.backward_requested()
        self._before = self.accumulated_passes()
        self._events.backward_began()

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Return a context for changes of present gradients, one by one; an interrupt in it drops them."""
        self._failed = True
        yield
        self._failed = False

    def accumulated_passes(self) -> int:
        """Return the number of passes that the step has gradients of."""
        return max(map(self._counts.so_far, self._counts.optimizers), default=0)

    @property
    def running(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._around or bool(self._tasks)

    def watch(self, output: torch.Tensor) -> torch.Tensor:
        """Hook a model's output, so that a pass that starts from it is recognized as the outermost one; return it."""
        # A transform's own passes give no gradients.
        if output.requires_grad and not in_backward() and not is_transformed(output):
            output.register_hook(self.note)  # type: ignore[no-untyped-call]
        return output

    def _own_scale(self) -> float | None:
        """Return the divisor of gradients of the program's own pass, or ``None`` if such a pass is refused."""
        unscaled = self.takes_unscaled or not self.scaled
        return self.own_divisor if self._expected is None and unscaled else self._expected

    def gradient_came(self) -> None:
        """Note a parameter's gradient.

        Raises:
            RuntimeError: under a loss scale or token weights, the pass did not go through :meth:`around`.
        """
        if not self._around:
            self._check_weighed("loss.backward()")
            self._check_scaled()
            self.note()

    def _check_weighed(self, call: str) -> None:
        if self._average == "tokens":
            raise RuntimeError(
                f"{call} without a number of tokens under average={self._average!r}: the pass has no weight in the "
                "step's mean; call session.backward(loss, tokens=...), or set requires_grad False where gradients only "
                "flow through this model to another one"
            )

    def _check_scaled(self) -> None:
        if not self.scaled or self._expected is not None:
            return
        if self.takes_unscaled:
            if not self._warned:
                self._warned = True
                warn_user(
                    "loss.backward() of an unscaled loss under a loss scale: small gradients become 0 in 16 bits. "
                    "Scale the loss, or train in bf16"
                )
            return
        raise RuntimeError(
            f"Loss scaling is required: loss.backward() was called under a loss scale (scaled={self.scaled}). Call "
            "backward(loss) of the optimizer, or of the object that made it, which scales the loss. If gradients only "
            "flow through this model to another one, set requires_grad=False on its parameters"
        )

    def fail(self, before: int) -> None:
        """Count the passes of this step as failed, until all ranks drop them.

        Args:
            before: :meth:`accumulated_passes` before the passes that failed.
        """
        self._failed, self._before = True, before

    def recover(self, dropping: bool = False) -> None:
        """Drop a failed pass, if there is one. Called by forward passes and ``zero_grad``, outside any pass.

        Args:
            dropping: the caller drops the gradients of all passes anyway.

        Warns:
            UserWarning: gradients of passes that did not fail are dropped, too.

        Raises:
            PeerError: not all ranks had detected the failure. Now they have, and the next call drops the pass.
        """
        if self._has_failed():
            earlier = self.accumulated_passes() if self._before is None else self._before
            # Until it is dropped: otherwise this rank's next pass would answer the other ranks' exchange.
            self._failed = True
            self._tasks.clear()
            if self._gathering:
                self._pool.abandon_phase()
                self._gathering = False
            try:
                self._reducer.abort(self._pool.make_up)
            except PeerError:  # other ranks may still be at the previous exchange
                self._gathering = True
                raise
            self._pool.catch_up()
            self.forget_tokens(None)
            self._failed = self.unreduced = False
            self._expected = self._before = None
            if earlier and not dropping:
                warn_user(
                    f"a forward or backward pass failed: its gradients, and those of {earlier} earlier "
                    f"pass{'es' * (earlier > 1)} of this step, which plain PyTorch keeps, were dropped. Make all "
                    "passes of the step again; zero_grad() after a failure says that they are to go"
                )

    def expect(self, loss_scale: float) -> None:
        """Expect a pass of the program (``loss.backward()``) over a loss multiplied by ``loss_scale``."""
        self._expected = loss_scale * self.own_divisor

    def _rescale(self, loss_scale: float | None) -> None:
        """Convert gradients from before a change of the loss scale (another optimizer's, not yet stepped)."""
        if loss_scale is not None and loss_scale != self._counts.loss_scale:
            with self.rewriting():
                self._reducer.rescale(loss_scale / self._counts.loss_scale)
                self._counts.loss_scale = loss_scale

    def _has_failed(self) -> bool:
        forward = self._pool.in_order and self._pool.in_forward
        return bool(self._tasks or self._failed or forward) and not self._around and not in_backward()

    def tokens(self, optimizer: int) -> float:
        """Return the tokens of this rank's passes since the gradients of ``optimizer`` were used or dropped."""
        return self._tokens - max(self._dropped.get(each, 0.0) for each in (optimizer, None))

    def forget_tokens(self, optimizer: int | None) -> None:
        """Reset the tokens of an optimizer (``None``: all), whose gradients were used or dropped."""
        self._dropped[optimizer] = self._tokens

    def _task_ended(self, task: int) -> None:
        nested = current_node() is not None
        if self._around or (nested and any(other != task for other in self._tasks)):
            self._tasks.pop(task, None)
            return
        self._failed = True  # before the task is forgotten
        self._tasks.clear()
        self._finish()

    def _finish(self) -> None:
        with torch.no_grad():
            self._failed = True  # in case anything below raises
            self._pool.finish_phase()
            self._gathering = False
            self._reducer.finish(self.sync)
            self._failed, self._before = False, None
        self.unreduced = not self.sync
        self._expected = None
        self._events.backward_ended()

    def reduce_unreduced(self) -> None:
        """Reduce the gradients of passes under :meth:`no_sync` that no other pass followed. Collective.

        Raises:
            RuntimeError: the last pass failed, and reduced gradients differ between ranks.
        """
        if self._has_failed():
            raise RuntimeError(
                f"step() after a pass that failed (tasks={len(self._tasks)}, failed={self._failed}): call "
                "zero_grad() and make the step's passes again, on every rank"
            )
        if self.unreduced:
            self._failed = True
            with torch.no_grad():
                self._reducer.finish(True)
            self._failed = self.unreduced = False
            self._events.backward_ended()

    def reduce_if_due(self) -> None:
        """Reduce gradients before they are used, unless the program itself asked for :meth:`no_sync`. Collective."""
        if self.due and self.unreduced and not self.running:
            self.reduce_unreduced()

    def backward(self, loss: torch.Tensor, tokens: float | None, loss_scale: float, retain_graph: bool) -> None:
        """Run the backward pass of ``loss`` times ``loss_scale``; see :meth:`weighed`."""
        if loss.dtype in HALF_DTYPES:
            loss = loss.float()  # a scaled loss would overflow in 16 bits
        with self.weighed(tokens, loss_scale) as factor:
            (loss * factor if factor != 1.0 else loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def weighed(self, tokens: float | None, loss_scale: float = 1.0) -> Iterator[float]:
        """Enter :meth:`around` for a pass over a mean of ``tokens``; yields the factor for its loss.

        Raises:
            ValueError: ``tokens`` is given under another average than ``"tokens"``, or missing under that.
        """
        if (tokens is None) == (self._average == "tokens"):
            todo = "call backward(loss, tokens=n)" if tokens is None else "leave tokens out, or set average='tokens'"
            raise ValueError(f"backward(tokens={tokens}) under average={self._average!r}: {todo}")
        weight = None if tokens is None else number("tokens", tokens, "[0, inf)") / TOKEN_UNIT
        with self.around(loss_scale, weight):
            yield loss_scale if weight is None else loss_scale * weight

    @contextlib.contextmanager
    def around(self, loss_scale: float = 1.0, weight: float | None = None) -> Iterator[None]:
        """Wrap ``loss.backward()``.

        Args:
            loss_scale: factor of the loss, by which gradients are divided later.
            weight: further factor of the loss: the pass's weight among those of a step (its tokens).

        Raises:
            RuntimeError: ``weight`` is missing under ``average="tokens"``.
        """
        if weight is None:
            self._check_weighed("a backward pass")
        self.recover()
        self._begin()
        self._rescale(loss_scale)
        # From here on peers may wait for a gather of this rank.
        self._around = self._gathering = True
        try:
            with self._meter.measuring() if self._meter is not None else contextlib.nullcontext():
                yield
            self._finish()
            self._tokens += weight or 0.0
        except BaseException as error:
            # Peers may still be in the pass, so nothing waits for them here; see recover().
            self._failed = True
            if isinstance(error, DeviceMemoryError) and self._gathering:
                self._pool.tell(error)
            raise
        finally:
            self._around = False
            self._tasks.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce passes inside."""
        previous, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = previous
