"""A step's micro-batches through this rank's stages, as passes of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.engine.casts import map_tensors
from shardwise.engine.engine import Engine
from shardwise.pipeline import Outcome, StageRun, make_schedule, split_batch
from shardwise.plan import HALF_DTYPES

if TYPE_CHECKING:
    from shardwise.engine.optimizer import ShardedOptimizer

__all__ = ["PipelineSteps"]


class PipelineSteps:
    """Of one session.

    Args:
        engine: with stages.
        optimizer: that scales losses; ``None``: nothing does.
    """

    def __init__(self, engine: Engine, optimizer: ShardedOptimizer | None) -> None:
        staging, wire = engine.staging, engine.mesh.wire
        if staging is None or wire is None:
            raise RuntimeError(f"{engine.mesh!r} has no stages; report this")
        self._engine, self._optimizer = engine, optimizer
        self._run = StageRun(staging, wire, engine.plan.pipeline.cache_shapes)
        self._shared = engine.division.shared
        self._staging = staging

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, and with it outputs and loss."""
        return self._staging.stages - 1 in self._staging.own

    def step(
        self, batch: Any, criterion: Callable[[Any, Any], Tensor], train: bool, wants_outputs: bool = False
    ) -> Outcome:
        """Forward passes of a batch's parts, and with ``train`` their backward passes. Every rank calls it.

        Args:
            batch: the same on all ranks of the pipeline: a mapping of the model's arguments, a sequence, or a tensor;
                it is put on the device.
            criterion: ``criterion(outputs, inputs)`` of a part, where the last stage is.
            train: gradients add up to those of the loss over the batch.
            wants_outputs: see :class:`Outcome`.
        """
        engine, plan = self._engine, self._engine.plan.pipeline
        batch = map_tensors(batch, lambda tensor: tensor.to(engine.mesh.device))
        number = plan.microbatches
        if number is None and plan.microbatch_rows is None:
            number = self._staging.stages
        parts = split_batch(batch, number, plan.microbatch_rows)
        schedule = make_schedule(plan.schedule, self._staging.ranks, plan.chunks, len(parts))
        if not train:
            with torch.no_grad():
                return self._run.step(schedule, parts, criterion, None, wants_outputs)
        late = engine.plan.shard.reduce == "last"
        try:
            with engine.no_sync() if late else contextlib.nullcontext():
                with self._shared.kept() if self._shared is not None else contextlib.nullcontext():
                    outcome = self._run.step(schedule, parts, criterion, self._backward, wants_outputs)
                if self._shared is not None:
                    with self._pass() as _:  # also where there is nothing: replicas make the same passes
                        for param, grad in self._shared.summed(self._run.tag_of_shared):
                            torch.autograd.backward(param, grad)
        except BaseException:
            engine.passes.fail()  # also where a forward pass failed: what was accumulated is no step's gradient
            raise
        return outcome

    def everywhere(self, loss: Tensor | None) -> Tensor:
        """The loss of the rank with the last stage, on every rank of the pipeline. Collective over these."""
        mesh = self._engine.mesh
        own = None if loss is None else [loss.item(), str(loss.dtype).removeprefix("torch.")]
        value, kind = mesh.pipeline.exchange_object(own, "the loss")[-1]
        return torch.tensor(value, dtype=getattr(torch, kind), device=mesh.device) if loss is None else loss

    def _backward(self, output: Tensor, grad: Tensor | None) -> None:
        with self._pass() as scale:
            if grad is None:  # the loss
                output = output.float() if output.dtype in HALF_DTYPES else output
                output = output * scale if scale != 1.0 else output
            torch.autograd.backward(output, grad)

    @contextlib.contextmanager
    def _pass(self) -> Iterator[float]:
        """Around one backward pass; the loss scale, which gradients between stages have in them."""
        scaler = self._optimizer.scaler if self._optimizer is not None else None
        scale = scaler.scale if scaler is not None else 1.0
        with self._engine.passes.around(scale):
            yield scale
