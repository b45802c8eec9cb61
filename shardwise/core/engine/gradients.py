"""The gradients of one model, from backward passes to their use by a step, and how they are dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from shardwise.core.base.events import Events
from shardwise.core.checks.batches import SameBatches
from shardwise.core.checks.broken import Broken
from shardwise.core.engine.grad_facade import GradFacade
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.grads.backward_passes import BackwardPasses
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer, StepCounts
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.shards.memory_meter import MemoryMeter
from shardwise.core.update.optimizer_in_backward import EarlyObserver

Arrived = tuple[ChunkGrads, int, torch.Tensor]
"""State, slot and gradient of one parameter."""


class Gradients:
    """The gradients of one model.

    Args:
        shards: the shards of the model.
        pool: the pool of gathered parameters.
        broken: updates during backward that cannot be used are marked there.
        meter: the meter of the device's memory, or ``None``.
        events: notified of passes and results.

    Attributes:
        states: gradient shards by chunk index.
        counts: the pass counts of the steps under way.
        reducer: reduces gradients over the ranks.
        passes: notices backward passes and ends them.
        early: updates during backward.
        facade: ``.grad`` of the parameters.
        batches: fingerprints of the passes since the last step.
        collected: gradients of the running pass, if they are collected and not reduced; see :meth:`collect`.
    """

    def __init__(
        self, shards: ModelShards, pool: ChunkPool, broken: Broken, meter: MemoryMeter | None, events: Events
    ) -> None:
        storage, mesh, self._plan = shards.storage, shards.mesh, shards.plan
        self._single = len(shards.optimizers) == 1
        self.states = storage.make_grads()
        self.counts = StepCounts(each.spec.optimizer for each in self.states.values())
        self.early = EarlyObserver(self.states, self.counts, broken, storage.store)
        sums, states = mesh.with_sums_in(self._plan.comm.gradients), list(self.states.values())
        self.reducer = Reducer(
            states, sums, storage.ledger, self._plan, shards.model_id, self.counts, events, self.early
        )
        # See [Note: Why no wait inside a pass closes a cycle].
        if pool.agrees and mesh.shard.starts_together:
            self.reducer.begin_in(pool.agreement)
        self.passes = BackwardPasses(pool, self.reducer, meter, events, self._plan.grad.average)
        self.facade = GradFacade(shards, self.states, self.passes, self.counts)
        self.batches = SameBatches()
        self.collected: list[Arrived] | None = None

    def zero(self, optimizer: int | None = None) -> None:
        """Drop the gradients of one optimizer's parameters and of parameters in no optimizer, or all gradients."""
        self.drop(optimizer)
        self.facade.stale.cleared(optimizer)
        self.facade.clear(optimizer)

    def drop(self, optimizer: int | None = None) -> None:
        """Drop gradients like :meth:`zero`, but leave ``.grad`` in place. Later use of ``.grad`` raises an error."""
        self.passes.recover(dropping=optimizer is None or self._single)
        self.batches.forget()
        self.reducer.clear(optimizer)
        for each in (optimizer,) if optimizer is None else (optimizer, -1):
            self.passes.forget_tokens(each)
        self.facade.forget(optimizer)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ranks keep full gradients. The next pass afterwards reduces the sum.

        Raises:
            ValueError: the plan reduces in every pass (ZeRO-2/3), or updates during backward.
        """
        if self._plan.shard.reduce == "every":
            raise ValueError(
                f"no_sync() with reduce={self._plan.shard.reduce!r}: this plan keeps only gradient shards (ZeRO-2/3); "
                "call backward several times before step instead, which accumulates gradients"
            )
        if self._plan.grad.update == "backward":
            raise ValueError(
                f"no_sync() with update={self._plan.grad.update!r}: gradients are used as soon as they are reduced, so "
                "each step is one backward pass; use update='step'"
            )
        return self.passes.no_sync()

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[Arrived]]:
        """Collect the gradients of a pass inside the block for :meth:`reduce`."""
        self.collected = []
        try:
            yield self.collected
        finally:
            self.collected = None

    def reduce(self, arrived: list[Arrived]) -> None:
        """Reduce gradients of an earlier pass as those of the current one, and clear the list."""
        for state, slot, grad in arrived:
            self.reducer.add(state, slot, grad, self.passes.sync)
        arrived.clear()
