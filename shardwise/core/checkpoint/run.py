"""What a checkpoint needs to know of a training run, and the runs of our engine."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.core.checks.unfinished import PARAMETERS, state_of
from shardwise.core.comm import Activity, Members, destroy, let_go_with, timeout_s
from shardwise.core.comm.control import Control
from shardwise.core.comm.open_files import make_room
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.fragments import Fill, FragmentBlock, FragmentPlan, Held, TensorShape
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.mesh import Mesh

__all__ = ["EngineRun", "Holding", "Ranks", "Run", "Scaler", "Trained", "TrainedOnly", "Trainer", "as_run"]


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
    def plan(self, most_bytes: int, shared: bool = True) -> FragmentPlan: ...
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
        """What was updated during backward is given up. See [Note: What an interrupt leaves half-done]."""
        engine, states = self._session.engine, [state_of(index) for index in optimizers]
        engine.values.before_load(whole)
        parts = [PARAMETERS, *states] if parameters else states
        with engine.unfinished.replaced("a load", parts, partly=() if whole else (PARAMETERS,)):
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
                for index in optimizers:  # no state may be left that is not on the disk
                    stack.enter_context(self._session.optimizers[index].undone_on_error())
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


class TrainedOnly(Held):
    """What the engine holds but for parameters that do not require gradients (those that an optimizer has stay).

    Attributes:
        left_out: their names.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
        super().__init__(engine, optimizers)
        self.left_out = set()
        for chunk in engine.chunks:
            if chunk.spec.index not in self._positions:
                frozen = (slot.param for slot in chunk.spec.slots if not engine.params[slot.param].requires_grad)
                self.left_out |= {self.names[param][0] for param in frozen}

    def aliases(self) -> dict[str, str]:
        return {other: name for other, name in super().aliases().items() if name not in self.left_out}

    def model_shapes(self) -> dict[str, TensorShape]:
        return {name: shape for name, shape in super().model_shapes().items() if name not in self.left_out}

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, dtype in super().compute_dtypes().items() if name not in self.left_out}

    def _blocks(self) -> Iterator[FragmentBlock]:
        names = {f"model/{name}" for name in self.left_out}
        for block in super()._blocks():
            yield replace(block, parts=tuple(part for part in block.parts if part[0].name not in names))


class Ranks:
    """Exchanges JSON and bytes between all ranks, or those of one process group. Collective over them to make.

    Ranks wait for each other (for the slowest to have written) as long as that group's time-out says.

    Args:
        own: a communicator of its own, for a thread beside training. Otherwise the group's serves where it takes
            tensors of the host.
        members: the group of the run's mesh; ``None``: all ranks.
        activity: what this rank is doing, for messages.
    """

    def __init__(self, own: bool, members: Members | None = None, activity: Activity | None = None) -> None:
        self.activity = activity or Activity()
        self._closed = False
        self._control: Control | None = None
        self._group: Any = None
        self._own: list[dist.ProcessGroup] = []
        self._all = members is None
        self.rank, self.size = 0, 1
        group = None if members is None else members.process_group
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        made = own or "gloo" not in str(dist.get_backend(group))
        if not made:
            self._group = group or dist.group.WORLD
        elif members is not None:
            self._group = members.new_group("beside", members.ranks, "gloo")
        else:
            make_room(self.size)
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s()))
        if made:
            self._own.append(self._group)
            let_go_with(self, self._own)

    @property
    def outdated(self) -> bool:
        """Whether they were closed, or are not all ranks any more: the process group may be made after a first save or
        load."""
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return self._closed or (self._all and self.size != size)

    def gather(self, value: object) -> list[Any]:
        """Every rank's JSON-able ``value``. Collective.

        Raises:
            PeerError: a peer died, or did not come in time.
        """
        if self._group is None:
            return [json.loads(json.dumps(value))]
        if self._control is None:
            self._control = Control("ranks of a checkpoint", self._group, self.activity)
        return self._control.exchange_object(value)[0]

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """A contiguous tensor of the host to ``rank``, which calls :meth:`receive`."""
        dist.send(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What ``rank`` sends, into ``tensor``."""
        dist.recv(tensor, group=self._group, group_src=rank)
        return tensor

    def close(self) -> None:
        """Give it back. Safe to call twice."""
        self._group = self._control = None
        self._closed = True
        destroy(self._own)
