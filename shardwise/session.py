"""The only composer: ``shard()`` and ``build()`` take a model, optimizers and a plan, and return a :class:`Session`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from shardwise.core.base.checked import require, shown, whole
from shardwise.core.base.device import give_back, on_device
from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.sizes import device_bytes
from shardwise.core.base.torch_internals import point
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checks.collective import collective
from shardwise.core.comm import collectively
from shardwise.core.deferred.construction import adopt
from shardwise.core.deferred.record import is_recording, recorders
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.given import as_now
from shardwise.core.engine.memory import MemoryReport
from shardwise.core.engine.module import ShardedModule
from shardwise.core.engine.one_parameter import OneParameter
from shardwise.core.engine.optimizer import ShardedOptimizer, sharded_of
from shardwise.core.engine.packed_weights import settle_packed
from shardwise.core.engine.pipelined import PipelineSteps
from shardwise.core.engine.whole import whole_gradients, whole_values
from shardwise.core.grads.scaler import LossScaler
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.mesh import Mesh, default_device, init_distributed
from shardwise.core.update.tiles import needs_whole_tensors
from shardwise.plan import DiskPlan, Plan, SequencePlan, TensorPlan, TierPlan, replicated, zero
from shardwise.plan import on_device as tiers_on_device

__all__ = [
    "MemoryReport",
    "OneParameter",
    "Session",
    "Settings",
    "ShardedModule",
    "ShardedOptimizer",
    "build",
    "needs_whole_tensors",
    "shard",
    "sharded_of",
]

DTYPES = {None: None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_LAYERS, EVERYWHERE = ("split_gather", "ring"), ("all_to_all", "ring_attn")
NO_DIRECTORY = re.compile(r"(host|cpu|cuda|gpu|device|ram|memory|disk|nvme|ssd|none|true|false)(:\d+)?", re.IGNORECASE)
"""Words of other libraries for a place, which nobody means as the name of a directory."""
MOVED = (
    "This came while the values of the {name} were being moved, so that some of its parameters are NaN now: make the "
    "model anew (its optimizers, too) and build again."
)


class Session:
    """One sharded model with its optimizers.

    Attributes:
        module: call it instead of the model.
        model: the user's own, whose parameters are sharded. It may be called as well, and has the methods of its class.
        optimizer: the first optimizer, or ``None``.
        optimizers: all of them.
        plan, mesh: what it was built from.
        params: the sharded parameters, in the model's order.
        events: what happens in it, by name; see :mod:`shardwise.core.base.events`.
        ledger: the device's accounts.
        pipeline: makes the passes of steps where the model is in stages; otherwise ``None``.
        checkpoints: ``save`` and ``load`` everything; ``wait`` for an asynchronous save. Several files written by all
            ranks, for any number of ranks, parts of layers, stage, packing, tier and precision.
    """

    def __init__(self, engine: Engine, module: ShardedModule, optimizers: Sequence[ShardedOptimizer]) -> None:
        self.engine, self.module, self.model = engine, module, engine.model
        self.optimizers = tuple(optimizers)
        self.optimizer = self.optimizers[0] if self.optimizers else None
        self.plan, self.mesh = engine.plan, engine.mesh
        self.params, self.events, self.ledger = engine.params, engine.events, engine.ledger
        self._place_of: dict[int, int] | None = None
        self.checkpoints = Checkpointer(self)
        self.pipeline = PipelineSteps(engine, self.optimizer) if engine.staging is not None else None

    def backward(self, loss: torch.Tensor, tokens: float | None = None, retain_graph: bool = False) -> None:
        """Backward pass of ``loss``; see :meth:`ShardedOptimizer.backward`. Without an optimizer, unscaled."""
        if self.optimizer is not None:
            self.optimizer.backward(loss, tokens, retain_graph)
        else:
            self.engine.passes.backward(loss, tokens, 1.0, retain_graph)

    def backward_pass(self, loss_scale: float = 1.0) -> AbstractContextManager[None]:
        """Around a backward pass that the caller makes, of a loss that was multiplied by ``loss_scale``.

        Raises:
            RuntimeError: under ``average="tokens"``: :meth:`backward` takes the number of tokens.
        """
        return self.engine.passes.around(loss_scale)

    def expect_backward(self, loss_scale: float) -> None:
        """The next pass is the caller's ``loss.backward()``, of a loss that it multiplied by ``loss_scale``."""
        self.engine.check_open("backward()")
        self.engine.passes.expect(loss_scale)

    def take_unscaled(self, takes: bool) -> None:
        """Whether a ``loss.backward()`` of a loss that nobody scaled is taken under a loss scale, with a warning."""
        self.engine.passes.takes_unscaled = takes

    def divide_own_passes(self, by: float) -> None:
        """From here on gradients of the caller's ``loss.backward()`` count as ``by`` times too large."""
        self.engine.passes.own_divisor = by

    def reduce_rest(self) -> None:
        """Reduce now what passes under :meth:`no_sync` kept, which the step would. Collective."""
        self.engine.passes.reduce_rest()

    def drop_gathered(self, to_system: bool = True) -> None:
        """Give back the memory of gathered parameters that nothing reads. Between passes, on every rank.

        Args:
            to_system: also what the allocator of the device keeps.
        """
        self.engine.pool.drop_idle()
        if to_system:
            give_back(self.mesh.device)

    def set_aside(self, pin_memory: bool = False) -> int:
        """Move masters and optimizer state from the device to host memory, until :meth:`bring_back`.

        Meanwhile the model can be evaluated, saved and loaded; what trains is refused. Every rank calls it, between
        steps.

        Args:
            pin_memory: page-lock that memory, and keep it for the next time.

        Returns:
            Bytes moved, on this rank.

        Raises:
            RuntimeError: gradients are held that no step has used, updates are made during backward, or the session is
                closed.
        """
        self.engine.check_open("set_aside()")
        if self.has_gradients or self.plan.grad.update == "backward":
            raise RuntimeError(
                f"set_aside() with has_gradients={self.has_gradients}, update={self.plan.grad.update!r}: call it "
                "between steps (zero_grad() drops gradients), under update='step'"
            )
        moved = sum(each.put(pin_memory) for each in self.engine.asides)
        self.drop_gathered()
        return moved

    def bring_back(self) -> None:
        """End of :meth:`set_aside`; where nothing was, nothing happens."""
        for each in self.engine.asides:
            each.bring_back()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside are not reduced (plans that keep whole gradients only)."""
        return self.engine.no_sync()

    @property
    def data_ranks(self) -> int:
        """How many ranks see different data; those that hold one model together, or share sequences, count once."""
        return self.mesh.data_ranks

    @property
    def data_rank(self) -> int:
        """Which of them this rank is, or belongs to: what a ``DistributedSampler`` wants as ``rank``."""
        return self.mesh.data_rank

    @property
    def has_gradients(self) -> bool:
        """Whether this rank holds the gradient of a pass that no step has used."""
        return any(state.present for state in self.engine.grads.values())

    @property
    def passes_held(self) -> int:
        """Passes that reached a parameter of the first optimizer since its gradients were used or dropped."""
        return self.engine.counts.so_far(0)

    def drop_failed(self) -> None:
        """Where a backward pass has failed, the gradients of the step's passes go, as by ``zero_grad()``. Collective
        then."""
        self.engine.passes.recover(dropping=True)

    @collective("full_gradients()")
    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that the next step would apply, before clipping: averaged over ranks and unscaled, full shape.

        fp32 (fp64 where gradients are). Parameters without a gradient on any rank are absent. Collective; call it
        after backward and before step.

        Raises:
            RuntimeError: the plan does not keep them (``update="backward"``), or the session is closed.
        """
        self.engine.check_open("full_gradients()")
        if self.plan.grad.update == "backward":
            raise RuntimeError(
                f"full_gradients() with update={self.plan.grad.update!r}: gradients are used as soon as they are "
                "reduced and not kept; look at them under update='step'"
            )
        self.engine.passes.reduce_rest()
        self.engine.visible.collect()
        # -1: of parameters that no optimizer holds, which carry loss scale and weights as well.
        divisors = {index: self.engine.visible.divisor(index) for index in range(-1, len(self.optimizers))}
        return {
            self.engine.division.census.facts[place].names[0]: value.div_(divisors[optimizer])
            for place, optimizer, value in whole_gradients(self.engine)
        }

    # ---- parameters

    def holders(self) -> list[int]:
        """For each of :attr:`params` the index of its optimizer, or -1."""
        return [fact.optimizer for fact in self.engine.layout.facts]

    def names(self) -> list[tuple[str, ...]]:
        """For each of :attr:`params` all its names in the model."""
        return [fact.names for fact in self.engine.layout.facts]

    def saved_names(self) -> dict[int, tuple[str, ...]]:
        """For each of :attr:`params`, by index, its names in ``state_dict()``; absent: hooks leave it out."""
        return {index: tuple(names) for index, names in self.engine.attachment.own_state.names().of_parameter.items()}

    def one(self, param: nn.Parameter) -> OneParameter | None:
        """Value, gradient and optimizer state of one of :attr:`params`, to be read and set; ``None``: of another
        model."""
        found = self.places([param])
        return OneParameter(self.engine, self.optimizers, found[0]) if found else None

    def places(self, params: Iterable[nn.Parameter]) -> list[int]:
        """Where those of ``params`` that are of this model stand in :attr:`params`, in order, each once."""
        if self._place_of is None:
            self._place_of = {id(each): place for place, each in enumerate(self.params)}
        return sorted({self._place_of[id(param)] for param in params if id(param) in self._place_of})

    def gathered(self, params: Iterable[nn.Parameter], write_back: bool = False) -> AbstractContextManager[None]:
        """As ``module.gathered()``, of ``params`` and what is gathered together with them. Every rank enters.

        Args:
            params: those of other models count for nothing.
            write_back: as there.

        Raises:
            ValueError: on every rank, where some have other ``params`` of a model that is not always whole. One that
                has none of the model is waited for.
        """
        return self.engine.values.gathered(write_back, self.places(params))

    def compare(self, params: Iterable[nn.Parameter]) -> None:
        """Every rank has the same of ``params``. Collective.

        Raises:
            ValueError: on every rank, where some have others; it says which.
        """
        self.engine.values.compare(self.places(params))

    def take_given(self) -> None:
        """``parameter.data = values`` inside ``gathered()`` so far are writes like others. Collective.

        Raises:
            RuntimeError: on every rank, where some rank gave a parameter data of another kind.
        """
        self.engine.values.take_given()

    def write_back(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Keep what was written to parameters that ``gathered()`` holds: to ``params``, or to all. Collective."""
        self.engine.values.write_back(None if params is None else self.places(params))

    @collective("unshard()")
    def unshard(self) -> None:
        """:meth:`close`, with full parameters back in the model, on the host (fp32 masters where there are any).
        Collective. A second time it does nothing.

        The model is an ordinary one then. Its optimizer is not: its state is of parts, so make a new one.
        """
        if self.engine.guards.given_back:
            return
        values: dict[int, torch.Tensor] = {}
        if self.engine.staging is not None:
            raise NotImplementedError(
                f"unshard() of a model in {self.engine.staging.stages} stages: each rank has its own alone; save it "
                "(state_dict(), save_model) and load that into a whole one"
            )
        self.engine.values.settle("unshard()")
        for index, value in whole_values(self.engine, masters=True):
            values[index] = value.to("cpu", copy=True)
        # What is gathered now would be evicted some time, with the user's values in it.
        self.engine.pool.invalidate(everything=True)
        self.close()
        if self.engine.cutting is not None:
            self.engine.cutting.remove()
            self.engine.division.release()  # what stood on layers that were cut
        for index, param in enumerate(self.params):
            param.grad = None
            adopt(param, values.pop(index))
            for follower in self.engine.chunks[self.engine.layout.where[index][0]].followers_of(index):
                point(follower, param)
        self.engine.guards.given_back = True
        for optimizer in self.optimizers:
            optimizer.close(given_back=True)

    # ---- what is held and sent

    def memory(self) -> MemoryReport:
        """Live bytes of model data on this rank."""
        return self.module.memory()

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has sent, by kind of operation, over all axes.

        With shards or state on a disk also ``disk_read`` and ``disk_write``: bytes transferred, each record rounded up
        to 4096.
        """
        store = self.engine.storage.store
        disk = {} if store is None else {"disk_read": store.bytes_read, "disk_write": store.bytes_written}
        return {**self.mesh.traffic(), **disk}

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self.mesh.reset_traffic()
        if self.engine.storage.store is not None:
            self.engine.storage.store.reset_counters()

    def memory_stats(self) -> MemStats | None:
        """The last training step's memory trace on this rank; ``None`` before one, or without a device capacity."""
        return self.module.memory_stats()

    def memory_so_far(self) -> MemStats | None:
        """As :meth:`memory_stats`, but the step under way, or one that failed, until now."""
        return self.engine.meter.so_far() if self.engine.meter is not None else None

    def use_memory_stats(self, stats: MemStats) -> None:
        """Place by a trace that was made earlier, without a warm-up step (``auto``).

        Args:
            stats: what :meth:`memory_stats` gave for the same model and plan, or
                :func:`~shardwise.core.memory.trace.tracing.trace_memory` for the same model.

        Raises:
            ValueError: its units or modules have other names or sizes than this model's, or the plan has no device
                capacity.
        """
        if self.engine.meter is None:
            raise ValueError(
                f"a trace for a plan with a device capacity of {self.engine.ledger.capacity_bytes}: declare one, and "
                "give a trace that the same plan recorded"
            )
        self.engine.meter.use(self.engine.attachment.by_units(stats))

    @property
    def resident(self) -> bool:
        """Whether all parameters are whole on every rank at all times; then they stay so behind :meth:`close`."""
        return all(chunk.resident for chunk in self.engine.chunks)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.engine.closed

    def close(self) -> None:
        """Remove the hooks from the model, and give back files, threads and memory; the mesh has its own ``close``.

        Call :meth:`ShardedModule.state_dict` first if it is still needed. Without this, the same goes with the last
        reference to session, model and optimizers; the model holds what it needs as long as it lives.
        """
        try:
            self.checkpoints.close()
        finally:
            for optimizer in self.optimizers:
                optimizer.close()
            self.engine.close()


def build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    plan: Plan,
    mesh: Mesh | None = None,
    device: torch.device | None = None,
) -> Session:
    """Shard ``model`` in place and wrap its optimizers. Collective.

    Args:
        model: any module, real, on the meta device, or built under ``deferred_init()``.
        optimizer: one, several (each parameter in at most one), or none. They stay usable through ``param_groups``,
            which hold the model's parameters as before, and their ``zero_grad``, ``state_dict`` and ``load_state_dict``
            are those of the session's; ``step`` and ``add_param_group`` refuse.
        plan: what to do; see :mod:`shardwise.plan`.
        mesh: made from ``plan.mesh`` over all ranks if not given.
        device: where parameters live, if no mesh is given; by default this rank's GPU where there is one a rank. It
            need not be the current one.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` is or has what is no optimizer.
        RuntimeError: called inside ``deferred_init()``.
        ValueError: the plan does not fit the number of ranks, an optimizer cannot be sharded, or the ranks differ in
            what has to be the same: parameters, optimizers and their groups, plan, versions. Which and in what is said
            on every rank.
        DeviceMemoryError: the declared device memory does not hold the model and its optimizers.
        PeerError: another rank cannot build; why is said.

    Whatever is raised, no hooks, files and process groups are left, and optimizers have the steps, parameters and state
    that they had. So has the model its values, unless these were being moved already, which a note of the error says
    then: a disk that fails, a peer that is gone, memory that nobody declared and an interrupt can come there.
    """
    optimizers = _given(model, optimizer)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={shown(plan)}: give a Plan, such as zero(3)")
    if is_recording():
        raise RuntimeError(
            f"build() of a {type(model).__name__} inside deferred_init() ({len(recorders())} entered): leave it first"
        )
    with deferred_interrupts("the build"), ExitStack() as undo:  # if it fails
        if mesh is None:
            mesh = Mesh.create(plan.mesh, device or default_device(), plan.comm)
            undo.callback(mesh.close)
        with on_device(mesh.device):
            undo.callback(settle_packed(model, mesh.device))
            with mesh.doing("build()"):
                engine = Engine(model, optimizers, plan, mesh)
            undo.callback(engine.close)  # its hooks and files
            scaler = LossScaler(plan.precision.scaler) if plan.precision.scaler is not None else None
            wrapped = []
            for index, each in enumerate(optimizers):
                undo.callback(as_now(each))  # also if it fails half way
                engine.division.narrow(each)
                wrapped.append(ShardedOptimizer(engine, each, index, scaler))
                undo.callback(wrapped[-1].close)
            with mesh.doing("build()"):
                _foresee(wrapped, mesh)
                _take_over(engine, wrapped)
            session = Session(engine, ShardedModule(engine), wrapped)
        undo.pop_all()
    return session


