"""``shard()`` and ``build()`` take a model, optimizers and a plan, and return a :class:`Session`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from shardwise.core.base.device import give_back, on_device
from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.base.sizes import device_bytes
from shardwise.core.base.torch_internals import point
from shardwise.core.base.validate import SESSION, Names, as_mapping, did_you_mean, integer, require, short_repr
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checks.collective_calls import collective
from shardwise.core.comm import collectively
from shardwise.core.deferred.construction import adopt
from shardwise.core.deferred.record import is_recording, recorders
from shardwise.core.engine.engine import Engine
from shardwise.core.engine.estimate import estimate_memory
from shardwise.core.engine.full_values import full_gradients, full_values
from shardwise.core.engine.memory_report import MemoryReport
from shardwise.core.engine.module import ShardedModule
from shardwise.core.engine.one_parameter import OneParameter
from shardwise.core.engine.optimizer import ShardedOptimizer, sharded_of
from shardwise.core.engine.pipeline_steps import PipelineSteps
from shardwise.core.engine.placement import describe
from shardwise.core.engine.quantized_weights import prepare_quantized
from shardwise.core.engine.user_optimizer import snapshot
from shardwise.core.grads.scaler import LossScaler
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.mesh import Mesh, default_device, init_distributed
from shardwise.core.update.tiles import needs_whole_tensors
from shardwise.plan import DiskPlan, ParamGroupPlan, Plan, SequencePlan, TensorPlan, TierPlan, replicated, zero
from shardwise.plan.plan import parts_with

__all__ = [
    "MemoryReport",
    "OneParameter",
    "Session",
    "Settings",
    "ShardedModule",
    "ShardedOptimizer",
    "build",
    "estimate_memory",
    "needs_whole_tensors",
    "shard",
    "sharded_of",
]

DTYPES = {None: None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_LAYERS, EVERYWHERE = ("split_gather",), ("all_to_all", "ring_attn")
NO_DIRECTORY = r"(?i)(host|cpu|cuda|gpu|device|ram|memory|disk|nvme|ssd|none|true|false|auto|optimizer|param\w*)(:\d+)?"
"""Values of other libraries, which are not meant as directories."""
ACCUMULATION = "call backward() several times before step(); average='mean' divides the sum by their number"
ELSEWHERE = dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), ACCUMULATION)
ELSEWHERE |= dict.fromkeys(("max_grad_norm", "gradient_clipping", "grad_clip"), "use max_norm=1.0")
ELSEWHERE |= dict.fromkeys(("mixed_precision", "fp16", "bf16", "dtype"), "use precision='bf16' or 'fp16'")
ELSEWHERE |= dict.fromkeys(("zero_stage", "sharding_strategy"), "use stage=1, 2 or 3")
ELSEWHERE |= dict.fromkeys(("cpu_offload", "offload_optimizer"), "use offload='host' or a directory")
"""Hints for settings of other libraries."""
BY_MODULE = (
    "a dict by names of modules, such as {'lm_head': False}; for all modules use stage=3 (True) or stage=2 (False)"
)


class Session:
    """One sharded model with its optimizers.

    Attributes:
        module (ShardedModule): the sharded model, a :class:`ShardedModule`; call it instead of the original model.
        model (nn.Module): the original model, whose parameters are sharded. It can be called, too, and keeps its
            methods.
        optimizer (ShardedOptimizer): the first :class:`ShardedOptimizer`; an ``AttributeError`` if none was given.
        optimizers (tuple[ShardedOptimizer, ...]): all sharded optimizers, in the order in which they were given.
        plan (Plan): the :class:`Plan` of the build.
        mesh (Mesh): the :class:`Mesh` of the build, with this rank's groups and its ``device``.
        pipeline (PipelineSteps | None): a :class:`PipelineSteps`, which runs the passes of a step; ``None`` if the
            model has no pipeline stages.
        checkpoints (Checkpointer): a :class:`Checkpointer`, which saves and loads the full state of the run. All ranks
            write files, which can be loaded with any number of ranks, parallelism, stage, packing, tier and precision.
        data_rank (int): index of this rank's data.
        data_ranks (int): number of ranks with different data.

    Examples:
        >>> session = shardwise.shard(model, optimizer, stage=3)
        >>> loss = criterion(session.module(inputs), targets)
        >>> session.backward(loss)
        >>> session.optimizer.step()
        >>> session.optimizer.zero_grad()
    """

    def __init__(self, engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
        report = partial(engine.accounts.report, engine.pool, engine.grads.reducer)
        self._engine, self.module = engine, ShardedModule(engine.values, engine.model_hooks, report)
        self.optimizers = tuple(optimizers)
        shards = self._shards = engine.shards
        self.model, self.params, self.plan = shards.model, shards.params, shards.plan
        self.mesh = self._mesh = shards.mesh
        self.values, self.passes, self.events = engine.values, engine.grads.passes, engine.events
        self.ledger = shards.storage.ledger
        self.checkpoints = Checkpointer(self)
        self._index_of = {id(each): index for index, each in enumerate(self.params)}
        first = optimizers[0] if optimizers else None
        self.pipeline = PipelineSteps(shards, engine.grads, first) if shards.partition.staging else None

    @property
    def optimizer(self) -> ShardedOptimizer:
        if not self.optimizers:
            raise AttributeError("this session has no optimizer: give shard() one, after the model")
        return self.optimizers[0]

    def backward(self, loss: torch.Tensor, tokens: float | None = None, retain_graph: bool = False) -> None:
        """Run the backward pass of ``loss`` (a scalar). The plan says when gradients are reduced.

        With an optimizer, the loss is multiplied by its loss scale.

        Args:
            loss: the mean over this rank's micro-batch.
            tokens: how many tokens it is the mean of, under ``average="tokens"`` only.
            retain_graph: as in :meth:`torch.Tensor.backward`.

        Raises:
            ValueError: ``tokens`` is given under another average than ``"tokens"``, or missing under that.
            RuntimeError: the model has pipeline stages, or the session is closed.

        Examples:
            Accumulate the gradients of several micro-batches:

            >>> for batch in micro_batches:
            ...     loss = session.module(batch).square().mean()
            ...     session.backward(loss / len(micro_batches))
            >>> session.optimizer.step()
            >>> session.optimizer.zero_grad()
        """
        if self.optimizers:
            self.optimizer.backward(loss, tokens, retain_graph)
        else:
            self.passes.backward(loss, tokens, 1.0, retain_graph)

    def backward_pass(self, loss_scale: float = 1.0) -> AbstractContextManager[None]:
        """Return a context in which the caller runs the backward pass of a loss multiplied by ``loss_scale``.

        Raises:
            RuntimeError: under ``average="tokens"``: :meth:`backward` takes the number of tokens.
        """
        return self.passes.around(loss_scale)

    def expect_backward(self, loss_scale: float) -> None:
        """Announce the caller's ``loss.backward()``, of a loss that it multiplied by ``loss_scale``."""
        self._engine.guards.check_open("backward()")
        self.passes.expect(loss_scale)

    def drop_gathered(self, to_system: bool = True) -> None:
        """Free gathered parameters that nothing reads. Call it between passes, on every rank.

        Args:
            to_system: also release the unused memory of the device's caching allocator.
        """
        self._engine.pool.drop_idle()
        if to_system:
            give_back(self.mesh.device)

    def offload_states(self, pin_memory: bool = False) -> int:
        """Move masters and optimizer state from the device to host memory, until :meth:`reload_states`.

        While they are offloaded, the model can be evaluated, saved and loaded, and training raises an error. Call it on
        every rank, between steps.

        Args:
            pin_memory: page-lock the host memory, and keep it for the next call.

        Returns:
            Number of bytes that this rank moved.

        Raises:
            RuntimeError: there are gradients that no step has used, updates run during backward, or the session is
                closed.

        Examples:
            >>> moved_bytes = session.offload_states()
            >>> session.reload_states()
        """
        self._engine.guards.check_open("offload_states()")
        if self.has_gradients or self.plan.grad.update == "backward":
            raise RuntimeError(
                f"offload_states() with has_gradients={self.has_gradients}, update={self.plan.grad.update!r}: call it "
                "between steps (zero_grad() drops gradients), under update='step'"
            )
        with deferred_interrupts("offload_states()"):
            moved = sum(each.updates.offload_state.offload(pin_memory) for each in self.optimizers)
            self.drop_gathered()
        return moved

    def reload_states(self) -> None:
        """Undo :meth:`offload_states`. Idempotent."""
        with deferred_interrupts("reload_states()"):
            for each in self.optimizers:
                each.updates.offload_state.reload()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes are not reduced (plans that keep full gradients only)."""
        return self._engine.grads.no_sync()

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different data. Ranks of a model-parallel or sequence-parallel group count as one."""
        return self.mesh.data_ranks

    @property
    def data_rank(self) -> int:
        """Index of this rank's data, from 0 to ``data_ranks - 1``: the ``rank`` of a ``DistributedSampler``."""
        return self.mesh.data_rank

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has gradients that no step has used."""
        return any(state.present for state in self._engine.grads.states.values())

    @collective("full_gradients()")
    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the unsharded gradients that the next step would apply, averaged and unscaled, before clipping.

        Collective. Call it between backward and step.

        Returns:
            Gradients by parameter name, with the shapes of the parameters, in fp32 (fp64 for fp64 gradients).
            Parameters without a gradient on any rank are left out.

        Raises:
            RuntimeError: the plan does not keep gradients (``update="backward"``), or the session is closed.

        Examples:
            >>> session.backward(loss)
            >>> session.full_gradients()["weight"].shape
            torch.Size([4, 8])
        """
        self._engine.guards.check_open("full_gradients()")
        if self.plan.grad.update == "backward":
            raise RuntimeError(
                f"full_gradients() with update={self.plan.grad.update!r}: gradients are used as soon as they are "
                "reduced, and not kept; use update='step' to read them"
            )
        self.passes.reduce_unreduced()
        facade, table = self._engine.grads.facade, self._shards.partition.table
        facade.collect()
        # -1: of parameters that no optimizer holds, which carry loss scale and weights as well.
        divisors = {index: facade.divisor(index) for index in range(-1, len(self.optimizers))}
        return {
            table.facts[place].names[0]: value.div_(divisors[optimizer])
            for place, optimizer, value in full_gradients(self._shards, self._engine.grads.states)
        }

    # ---- parameters

    def names(self) -> list[tuple[str, ...]]:
        """Return all names in the model of each of :attr:`params`."""
        return [fact.names for fact in self._shards.layout.facts]

    def saved_names(self) -> dict[int, tuple[str, ...]]:
        """Return the names in ``state_dict()`` by index in :attr:`params`, without parameters that hooks omit."""
        names = self._engine.guards.state_dicts.names().of_parameter
        return {index: tuple(own) for index, own in names.items()}

    def one(self, param: nn.Parameter) -> OneParameter | None:
        """Return access to value, gradient and optimizer state of one parameter.

        Args:
            param: a parameter of :attr:`model`. Access it as an attribute, or by ``model.named_parameters()``.

        Returns:
            The access; ``None`` if the parameter belongs to another model.

        Examples:
            >>> weight = session.one(session.model.weight)
            >>> weight.value().shape
            torch.Size([4, 8])
            >>> weight.set_value(torch.zeros(4, 8))
        """
        places = self._places([param])
        return OneParameter(self.values, self._engine.grads, self.optimizers, places[0]) if places else None

    def _places(self, params: Iterable[nn.Parameter]) -> list[int]:
        """Return the sorted indices in :attr:`params` of the ``params`` that belong to this model."""
        return sorted({self._index_of[id(param)] for param in params if id(param) in self._index_of})

    def gathered(self, params: Iterable[nn.Parameter], write_back: bool = False) -> AbstractContextManager[None]:
        """Return a context in which ``params``, and the units to which they belong, are gathered. Collective.

        Args:
            params: parameters to gather. Parameters of other models are ignored.
            write_back: keep changes of the parameters inside, each rank its own part of them.

        Raises:
            ValueError: ranks have different ``params`` and the model is not resident (raised on every rank). A rank
                without any parameter of the model does not take part, and the others wait for it.

        Examples:
            >>> with session.gathered([session.model.weight]):
            ...     norm = session.model.weight.norm().item()
        """
        return self.values.gathered(write_back, self._places(params))

    def compare(self, params: Iterable[nn.Parameter]) -> None:
        """Check that every rank has the same ``params``. Collective.

        Raises:
            ValueError: the ranks have different ``params``; every rank raises, and the message has the difference.
        """
        self.values.compare(self._places(params))

    def write_back(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Copy writes to gathered parameters (``params``, or all of them) into the shards. Collective."""
        self.values.write_back(None if params is None else self._places(params))

    @collective("unshard()")
    def unshard(self) -> None:
        """Close the session and restore the ordinary model, with full parameters on the host. Collective. Idempotent.

        Parameters with fp32 masters get the values of the masters. The optimizer's state stays sharded, so create a
        new optimizer.

        Raises:
            NotImplementedError: the model has pipeline stages.

        Examples:
            >>> session.unshard()
            >>> names = list(model.state_dict())
        """
        if self._engine.guards.unsharded:
            return
        partition = self._shards.partition
        if partition.staging is not None:
            raise NotImplementedError(
                f"unshard() of a model in {partition.staging.stages} pipeline stages: each rank has only its own "
                "stages; save the model (state_dict(), save_model) and load it into an unsharded one"
            )
        self.values.settle("unshard()")
        values = {index: value.to("cpu", copy=True) for index, value in full_values(self._shards, masters=True)}
        # Gathered parameters would be evicted later, with the user's values in them.
        self._engine.pool.invalidate(everything=True)
        self.checkpoints.close()  # an error of a save leaves the session as it is
        self._engine.guards.unsharded = True
        self.close()
        if partition.tp_plan is not None:
            partition.tp_plan.remove()
            partition.release()  # hooks on layers that were cut
        for index, param in enumerate(self.params):
            param.grad = None
            adopt(param, values.pop(index))
            for follower in self._shards.chunks[self._shards.layout.where[index][0]].followers_of(index):
                point(follower, param)

    # ---- memory and traffic

    def memory(self) -> MemoryReport:
        """Return the bytes of model data on this rank.

        Returns:
            Bytes by kind, and by tier: device, host memory and disk. Activations are not model data.

        Examples:
            >>> report = session.memory()
            >>> parameter_bytes = report.by_tier["device"]["parameters"]
            >>> report.total_bytes == report.tier_bytes("device")
            True
        """
        return self.module.memory()

    def describe(self) -> str:
        """Return a table of where parameters, masters, optimizer state and gradients are kept, and in which dtypes.

        It has one line for all chunks with equal placement. ``bytes`` counts this rank's parameters: its shards, and
        unsharded arrays of chunks that stay resident. The table describes the build: state that a later step moves
        (``auto``, :meth:`offload_states`) is counted by :meth:`memory`.

        Returns:
            The text of the table, for ``print``.

        Examples:
            >>> text = session.describe()
        """
        return describe(self._engine.shards.storage.placement, self._engine.shards.layout)

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, by kind of operation, over all axes.

        Returns:
            Bytes by operation, such as ``"all_gather"`` and ``"reduce_scatter"``. ``"disk_read"`` and ``"disk_write"``
            are the bytes that were transferred to and from a disk, where each record is rounded up to 4096 bytes.

        Examples:
            >>> session.reset_traffic()
            >>> session.backward(session.module(inputs).square().mean())
            >>> session.optimizer.step()
            >>> sent = session.traffic()
        """
        store = self._shards.storage.store
        read, written = (0, 0) if store is None else (store.bytes_read, store.bytes_written)
        return {**self.mesh.traffic(), "disk_read": read, "disk_write": written}

    def reset_traffic(self) -> None:
        """Reset the counts of :meth:`traffic`."""
        self.mesh.reset_traffic()
        if self._shards.storage.store is not None:
            self._shards.storage.store.reset_counters()

    def memory_stats(self) -> MemStats | None:
        """Return the memory trace of the last training step.

        Returns:
            The trace; ``None`` before the first step, or without a limit of device memory (``device_memory``).
        """
        return self.module.memory_stats()

    def memory_so_far(self) -> MemStats | None:
        """Return the memory trace of the current step until now, or of a failed step."""
        return self._engine.meter.so_far() if self._engine.meter is not None else None

    def use_memory_stats(self, stats: MemStats) -> None:
        """Place chunks by an earlier trace instead of a traced first step (``auto``).

        Args:
            stats: the result of :meth:`memory_stats` for the same model and plan, or of
                :func:`~shardwise.core.memory.trace.standalone.trace_memory` for the same model.

        Raises:
            ValueError: the trace has units or modules with other names or sizes than this model, or the plan has no
                device capacity.
        """
        if self._engine.meter is None:
            raise ValueError(
                f"use_memory_stats() needs a device capacity, and the plan has {self.ledger.capacity_bytes}: "
                "declare one (device_capacity_bytes), and give a trace that the same plan recorded"
            )
        self._engine.meter.use(self._engine.model_hooks.by_units(stats))

    @property
    def resident(self) -> bool:
        """Whether every rank has the full parameters at all times, also after :meth:`close`."""
        return all(chunk.resident for chunk in self._shards.chunks)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._engine.guards.closed

    def close(self) -> None:
        """Remove the hooks from the model, and free files, threads and memory. The mesh is not closed.

        Call :meth:`ShardedModule.state_dict` first if you need the values. Without ``close()``, the last reference to
        session, model and optimizers frees the resources.

        Raises:
            CheckpointError: an asynchronous save failed; everything is closed.
        """
        try:
            self.checkpoints.close()
        finally:
            for optimizer in self.optimizers:
                optimizer.close()
            self._engine.close()


def build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    plan: Plan,
    mesh: Mesh | None = None,
    device: torch.device | None = None,
    names: Names = SESSION,
) -> Session:
    """Shard ``model`` in place and wrap its optimizers. Collective.

    Args:
        model: any module: with values, on the meta device, or built under ``deferred_init()``.
        optimizer: one optimizer, several (each parameter in at most one), or ``None``. Their ``param_groups`` keep the
            model's parameters. Their ``zero_grad``, ``state_dict`` and ``load_state_dict`` are redirected to the
            session's optimizers; their ``step`` and ``add_param_group`` raise an error.
        plan: a :class:`Plan`, such as ``zero(3)`` of ``shardwise.plan``.
        mesh: device mesh; by default it is made from ``plan.mesh`` over all ranks.
        device: device of the parameters, if no mesh is given; by default this rank's GPU if every rank has one. It
            need not be the current device.
        names: for integrations: what error messages call the sharded objects.

    Returns:
        The :class:`Session` of the model.

    Raises:
        TypeError: an argument has the wrong type.
        RuntimeError: called inside ``deferred_init()``.
        ValueError: the plan does not fit the number of ranks, an optimizer cannot be sharded, or the ranks have
            different parameters, optimizers, param groups, plans or versions. The message on every rank names them.
        DeviceMemoryError: the model and its optimizers do not fit into the declared device memory.
        PeerError: another rank cannot build; the message has its error.

    After an error, hooks, files and process groups are removed, and optimizers have their ``step``, parameters and
    state again. The model keeps its values, unless the error came while values were being moved (a disk failed, a rank
    died, memory ran out, or Ctrl-C was pressed twice); then a note of the error says so.

    Examples:
        >>> from shardwise.plan import zero
        >>> session = shardwise.build(model, optimizer, zero(2, torch.bfloat16).but(max_norm=1.0))
    """
    optimizers = _optimizers_of(model, optimizer)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={short_repr(plan)} is not a Plan; give one, such as zero(3)")
    if is_recording():
        raise RuntimeError(
            f"build() of a {type(model).__name__} inside deferred_init() ({len(recorders())} entered): leave the block "
            "first"
        )
    with deferred_interrupts("the build"), ExitStack() as undo:  # if it fails
        if mesh is None:
            mesh = Mesh.create(plan.mesh, device or default_device(), plan.comm)
            undo.callback(mesh.close)
        with on_device(mesh.device):
            undo.callback(prepare_quantized(model, mesh.device))
            with mesh.doing("build()"):
                engine = Engine(model, optimizers, plan, mesh, names)
            undo.callback(engine.close)  # its hooks and files
            scaler = LossScaler(plan.precision.scaler) if plan.precision.scaler is not None else None
            wrapped = []
            for index, each in enumerate(optimizers):
                undo.callback(snapshot(each))  # also if it fails half way
                wrapped.append(engine.wrap(index, scaler))
                undo.callback(wrapped[-1].close)
            with mesh.doing("build()"):
                with collectively(mesh.mesh_group, "sharding the model", "Nothing was sharded."):  # checks user input
                    engine.check(wrapped)
                engine.take_over(wrapped)
            session = Session(engine, wrapped)
        undo.pop_all()
    return session


