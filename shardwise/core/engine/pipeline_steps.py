"""Runs the micro-batches of a step through this rank's pipeline stages, as passes of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardwise.core.checks.batches import TEXT_LENGTH, SameBatches, differing
from shardwise.core.comm import collectively
from shardwise.core.engine.gradients import Arrived, Gradients
from shardwise.core.engine.mixed_precision import map_tensors
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.parallel.pipeline.batch import MicroBatch, split_batch
from shardwise.core.parallel.pipeline.run import Outcome, StageRun
from shardwise.core.parallel.pipeline.schedule import Schedule, custom_schedule, make_schedule
from shardwise.core.parallel.pipeline.split import Passes, WeightGradients, walk
from shardwise.plan.precision import HALF_DTYPES


class PipelineSteps:
    """Runs the steps of a model with pipeline stages.

    Args:
        shards: the shards of a model with pipeline stages.
        grads: the gradients of the model.
        optimizer: the optimizer whose loss scale is applied. With ``None`` losses are not scaled.
    """

    def __init__(self, shards: ModelShards, grads: Gradients, optimizer: ShardedOptimizer | None) -> None:
        self._plan, self._mesh, self._grads = shards.plan, shards.mesh, grads
        staging, wire, model = shards.partition.staging, self._mesh.wire, self._mesh.model_parallel
        if staging is None or wire is None or model is None:
            raise RuntimeError(f"{self._mesh!r} has no stages; report this")
        self._model = model
        wire = wire.compressed() if self._plan.comm.compress is not None else wire
        self._run = StageRun(staging, wire, self._plan.pipeline.cache_shapes, self._tell)
        self._batches = SameBatches()
        """The step's batch; a fingerprint of its values on a GPU comes to the host during the passes, and is read at
        the end of the step."""
        self._shared = shards.partition.shared
        self._staging = staging
        self._passes = _EnginePasses(grads, optimizer)

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, with outputs and loss."""
        return self._staging.stages - 1 in self._staging.own

    def step(
        self, batch: Any, criterion: Callable[[Any, Any], Tensor], train: bool, wants_outputs: bool = False
    ) -> Outcome:
        """Run forward passes of a batch's micro-batches, with ``train`` also backward passes. Every rank calls it.

        Args:
            batch: the same on all ranks of the pipeline: a mapping of the model's arguments, a sequence, or a tensor;
                it is moved to the device.
            criterion: ``criterion(outputs, inputs)`` returns the loss of a micro-batch, a scalar. It is called on the
                last stage, with the model's outputs and the micro-batch.
            train: gradients accumulate to those of the loss over the batch.
            wants_outputs: return the outputs of all micro-batches, too, which need memory for the full batch.

        Returns:
            Loss and outputs, see :class:`Outcome`.

        Raises:
            ValueError: the batch cannot be divided, or ranks have different batches (raised on every rank).
            PeerError: another rank failed.

        Examples:
            >>> outcome = session.pipeline.step(batch, lambda outputs, inputs: outputs.loss, train=True)
            >>> session.optimizer.step()
            >>> session.optimizer.zero_grad()
            >>> loss = session.pipeline.everywhere(outcome.loss).item()
        """
        grads = self._grads
        parts = self._begin(batch, train)
        schedule = self._schedule(len(parts))
        if not train:
            with torch.no_grad():
                return self._run.step(schedule, parts, criterion, None, wants_outputs)
        late, before = self._plan.shard.reduce == "last", grads.passes.accumulated_passes()
        try:
            with grads.no_sync() if late else contextlib.nullcontext():
                with self._shared.accumulating() if self._shared is not None else contextlib.nullcontext():
                    outcome = self._run.step(schedule, parts, criterion, self._passes, wants_outputs)
                if self._shared is not None:
                    with self._passes.one() as _:  # also without shared gradients: replicas run the same passes
                        for param, grad in self._shared.summed(self._run.tag_of_shared):
                            torch.autograd.backward(param, grad)
        except BaseException:
            self._passes.pending.clear()
            grads.passes.fail(before)  # also if a forward pass failed: the gradients are incomplete
            raise
        grads.passes.due = late and grads.passes.sync  # false under a no_sync() of the program
        return outcome

    def _begin(self, batch: Any, train: bool) -> list[MicroBatch]:
        """Split the batch into micro-batches, after checking that all ranks have the same.

        Raises:
            ValueError: on all ranks, if it cannot be split on one, or ranks have different batches.
        """
        plan = self._plan.pipeline
        number = plan.microbatches
        if number is None and plan.microbatch_rows is None:
            number = self._staging.stages
        self._batches.forget()
        self._batches.note(batch, " (training)" if train else " (forward passes alone)")
        with self._splitting():
            on_device = map_tensors(batch, lambda tensor: tensor.to(self._mesh.device))
            parts = split_batch(on_device, number, plan.microbatch_rows)
            self._run.check_number(len(parts))
        posts = self._model.exchange([*self._batches.words(waits=False)], "the batch of a step of a pipeline")
        if any(post != posts[0] for post in posts):
            self._batches.explain(self._model)
        if train and self._plan.shard.reduce == "every":
            self._compare_number(len(parts))
        return parts

    def _compare_number(self, microbatches: int) -> None:
        """Check that data-parallel ranks have equally many micro-batches, since each is reduced. Collective over them.

        Raises:
            ValueError: on each of them, if they do not.
        """
        posts = self._mesh.world.exchange([float(microbatches)], "the number of micro-batches")
        if len({post[0] for post in posts}) > 1:
            by_rank = ", ".join(f"rank {rank} {int(post[0])}" for rank, post in enumerate(posts))
            raise ValueError(
                f"data-parallel ranks divide their batches into different numbers of micro-batches ({by_rank}), and "
                "ZeRO-2 reduces the gradients of each: give all ranks batches with the same number of rows "
                "(drop_last=True), or use zero_stage=0 or 1. No pass of the step was run on any rank"
            )

    def without_batch(self, error: Exception) -> None:
        """Tell the other ranks, which may begin a step, that this rank has no batch. Collective, as :meth:`step`.

        Raises:
            Exception: ``error``.
        """
        with self._splitting():
            raise error

    def _splitting(self) -> AbstractContextManager[None]:
        """Run the block on all ranks of the model, or none goes on. Collective."""
        self._mesh.world.activity.begin_pass()
        return collectively(self._model, "splitting the batch of a step", "No pass of the step was run on any rank.")

    def _tell(self, failure: str | None) -> dict[int, str]:
        """Exchange what failed in a step, by rank of the model-parallel group. Collective over it."""
        word = self._batches.words()[1]
        posts = self._model.exchange([float(failure is not None), word], "how a step of a pipeline went")
        if any(post[0] for post in posts):
            texts = self._model.exchange_object(failure and failure[:TEXT_LENGTH], "what went wrong in it")
            return {rank: text or "" for rank, text in enumerate(texts) if posts[rank][0]}
        if any(post != posts[0] for post in posts):
            return {0: differing([tuple(post) for post in posts], ["(on the device)"] * len(posts))}
        return {}

    def _schedule(self, microbatches: int) -> Schedule:
        """Return the plan's own schedule if it is for this number of micro-batches, otherwise a new one."""
        plan, ranks = self._plan.pipeline, self._staging.ranks
        if plan.orders is not None:
            own = custom_schedule(ranks, plan.orders)
            if own.microbatches == microbatches:
                return own
        return make_schedule(plan.schedule, ranks, plan.chunks, microbatches)

    def everywhere(self, loss: Tensor | None) -> Tensor:
        """Return the loss of the last stage on every rank of the pipeline. Collective over these.

        Args:
            loss: ``outcome.loss`` of :meth:`step`: a scalar on the last stage, ``None`` on other ranks.

        Returns:
            The loss, on this rank's device.
        """
        mesh = self._mesh
        own = None if loss is None else [loss.item(), str(loss.dtype).removeprefix("torch.")]
        value, kind = mesh.pipeline.exchange_object(own, "the loss")[self._staging.last_rank]
        return torch.tensor(value, dtype=getattr(torch, kind), device=mesh.device) if loss is None else loss


