"""Runs one rank's part of a pipeline schedule: forward and backward passes of micro-batches through its stages."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core.base.rng import RankRng
from shardwise.core.comm import P2PChannel, PeerError, SendHandle, check_sent
from shardwise.core.parallel.pipeline.batch import MicroBatch, check_mergeable, detached
from shardwise.core.parallel.pipeline.schedule import Action, Kind, Schedule, Span
from shardwise.core.parallel.pipeline.split import Passes, WeightGradients, WeightsApart
from shardwise.core.parallel.pipeline.staging import Staging
from shardwise.plan.parallel import MOST_MICROBATCHES, MOST_STAGES

MARK = 42
"""Value added to the bits of a quiet NaN."""
SEEN = 4
"""Number of elements that are compared."""
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def sentinel(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of the sentinel NaN. Integer tensors are zeros, which cannot be recognized."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    x = torch.full(shape, float("nan"), dtype=dtype, device=device)
    x.view(_INTEGERS[dtype.itemsize]).add_(MARK)
    return x


def is_sentinel(x: Tensor) -> bool:
    """Return True if ``x`` is a sentinel. Always False on a GPU, since the check would synchronize with the device."""
    if x.device.type != "cpu" or not x.is_floating_point() or x.numel() == 0:
        return False
    integers = _INTEGERS[x.dtype.itemsize]
    first = x.detach().reshape(-1)[:SEEN].view(integers)
    mark = torch.full((1,), float("nan"), dtype=x.dtype, device="cpu").view(integers) + MARK
    return bool((first == mark).all())


FORWARD, BACKWARD = 0, 1  # lanes
STEPS = 1 << 8
"""Number of consecutive steps with different tags: together with stages and micro-batches, tags have 30 bits."""
MAX_CACHED_SHAPES = 1 << 12
"""Number of cached shapes per stage, about 1 KiB each: one for every length that sequences may have. With a cycle of
more shapes than this, each would be evicted before it is used again."""

Criterion = Callable[[Any, Any], Tensor]
Tell = Callable[[str | None], dict[int, str]]
"""Sends the status of a step on this rank (``None``: success) to all ranks, and returns the failures by rank."""
What = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Outcome:
    """The result of a step.

    Attributes:
        loss: the mean over the batch's rows, on the rank with the last stage; ``None`` on other ranks.
        outputs: outputs of the micro-batches, on the rank with the last stage, if they were requested.
        losses: losses of the micro-batches, on the rank with the last stage, each weighted by its fraction of the rows:
            ``loss`` is their sum.
    """

    loss: Tensor | None
    outputs: list[Any]
    losses: Tensor | None


# [Note: A step that fails on one rank]
# The messages of each rank in a step follow from the schedule. A rank whose pass fails (an error in the model or in the
# criterion, or out of memory) continues with its part of the schedule: it receives messages, runs no more passes, and
# instead of each result sends a sentinel: a tensor of the same shape filled with a NaN that no computation creates. If
# the shape is not known yet, the message header says that no data follows. A rank that receives a sentinel runs no more
# passes, either. All ranks therefore reach the end of the step with no messages in flight. There they exchange their
# errors, and the error of the first rank is raised on all of them. zero_grad() drops the accumulated gradients, and the
# next step is unaffected. On a GPU, sentinels are not detected, since reading one would synchronize with the device:
# NaNs propagate, and the exchange at the end reports the error. A failed connection or an interrupt ends the session,
# because ranks that do not know the state of the others cannot run another step.
#
# [Note: Shapes that both sides know]
# A message from a stage to the next has a header with its shape if the receiver does not know the shape; on a GPU,
# reading the header synchronizes with the device. No messages are needed to find out whether it does: each side has a
# cache by the shapes of the micro-batch's inputs, which all ranks have, and both caches are equal before each message,
# since both sides update them in the same way. For each message of a stage, each side does one of three things with its
# key, in the order in which the sender sends and the receiver receives (this is one order for all messages from one
# rank to another; see custom_schedule, and a test of all schedules):
# * the key is cached: it becomes the most recently used one (send or send_sentinel; receive), also for a sentinel of
#   the cached shape;
# * it is not cached, and data comes: it is added, and the least recently used one is evicted (send; receive);
# * it is not cached, and no data comes: nothing changes (send_sentinel; receive).
# Lookups by one side only (cached_shape, check_shape) change nothing.
class StageRun:
    """Runs the steps of one rank, one at a time.

    Args:
        staging: the stages of this rank, installed.
        wire: point-to-point channel to the neighbors; ``None`` if there are none.
        keeps_shapes: whether shapes are sent once for each shape of a micro-batch, instead of with each message.
        tell: exchanges errors at the end of a step; ``None``: errors of other ranks are not reported.

    Raises:
        ValueError: there are more stages than message tags can represent.

    Attributes:
        trace: a list to which the time span of each action is added, without its waiting time, in seconds of a clock
            that all ranks of a host share. ``None``: nothing is recorded.
    """

    def __init__(
        self, staging: Staging, wire: P2PChannel | None, keeps_shapes: bool = True, tell: Tell | None = None
    ) -> None:
        if staging.stages > MOST_STAGES:
            raise ValueError(
                f"a model of {staging.stages} stages (pp times chunks): a pipeline has at most {MOST_STAGES}, whose "
                "messages can be told apart; give fewer"
            )
        self.staging = staging
        self._wire = wire
        self._keeps_shapes = keeps_shapes
        self._tell = tell
        self._cached_shapes: dict[tuple[int, bool], OrderedDict[object, What]] = {}
        self._step = 0
        self._over: str | None = None
        self._connected: Schedule | None = None
        self.trace: list[Span] | None = None

    def step(
        self,
        schedule: Schedule,
        parts: Sequence[MicroBatch],
        criterion: Criterion,
        backward: Passes | None,
        wants_outputs: bool = False,
    ) -> Outcome:
        """Run the passes of a step. Every rank of the pipeline calls it with the same schedule and micro-batches.

        Args:
            schedule: a schedule for this number of micro-batches.
            parts: the micro-batches.
            criterion: ``criterion(outputs, inputs)`` returns a micro-batch's loss, the mean over its rows.
            backward: runs backward passes; ``None``: run forward passes only.
            wants_outputs: keep what the last stage returns.

        Raises:
            ValueError: there are more micro-batches than message tags can represent.
            Exception: the error of this rank.
            PeerError: the error of another rank; or a neighbor is unreachable, which ends the session.
            RuntimeError: the session is over.
        """
        if self._over is not None:
            raise RuntimeError(
                f"a step after one that ended in {self._over}: the stages' ranks have lost each other, and the session "
                "is over; go on from a checkpoint in a new one"
            )
        self.check_number(len(parts))
        self._step = (self._step + 1) % STEPS
        order = schedule if backward is not None else schedule.forward_only()
        step = _Step(self, order, parts, criterion, backward, wants_outputs)
        try:
            self._connect(order)
            for action in order.orders[self.staging.rank]:
                step.do(action)
            if self._wire is not None:
                self._wire.settle()
            failures = self._tell(step.status()) if self._tell is not None else {}
        except BaseException as error:
            self._over = f"{type(error).__name__}: {error}"
            if self._wire is not None:
                self._wire.forget()
            raise
        finally:
            self.staging.enter(self.staging.own[0], None)
        step.complain(failures)
        return step.outcome()

    @staticmethod
    def check_number(microbatches: int) -> None:
        """Check the number of micro-batches.

        Raises:
            ValueError: there are more than message tags can represent.
        """
        if microbatches > MOST_MICROBATCHES:
            raise ValueError(
                f"a step of {microbatches} micro-batches: a pipeline takes at most {MOST_MICROBATCHES}, whose messages "
                "can be told apart; give larger ones (microbatch_rows), or a smaller batch"
            )

    @contextmanager
    def own_numbers(self, stage: int) -> Iterator[None]:
        """Use a random number stream of the stage during a forward pass, even if the pass is skipped."""
        # This includes the first stage: all ranks must draw equally many common numbers, which may seed samplers.
        cpu = torch.device("cpu")  # models on a GPU draw CPU numbers as well (layerdrop)
        device = self._wire.device if self._wire is not None else cpu
        with ExitStack() as drawing:
            for each in {cpu, device} if self.staging.model.training else ():
                drawing.enter_context(RankRng(stage).drawing(True, each, None))
            yield

    # ---- messages

    def _connect(self, order: Schedule) -> None:
        """Connect the ranks of a schedule. In a user-defined order, any rank may send first."""
        if self._wire is not None and order != self._connected:
            self._wire.connect((each.sender, each.receiver, _lane(each.action)) for each in order.messages())
            self._connected = order

    def _tag(self, action: Action) -> int:
        """Return the message tag of the result of ``action``."""
        return (self._step * MOST_STAGES + action.stage) * MOST_MICROBATCHES + action.microbatch

    def tag_of_shared(self, position: int) -> int:
        """Return the tag for exchanging the shared parameter at ``position`` after this step's schedule, in the channel
        of gradients. It uses the tags of the gradient of the first stage's input, which is never sent."""
        return self._step * MOST_STAGES * MOST_MICROBATCHES + position % MOST_MICROBATCHES

    def send(self, x: Tensor, action: Action, rank: int, key: object) -> SendHandle:
        """Send the result ``x`` of ``action`` to the rank that uses it."""
        assert self._wire is not None
        lane = _lane(action)
        described = lane == FORWARD and not self._known(action.stage, True, key, (x.shape, x.dtype))
        return self._wire.send(x, rank, lane, self._tag(action), _called(action), described)

    def send_sentinel(self, action: Action, rank: int, key: object, what: What | None) -> None:
        """Send a sentinel instead of the result. ``what`` is the shape that the receiver expects, if it is known."""
        assert self._wire is not None
        lane = _lane(action)
        if lane == FORWARD:
            self._use(action.stage, True, key)
        if what is None:
            self._wire.send_nothing(rank, lane, self._tag(action), _called(action))
        else:
            self._wire.send(sentinel(*what, self._wire.device), rank, lane, self._tag(action), _called(action))

    def cached_shape(self, stage: int, key: object) -> What | None:
        """Return the shape that the receiver of a stage's output expects, or ``None`` if it has not been sent."""
        return self._shapes(stage, True).get(key) if self._keeps_shapes else None

    def receive(self, action: Action, rank: int, key: object, what: What | None) -> Tensor | None:
        """Receive the result of ``action`` from another rank (None: no data); ``what`` is a gradient's shape."""
        assert self._wire is not None
        lane = _lane(action)
        if lane == FORWARD and self._keeps_shapes:
            what = self._use(action.stage, False, key)
        if what is not None:
            return self._wire.receive(what, rank, lane, self._tag(action), _called(action))
        x = self._wire.receive_described(rank, lane, self._tag(action), _called(action))
        if x is not None:
            self._known(action.stage, False, key, (x.shape, x.dtype))
        return x

    def check_shape(self, stage: int, key: object, what: What) -> None:
        """Check a shape against the one that the other side has cached.

        Raises:
            RuntimeError: they differ.
        """
        cached = self.cached_shape(stage, key)
        if cached is not None and cached != what:
            raise RuntimeError(
                f"stage {stage} made {tuple(what[0])} x {what[1]} of inputs of the same shapes of which it made "
                f"{tuple(cached[0])} x {cached[1]} before: its shapes follow from values, so use "
                "enable_metadata_cache=False (cache_shapes of the plan)"
            )

    def _shapes(self, stage: int, sent: bool) -> OrderedDict[object, What]:
        return self._cached_shapes.setdefault((stage, sent), OrderedDict())

    def _use(self, stage: int, sent: bool, key: object) -> What | None:
        """Return the cached shape for ``key`` and mark it as most recently used.

        See [Note: Shapes that both sides know].
        """
        if not self._keeps_shapes:
            return None
        shapes = self._shapes(stage, sent)
        if key in shapes:
            shapes.move_to_end(key)
        return shapes.get(key)

    def _known(self, stage: int, sent: bool, key: object, what: What) -> bool:
        """Return True if the other side has cached the shape, and add it otherwise."""
        if not self._keeps_shapes:
            return False
        if self._use(stage, sent, key) is not None:
            return True
        shapes = self._shapes(stage, sent)
        shapes[key] = what
        if len(shapes) > MAX_CACHED_SHAPES:
            shapes.popitem(last=False)
        return False


