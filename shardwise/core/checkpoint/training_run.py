"""The interface between a checkpoint and a training run, the runs of our engine, and messages between a run's ranks."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.core.checks.broken import PARAMETERS, state_of
from shardwise.core.comm import Activity, Members, destroy, let_go_with, timeout_s
from shardwise.core.comm.control import Control
from shardwise.core.comm.members import make_room
from shardwise.core.engine.checkpoint_state import EngineLocalState, Fill, FragmentBlock, FragmentPlan, TensorShape
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.mesh import Mesh


class Trained(Protocol):
    """The parts of an engine's session that are saved."""

    @property
    def values(self) -> ParameterValues: ...
    @property
    def optimizers(self) -> tuple[ShardedOptimizer, ...]: ...
    @property
    def mesh(self) -> Mesh: ...


class Scaler(Protocol):
    """A loss scale: ``scale``, ``overflows`` and ``good_steps`` as numbers."""

    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state: dict[str, float], /) -> None: ...


class RunOptimizer(Protocol):
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


class LocalState(Protocol):
    """The part of every global tensor that one rank holds; see
    :class:`shardwise.core.engine.checkpoint_state.EngineLocalState`."""

    names: list[tuple[str, ...]]
    buffers_and_extra: dict[str, Any]

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
    def owns(self, name: str, /) -> bool: ...
    def group_names(self, optimizer: Any, /) -> list[list[str]]: ...
    def trained(self, optimizer: Any, /) -> set[str]: ...
    def small_state(self, optimizer: Any, /) -> dict[str, dict[str, Any]]: ...
    def plan(self, most_bytes: int, shared: bool = True) -> FragmentPlan: ...
    def load_into(
        self,
        fill: Fill,
        stored: Callable[[str], str | None],
        state_of: Callable[[str], dict[str, Any] | None],
        optimizers: Collection[int],
    ) -> None: ...
    def check_buffers_and_extra(self, values: dict[str, Any]) -> None:
        """Raise before anything is changed if no module can load some of them."""

    def load_buffers_and_extra(self, values: dict[str, Any]) -> None: ...
    def loaded(self, missing: list[str], unexpected: list[str]) -> None:
        """Call the module's load hooks after everything is loaded. The hooks may change the lists of names."""


class Run(Protocol):
    """A training run on one rank. ``gather``, ``settle``, ``replaced`` and ``adopting`` are collective."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def data_rank(self) -> int:
        """Return the data-parallel rank. Ranks of one model-parallel group have the same data-parallel rank."""

    @property
    def members(self) -> Members | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def optimizers(self) -> Sequence[RunOptimizer]: ...
    def gather(self, value: object, /) -> list[Any]:
        """Return every rank's JSON-able ``value``."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Return a context for a call that all ranks make; errors of ranks that are out of sync name it."""

    def world(self) -> Mapping[str, int]:
        """Return the sizes of this run, for information."""

    def settle(self) -> None:
        """Finish or undo pending work, so that the state is that of the last step."""

    def local_state(self) -> LocalState:
        """Return the tensors that this rank holds now."""

    def replaced(self, parameters: bool, complete: bool, optimizers: Collection[int]) -> AbstractContextManager[None]:
        """Return a context from before the first value that a load replaces until after the last.

        After an interrupt in the block these values must be loaded again before the run continues: ``parameters`` (all
        of them, if ``complete``) and the state of ``optimizers``.
        """

    def adopting(self, optimizers: Collection[int]) -> AbstractContextManager[None]:
        """Return a context in which parameters and the state of ``optimizers`` are replaced; it publishes the new
        values.
        """


