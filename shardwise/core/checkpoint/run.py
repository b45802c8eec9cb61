"""What a checkpoint needs to know of a training run, and the runs of our engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from shardwise.core.checks.broken import PARAMETERS, state_of
from shardwise.core.comm import Members
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.fragments import Fill, Fragment, Held, TensorShape
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.mesh import Mesh

__all__ = ["EngineRun", "Holding", "Plan", "Reader", "Run", "Scaler", "Trained", "Trainer", "as_run"]


class Trained(Protocol):
    """What of an engine's session is saved."""

    @property
    def engine(self) -> Engine: ...
    @property
    def optimizers(self) -> tuple[ShardedOptimizer, ...]: ...
    @property
    def mesh(self) -> Mesh: ...


class Scaler(Protocol):
    """A loss scale: ``scale``, ``overflows`` and ``good_steps`` as numbers."""

    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state: dict[str, float], /) -> None: ...


class Trainer(Protocol):
    """An optimizer of a run."""

    @property
    def index(self) -> int: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> Any: ...
    @property
    def scaler(self) -> Scaler | None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class Reader(Protocol):
    """See :class:`shardwise.core.engine.fragments.FragmentReader`."""

    def read(self, index: int, start: int = 0, numel: int | None = None) -> torch.Tensor: ...
    def close(self) -> None: ...


class Plan(Protocol):
    """See :class:`shardwise.core.engine.fragments.FragmentPlan`."""

    @property
    def fragments(self) -> list[Fragment]: ...
    def values(self) -> Iterator[torch.Tensor]: ...
    def reader(self) -> Reader: ...


class Holding(Protocol):
    """What one rank holds of every global tensor; see :class:`shardwise.core.engine.fragments.Held`."""

    names: list[tuple[str, ...]]
    others: dict[str, Any]

    @property
    def module(self) -> torch.nn.Module | None: ...
    @property
    def optimizers(self) -> Sequence[Any]: ...
    def aliases(self) -> dict[str, str]: ...
    def model_shapes(self) -> dict[str, TensorShape]: ...
    def compute_dtypes(self) -> dict[str, torch.dtype]: ...
    def buffers(self) -> dict[str, torch.Tensor]: ...
    def extra(self) -> dict[str, Any]: ...
    def extra_names(self) -> Sequence[str]: ...
    def gives(self, name: str, /) -> bool: ...
    def group_names(self, optimizer: Any, /) -> list[list[str]]: ...
    def trained(self, optimizer: Any, /) -> set[str]: ...
    def small_state(self, optimizer: Any, /) -> dict[str, dict[str, Any]]: ...
    def plan(self, most_bytes: int, shared: bool = True) -> Plan: ...
    def put_back(
        self,
        fill: Fill,
        stored: Callable[[str], str | None],
        state_of: Callable[[str], dict[str, Any] | None],
        optimizers: Collection[int],
    ) -> None: ...
    def check_others(self, values: dict[str, Any]) -> None:
        """Before anything is changed: no module has a way to take some of them."""

    def put_others(self, values: dict[str, Any]) -> None: ...
    def loaded(self, missing: list[str], unexpected: list[str]) -> None:
        """The module's own hooks for loads, once everything of it is there; they may change the lists of names."""


class Run(Protocol):
    """One training run on one rank. ``gather``, ``settle``, ``replaced`` and ``taken_over`` are collective."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def data_rank(self) -> int:
        """Which of the ranks that see different data this is; those that hold one model together see the same."""

    @property
    def members(self) -> Members | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def optimizers(self) -> Sequence[Trainer]: ...
    def gather(self, value: object, /) -> list[Any]:
        """Every rank's JSON-able ``value``."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Around what all ranks have to call; errors of ranks that do not meet then tell it."""

    def world(self) -> Mapping[str, int]:
        """The sizes of this run, for information."""

    def settle(self) -> None:
        """What is under way is finished or taken back: the state is that of the last step."""

    def held(self) -> Holding:
        """What this rank holds, as it is now."""

    def replaced(self, parameters: bool, whole: bool, optimizers: Collection[int]) -> AbstractContextManager[None]:
        """From before the first value that a load replaces until behind the last: ``parameters``, the ``whole`` model's
        or some, the state of ``optimizers``, and what belongs to these. What an interrupt in the block leaves must be
        loaded before the run goes on."""

    def taken_over(self, optimizers: Collection[int]) -> AbstractContextManager[None]:
        """Inside the block values are replaced, and the state of ``optimizers``; afterwards every rank uses the new
        ones."""


class EngineRun:
    """A session of our engine."""

    def __init__(self, session: Trained) -> None:
        self._session = session
        self._purpose = "what a checkpoint needs"
        mesh = session.mesh
        self.rank, self.size, self.device, self.members = (
            mesh.everyone.rank,
            mesh.everyone.size,
            mesh.device,
            mesh.members,
        )
        self.data_rank = mesh.rank

    @property
    def optimizers(self) -> tuple[ShardedOptimizer, ...]:
        return self._session.optimizers

    def gather(self, value: object, /) -> list[Any]:
        """Every rank's JSON-able ``value``. Collective."""
        return self._session.mesh.everyone.exchange_object(value, self._purpose)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """See :meth:`Mesh.doing`. The first word of ``what`` ("saving") is the same on all ranks that do the same."""
        before, self._purpose = self._purpose, f"what {what.split()[0]} needs"
        try:
            with self._session.mesh.doing(what):
                yield
        finally:
            self._purpose = before

    def world(self) -> dict[str, int]:
        """The mesh."""
        mesh = self._session.mesh
        sizes = {"shard": mesh.shard.size, "replicate": mesh.replicate.size}
        sizes |= {"tensor": mesh.tensor.size, "pipeline": mesh.pipeline.size}
        return {"size": mesh.everyone.size, **sizes}

    def settle(self) -> None:
        """Drop a pass that failed, wait for gathers. Collective."""
        engine = self._session.engine
        engine.passes.recover()
        engine.values.take_written()
        engine.values.make_current("a checkpoint")
        engine.pool.settle()

    def held(self) -> Held:
        """What the engine holds."""
        return Held(self._session.engine, self._session.optimizers)

    @contextmanager
    def replaced(self, parameters: bool, whole: bool, optimizers: Collection[int]) -> Iterator[None]:
        """What was updated during backward is given up. See [Note: Broken sessions]."""
        engine, states = self._session.engine, [state_of(index) for index in optimizers]
        engine.values.before_load(whole)
        parts = [PARAMETERS, *states] if parameters else states
        with engine.broken.replacing("a load", parts, partly=() if whole else (PARAMETERS,)):
            yield

    @contextmanager
    def taken_over(self, optimizers: Collection[int]) -> Iterator[None]:
        """Gradients are dropped; shards are published at the end. Collective."""
        engine = self._session.engine
        engine.zero_grad()
        for optimizer in self._session.optimizers:
            optimizer.zero_grad()
        engine.values.before_update()
        try:
            with ExitStack() as stack:
                for index in optimizers:
                    stack.enter_context(self._session.optimizers[index].replacing_state())
                yield
        except BaseException:
            if engine.storage.store is not None:
                engine.storage.store.rollback()  # a failed write could not be committed, on this rank alone
            engine.values.publish(everything=True)
            raise
        engine.values.publish(everything=True)


def as_run(session: Any) -> Run:
    """A :class:`Run` itself, or that of an engine's session."""
    return session if hasattr(session, "taken_over") else EngineRun(session)