class _Step:
    """State of a step between the forward and the backward passes of its micro-batches."""

    def __init__(
        self,
        run: StageRun,
        schedule: Schedule,
        parts: Sequence[MicroBatch],
        criterion: Criterion,
        backward: Passes | None,
        wants_outputs: bool,
    ) -> None:
        self._run, self._schedule, self._parts, self._criterion = run, schedule, parts, criterion
        self._backward, self._wants_outputs = backward, wants_outputs
        self._apart = WeightsApart() if schedule.splits else None
        self._tensors: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._later: dict[tuple[int, int], WeightGradients] = {}
        self._here: dict[Action, Tensor | None] = {}
        """Results of this rank for its other stages."""
        self._passed: dict[tuple[int, int], What | None] = {}
        """Shape of each hidden state that went into a stage. ``None`` if no data came, and no gradient goes back."""
        self._under_way: dict[int, deque[tuple[int, SendHandle]]] = {}
        """Messages in flight by receiving rank, with the positions in its order at which the rank receives them."""
        self._places = [{each: place for place, each in enumerate(order)} for order in schedule.orders]
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}
        self._failed = False
        self._error: Exception | None = None
        self._where = ""

    def do(self, action: Action) -> None:
        """Receive the inputs of an action, run it unless this or another rank has failed, and send the result."""
        arrived = self._take(action)
        made: Tensor | None = None
        began = time.monotonic()
        if not self._failed:
            try:
                made = self._made(action, arrived)
            except Exception as error:
                self._error, self._where = error, f"{_named(action.kind)} of stage {action.stage}, micro-batch "
                self._where += str(action.microbatch)
                self._fail()
        elif action.kind is Kind.FORWARD:
            with self._run.own_numbers(action.stage):
                pass  # so that random number generators stay in step with ranks that ran the pass
        if self._run.trace is not None:
            self._run.trace.append(Span(began, time.monotonic(), action))
        self._give(action, made)

    def _fail(self) -> None:
        """Run no more passes, and release what they would have needed."""
        self._failed = True
        for tensors in (self._tensors, self._later, self._here, self._losses, self._outputs):
            tensors.clear()

    def status(self) -> str | None:
        """Return the status of the step on this rank: ``None`` for success, empty for a failure on another rank."""
        if self._error is not None:
            return f"{self._where}: {type(self._error).__name__}: {self._error}"
        return "" if self._failed else None

    def complain(self, failures: Mapping[int, str]) -> None:
        """Raise the error of a failed step.

        Raises:
            Exception: the error of this rank.
            PeerError: the error of another rank.
        """
        advice = "call zero_grad() on every rank, and make the step's passes again"
        if self._error is not None:
            self._error.add_note(f"The step failed on all ranks of the pipeline: {advice}.")
            raise self._error
        if self._failed or failures:
            first = "; ".join(f"rank {rank} in {text}" for rank, text in failures.items() if text)
            raise PeerError(f"a step of a pipeline failed on {first or 'another rank'}. Nothing came of it: {advice}")

    def outcome(self) -> Outcome:
        losses = [self._losses[index] for index in sorted(self._losses)]
        shares = torch.stack(losses) if losses else None
        outputs = [self._outputs[index] for index in sorted(self._outputs)]
        return Outcome(None if shares is None else shares.sum(), outputs, shares)

    # ---- between stages

    def _take(self, action: Action) -> Tensor | None:
        source = action.takes(self._schedule.stages)
        if source is None:
            return None
        rank, forward = self._schedule.rank_of(source.stage), action.kind is Kind.FORWARD
        if rank == self._run.staging.rank:
            x = self._here.pop(source, None)
        else:
            boundary = (action.stage if forward else source.stage, action.microbatch)
            if not forward and self._passed[boundary] is None:
                return None
            key = self._parts[action.microbatch].key
            x = self._run.receive(source, rank, key, None if forward else self._passed[boundary])
            self._settle(rank, self._places[rank][source])
            if forward:
                self._passed[boundary] = None if x is None else (x.shape, x.dtype)
        if not self._failed and (x is None or is_sentinel(x)):
            self._fail()
        return x

    def _give(self, action: Action, made: Tensor | None) -> None:
        forward = action.kind is Kind.FORWARD
        stage = action.stage + 1 if forward else action.stage - 1
        if action.kind is Kind.WEIGHT or not 0 <= stage < self._schedule.stages:
            return
        rank, key = self._schedule.rank_of(stage), self._parts[action.microbatch].key
        if rank == self._run.staging.rank:
            self._here[action] = None if made is None else made.detach()
            return
        boundary = (stage if forward else action.stage, action.microbatch)
        if made is not None:
            sent = self._run.send(made, action, rank, key)
            self._passed[boundary] = made.shape, made.dtype
            place = self._places[rank][action._replace(stage=stage)]
            self._under_way.setdefault(rank, deque()).append((place, sent))
        elif forward:
            self._passed[boundary] = self._run.cached_shape(action.stage, key)
            self._run.send_sentinel(action, rank, key, self._passed[boundary])
        elif self._passed[boundary] is not None:
            self._run.send_sentinel(action, rank, key, self._passed[boundary])

    def _settle(self, rank: int, place: int) -> None:
        """Wait for messages that ``rank`` received before position ``place`` of its order."""
        waiting = self._under_way.get(rank, deque())
        while waiting and waiting[0][0] < place:
            waiting.popleft()[1].wait()

    # ---- passes

    def _made(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        if action.kind is Kind.FORWARD:
            return self._forward(action, arrived)
        if action.kind is Kind.BACKWARD:
            return self._go_back(action, arrived)
        assert self._backward is not None
        self._backward.weights(self._later.pop((action.stage, action.microbatch)))
        return None

    def _forward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        stage, staging = action.stage, self._run.staging
        part = self._parts[action.microbatch]
        if arrived is not None:
            arrived.requires_grad_(self._backward is not None and arrived.is_floating_point())
        last = stage == staging.stages - 1
        with self._run.own_numbers(stage):  # includes the criterion, which only this rank runs
            with self._apart or nullcontext():
                output: Any = staging.run(stage, arrived, part.args, part.kwargs)
            if last:
                output = self._judged(output, action.microbatch)
        if not last:
            check_sent(output)  # checked here, so that the step fails on all ranks
            self._run.check_shape(stage, part.key, (output.shape, output.dtype))
        if self._backward is not None:
            self._tensors[stage, action.microbatch] = arrived, output
        made: Tensor = output
        return made

    def _judged(self, output: Any, microbatch: int) -> Tensor:
        """Return the micro-batch's loss for the output of the last stage, weighted by its fraction of the batch."""
        part = self._parts[microbatch]
        loss = self._criterion(output, part.inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"criterion(outputs, inputs) returned {loss!r:.80}: give a tensor of one element")
        if self._backward is not None and not loss.requires_grad:
            raise RuntimeError(
                f"the loss of micro-batch {microbatch} does not require grad, so nothing would be trained: "
                "the criterion has to return it undetached; for forward passes alone use train=False, or "
                "torch.no_grad() around execute_pipeline()"
            )
        share = loss.reshape(()) * part.share
        self._losses[microbatch] = share.detach()
        if self._wants_outputs:
            for first in list(self._outputs.values())[:1]:
                check_mergeable(first, output)
            self._outputs[microbatch] = detached(output)
        return share

    def _go_back(self, action: Action, grad: Tensor | None) -> Tensor | None:
        assert self._backward is not None
        stage, staging = action.stage, self._run.staging
        arrived, output = self._tensors.pop((stage, action.microbatch))
        staging.enter(stage, arrived)  # for recomputation of activations
        later = WeightGradients()
        if output.requires_grad and self._apart is None:
            self._backward.full(output, grad)
        elif output.requires_grad and self._apart is not None:
            with self._apart.into(later):
                self._backward.inputs(output, grad, later)
        if self._apart is not None:
            self._later[stage, action.microbatch] = later
        if arrived is None:
            return None
        if arrived.grad is None and output.requires_grad and arrived.requires_grad:
            raise RuntimeError(
                f"stage {stage} did not use what stage {stage - 1} has sent of micro-batch {action.microbatch}: it "
                "has no gradient; report this"
            )
        return torch.zeros_like(arrived) if arrived.grad is None else arrived.grad


def _named(kind: Kind) -> str:
    return "the forward pass" if kind is Kind.FORWARD else "the backward pass"


def _lane(action: Action) -> int:
    return FORWARD if action.kind is Kind.FORWARD else BACKWARD


def _called(action: Action) -> str:
    what = "output" if action.kind is Kind.FORWARD else "gradient of the input"
    return f"the {what} of stage {action.stage}, micro-batch {action.microbatch}"