def _optimizers_of(model: Any, optimizer: Any) -> list[torch.optim.Optimizer]:
    """Check the arguments and return the optimizers: one, several or none.

    Raises:
        TypeError, ValueError: see :func:`build`.
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"model is {kind}, not a torch.nn.Module: call shard(model, optimizer) with the model itself")
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, str)
    optimizers: list[Any] = list(optimizer) if several else [optimizer]
    for each in optimizers:
        if isinstance(each, type):
            raise TypeError(f"optimizer={each.__name__} is a class: give {each.__name__}(model.parameters())")
        if isinstance(each, torch.Tensor):
            raise TypeError(f"optimizer=[{type(each).__name__}, ...]: give an optimizer, AdamW(model.parameters())")
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"optimizer={short_repr(each)} is not a torch.optim.Optimizer; give one, several or None")
        if sharded_of(each) is not None:
            raise ValueError(
                f"optimizer {type(each).__name__} belongs to a sharded model already, and its state is sharded: "
                "create a new one on model.parameters(), and load the state_dict() of the old one"
            )
    return optimizers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of :func:`shard`, which takes them as keyword arguments or as the plan that they make.

    Attributes:
        stage: the ZeRO stage. 0 shards nothing; 1 shards masters and optimizer state; 2 also gradients; 3 also
            parameters.
        precision: ``"bf16"`` or ``"fp16"`` casts parameters and inputs, and keeps fp32 masters; ``"fp32"`` and
            ``None`` do not cast.
        max_norm: gradients are clipped to this norm; 0 turns clipping off.
        average: how gradients of the backward passes of a step are combined (gradient accumulation). ``"sum"`` adds
            them, as autograd does; ``"mean"`` divides the sum by the number of passes; ``"tokens"`` weights each pass
            by the ``tokens=`` of its ``backward``.
        offload: ``"host"`` or a directory on a disk for masters and optimizer state, and at stage 3 for parameters;
            ``None`` keeps them on the device.
        replicas: number of copies of the sharded model (hybrid sharding, stages 1 to 3).
        tp: number of tensor-parallel ranks.
        pp: number of pipeline-parallel ranks.
        sp: number of sequence-parallel ranks.
        sequence: the mode of sequence parallelism: ``"all_to_all"`` or ``"ring_attn"`` over ``sp`` ranks, or
            ``"split_gather"`` between layers over the ``tp`` ranks. ``None`` is ``"all_to_all"`` if ``sp`` is above 1.
        microbatches: number of micro-batches per batch in a pipeline; ``None`` is one for each stage.
        device_memory: limit of device memory, in bytes or as a string such as ``"64MiB"``; ``None``: no limit.
        reshard_after_forward: by module name, whether parameters are freed after forward and gathered again in backward
            (``True``, as in FSDP2), or stay gathered (``False``), such as ``{"lm_head": False}``. Modules inside them
            may have another value. For other modules ``stage`` decides.

    Raises:
        ValueError: a value is out of range, or two settings exclude each other.
        TypeError: ``offload`` is neither a string nor a path, or ``reshard_after_forward`` is not a mapping.

    Examples:
        >>> plan = shardwise.Settings(stage=2, precision="bf16", max_norm=1.0).plan()
        >>> session = shardwise.shard(model, optimizer, plan.but(overlap=False))
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
    reshard_after_forward: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stages = isinstance(self.stage, int) and not isinstance(self.stage, bool)
        require(
            stages and 0 <= self.stage <= 3, f"stage={short_repr(self.stage)} is not a ZeRO stage; use 0, 1, 2 or 3"
        )
        spelled = self.precision is None or isinstance(self.precision, str)
        names = "use 'bf16', 'fp16', 'fp32' or None"
        hint = did_you_mean(str(self.precision).removeprefix("torch."), ("bf16", "fp16", "fp32"), names, 0.6)
        require(spelled and self.precision in DTYPES, f"precision={short_repr(self.precision)} is not known; {hint}")
        integer("replicas", self.replicas, 1, what="a number of copies")
        copies = f"replicas={self.replicas} at stage 0, where every rank is a replica: use stage 1, 2 or 3"
        require(self.stage > 0 or self.replicas == 1, copies)
        modes = (None, *IN_LAYERS, *EVERYWHERE)
        require(
            self.sequence in modes,
            f"sequence={short_repr(self.sequence)} is not a mode of sequence parallelism; use "
            f"{', '.join(map(repr, modes[1:]))} or None",
        )
        settings = f"sequence={self.sequence!r} with tp={self.tp}, sp={self.sp}"
        if self.sequence in IN_LAYERS:
            require(self.tp > 1 and self.sp == 1, f"{settings}: this mode uses the tp ranks; set tp > 1 and sp=1")
        elif self.sequence is not None:
            require(self.sp > 1, f"{settings}: this mode uses the sp ranks; set sp > 1")
        require(
            self.microbatches is None or self.pp > 1,
            f"microbatches={self.microbatches} with pp={self.pp}: only pipelines have micro-batches; set pp > 1",
        )
        self.plan()

    def plan(self) -> Plan:
        """Return the plan of these settings; :meth:`~shardwise.plan.Plan.but` changes it."""
        dtype = DTYPES[self.precision]
        # The types of literals: checked above.
        base = replicated(dtype) if self.stage == 0 else zero(self.stage, dtype, self.replicas)  # type: ignore[arg-type]
        in_layers = self.sequence if self.sequence in IN_LAYERS else None
        everywhere = self.sequence if self.sequence in EVERYWHERE else "all_to_all"
        by_module = as_mapping("reshard_after_forward", self.reshard_after_forward, BY_MODULE)
        return base.but(
            mesh=replace(base.mesh, tp=self.tp, pp=self.pp, sp=self.sp),
            max_norm=self.max_norm,
            average=self.average,
            tiers=self._tiers(),
            tensor=TensorPlan(sequence=in_layers),  # type: ignore[arg-type]
            sequence=SequencePlan(mode=everywhere),  # type: ignore[arg-type]
            microbatches=self.microbatches,
            groups=tuple(ParamGroupPlan(names=(name,), reshard_after_forward=each) for name, each in by_module.items()),
        )

    def _tiers(self) -> TierPlan:
        tiers, params = TierPlan(), 1.0 if self.stage == 3 else 0.0
        if self.offload == "host":
            tiers = replace(tiers, state_host_fraction=1.0, param_host_fraction=params, pin_memory=True)
        elif self.offload is not None:
            place = f"offload={short_repr(self.offload)}: use 'host' for host memory, or a directory on a disk"
            if not isinstance(self.offload, (str, os.PathLike)):
                raise TypeError(place)
            bare = isinstance(self.offload, str) and not os.path.dirname(self.offload)
            misspelled = did_you_mean(str(self.offload), ["host"], "", 0.75) and not os.path.isdir(self.offload)
            if bare and (re.fullmatch(NO_DIRECTORY, str(self.offload)) or misspelled):
                raise ValueError(f"{place} (write './{self.offload}' for a directory of that name)")
            disk = DiskPlan(directory=os.fspath(self.offload))
            tiers = replace(tiers, state_disk_fraction=1.0, param_disk_fraction=params, pin_memory=True, disk=disk)
        return replace(tiers, device_capacity_bytes=device_bytes(self.device_memory))


class ShardArguments(TypedDict, total=False):
    """The fields of :class:`Settings` as keyword arguments of :func:`shard`, for editors and type checkers."""

    stage: int
    precision: str | None
    max_norm: float
    average: str
    offload: str | os.PathLike[str] | None
    replicas: int
    tp: int
    pp: int
    sp: int
    sequence: str | None
    microbatches: int | None
    device_memory: int | str | None
    reshard_after_forward: Mapping[str, bool]


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | None = None,
    **settings: Unpack[ShardArguments],
) -> Session:
    """Shard ``model`` in place over all ranks, with its optimizers. Collective.

    The process group is created from the environment variables of torchrun and ``shardwise run`` (``RANK``,
    ``WORLD_SIZE``); without them the program runs in one process. Call ``session.module``, then
    ``session.backward(loss)`` and ``session.optimizer.step()``; with pipeline stages call ``session.pipeline.step``
    instead of the first two. Divide the data set by ``session.data_rank`` and ``session.data_ranks``.

    Args:
        model: any module: with values, on the meta device, or built under ``deferred_init()``.
        optimizer: one optimizer, several (each parameter in at most one), or ``None``. Any element-wise torch
            optimizer is possible.
        plan: a plan, or the path of a TOML or JSON file with a plan, instead of ``settings``.
        device: device of the parameters; by default this rank's GPU if every rank has one.
        settings: fields of :class:`Settings`, such as ``stage=3, precision="bf16", tp=2``.

    Returns:
        The :class:`Session` of the model.

    Raises:
        TypeError: unknown setting, or an argument of the wrong type.
        OSError: the plan's file cannot be read.
        ValueError: a plan and settings are given, or an error of :class:`Settings`, ``Plan.load`` or
            :func:`build`.

    Examples:
        >>> import shardwise, torch
        >>> device = shardwise.init_distributed()
        >>> model = torch.nn.Linear(8, 4)
        >>> session = shardwise.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3)
        >>> loss = session.module(torch.randn(2, 8, device=device)).square().mean()
        >>> session.backward(loss)
        >>> session.optimizer.step()
    """
    names = [each.name for each in fields(Settings)]
    for name, value in settings.items():
        if name not in names:
            near = did_you_mean(name, names, f"use {', '.join(names)}, or a plan for everything else")
            in_plan = f"it is a field of a plan; use plan=Settings(...).plan().but({name}=...)"
            hint = ELSEWHERE.get(name, in_plan if parts_with(name) else near)
            raise TypeError(f"{name}={value!r:.80} is not a setting of shard(): {hint}")
    if plan is not None and settings:
        raise ValueError(
            f"both plan={plan!r:.40}... and {', '.join(settings)} are given; give one, or change the plan by plan.but()"
        )
    if plan is not None and not isinstance(plan, Plan):
        if not isinstance(plan, (str, os.PathLike)) or not os.path.splitext(plan)[1]:
            raise TypeError(
                f"plan={short_repr(plan)} is not a Plan, nor the path of a .toml or .json file; give settings by name: "
                "shard(model, optimizer, stage=3, precision='bf16')"
            )
        plan = Plan.load(plan)
    chosen = plan if plan is not None else Settings(**settings).plan()
    return build(model, optimizer, chosen, device=init_distributed(device))
