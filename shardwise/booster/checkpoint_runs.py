"""Finds the run of a boosted model or optimizer for checkpoints."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardwise.booster.wrappers import unwrap_model, unwrap_optimizer
from shardwise.core.base.validate import short_repr
from shardwise.core.checkpoint import Checkpointer, CheckpointError, EngineRun, Ranks, Run, TorchRun
from shardwise.session import ShardedModule, ShardedOptimizer

SESSION = "_shardwise_session"


def remember_session(session: Any) -> None:
    """Register a session of our engine by its module and its optimizers."""
    for each in (session.module, *session.optimizers):
        vars(each)[SESSION] = session


def _session(boosted: object) -> Any:
    """Return the session of an object of our engine; ``None`` for objects of torch.

    Raises:
        ValueError: the model or optimizer was not boosted.
    """
    if not isinstance(boosted, nn.Module | torch.optim.Optimizer):
        raise TypeError(f"{short_repr(boosted)} is neither a model nor an optimizer: give what boost returned")
    session = vars(boosted).get(SESSION)
    if session is None and isinstance(boosted, ShardedModule | ShardedOptimizer):
        raise ValueError(
            f"{type(boosted).__name__} was not made by a Booster; save and load it with its session's checkpoints"
        )
    return session


class Runs:
    """The models and optimizers of a Booster, by weak references."""

    def __init__(self) -> None:
        self._modules: WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[nn.Module]] = WeakKeyDictionary()
        self._savers: WeakKeyDictionary[nn.Module, Checkpointer] = WeakKeyDictionary()
        self._all: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
        self._sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._own_ranks: Ranks | None = None

    def add(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, together: bool) -> None:
        """Add the result of boost. ``together``: on every rank, which is collective."""
        session = _session(model)
        if session is not None:
            self._all.add(session.checkpoints)
            self._sharded.add(model)
            return
        module = unwrap_model(model)
        if optimizer is not None:
            self._modules[unwrap_optimizer(optimizer)] = weakref.ref(module)
        if together and (self._own_ranks is None or self._own_ranks.outdated):
            # Created while all ranks are here. If a rank saves alone, it times out in this group and not in the
            # program's.
            self._own_ranks = Ranks(own=True)
        # created early, because it counts the updates
        self._savers[module] = Checkpointer(self._torch_run(module, optimizer))
        self._all.add(self._savers[module])

    def of_model(self, model: nn.Module) -> Run:
        """Return the run of a boosted model, or of a plain one."""
        session = _session(model)
        return self._torch_run(unwrap_model(model), None) if session is None else EngineRun(session)

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> tuple[Run, int]:
        """Return the run of a boosted optimizer and the optimizer's index in it.

        A plain optimizer has a run whose parameters are known by number.
        """
        session = _session(optimizer)
        if isinstance(optimizer, nn.Module):
            raise TypeError(f"optimizer={type(optimizer).__name__}: give the optimizer that boost returned")
        if session is not None:
            return EngineRun(session), session.optimizers.index(optimizer)
        module = self._modules.get(unwrap_optimizer(optimizer))
        return self._torch_run(None if module is None else module(), optimizer), 0

    def of_scheduler(self, scheduler: Any) -> Run:
        """Return the run of the scheduler's optimizer; a run of all ranks if no boosted model has that optimizer."""
        optimizer = getattr(scheduler, "optimizer", None)
        for session in map(_session, self._sharded):
            if any(optimizer is each or optimizer is each.optimizer for each in session.optimizers):
                return EngineRun(session)
        return self._torch_run(None, None)

    def pipeline(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, plugin: str) -> Any:
        """Return the pipeline steps of a boosted model.

        Raises:
            NotImplementedError: the model has no pipeline stages.
            ValueError: the optimizer was not boosted with this model.
        """
        session = _session(model)
        if session is None or session.pipeline is None:
            raise NotImplementedError(
                f"execute_pipeline needs a pipeline, HybridParallelPlugin(pp_size > 1); plugin is {plugin}, and the "
                f"{type(model).__name__} is in one piece. Call model, criterion and booster.backward instead"
            )
        self.saver(model, optimizer)
        return session.pipeline

    def saver(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Checkpointer:
        """Return the checkpointer of a boosted model's run.

        Raises:
            ValueError: the optimizer was not boosted with this model.
        """
        if isinstance(model, list | tuple) or isinstance(optimizer, list | tuple):
            several = len(model) if isinstance(model, list | tuple) else 1
            raise ValueError(
                f"{several} models and {len(optimizer) if isinstance(optimizer, list | tuple) else 1} optimizers: a "
                "checkpoint holds one model. Save each with its optimizer into a directory of its own under the same "
                "tag, such as save_checkpoint('runs/generator', generator, its_optimizer, tag='step-100'), and load "
                "the last tag that all directories have"
            )
        session, module = _session(model), unwrap_model(model)
        saver: Checkpointer | None = self._savers.get(module) if session is None else session.checkpoints
        if session is not None:
            own = any(optimizer is each for each in (None, *session.optimizers))
        else:
            own = optimizer is None or self._modules.get(unwrap_optimizer(optimizer), lambda: None)() is module
        if saver is None or not own:
            raise ValueError(
                f"model={type(model).__name__}, optimizer={type(optimizer).__name__}: one of them was not boosted, or "
                "the optimizer was not boosted with this model; give what one call of boost returned"
            )
        return saver

    def wait_for_saves(self) -> None:
        """Wait until no run's checkpoint is being written.

        Raises:
            CheckpointError: the last asynchronous save of a run failed.
        """
        failures = []
        for saver in list(self._all):
            try:
                saver.wait_for_saves()
            except CheckpointError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close every session that still exists, and the checkpointers under torch's own sharding.

        Raises:
            CheckpointError: the last asynchronous save of one failed; all are closed.
        """
        with ExitStack() as stack:
            for each in [*map(_session, self._sharded), *self._savers.values()]:
                stack.callback(each.close)
            if self._own_ranks is not None:
                stack.callback(self._own_ranks.close)
        self._sharded.clear()

    def _torch_run(self, module: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> TorchRun:
        if optimizer is None:
            return TorchRun(module, ranks=self._own_ranks)
        return TorchRun(module, unwrap_optimizer(optimizer), getattr(optimizer, "scaler", None), self._own_ranks)
