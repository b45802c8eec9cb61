"""Runs one rank's part of a schedule: micro-batches through its stages, and their gradients back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Wire
from shardwise.draws import Private
from shardwise.pipeline.schedule import Action, Kind, Schedule
from shardwise.pipeline.split import Passes, WeightGradients, WeightsApart
from shardwise.pipeline.staging import Staging

__all__ = ["MicroBatch", "Outcome", "StageRun", "merged", "split_batch"]

FORWARD, BACKWARD = 0, 1  # lanes
STEPS, MOST_STAGES, MOST_MICROBATCHES = 1 << 8, 1 << 8, 1 << 14
SHAPES_KEPT = 256

Criterion = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        inputs: as the batch is.
        share: of the batch's rows.
    """

    inputs: Any
    share: float

    @property
    def args(self) -> Sequence[Any]:
        return () if isinstance(self.inputs, Mapping) else _listed(self.inputs)

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.inputs) if isinstance(self.inputs, Mapping) else {}

    @property
    def key(self) -> tuple[object, ...]:
        """What the shapes inside of a model follow from; the same on every rank."""
        values = self.inputs.items() if isinstance(self.inputs, Mapping) else enumerate(_listed(self.inputs))
        return tuple((name, value.shape) for name, value in values if isinstance(value, Tensor))


@dataclass(frozen=True)
class Outcome:
    """Of a step.

    Attributes:
        loss: the mean over the batch's rows, on the rank with the last stage; elsewhere ``None``.
        outputs: of the micro-batches, there, where they were asked for.
    """

    loss: Tensor | None
    outputs: list[Any]


def _listed(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, tuple | list) else (batch,)


def _rows(batch: Any) -> int:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return int(batch["input_ids"].shape[0])
    values = batch.values() if isinstance(batch, Mapping) else _listed(batch)
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
    if not sizes:
        raise ValueError(f"a batch of {type(batch).__name__} without a tensor: there is nothing to divide")
    return Counter(sizes).most_common(1)[0][0]


