"""The engine: creates the parts of one sharded model, connects their events, and starts and ends them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from shardwise.core.base.events import Events
from shardwise.core.base.torch_internals import makes_cuda_graphs
from shardwise.core.base.validate import Names
from shardwise.core.base.warnings import warn_user
from shardwise.core.checks.broken import Broken
from shardwise.core.checks.build_fingerprint import describe_build
from shardwise.core.checks.guards import Guards, check_shardable
from shardwise.core.comm import Description, collectively
from shardwise.core.engine.allocation import Storage
from shardwise.core.engine.gradients import Gradients
from shardwise.core.engine.memory_report import Accounts
from shardwise.core.engine.model_hooks import ModelHooks
from shardwise.core.engine.model_shards import ModelShards
from shardwise.core.engine.optimizer import ShardedOptimizer
from shardwise.core.engine.param_writer import load_initial_values
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.engine.partition import Partition
from shardwise.core.engine.quantized_weights import check_quantized, follow
from shardwise.core.grads.scaler import LossScaler
from shardwise.core.memory.tier import Tier
from shardwise.core.mesh import Mesh
from shardwise.core.shards.gather import ChunkPool
from shardwise.core.shards.gather_order import GatherOrderCheck
from shardwise.core.shards.layout import make_layout, search_report
from shardwise.core.shards.memory_meter import MemoryMeter
from shardwise.core.shards.prefetch import GatherLimits
from shardwise.core.update.tiles import needs_whole_tensors
from shardwise.plan import Plan

MOVED = (
    "The build failed while it moved the values of the {name}, so that some of its parameters are NaN now: create the "
    "model and its optimizers again, and build again."
)


# [Note: What a build changes, and when]
# Before take_over() nothing of the model and its optimizers changes. All checks that may refuse the build come before
# it, on every rank, and the accounts of device memory include memory that is not allocated yet. take_over() cannot be
# undone: there is no memory for a second copy of the values, so an error says that the model has to be created again
# (MOVED). take_over() moves values first, while there are no exchange buffers, then allocates these, and installs the
# hooks last.
class Engine:
    """Shards ``model`` in place according to ``plan`` over ``mesh``.

    The model does not change before :meth:`take_over` moves the values. Only a session has an engine. Each part gets
    the earlier parts that it uses as arguments; earlier parts tell later ones by events.

    Args:
        model: any module; parameters may be on the meta device or deferred.
        optimizers: the optimizers of the model's parameters (each parameter in at most one).
        plan: the packing, tiers, precision and schedule.
        mesh: the ranks.
        names: names of the sharded objects, for error messages.

    Attributes:
        events: listeners by name; see :mod:`shardwise.core.base.events`.
        shards: the chunk, memory and ranks of each parameter.
        pool: gathered parameters.
        grads: gradients, from backward passes to their use by a step.
        guards: errors for wrong uses.
        values: access to all parameter values.
        model_hooks: the hooks on the model.
        accounts, meter: accounts and meter of the device's memory.

    Raises:
        ValueError: an optimizer cannot be sharded, has a tensor that is not a parameter of the model, or shares
            one with another optimizer; a module makes CUDA graphs of parameters that are gathered for each use; or the
            ranks have different arguments. Nothing was changed.
        PeerError: another rank cannot build. Nothing was changed.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, mesh: Mesh, names: Names
    ) -> None:
        self.events = Events()
        self.shards = _make_shards(model, tuple(optimizers), plan, mesh, self.events)
        storage, chunks = self.shards.storage, self.shards.chunks
        params, layout, staged = self.shards.params, self.shards.layout, self.shards.partition.staging is not None
        ledger = storage.ledger
        self.meter: MemoryMeter | None = None
        self.accounts = Accounts(storage, model, plan.precision.buffer_dtype, foreseen=not staged)
        if ledger.capacity_bytes is not None:
            self.meter = MemoryMeter(ledger, mesh.device, plan.tiers.auto, self.accounts.reserved_bytes)
        self.pool = self._make_pool(names)
        if self.pool.has_transient and (graphs := [n for n, m in model.named_modules() if makes_cuda_graphs(m)]):
            raise ValueError(
                f"module {graphs[0]!r} is compiled into CUDA graphs, which replay fixed addresses; this plan gathers "
                "parameters to new ones at each use. Compile it with mode='default' or 'max-autotune-no-cudagraphs', "
                "or keep parameters gathered (stage 0, 1 or 2)"
            )
        self.guards = Guards(model, params, chunks, layout, self.pool, Broken(storage.roll_back), staged)
        self.grads = Gradients(self.shards, self.pool, self.guards.broken, self.meter, self.events)
        self.values = ParameterValues(self.shards, self.pool, self.guards, self.grads, self.meter)
        self.model_hooks = ModelHooks(self.values, self.grads, self.events)
        self._begun = False  # take_over() was called
        self._wire()

    def _wire(self) -> None:
        """Connect events with their listeners."""
        events, early, facade, plan = self.events, self.grads.early, self.grads.facade, self.shards.plan
        events.backward_requested.listen(partial(self.guards.check_open, "backward()"))
        if self.meter is not None:
            events.forward_began.listen(lambda trains: self.accounts.look())
            events.unit_requested.listen(self.meter.before_use)
            events.unit_ready.listen(self.meter.after_use)
        if plan.grad.update == "backward":
            events.backward_requested.listen(early.begin_pass)
            events.backward_requested.listen(self.values.take_edits)  # writes since the forward pass
            events.result_added.listen(early.result_added)
            events.gradients_dropped.listen(early.dropped)
        events.backward_began.listen(facade.begin_pass)
        events.backward_ended.listen(self._pass_ended)
        events.backward_ended.listen(facade.end_pass)
        mesh, pool = self.shards.mesh, self.pool
        if mesh.world.size > 1 and pool.has_transient:  # also if only another replica gathers in order
            name_of = lambda chunk: pool.name_of(pool.chunks[chunk].spec.unit)  # noqa: E731
            order = GatherOrderCheck(pool.issued, mesh.world, mesh.replicate.rank, name_of)
            self.grads.reducer.piggybacks.append(order)
        if pool.in_order and mesh.shard.starts_together and plan.comm.overlap:
            events.unit_requested.listen(self._pass_by)

    def _pass_ended(self) -> None:
        self.pool.trace.end_pass()
        if not self.grads.passes.unreduced:  # the ranks have compared the order
            self.pool.issued.restart()

    def _pass_by(self, unit: int) -> None:
        pool = self.pool
        # While the order is not known, a unit that is used again is reduced again, unless it was updated.
        if pool.in_training and (pool.trace.followed or not self.grads.early.active):
            self.grads.reducer.pass_by(unit, pool.trace.upcoming_in_pass())

    # ---- set-up

    def wrap(self, index: int, scaler: LossScaler | None) -> ShardedOptimizer:
        """Create the sharded form of one of the user's optimizers."""
        optimizer = self.shards.optimizers[index]
        self.shards.partition.narrow(optimizer)
        sharded = ShardedOptimizer(optimizer, index, scaler, self.values, self.grads, self.model_hooks, self.events)
        sharded.updates.connect(self.events, self.accounts)
        return sharded

    def check(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Check the optimizers before anything of the model or the optimizers changes.

        Raises:
            DeviceMemoryError: the device has too little memory for the state that steps will make.
            ValueError: an optimizer has state that cannot be sharded.
        """
        for each in optimizers:
            if self.meter is not None:
                self.accounts.expect(each.updates.expected_bytes(Tier.DEVICE))
            each.full_state.check_prior()
        if any(param.grad is not None for param in self.shards.params):
            warn_user(
                "gradients from before sharding are dropped: make all backward passes of a step after it, or call "
                "zero_grad() before it"
            )

    def take_over(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Move values and state into shards, one parameter after the other, since there may not be memory for both,
        and install the hooks. Collective.

        An error here (a disk, a peer that is gone, Ctrl-C) gets a note that says what was lost.
        """
        self._begun, shards = True, self.shards
        try:
            for index, followers in follow(shards.model, shards.params).items():
                shards.chunks[shards.layout.where[index][0]].follow(index, followers)
            load_initial_values(shards.model, shards.partition, shards.storage, shards.plan, shards.mesh)
            shards.mesh.shard.fence("after an update")  # from here on peers may read the shards
            self.values.master_edits.note()
            self.grads.reducer.allocate()  # after the values, which need the most memory
            shards.partition.install()
            if self.meter is not None:
                self.accounts.look()
            self.model_hooks.install()
            for each in optimizers:
                each.adopt()
        except BaseException as error:
            error.add_note(MOVED.format(name=type(self.shards.model).__name__))
            raise

    def _make_pool(self, names: Names) -> ChunkPool:
        shards, meter = self.shards, self.meter
        shard, comm = shards.plan.shard, shards.plan.comm
        transient = sum(c.spec.padded_bytes for c in shards.chunks if not c.resident)
        budget = max(int(shard.gathered_fraction * transient), shard.gathered_budget_bytes or 0)
        traced = meter if shards.plan.tiers.auto is not None else None
        limits = GatherLimits(
            budget_bytes=traced.budget_bytes if traced is not None else lambda: budget,
            prefetch=shard.prefetch if comm.overlap else 0,
            # Under a declared capacity, evictions depend on the memory of each rank.
            agree=comm.same_order is False or meter is not None,
        )
        units, ledger = shards.layout.units, shards.storage.ledger
        pool = ChunkPool(units, shards.chunks, shards.mesh.shard, ledger, limits, self.events, shards.model_id, names)
        if meter is not None:
            meter.attach(pool)
        return pool

    def close(self) -> None:
        """Remove all hooks. Parameters that are not gathered stay unreadable, so gather them first if needed."""
        self.guards.closed = True
        self.model_hooks.remove()
        self.shards.partition.release()
        # Before take_over() .grad is the user's own.
        if self._begun:
            self.grads.facade.clear()
        self.shards.storage.close()


def _make_shards(
    model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], plan: Plan, mesh: Mesh, events: Events
) -> ModelShards:
    """Divide the model into chunks, and allocate their memory. Collective.

    Raises:
        ValueError: a rank cannot shard the model, or ranks have different arguments (raised on every rank).
    """

    def describe() -> Description:
        return describe_build(model, optimizers, plan, partition.every)

    with collectively(mesh.mesh_group, "sharding the model", "Nothing was sharded.", describe=describe):
        whole_tensor_optimizers = [index for index, each in enumerate(optimizers) if needs_whole_tensors(each)]
        check_quantized(model)
        check_shardable(model)
        partition = Partition(model, optimizers, plan, mesh)
        _check_whole_tensors(optimizers, whole_tensor_optimizers, partition, plan, mesh)
        uneven = mesh.shard.uneven and not plan.comm.compressed and plan.mesh.secondary is None
        packing, sizes, groups = plan.shard.packing, (mesh.shard.size, mesh.replicate.size), plan.shard.groups
        layout = make_layout(partition.facts, model, packing, *sizes, groups, whole_tensor_optimizers, uneven=uneven)
    model_id = mesh.register_model(type(model).__name__)
    report = search_report(layout)
    if plan.verbose and report is not None and mesh.is_rank0:
        print(report, flush=True)
    params = partition.params
    storage = Storage(layout, params, plan, mesh, events)
    return ModelShards(
        model=model,
        model_id=model_id,
        partition=partition,
        layout=layout,
        storage=storage,
        params=params,
        optimizers=optimizers,
        whole_tensor_optimizers=frozenset(whole_tensor_optimizers),
        chunks=storage.chunks,
        states=storage.states,
        plan=plan,
        mesh=mesh,
    )


def _check_whole_tensors(
    optimizers: Sequence[torch.optim.Optimizer], indices: Sequence[int], partition: Partition, plan: Plan, mesh: Mesh
) -> None:
    """Check optimizers that need unsharded tensors; ``indices`` are theirs.

    Raises:
        ValueError: the plan divides the tensors of one or keeps them on a disk.
    """
    for index in indices:
        name, tiers = type(optimizers[index]).__name__, plan.tiers
        if tiers.param_disk_fraction or tiers.state_disk_fraction:
            raise ValueError(
                f"param_disk_fraction={tiers.param_disk_fraction}, state_disk_fraction={tiers.state_disk_fraction}: "
                f"{name} needs whole tensors, which a disk tile does not have; keep its state on the host, or use AdamW"
            )
        cut = [fact.names[0] for fact in partition.facts if fact.optimizer == index and fact.part is not None]
        if cut:
            raise ValueError(
                f"tp={mesh.tensor.size} divides {len(cut)} parameters ({cut[0]}, ...) that {name} needs "
                "whole: use tp=1, or an element-wise optimizer (AdamW)"
            )
