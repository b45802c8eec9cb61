"""The life of backward passes: when one begins, when it ends, and what happens if it fails."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from shardwise.core.base.checked import number
from shardwise.core.base.events import Events
from shardwise.core.base.remarks import warn_user
from shardwise.core.base.torch_internals import at_end_of_backward, current_graph_task, current_node, is_transformed
from shardwise.core.comm import PeerError
from shardwise.core.grads.reducer import Reducer
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.shards.hooks import in_backward
from shardwise.core.shards.meter import MemoryMeter
from shardwise.core.shards.pool import ChunkPool
from shardwise.plan.precision import HALF_DTYPES

__all__ = ["BackwardPasses"]

TOKEN_UNIT = 1024.0  # token weights are counted in this unit, a power of two, to keep scaled fp16 losses small


# [Note: A pass that failed]
# Where a pass fails nothing waits for the peers: they may be in the midst of it, and come to no agreement. It is noted
# (``_failed``), and stays so until all ranks have dropped the pass. Before anything at the end of a pass can raise it
# is set, and taken back when the last reduction is in, so whatever interrupts the end counts as a failure; and so does
# what interrupts a change of gradients that are held (``rewriting``: the scale has moved, or they were clipped). A pass
# that autograd itself gave up shows by its callback, which autograd drops then (``_tasks`` has weak references). The
# next forward pass or zero_grad() recovers, on every rank alike: the ranks tell how far each came, begin what any of
# them has begun, wait for it, and forget the gradients of the step. A rank that noticed nothing comes to another
# exchange instead; the purposes differ, all raise, and the pass counts as failed until they do agree. step() or a new
# pass before that is refused, because what was reduced by then differs between the ranks. With the failed pass go those
# that the step had before, whose sums it may have been added to; a forward pass or a new pass, after which a program
# would go on to its step, warns of them. Where gathers go in program order, a forward pass that ended in an exception
# counts as well, with or without a graph: ranks that stopped at different places have issued different gathers.
class BackwardPasses:
    """Notices backward passes over one model and ends them on every rank alike.

    A pass that comes through :meth:`around` ends with its block. One that the user starts (``loss.backward()``) ends
    with autograd's callback of its outermost task; nested ones (reentrant checkpointing) end nothing by themselves.

    Args:
        pool, reducer, meter: of the model; ``meter`` is ``None`` where memory has no limit.
        events: is told of passes.
        average: over the passes of a step, as in :class:`~shardwise.plan.GradPlan`. Under ``"tokens"`` gradients must
            come through :meth:`backward` or :meth:`weighed`, with the number of tokens.

    Attributes:
        scaled: set where losses have to be multiplied by a scale: gradients must then come through :meth:`around`.
        takes_unscaled: passes that the program makes of a loss that nobody scaled are taken, with a warning.
        own_divisor: gradients of passes that the program makes itself are to be divided by it.
        sync: whether passes are reduced now.
        unreduced: whether the last pass was not.
        due: set where that was not asked for by the program: who uses its gradients has them reduced.
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
        """By optimizer, and ``None`` for all: tokens of passes whose gradients were used or dropped."""
        self._around = False
        self._expected: float | None = None
        """What the loss of the next pass that the program makes was multiplied by; ``None``: nobody has said."""
        self._failed = False
        """A pass has failed, and not all ranks have dropped it yet."""
        self._before: int | None = None
        """Passes whose gradients were held when the running pass began."""
        self._gathering = False
        """The peers that gather with this rank may still be in a pass that this one has begun."""
        self.unreduced = self.due = False
        self._tasks: dict[int, weakref.ref[partial[None]]] = {}
        """Of autograd, begun and not ended, with what each will call at its end; one that failed has dropped that."""

    def note(self, _gradient: object = None) -> None:
        """Called by what may happen first in a backward pass: an output's or a parameter's gradient, or a gather."""
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
            # Autograd holds it, and drops it with a pass that fails.
            self._tasks[task] = weakref.ref(ending)
            at_end_of_backward(ending)

    def _check_nothing_failed(self) -> None:
        if self._failed or any(ending() is None for ending in self._tasks.values()):
            raise RuntimeError(
                f"a backward pass after one that failed (tasks={len(self._tasks)}, failed={self._failed}): call "
                "zero_grad() and make the step's passes again, on every rank"
            )

    def _begin(self) -> None:
        """All that may refuse the pass, then all that begins with it."""
        self._events.backward_asked()
        self._before = self.held()
        self._events.backward_began()

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Around a change of the gradients that are held, one by one: if it is interrupted they are dropped."""
        self._failed = True
        yield
        self._failed = False

    def held(self) -> int:
        """Of how many passes the step has gradients so far."""
        return max(map(self._counts.so_far, self._counts.optimizers), default=0)

    @property
    def running(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._around or bool(self._tasks)

    def watch(self, output: Any) -> None:
        """Have a model's output note the pass that starts from it, which is then the outermost one."""
        if not isinstance(output, torch.Tensor) or not output.requires_grad or in_backward():
            return
        if not is_transformed(output):  # a transform's own passes give no gradients
            output.register_hook(self.note)  # type: ignore[no-untyped-call]

    def _own_scale(self) -> float | None:
        """What gradients of a pass that the program makes are to be divided by; ``None``: it is refused."""
        unscaled = self.takes_unscaled or not self.scaled
        return self.own_divisor if self._expected is None and unscaled else self._expected

    def gradient_came(self) -> None:
        """A parameter has a gradient: under a loss scale, or weights, only passes through :meth:`around` may make one.

        Raises:
            RuntimeError: this one did not, and is not to be taken.
        """
        if not self._around:
            self._check_weighed("loss.backward()")
            self._check_scaled()
            self.note()

    def _check_weighed(self, call: str) -> None:
        if self._average == "tokens":
            raise RuntimeError(
                f"{call} without a number of tokens under average={self._average!r}: gradients of such a pass have no "
                "weight among those of the step; call session.backward(loss, tokens=...), or set requires_grad False "
                "where gradients only flow through this model to another one"
            )

    def _check_scaled(self) -> None:
        if not self.scaled or self._expected is not None:
            return
        if self.takes_unscaled:
            if not self._warned:
                self._warned = True
                warn_user(
                    "loss.backward() under a loss scale, of a loss that nobody scaled: its gradients are taken as they "
                    "are, and small ones are 0 in 16 bits. Scale the loss where the front-end can, or train in bf16"
                )
            return
        raise RuntimeError(
            "Loss scaling is required: a parameter got a gradient from loss.backward() under a loss scale "
            f"(scaled={self.scaled}); call backward(loss) of the optimizer, or of "
            "what made it, which multiplies the loss by it, and set requires_grad False where gradients only flow "
            "through this model to another one"
        )

    def fail(self, before: int) -> None:
        """What was to follow on the passes of this step failed: they count as failed, until all ranks drop them.

        Args:
            before: what :meth:`held` was before the passes that failed.
        """
        self._failed, self._before = True, before

    def recover(self, dropping: bool = False) -> None:
        """At a forward pass or ``zero_grad``, outside any pass: one that never ended has failed; drop its remains.

        Args:
            dropping: the caller drops the gradients of all passes anyway.

        Warns:
            UserWarning: gradients of passes that did not fail go with it.

        Raises:
            PeerError: not on all ranks yet; all of them learn of it now, and the next call drops it.
        """
        if self._has_failed():
            earlier = self.held() if self._before is None else self._before
            # Until it is done: a rank that forgot would meet the others' agreement with its next pass.
            self._failed = True
            self._tasks.clear()
            if self._gathering:
                self._pool.abandon_phase()
                self._gathering = False
            try:
                self._reducer.abort(self._pool.make_up)
            except PeerError:  # others may still be at what comes before it
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
        """The next pass is one that the program makes (``loss.backward()``), of a loss multiplied by ``loss_scale``."""
        self._expected = loss_scale * self.own_divisor

    def _rescale(self, loss_scale: float | None) -> None:
        """Gradients from before the scale moved (another optimizer's, not yet stepped) keep in line with new ones."""
        if loss_scale is not None and loss_scale != self._counts.loss_scale:
            with self.rewriting():
                self._reducer.rescale(loss_scale / self._counts.loss_scale)
                self._counts.loss_scale = loss_scale

    def _has_failed(self) -> bool:
        forward = self._pool.in_order and self._pool.in_forward
        return bool(self._tasks or self._failed or forward) and not self._around and not in_backward()

    def tokens(self, optimizer: int) -> float:
        """Sum of the weights of the passes on this rank since the gradients of ``optimizer`` were used or dropped."""
        return self._tokens - max(self._dropped.get(each, 0.0) for each in (optimizer, None))

    def forget_tokens(self, optimizer: int | None) -> None:
        """Gradients of an optimizer (of all, for ``None``) were used or dropped."""
        self._dropped[optimizer] = self._tokens

    def _task_ended(self, task: int) -> None:
        nested = current_node() is not None
        if self._around or (nested and any(other != task for other in self._tasks)):
            self._tasks.pop(task, None)
            return
        self._failed = True  # before nobody knows of the task any more
        self._tasks.clear()
        self._finish()

    def _finish(self) -> None:
        with torch.no_grad():
            self._failed = True  # whatever comes in between
            self._pool.finish_phase()
            self._gathering = False
            self._reducer.finish(self.sync)
            self._failed, self._before = False, None
        self.unreduced = not self.sync
        self._expected = None
        self._events.backward_ended()

    def reduce_rest(self) -> None:
        """Reduce the gradients of passes under :meth:`no_sync` that no other pass followed. Collective.

        Raises:
            RuntimeError: the last pass failed; how much of it was gathered or reduced differs between ranks.
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

    def reduce_due(self) -> None:
        """:meth:`reduce_rest` before a use of gradients, of passes that the program did not make under
        :meth:`no_sync` itself. Collective."""
        if self.due and self.unreduced and not self.running:
            self.reduce_rest()

    def backward(self, loss: torch.Tensor, tokens: float | None, loss_scale: float, retain_graph: bool) -> None:
        """Backward pass of ``loss`` times ``loss_scale``; see :meth:`weighed`."""
        if loss.dtype in HALF_DTYPES:
            loss = loss.float()  # a scaled loss would overflow in 16 bits
        with self.weighed(tokens, loss_scale) as factor:
            (loss * factor if factor != 1.0 else loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def weighed(self, tokens: float | None, loss_scale: float = 1.0) -> Iterator[float]:
        """:meth:`around` a backward pass; gives what its loss, a mean over ``tokens``, is to be multiplied by.

        Raises:
            ValueError: ``tokens`` under another average than ``"tokens"``, or none under that.
        """
        if (tokens is None) == (self._average == "tokens"):
            raise ValueError(
                f"backward(tokens={tokens}) under average={self._average!r}: give tokens exactly under 'tokens'"
            )
        weight = None if tokens is None else number("tokens", tokens, "[0, inf)") / TOKEN_UNIT
        with self.around(loss_scale, weight):
            yield loss_scale if weight is None else loss_scale * weight

    @contextlib.contextmanager
    def around(self, loss_scale: float = 1.0, weight: float | None = None) -> Iterator[None]:
        """Around ``loss.backward()``.

        Args:
            loss_scale: what the loss was multiplied by and gradients must be divided by.
            weight: the pass's weight among those of a step (its tokens), by which the loss was multiplied, too.

        Raises:
            RuntimeError: there is none under ``average="tokens"``.
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
        """Passes inside are not reduced."""
        previous, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = previous
