"""Engines with one fault each, made inside the ranks by replacing a part of the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardwise.core.comm import Buffer, Group
from shardwise.core.engine import optimizer as optimizer_module
from shardwise.core.engine import placement
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.engine.values import Values
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.reducer import Reducer
from tests.parity.sharded import Run, Setting, train_on_rank

_Patch = contextlib.AbstractContextManager[Any]


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> _Patch:
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _nothing() -> _Patch:
    return contextlib.nullcontext()


class _Skipped:
    def wait(self) -> None: ...

    def finished(self) -> bool:
        return True


@contextlib.contextmanager
def _one_reduction_skipped() -> Iterator[None]:
    """The fourth reduction keeps this rank's own gradient."""
    calls = iter(range(1_000_000))

    def make(real: Any) -> Any:
        def reduce_scatter(self: Group, out: torch.Tensor, full: Any, scale: float) -> Any:
            if next(calls) == 3:
                part = full.local.view(self.size, -1)[self.rank]
                out.copy_(part * (scale * self.size))
                return _Skipped()
            return real(self, out, full, scale)

        return reduce_scatter

    kinds = [kind for kind in _all_kinds(Group) if "reduce_scatter" in vars(kind)]
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(_wrap(kind, "reduce_scatter", make))
        yield


def _all_kinds(kind: type) -> list[type]:
    return [kind, *(k for child in kind.__subclasses__() for k in _all_kinds(child))]


def _not_unscaled() -> _Patch:
    return mock.patch.object(ShardedOptimizer, "divisor", lambda self: 1.0)


def _gradient_of_rank_1_forgotten() -> _Patch:
    def make(real: Any) -> Any:
        def add(self: Reducer, state: ChunkGrads, index: int, grad: torch.Tensor, sync: bool) -> None:
            real(self, state, index, torch.zeros_like(grad) if dist.get_rank() == 1 else grad, sync)

        return add

    return _wrap(Reducer, "add", make)


def _norm_of_each_rank() -> _Patch:
    """Every rank clips by the norm of its own shards."""

    def make(real: Any) -> Any:
        def norm(tensors: Any, p: float, ask: Callable[[float, bool], float], *others: Any) -> float:
            def alone(share: float, largest: bool) -> float:
                ask(share, largest)  # the others wait for it
                return share

            return float(real(tensors, p, alone, *others))

        return norm

    return _wrap(optimizer_module, "global_norm", make)


def _earlier_passes_dropped() -> _Patch:
    """Only the last backward pass of a step counts."""

    def make(real: Any) -> Any:
        def complete(self: Reducer, state: ChunkGrads) -> None:
            state.reduced = None
            real(self, state)

        return complete

    return _wrap(Reducer, "_complete", make)


def _replicas_not_averaged() -> _Patch:
    """The mean over the shard group in place of that over all ranks."""

    def make(real: Any) -> Any:
        def issue(self: Reducer, state: ChunkGrads, bucket: Buffer) -> None:
            self._scale = 1.0 / self.mesh.shard.size
            real(self, state, bucket)

        return issue

    return _wrap(Reducer, "_issue", make)


def _no_masters() -> _Patch:
    return mock.patch.object(placement, "master_dtype", lambda *args: None)


def _replicas_drift() -> _Patch:
    """Rank 1's parameters move away in the last bit, which no tolerance would show."""

    def make(real: Any) -> Any:
        def publish(self: Values, *args: Any, **how: Any) -> None:
            real(self, *args, **how)
            if dist.get_rank() == 1:
                for chunk in self.shards.chunks:
                    if chunk.full is not None:
                        chunk.full.mul_(1 + 2**-52)

        return publish

    return _wrap(Values, "publish", make)


FAULTS: dict[str, Callable[[], _Patch]] = {
    "nothing": _nothing,
    "one_reduction_skipped": _one_reduction_skipped,
    "not_unscaled": _not_unscaled,
    "gradient_of_rank_1_forgotten": _gradient_of_rank_1_forgotten,
    "norm_of_each_rank": _norm_of_each_rank,
    "earlier_passes_dropped": _earlier_passes_dropped,
    "replicas_not_averaged": _replicas_not_averaged,
    "no_masters": _no_masters,
    "replicas_drift": _replicas_drift,
}


def train_broken(fault: str, setting: Setting) -> Run:
    """Runs on every rank of a pool: a training with one fault. Nothing of it stays."""
    with FAULTS[fault]():
        return train_on_rank(setting)