class _EnginePasses(Passes):
    """Backward passes of stages as passes of the engine. If one is split in two (zero bubble), the engine gets the
    gradients of both with the second, so that a micro-batch is reduced once.

    Args:
        grads, optimizer: see :class:`PipelineSteps`.

    Attributes:
        pending: gradients of first parts, to be dropped if the step fails.
    """

    def __init__(self, grads: Gradients, optimizer: ShardedOptimizer | None) -> None:
        self._grads, self._optimizer = grads, optimizer
        self.pending: dict[WeightGradients, list[Arrived]] = {}

    def full(self, output: Tensor, grad: Tensor | None) -> None:
        with self.one() as scale:
            torch.autograd.backward(_scaled(output, grad, scale), grad)

    def inputs(self, output: Tensor, grad: Tensor | None, later: WeightGradients) -> None:
        with self._grads.passes.no_sync(), self._grads.collect() as self.pending[later], self.one() as scale:
            walk(_scaled(output, grad, scale), grad)

    def weights(self, later: WeightGradients) -> None:
        with self.one():
            self._grads.reduce(self.pending.pop(later, []))
            super().weights(later)

    @contextlib.contextmanager
    def one(self) -> Iterator[float]:
        """Return a context for one backward pass, with the loss scale that gradients between stages include."""
        scale = self._optimizer.loss_scale if self._optimizer is not None else 1.0
        with self._grads.passes.around(scale):
            yield scale


def _scaled(output: Tensor, grad: Tensor | None, scale: float) -> Tensor:
    if grad is not None:
        return output
    output = output.float() if output.dtype in HALF_DTYPES else output  # the loss
    return output * scale if scale != 1.0 else output
