"""Runs one rank's part of a schedule: micro-batches through its stages, and their gradients back."""

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

__all__ = [
    "Outcome",
    "StageRun",
    "is_sentinel",
    "sentinel",
]

MARK = 42
"""Added to the bits of a quiet NaN."""
SEEN = 4
"""Elements that are looked at."""
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def sentinel(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of integers it is zeros, which are not known for it."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    x = torch.full(shape, float("nan"), dtype=dtype, device=device)
    x.view(_INTEGERS[dtype.itemsize]).add_(MARK)
    return x


def is_sentinel(x: Tensor) -> bool:
    """Whether it is one. On a GPU it is never known, since that would wait for the device."""
    if x.device.type != "cpu" or not x.is_floating_point() or x.numel() == 0:
        return False
    integers = _INTEGERS[x.dtype.itemsize]
    first = x.detach().reshape(-1)[:SEEN].view(integers)
    mark = torch.full((1,), float("nan"), dtype=x.dtype, device="cpu").view(integers) + MARK
    return bool((first == mark).all())


FORWARD, BACKWARD = 0, 1  # lanes
STEPS = 1 << 8
"""Whose tags differ: with those of stages and micro-batches, 30 bits."""
SHAPES_KEPT = 1 << 12
"""For each stage, about a KiB each: one for every length that sequences may have. In a cycle of one more than are kept
each would be gone when it comes again."""

Criterion = Callable[[Any, Any], Tensor]
Tell = Callable[[str | None], dict[int, str]]
"""Of how a step went on this rank (``None``: well), to all ranks of the model: by rank what went wrong there."""
What = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Outcome:
    """Of a step.

    Attributes:
        loss: the mean over the batch's rows, on the rank with the last stage; elsewhere ``None``.
        outputs: of the micro-batches, there, where they were asked for.
        losses: of the micro-batches, there, each times its share of the rows: what ``loss`` is the sum of.
    """

    loss: Tensor | None
    outputs: list[Any]
    losses: Tensor | None


# [Note: A step that fails on one rank]
# What each rank sends and takes in a step follows from the schedule. A rank whose pass fails (an error in the model, in
# the criterion, too little memory) goes on through its part of it: it takes what comes, makes no more passes, and
# sends, where a result is due, a tensor of the same shape filled with one NaN that no computation makes (a void; where
# the shape is not known yet, the description says so, and nothing follows). Who takes a void makes no more passes
# either. So all ranks come to the end of the step as soon as messages do, with nothing under way between them, and
# there they tell each other what went wrong: the first rank's error is raised on all. zero_grad() drops what was
# accumulated, and the next step is one like any other. On a GPU voids are not looked for, since reading one would wait
# for the device: NaNs flow on, and the end tells. A connection that fails, or an interrupt, ends the session: ranks
# that do not know where the others are cannot make another step.
#
# [Note: Shapes that both sides know]
# What goes from a stage to the next is described where the receiver does not know its shape; on a GPU reading that
# waits for the device. Neither asks the other: each keeps a list by the inputs' shapes, which all ranks have, and both
# lists are the same before each message, since both change alike. For each message of a stage, whatever comes of it,
# each side does one of three things with its key, in the order in which the sender makes them and the receiver takes
# them (it is one order for all that goes from one rank to another: given_schedule, and a test of all schedules):
# * it is known: it becomes the last one used (send or send_void; receive), a void of the shape that is told included;
# * it is not, and something comes: it is added, and the one that was not used for longest goes (send; receive);
# * it is not, and nothing comes: nothing changes (send_void; receive).
# What only looks (told_of, check_shape) changes nothing, since one side alone does it.
class StageRun:
    """Of one rank; a step at a time.

    Args:
        staging: its stages, installed.
        wire: to the neighbours; ``None`` where there are none.
        keeps_shapes: shapes are told once for each shape of a micro-batch, otherwise with each message.
        tell: ends a step with the others; ``None``: errors of other ranks are not told.

    Raises:
        ValueError: there are more stages than messages can name.

    Attributes:
        trace: a list to which each action's span is added, without its waiting, in seconds of a clock that all ranks of
            a host share. ``None``: nothing is noted down.
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
        self._told: dict[tuple[int, bool], OrderedDict[object, What]] = {}
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
        """Make a step's passes. Every rank of the pipeline calls it with the same schedule and parts.

        Args:
            schedule: for so many parts.
            parts: of the batch.
            criterion: ``criterion(outputs, inputs)`` is a part's loss, the mean over its rows.
            backward: makes backward passes; ``None``: forward passes alone.
            wants_outputs: keep what the last stage returns.

        Raises:
            ValueError: there are more parts than messages can name.
            Exception: what went wrong on this rank.
            PeerError: what went wrong on another; or a neighbour did not come, and the session is over.
            RuntimeError: it is over.
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
            failures = self._tell(step.told()) if self._tell is not None else {}
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
        """Raises:
        ValueError: they are more than messages can name.
        """
        if microbatches > MOST_MICROBATCHES:
            raise ValueError(
                f"a step of {microbatches} micro-batches: a pipeline takes at most {MOST_MICROBATCHES}, whose messages "
                "can be told apart; give larger ones (microbatch_rows), or a smaller batch"
            )

    @contextmanager
    def own_numbers(self, stage: int) -> Iterator[None]:
        """Around a forward pass, made or not: layers of another stage draw other numbers."""
        # The first stage's, too: all ranks draw equally many common ones, which samplers may be seeded with.
        cpu = torch.device("cpu")  # whose numbers models draw on a GPU as well (which layers are left out)
        device = self._wire.device if self._wire is not None else cpu
        with ExitStack() as drawing:
            for each in {cpu, device} if self.staging.model.training else ():
                drawing.enter_context(RankRng(stage).drawing(True, each, None))
            yield

    # ---- messages

    def _connect(self, order: Schedule) -> None:
        """In an order of somebody's own any ranks may send first."""
        if self._wire is not None and order != self._connected:
            self._wire.connect((each.sender, each.receiver, _lane(each.action)) for each in order.messages())
            self._connected = order

    def _tag(self, action: Action) -> int:
        """Of what ``action`` makes."""
        return (self._step * MOST_STAGES + action.stage) * MOST_MICROBATCHES + action.microbatch

    def tag_of_shared(self, position: int) -> int:
        """Of what ranks exchange of the parameter at ``position`` behind this step's schedule, in the lane of
        gradients: that of the first stage's input, which goes nowhere."""
        return self._step * MOST_STAGES * MOST_MICROBATCHES + position % MOST_MICROBATCHES

    def send(self, x: Tensor, action: Action, rank: int, key: object) -> SendHandle:
        """What ``action`` has made, to the rank that uses it."""
        assert self._wire is not None
        lane = _lane(action)
        described = lane == FORWARD and not self._known(action.stage, True, key, (x.shape, x.dtype))
        return self._wire.send(x, rank, lane, self._tag(action), _called(action), described)

    def send_sentinel(self, action: Action, rank: int, key: object, what: What | None) -> None:
        """In its place, that nothing comes of it; ``what`` the receiver expects, if it knows."""
        assert self._wire is not None
        lane = _lane(action)
        if lane == FORWARD:
            self._use(action.stage, True, key)
        if what is None:
            self._wire.send_nothing(rank, lane, self._tag(action), _called(action))
        else:
            self._wire.send(sentinel(*what, self._wire.device), rank, lane, self._tag(action), _called(action))

    def told_of(self, stage: int, key: object) -> What | None:
        """What the receiver of a stage's output expects, if it has been told."""
        return self._shapes(stage, True).get(key) if self._keeps_shapes else None

    def receive(self, action: Action, rank: int, key: object, what: What | None) -> Tensor | None:
        """What ``action`` has made on another rank, or that nothing came of it; ``what`` it is, of gradients."""
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
        """Raises:
        RuntimeError: the other side has been told something else.
        """
        told = self.told_of(stage, key)
        if told is not None and told != what:
            raise RuntimeError(
                f"stage {stage} made {tuple(what[0])} x {what[1]} of inputs of the same shapes of which it made "
                f"{tuple(told[0])} x {told[1]} before: its shapes follow from values, so use "
                "enable_metadata_cache=False (cache_shapes of the plan)"
            )

    def _shapes(self, stage: int, sent: bool) -> OrderedDict[object, What]:
        return self._told.setdefault((stage, sent), OrderedDict())

    def _use(self, stage: int, sent: bool, key: object) -> What | None:
        """What the other side has been told for ``key``, which is now the last one used; see [Note: Shapes that both
        sides know]."""
        if not self._keeps_shapes:
            return None
        shapes = self._shapes(stage, sent)
        if key in shapes:
            shapes.move_to_end(key)
        return shapes.get(key)

    def _known(self, stage: int, sent: bool, key: object, what: What) -> bool:
        """Whether the other side has been told; now it is."""
        if not self._keeps_shapes:
            return False
        if self._use(stage, sent, key) is not None:
            return True
        shapes = self._shapes(stage, sent)
        shapes[key] = what
        if len(shapes) > SHAPES_KEPT:
            shapes.popitem(last=False)
        return False


class _Step:
    """What is kept between a micro-batch's forward and backward pass."""

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
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._later: dict[tuple[int, int], WeightGradients] = {}
        self._here: dict[Action, Tensor | None] = {}
        """What this rank has made for another stage of its own."""
        self._passed: dict[tuple[int, int], What | None] = {}
        """What has gone into a stage as a micro-batch's hidden state; ``None``: nothing came of it, and no gradient of
        it goes back."""
        self._under_way: dict[int, deque[tuple[int, SendHandle]]] = {}
        """By rank, what it has been sent, and the place in its order at which it takes that."""
        self._places = [{each: place for place, each in enumerate(order)} for order in schedule.orders]
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}
        self._failed = False
        self._error: Exception | None = None
        self._where = ""

    def do(self, action: Action) -> None:
        """What it takes, what it makes of that, unless this or another rank has failed, and what is made of it
        elsewhere."""
        taken = self._take(action)
        made: Tensor | None = None
        began = time.monotonic()
        if not self._failed:
            try:
                made = self._made(action, taken)
            except Exception as error:
                self._error, self._where = error, f"{_named(action.kind)} of stage {action.stage}, micro-batch "
                self._where += str(action.microbatch)
                self._fail()
        elif action.kind is Kind.FORWARD:
            with self._run.own_numbers(action.stage):
                pass  # so that generators stay as those of ranks that made the pass
        if self._run.trace is not None:
            self._run.trace.append(Span(began, time.monotonic(), action))
        self._give(action, made)

    def _fail(self) -> None:
        """No more passes; what they would have needed is let go of."""
        self._failed = True
        for kept in (self._kept, self._later, self._here, self._losses, self._outputs):
            kept.clear()

    def told(self) -> str | None:
        """How the step went on this rank; empty: badly on another."""
        if self._error is not None:
            return f"{self._where}: {type(self._error).__name__}: {self._error}"
        return "" if self._failed else None

    def complain(self, failures: Mapping[int, str]) -> None:
        """Raises:
        Exception: this rank's own.
        PeerError: another's.
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
            self._passed[boundary] = self._run.told_of(action.stage, key)
            self._run.send_sentinel(action, rank, key, self._passed[boundary])
        elif self._passed[boundary] is not None:
            self._run.send_sentinel(action, rank, key, self._passed[boundary])

    def _settle(self, rank: int, place: int) -> None:
        """``rank`` is behind ``place`` of its order: what it took before that is through."""
        waiting = self._under_way.get(rank, deque())
        while waiting and waiting[0][0] < place:
            waiting.popleft()[1].wait()

    # ---- passes

    def _made(self, action: Action, taken: Tensor | None) -> Tensor | None:
        if action.kind is Kind.FORWARD:
            return self._forward(action, taken)
        if action.kind is Kind.BACKWARD:
            return self._go_back(action, taken)
        assert self._backward is not None
        self._backward.weights(self._later.pop((action.stage, action.microbatch)))
        return None

    def _forward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        stage, staging = action.stage, self._run.staging
        part = self._parts[action.microbatch]
        if arrived is not None:
            arrived.requires_grad_(self._backward is not None and arrived.is_floating_point())
        last = stage == staging.stages - 1
        with self._run.own_numbers(stage):  # the criterion too: no other rank draws what it does
            with self._apart or nullcontext():
                output: Any = staging.run(stage, arrived, part.args, part.kwargs)
            if last:
                output = self._judged(output, action.microbatch)
        if not last:
            check_sent(output)  # here, where it fails on all ranks
            self._run.check_shape(stage, part.key, (output.shape, output.dtype))
        if self._backward is not None:
            self._kept[stage, action.microbatch] = arrived, output
        made: Tensor = output
        return made

    def _judged(self, output: Any, microbatch: int) -> Tensor:
        """The share of a micro-batch's loss in the batch's, of what the last stage made of it."""
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
        arrived, output = self._kept.pop((stage, action.microbatch))
        staging.enter(stage, arrived)  # for what is computed again
        later = WeightGradients()
        if output.requires_grad and self._apart is None:
            self._backward.whole(output, grad)
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