def split_batch(batch: Any, number: int | None, rows: int | None) -> list[MicroBatch]:
    """A batch in micro-batches along the first dimension of its tensors; what does not have as many rows as most do
    goes to each whole.

    Args:
        batch: a mapping, a sequence, or one tensor.
        number: of micro-batches; fewer where there are fewer rows. They are as even as can be.
        rows: of each but the last, where ``number`` is ``None``.

    Raises:
        ValueError: the batch has no rows.
    """
    total = _rows(batch)
    if total < 1:
        raise ValueError(f"a batch of {total} rows: give at least one")
    if number is not None:
        count = min(number, total)
        sizes = [total // count + (index < total % count) for index in range(count)]
    else:
        rows = rows or total
        sizes = [min(rows, total - start) for start in range(0, total, rows)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]

    def part(value: Any, start: int, size: int) -> Any:
        divides = isinstance(value, Tensor) and value.dim() and value.shape[0] == total
        return value.narrow(0, start, size) if divides else value

    def inputs(start: int, size: int) -> Any:
        if isinstance(batch, Mapping):
            return {name: part(value, start, size) for name, value in batch.items()}
        if isinstance(batch, tuple | list):
            return [part(value, start, size) for value in batch]
        return part(batch, start, size)

    return [MicroBatch(inputs(start, size), size / total) for start, size in zip(starts, sizes, strict=True)]


class StageRun:
    """Of one rank; a step at a time.

    Args:
        staging: its stages, installed.
        wire: to the neighbours; ``None`` where there are none.
        keeps_shapes: shapes are told once for each shape of a micro-batch, otherwise with each message.
    """

    def __init__(self, staging: Staging, wire: Wire | None, keeps_shapes: bool = True) -> None:
        self.staging = staging
        self._wire = wire
        self._keeps_shapes = keeps_shapes
        self._told: dict[tuple[int, bool], OrderedDict[object, tuple[torch.Size, torch.dtype]]] = {}
        self._step = 0

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
            PeerError: a neighbour did not come.
        """
        self._step = (self._step + 1) % STEPS
        step = _Step(self, schedule, parts, criterion, backward, wants_outputs)
        order = schedule if backward is not None else schedule.forward_only()
        try:
            for action in order.orders[self.staging.rank]:
                step.do(action)
            if self._wire is not None:
                self._wire.settle()
        except BaseException:
            if self._wire is not None:
                self._wire.forget()
            raise
        finally:
            self.staging.enter(self.staging.own[0], None)
        return step.outcome()

    def own_numbers(self, stage: int) -> AbstractContextManager[None]:
        """Around a forward pass: layers of another stage draw other numbers."""
        # The first stage's, too: all ranks draw equally many common ones, which samplers may be seeded with.
        draws = self.staging.model.training and torch.is_grad_enabled()
        device = self._wire.device if self._wire is not None else torch.device("cpu")
        return Private(stage).drawing(draws, device, self.staging.rates)

    # ---- messages

    def _tag(self, action: Action) -> int:
        """Of what ``action`` makes; steps that failed have others."""
        return (self._step * MOST_STAGES + action.stage) * MOST_MICROBATCHES + action.microbatch

    def tag_of_shared(self, position: int) -> int:
        """Of what ranks exchange of the parameter at ``position`` behind this step's schedule."""
        return (self._step * MOST_STAGES + MOST_STAGES - 1) * MOST_MICROBATCHES + position % MOST_MICROBATCHES

    def send(self, x: Tensor, action: Action, rank: int, key: object) -> None:
        """What ``action`` has made, to the rank that uses it."""
        assert self._wire is not None
        lane = FORWARD if action.kind is Kind.FORWARD else BACKWARD
        described = lane == FORWARD and not self._known(action.stage, True, key, (x.shape, x.dtype))
        self._wire.send(x, rank, lane, self._tag(action), _called(action), described)

    def receive(self, action: Action, rank: int, key: object, like: Tensor | None) -> Tensor:
        """What ``action`` has made on another rank."""
        assert self._wire is not None
        lane = FORWARD if action.kind is Kind.FORWARD else BACKWARD
        known = (like.shape, like.dtype) if like is not None else self._shapes(action.stage, False).get(key)
        x = self._wire.receive(known, rank, lane, self._tag(action), _called(action))
        if known is None:
            self._known(action.stage, False, key, (x.shape, x.dtype))
        return x

    def _shapes(self, stage: int, sent: bool) -> OrderedDict[object, tuple[torch.Size, torch.dtype]]:
        return self._told.setdefault((stage, sent), OrderedDict())

    def _known(self, stage: int, sent: bool, key: object, what: tuple[torch.Size, torch.dtype]) -> bool:
        """Whether the other side has been told; now it is. Both sides forget alike."""
        if not self._keeps_shapes:
            return False
        shapes = self._shapes(stage, sent)
        if key in shapes:
            if shapes[key] != what:
                raise RuntimeError(
                    f"stage {stage} made {tuple(what[0])} x {what[1]} of inputs of the same shapes of which it made "
                    f"{tuple(shapes[key][0])} x {shapes[key][1]} before: its shapes follow from values, so use "
                    "enable_metadata_cache=False (cache_shapes of the plan)"
                )
            return True
        shapes[key] = what
        while len(shapes) > SHAPES_KEPT:
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
        self._apart = WeightsApart() if schedule.splits and backward is not None else None
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._later: dict[tuple[int, int], WeightGradients] = {}
        self._here: dict[Action, Tensor] = {}
        """What this rank has made for another stage of its own."""
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}

    def do(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind is Kind.BACKWARD:
            self._go_back(action)
        elif self._backward is not None:
            self._backward.weights(self._later.pop((action.stage, action.microbatch)))

    def outcome(self) -> Outcome:
        losses = [self._losses[index] for index in sorted(self._losses)]
        loss = torch.stack(losses).sum() if losses else None
        return Outcome(loss, [self._outputs[index] for index in sorted(self._outputs)])

    def _take(self, action: Action, like: Tensor | None) -> Tensor:
        rank = self._schedule.rank_of(action.stage)
        if rank == self._run.staging.rank:
            return self._here.pop(action)
        return self._run.receive(action, rank, self._parts[action.microbatch].key, like)

    def _give(self, x: Tensor, action: Action, stage: int) -> None:
        rank = self._schedule.rank_of(stage)
        if rank == self._run.staging.rank:
            self._here[action] = x.detach()
        else:
            self._run.send(x, action, rank, self._parts[action.microbatch].key)

    def _forward(self, action: Action) -> None:
        stage, staging = action.stage, self._run.staging
        part = self._parts[action.microbatch]
        arrived = None
        if stage > 0:
            arrived = self._take(action._replace(stage=stage - 1), None)
            arrived.requires_grad_(self._backward is not None and arrived.is_floating_point())
        with self._run.own_numbers(stage), self._apart or nullcontext():
            output = staging.run(stage, arrived, part.args, part.kwargs)
        if stage == staging.stages - 1:
            loss = self._criterion(output, part.inputs)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError(f"criterion(outputs, inputs) returned {loss!r:.80}: give a tensor of one element")
            output_loss = loss.reshape(()) * part.share
            self._losses[action.microbatch] = output_loss.detach()
            if self._wants_outputs:
                self._outputs[action.microbatch] = _detached(output)
            output = output_loss
        else:
            self._give(output, action, stage + 1)
        if self._backward is not None:
            self._kept[stage, action.microbatch] = arrived, output

    def _go_back(self, action: Action) -> None:
        assert self._backward is not None
        stage, staging = action.stage, self._run.staging
        arrived, output = self._kept.pop((stage, action.microbatch))
        last = stage == staging.stages - 1
        grad = None if last else self._take(action._replace(stage=stage + 1), output)
        staging.enter(stage, arrived)  # for what is computed again
        later = WeightGradients()
        if output.requires_grad and self._apart is None:
            self._backward.whole(output, grad)
        elif output.requires_grad and self._apart is not None:
            with self._apart.into(later):
                self._backward.inputs(output, grad, later)
        if self._apart is not None:
            self._later[stage, action.microbatch] = later
        if arrived is not None:
            if arrived.grad is None and output.requires_grad and arrived.requires_grad:
                raise RuntimeError(
                    f"stage {stage} did not use what stage {stage - 1} has sent of micro-batch {action.microbatch}: it "
                    "has no gradient; report this"
                )
            self._give(torch.zeros_like(arrived) if arrived.grad is None else arrived.grad, action, stage - 1)


def _called(action: Action) -> str:
    what = "output" if action.kind is Kind.FORWARD else "gradient of the input"
    return f"the {what} of stage {action.stage}, micro-batch {action.microbatch}"


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {name: _detached(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_detached(each) for each in value]
    return value


def merged(outputs: Sequence[Any]) -> Any:
    """The micro-batches' outputs as one: tensors one behind the other, numbers in a tensor of one dimension."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {name: merged([each[name] for each in outputs]) for name in first}
    if isinstance(first, tuple | list):
        return [merged(each) for each in zip(*outputs, strict=True)]
    return first