class EngineRun:
    """A session of our engine."""

    def __init__(self, session: Trained) -> None:
        self._session = session
        self._purpose = "what a checkpoint needs"
        mesh = session.mesh
        self.rank, self.size = mesh.mesh_group.rank, mesh.mesh_group.size
        self.device, self.members, self.data_rank = mesh.device, mesh.members, mesh.rank

    @property
    def optimizers(self) -> tuple[ShardedOptimizer, ...]:
        return self._session.optimizers

    def gather(self, value: object, /) -> list[Any]:
        """Return every rank's JSON-able ``value``. Collective."""
        return self._session.mesh.mesh_group.exchange_object(value, self._purpose)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """See :meth:`Mesh.doing`. The first word of ``what`` ("saving") must be the same on all ranks."""
        before, self._purpose = self._purpose, f"what {what.split()[0]} needs"
        try:
            with self._session.mesh.doing(what):
                yield
        finally:
            self._purpose = before

    def world(self) -> dict[str, int]:
        """Return the sizes of the mesh."""
        mesh = self._session.mesh
        sizes = {"shard": mesh.shard.size, "replicate": mesh.replicate.size}
        sizes |= {"tensor": mesh.tensor.size, "pipeline": mesh.pipeline.size}
        return {"size": mesh.mesh_group.size, **sizes}

    def settle(self) -> None:
        """Drop a failed pass, and wait for gathers. Collective."""
        values = self._session.values
        values.grads.passes.recover()
        values.take_written()
        values.make_current("a checkpoint")
        values.pool.settle()

    def local_state(self) -> EngineLocalState:
        """Return the tensors of the engine that this rank holds, after updates of a failed pass have ended."""
        self._session.values.grads.early.catch_up()  # an update replaces param_groups while it runs
        return EngineLocalState(self._session.values, self._session.optimizers)

    @contextmanager
    def replaced(self, parameters: bool, complete: bool, optimizers: Collection[int]) -> Iterator[None]:
        """Drop updates made during backward. See [Note: Broken sessions]."""
        values, states = self._session.values, [state_of(index) for index in optimizers]
        values.before_load(complete)
        parts = [PARAMETERS, *states] if parameters else states
        with values.guards.broken.replacing("a load", parts, partly=() if complete else (PARAMETERS,)):
            yield

    @contextmanager
    def adopting(self, optimizers: Collection[int]) -> Iterator[None]:
        """Drop gradients, and publish shards at the end of the block. Collective."""
        values = self._session.values
        values.grads.zero()
        for optimizer in self._session.optimizers:
            optimizer.zero_grad()
        values.before_update()
        try:
            with ExitStack() as stack:
                for index in optimizers:
                    stack.enter_context(self._session.optimizers[index].updates.replacing_state())
                yield
        except BaseException:
            values.shards.storage.roll_back()  # a failed write on this rank alone could not be committed
            values.publish(everything=True)
            raise
        values.publish(everything=True)


def as_run(session: Any) -> Run:
    """Return a :class:`Run` as it is, or the run of an engine's session."""
    return session if hasattr(session, "adopting") else EngineRun(session)


class TrainedOnly(EngineLocalState):
    """The engine's tensors without frozen parameters, except those that an optimizer has.

    Attributes:
        left_out: names of the parameters that are not saved.
    """

    def __init__(self, values: ParameterValues, optimizers: Sequence[ShardedOptimizer]) -> None:
        super().__init__(values, optimizers)
        self.left_out = set()
        shards = values.shards
        for chunk in shards.chunks:
            if chunk.spec.index not in self._positions:
                frozen = (slot.param for slot in chunk.spec.slots if not shards.params[slot.param].requires_grad)
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
    """Exchanges JSON and bytes between all ranks, or those of one process group. The constructor is collective.

    The group's time-out bounds how long ranks wait for each other.

    Args:
        own: create a communicator, for a thread that runs during training. Otherwise the group's is used if it
            supports CPU tensors.
        members: the group of the run's mesh; ``None``: all ranks.
        activity: activity of this rank, for messages.
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
            self._group = members.new_group("checkpoint", members.ranks, "gloo")
        else:
            make_room(self.size)
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s()))
        if made:
            self._own.append(self._group)
            let_go_with(self, self._own)
            self.gather(None)  # wait for all ranks: closing a group while a peer still connects to it fails the peer

    @property
    def outdated(self) -> bool:
        """Return True if this was closed, or the process group was created after it."""
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return self._closed or (self._all and self.size != size)

    def gather(self, value: object) -> list[Any]:
        """Return every rank's JSON-able ``value``. Collective.

        Raises:
            PeerError: a peer died, or did not arrive in time.
        """
        if self._group is None:
            return [json.loads(json.dumps(value))]
        if self._control is None:
            self._control = Control("ranks of a checkpoint", self._group, self.activity)
        return self._control.exchange_object(value)[0]

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a contiguous CPU tensor to ``rank``, which calls :meth:`receive`."""
        dist.send(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Receive the tensor that ``rank`` sends into ``tensor``."""
        dist.recv(tensor, group=self._group, group_src=rank)
        return tensor

    def close(self) -> None:
        """Release the communicator. Safe to call twice."""
        self._group = self._control = None
        self._closed = True
        destroy(self._own)