def _given(model: Any, optimizer: Any) -> list[torch.optim.Optimizer]:
    """All optimizers of ``optimizer``: one, several or none.

    Raises:
        TypeError, ValueError: see :func:`build`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={shown(model)}: give a torch.nn.Module{', not its class' * isinstance(model, type)}")
    if optimizer is None:
        return []
    several: list[Any] = [optimizer]
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str):
        several = list(optimizer)
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            hint = ", not its class: AdamW(model.parameters())" * isinstance(each, type)
            raise TypeError(f"optimizer={shown(each)}: give a torch.optim.Optimizer, a sequence of them, or None{hint}")
        if sharded_of(each) is not None:
            raise ValueError(
                f"optimizer {type(each).__name__} was given to boost/build before, and its state is of parts of "
                "parameters: make a new one on model.parameters(), and load the state_dict() that was taken then"
            )
    return several


def _foresee(optimizers: Sequence[ShardedOptimizer], mesh: Mesh) -> None:
    """The last that may be wrong with what the user gave; all ranks go on, or none."""
    with collectively(mesh.everyone, "sharding the model", "Nothing was sharded."):
        for each in optimizers:
            each.foresee()


def _take_over(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Values and state are moved, one parameter after the other, since there may not be memory for both.

    Raises what interrupts that (a disk, a peer that is gone, Ctrl-C), with a note that says what was lost.
    """
    try:
        engine.take_over()
        for each in optimizers:
            each.adopt()
    except BaseException as error:
        error.add_note(MOVED.format(name=type(engine.model).__name__))
        raise


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What most runs need of a plan.

    Attributes:
        stage: of ZeRO: 0 shards nothing, 1 masters and optimizer state, 2 gradients too, 3 parameters too.
        precision: ``"bf16"`` or ``"fp16"`` casts parameters and inputs, and keeps fp32 masters; ``"fp32"`` and
            ``None`` leave them as they are.
        max_norm: gradients are clipped to this norm; 0 is off.
        average: over the backward passes of a step (gradient accumulation): ``"sum"``, as autograd does, so that a loss
            is divided by the program; ``"mean"``; or ``"tokens"``, each pass by the ``tokens=`` of its ``backward``.
        offload: ``"host"``, or a directory on a disk: where masters and optimizer state are at home, and at stage 3
            parameters; ``None``: on the device.
        replicas: copies of the sharded model (hybrid sharding, stages 1 to 3).
        tp: ranks that hold parts of the same layers.
        pp: ranks that hold the stages of one model.
        sp: ranks that see parts of the same sequences.
        sequence: how: ``"all_to_all"`` or ``"ring_attn"`` over ``sp`` ranks, ``"split_gather"`` or ``"ring"`` between
            the layers that ``tp`` ranks hold. ``None``: ``"all_to_all"`` where ``sp`` is above 1.
        microbatches: of a batch in a pipeline; ``None``: one a stage.
        device_memory: what may be used of the device, in bytes or as a text such as ``"64MiB"``; ``None``: all of it,
            on a CPU without a limit.

    Raises:
        ValueError: a value out of range, or two that do not go together.
        TypeError: ``offload`` is neither a text nor a path.
    """

    stage: int = 3
    precision: str | None = None
    max_norm: float = 0.0
    average: str = "sum"
    offload: str | os.PathLike[str] | None = None
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    sequence: str | None = None
    microbatches: int | None = None
    device_memory: int | str | None = None

    def __post_init__(self) -> None:
        stages = isinstance(self.stage, int) and not isinstance(self.stage, bool)
        require(stages and 0 <= self.stage <= 3, f"stage={shown(self.stage)}: give 0, 1, 2 or 3")
        spelled = self.precision is None or isinstance(self.precision, str)
        require(
            spelled and self.precision in DTYPES,
            f"precision={shown(self.precision)}: give 'bf16', 'fp16', 'fp32' or None",
        )
        whole("replicas", self.replicas, 1, what="a number of copies")
        require(self.stage > 0 or self.replicas == 1, f"replicas={self.replicas} at stage 0, which has one a rank")
        modes = (None, *IN_LAYERS, *EVERYWHERE)
        require(self.sequence in modes, f"sequence={shown(self.sequence)}: give one of {modes}")
        beside = f"sequence={self.sequence!r} with tp={self.tp}, sp={self.sp}"
        if self.sequence in IN_LAYERS:
            require(self.tp > 1 and self.sp == 1, f"{beside}: it is over the ranks of tp; give tp > 1 and sp=1")
        elif self.sequence is not None:
            require(self.sp > 1, f"{beside}: give sp > 1")
        require(
            self.microbatches is None or self.pp > 1,
            f"microbatches={self.microbatches} with pp={self.pp}: they are for a pipeline; give pp > 1",
        )
        self.plan()

    def plan(self) -> Plan:
        """The plan that they mean; change it with :meth:`~shardwise.plan.Plan.but`, and give it instead."""
        dtype = DTYPES[self.precision]
        # The types of literals: checked above.
        base = replicated(dtype) if self.stage == 0 else zero(self.stage, dtype, self.replicas)  # type: ignore[arg-type]
        in_layers = self.sequence if self.sequence in IN_LAYERS else None
        everywhere = self.sequence if self.sequence in EVERYWHERE else "all_to_all"
        return base.but(
            mesh=replace(base.mesh, tp=self.tp, pp=self.pp, sp=self.sp),
            max_norm=self.max_norm,
            average=self.average,
            tiers=self._tiers(),
            tensor=TensorPlan(sequence=in_layers),  # type: ignore[arg-type]
            sequence=SequencePlan(mode=everywhere),  # type: ignore[arg-type]
            microbatches=self.microbatches,
        )

    def _tiers(self) -> TierPlan:
        tiers, params = tiers_on_device(), 1.0 if self.stage == 3 else 0.0
        if self.offload == "host":
            tiers = replace(tiers, state_host_fraction=1.0, param_host_fraction=params, pin_memory=True)
        elif self.offload is not None:
            place = f"offload={shown(self.offload)}: give 'host' for host memory, or a directory on a disk"
            if not isinstance(self.offload, (str, os.PathLike)):
                raise TypeError(place)
            word = isinstance(self.offload, str) and os.path.basename(self.offload) == self.offload
            near = word and difflib.get_close_matches(str(self.offload), ["host"], cutoff=0.75)
            meant = near and not os.path.isdir(self.offload)
            if meant or (word and NO_DIRECTORY.fullmatch(str(self.offload))):
                raise ValueError(f"{place} (a path such as './{self.offload}' where one is called that)")
            disk = DiskPlan(directory=os.fspath(self.offload))
            tiers = replace(tiers, state_disk_fraction=1.0, param_disk_fraction=params, pin_memory=True, disk=disk)
        return replace(tiers, device_capacity_bytes=device_bytes(self.device_memory))


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | None = None,
    **settings: Any,
) -> Session:
    """Shard ``model`` over all ranks, in place, with its optimizers. Collective.

    The ranks meet by the variables that torchrun and ``shardwise run`` set (``RANK``, ``WORLD_SIZE``); without them
    this is one process. Call ``session.module``, then ``session.backward(loss)`` and ``session.optimizer.step()``; a
    model in stages makes its passes in ``session.pipeline.step``. What a rank is to see of a data set
    ``session.data_rank`` and ``session.data_ranks`` say.

    Args:
        model: any module, real, on the meta device, or built under ``deferred_init()``.
        optimizer: one, several (each parameter in at most one), or none: any element-wise ones of torch.
        plan: everything that can be told, instead of ``settings``; or the TOML or JSON file that has it.
        device: where parameters live; by default this rank's GPU where there is one a rank.
        settings: those of :class:`Settings`: ``stage=3, precision="bf16", tp=2``.

    Raises:
        TypeError: a setting that there is not, or a model, an optimizer or a plan that is none.
        OSError: a plan's file cannot be read.
        ValueError: a plan and settings, or see :class:`Settings`, :meth:`shardwise.plan.Plan.load` and
            :func:`shardwise.session.build`.
    """
    names = [each.name for each in fields(Settings)]
    for name, value in settings.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}; a plan has all others"
            raise TypeError(f"{name}={value!r:.80} is no setting of shard(): {hint}")
    if plan is not None and settings:
        raise ValueError(
            f"plan={plan!r:.40}... and {', '.join(settings)}: give one of them; plan.but(...) changes a plan"
        )
    if plan is not None and not isinstance(plan, Plan):
        if not isinstance(plan, (str, os.PathLike)):
            raise TypeError(
                f"plan={shown(plan)}: give a Plan, or the .toml or .json file that has one; settings have names"
            )
        plan = Plan.load(plan)
    chosen = plan if plan is not None else Settings(**settings).plan()
    return build(model, optimizer, chosen, device=init_distributed(device))
