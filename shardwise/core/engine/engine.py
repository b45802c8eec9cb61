"""The engine: creates the parts of one sharded model, connects their events, and starts and ends them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.core.base.events import Events
from shardwise.core.checks.batches import SameBatches
from shardwise.core.checks.broken import Broken
from shardwise.core.checks.description import describe_build
from shardwise.core.checks.guards import check_shardable
from shardwise.core.comm import Description, collectively
from shardwise.core.engine.accounts import HeldBuffers, StateAccounts
from shardwise.core.engine.attachment import Attachment
from shardwise.core.engine.grad_facade import GradFacade, StaleGradWarnings
from shardwise.core.engine.offload_states import StateOffload
from shardwise.core.engine.packed_weights import check_packed, follow
from shardwise.core.engine.partition import Partition
from shardwise.core.engine.storage import Storage
from shardwise.core.engine.values import Values
from shardwise.core.engine.writer import load_initial_values
from shardwise.core.grads.passes import BackwardPasses
from shardwise.core.grads.reducer import Reducer, StepCounts
from shardwise.core.mesh import Mesh
from shardwise.core.shards.gather_order import GatherOrderCheck
from shardwise.core.shards.layout import Layout, make_layout, search_report
from shardwise.core.shards.meter import MemoryMeter
from shardwise.core.shards.policy import GatherLimits
from shardwise.core.shards.pool import ChunkPool
from shardwise.core.update.early import EarlyObserver
from shardwise.core.update.masters import MasterEdits
from shardwise.core.update.tiles import needs_whole_tensors
from shardwise.plan import Plan

__all__ = ["Engine"]


# [Note: What a build changes, and when]
# Before take_over() nothing of the model and its optimizers changes, except for the optimizers' step(), which build()
# restores. All refusals come before it, on every rank, and the accounts of device memory include what is not allocated
# yet. After that there is no way back: there is no memory for a second copy of the values, so an error says that the
# model has to be created again (session.MOVED). take_over() moves values first, while there are no exchange buffers,
# then allocates these, and installs the hooks last.
class Engine:
    """Shards ``model`` in place according to ``plan`` over ``mesh``.

    The model does not change before :meth:`take_over` moves the values.

    Args:
        model: any module; parameters may be on the meta device or deferred.
        optimizers: of its parameters (each parameter in at most one).
        plan: the packing, tiers, precision and schedule.
        mesh: the ranks.

    Raises:
        ValueError: an optimizer cannot be sharded, has a tensor that is not a parameter of the model, or shares
            one with another optimizer; or the ranks have different arguments. Nothing was changed.
        PeerError: another rank cannot build. Nothing was changed.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, mesh: Mesh) -> None:
        self.model, self.plan, self.mesh = model, plan, mesh
        self.optimizers = tuple(optimizers)
        with collectively(mesh.mesh_group, "sharding the model", "Nothing was sharded.", describe=self._described):
            self.whole_tensor_optimizers = [index for index, each in enumerate(optimizers) if needs_whole_tensors(each)]
            """Indices of optimizers that need unsharded tensors."""
            check_packed(model)
            check_shardable(model)
            self.partition = Partition(model, optimizers, plan, mesh)
            self._check_whole()
        self.params, facts = self.partition.params, self.partition.facts
        self.tp_plan, self.staging = self.partition.tp_plan, self.partition.staging
        self.model_id = mesh.register_model(type(model).__name__)
        shard = plan.shard
        self.layout: Layout = make_layout(
            facts,
            model,
            shard.packing,
            mesh.shard.size,
            mesh.replicate.size,
            shard.groups,
            self.whole_tensor_optimizers,
            uneven=mesh.shard.uneven and not plan.comm.compressed and plan.mesh.secondary is None,
        )
        report = search_report(self.layout)
        if plan.verbose and report is not None and mesh.is_rank0:
            print(report, flush=True)
        # Parts get earlier parts as arguments. Earlier parts tell later ones by events (_wire).
        self.events = Events()
        self.storage = Storage(self.layout, self.params, plan, mesh, self.events)
        self.ledger, self.chunks, self.states = self.storage.ledger, self.storage.chunks, self.storage.states
        self.accounts = StateAccounts(self.storage)
        self.buffers = HeldBuffers(model, mesh.device, self.ledger, plan.precision.buffer_dtype, self.staging is None)
        self.master_edits = MasterEdits(self.chunks, self.states, self.storage.comm_dtypes.rounding)
        self.grads = self.storage.make_grads()
        self.meter = self._make_meter()
        self.pool = self._make_pool()
        self.counts = StepCounts(each.spec.optimizer for each in self.grads.values())
        self.broken = Broken(self.storage.roll_back)
        self.early = EarlyObserver(self.grads, self.counts, self.broken, self.storage.store)
        states = list(self.grads.values())
        sums = mesh.with_sums_in(plan.comm.gradients)
        self.reducer = Reducer(states, sums, self.ledger, plan, self.model_id, self.counts, self.events, self.early)
        # See [Note: Why no wait inside a pass closes a cycle].
        if self.pool.agrees and mesh.shard.starts_together:
            self.reducer.begin_in(self.pool.agreement)
        self.stale_grads, self.facade = StaleGradWarnings(), GradFacade(self)
        self.passes = BackwardPasses(self.pool, self.reducer, self.meter, self.events, plan.grad.average)
        self.batches = SameBatches()
        self.values = Values(self)
        self.attachment = Attachment(self)
        self.state_offloads: list[StateOffload] = []
        """By optimizer."""
        self.limits: dict[int, float] = {}  # max_norm by optimizer, if the program has set it
        self.closed = False
        self._begun = False  # take_over() was called
        self._wire()

    def _wire(self) -> None:
        """Connect events with their listeners."""
        events, early, facade = self.events, self.early, self.facade
        events.backward_asked.listen(lambda: self.check_open("backward()"))
        if self.meter is not None:
            events.forward_began.listen(lambda trains: self.buffers.look())
            events.unit_wanted.listen(self.meter.before_use)
            events.unit_ready.listen(self.meter.after_use)
        if self.plan.grad.update == "backward":
            events.backward_asked.listen(early.begin_pass)
            events.backward_asked.listen(self.values.take_edits)  # writes since the forward pass
            events.result_added.listen(early.result_added)
            events.gradients_dropped.listen(early.dropped)
        events.backward_began.listen(facade.begin_pass)
        events.backward_ended.listen(self._pass_ended)
        events.backward_ended.listen(facade.end_pass)
        mesh, pool = self.mesh, self.pool
        if mesh.world.size > 1 and pool.has_transient:  # also if only another replica gathers in order
            name_of = lambda chunk: pool.name_of(pool.chunks[chunk].spec.unit)  # noqa: E731
            self.reducer.piggybacks.append(GatherOrderCheck(pool.issued, mesh.world, mesh.replicate.rank, name_of))
        if pool.in_order and mesh.shard.starts_together and self.plan.comm.overlap:
            events.unit_wanted.listen(self._pass_by)

    def _pass_ended(self) -> None:
        self.pool.trace.end_pass()
        if not self.passes.unreduced:  # the ranks have compared the order
            self.pool.issued.restart()

    def _pass_by(self, unit: int) -> None:
        pool = self.pool
        # While the order is not known, a unit that is used again is reduced again, unless it was updated.
        if pool.in_training and (pool.trace.followed or not self.early.active):
            self.reducer.pass_by(unit, pool.trace.rest_of_pass())

    # ---- set-up

    def take_over(self) -> None:
        """Move the model's values into chunks and install the hooks. Collective."""
        self._begun = True
        for index, followers in follow(self.model, self.params).items():
            self.chunks[self.layout.where[index][0]].follow(index, followers)
        load_initial_values(self.model, self.partition, self.storage, self.plan, self.mesh)
        self.mesh.shard.fence("after an update")  # from here on peers may read the shards
        self.master_edits.note()
        self.reducer.allocate()  # after the values, which need the most memory
        self.partition.install()
        if self.meter is not None:
            self.buffers.look()
        self.guards = self.attachment.install()

    def _foreseen_bytes(self) -> int:
        """Return the bytes of model data that the device's accounts include and that are not allocated yet."""
        return self.accounts.foreseen_bytes() + self.buffers.foreseen_bytes()

    def _described(self) -> Description:
        return describe_build(self.model, self.optimizers, self.plan, self.partition.every)

    def _check_whole(self) -> None:
        """Raises:
        ValueError: an optimizer needs unsharded tensors, and the plan divides them or keeps them on a disk.
        """
        for index in self.whole_tensor_optimizers:
            name, tiers = type(self.optimizers[index]).__name__, self.plan.tiers
            shares = {"param": tiers.param_disk_fraction, "state": tiers.state_disk_fraction}
            if any(shares.values()):
                given = ", ".join(f"{kind}_disk_fraction={share}" for kind, share in shares.items())
                raise ValueError(
                    f"{given}: {name} needs whole tensors, which a disk tile does not have; keep its state on the "
                    "host, or use AdamW"
                )
            cut = [fact.names[0] for fact in self.partition.facts if fact.optimizer == index and fact.part is not None]
            if cut:
                raise ValueError(
                    f"tp={self.mesh.tensor.size} divides {len(cut)} parameters ({cut[0]}, ...) that {name} needs "
                    "whole: use tp=1, or an element-wise optimizer (AdamW)"
                )

    def _make_meter(self) -> MemoryMeter | None:
        if self.ledger.capacity_bytes is None:
            return None
        return MemoryMeter(self.ledger, self.mesh.device, self.plan.tiers.auto, self._foreseen_bytes)

    def _make_pool(self) -> ChunkPool:
        shard, comm, meter = self.plan.shard, self.plan.comm, self.meter
        transient = sum(c.spec.padded_bytes for c in self.chunks if not c.resident)
        budget = max(int(shard.gathered_fraction * transient), shard.gathered_budget_bytes or 0)
        traced = meter if self.plan.tiers.auto is not None else None
        limits = GatherLimits(
            budget_bytes=traced.budget_bytes if traced is not None else lambda: budget,
            prefetch=shard.prefetch if comm.overlap else 0,
            # Under a declared capacity, evictions depend on the memory of each rank.
            agree=comm.same_order is False or meter is not None,
        )
        pool = ChunkPool(
            self.layout.units, self.chunks, self.mesh.shard, self.ledger, limits, self.events, self.model_id
        )
        if meter is not None:
            meter.attach(pool)
        return pool

    # ---- gradients

    def zero_grad(self, optimizer: int | None = None, set_to_none: bool = True) -> None:
        """Drop the gradients of one optimizer's parameters and of parameters in no optimizer, or all gradients."""
        self.drop_gradients(optimizer)
        self.stale_grads.cleared(optimizer)
        self.facade.clear(optimizer)

    def drop_gradients(self, optimizer: int | None = None) -> None:
        """As :meth:`zero_grad`, but leave ``.grad`` in place; it raises when it is used."""
        self.passes.recover(dropping=optimizer is None or len(self.optimizers) == 1)
        self.batches.forget()
        self.reducer.clear(optimizer)
        for each in (optimizer,) if optimizer is None else (optimizer, -1):
            self.passes.forget_tokens(each)
        self.facade.forget(optimizer)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes keep full gradients on this rank; the next pass reduces their sum.

        Raises:
            ValueError: the plan reduces in every pass (ZeRO-2/3), or updates during backward.
        """
        if self.plan.shard.reduce == "every":
            raise ValueError(
                f"no_sync() with reduce={self.plan.shard.reduce!r}: this plan keeps only gradient shards (ZeRO-2/3); "
                "call backward several times before step instead, which accumulates gradients"
            )
        if self.plan.grad.update == "backward":
            raise ValueError(
                f"no_sync() with update={self.plan.grad.update!r}: gradients are used as soon as they are reduced, so "
                "each step is one backward pass; use update='step'"
            )
        return self.passes.no_sync()

    def __deepcopy__(self, _memo: object) -> Engine:
        raise TypeError(
            f"a model sharded over {self.mesh.size} ranks cannot be copied: build another one and load state_dict()"
        )

    def check_open(self, call: str) -> None:
        """Raise if the model is closed. ``call`` is the call that needs it, for the message.

        Raises:
            RuntimeError: it was closed, or given back by ``unshard()``.
        """
        if self.closed:
            self.guards.check_held()
            raise RuntimeError(
                f"{call} of a {type(self.model).__name__} that was closed: build it again, and load a state"
            )

    def close(self) -> None:
        """Remove all hooks. Parameters that are not gathered stay unreadable; gather them first if needed."""
        self.closed = True
        self.attachment.remove()
        self.partition.release()
        # Before take_over() .grad is the user's own.
        if self._begun:
            self.facade.clear()
        self.storage.close()
