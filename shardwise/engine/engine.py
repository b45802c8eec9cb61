"""The module side of sharded training: storage of one model, and the life of a forward and a backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.checks.agreement import agreed_build
from shardwise.checks.description import describe_build
from shardwise.checks.guards import Guards, check_shardable
from shardwise.checks.unfinished import Unfinished, state_of
from shardwise.chunk.chunk import Chunk
from shardwise.chunk.layout import Layout, make_layout, search_report
from shardwise.device import synchronize
from shardwise.disk.agreement import agreed
from shardwise.engine.casts import cast_floats, each_tensor
from shardwise.engine.facts import all_names, parameter_facts
from shardwise.engine.initial import load_initial_values
from shardwise.engine.outside_trace import of_units
from shardwise.engine.staging import WhenAsked, gather_shards
from shardwise.engine.storage import Storage
from shardwise.engine.visible_grads import VisibleGrads
from shardwise.engine.weak import weakly
from shardwise.events import Events
from shardwise.gather.hooks import GatherHooks, trace_hooks
from shardwise.gather.meter import MemoryMeter
from shardwise.gather.pool import ChunkPool
from shardwise.gather.transforms import outside_transforms
from shardwise.memory.ledger import DeviceMemoryError
from shardwise.memory.tier import Tier
from shardwise.mesh import Mesh
from shardwise.plan import Plan
from shardwise.reduce.counts import StepCounts
from shardwise.reduce.passes import BackwardPasses
from shardwise.reduce.reducer import Reducer
from shardwise.trace.stats import MemStats
from shardwise.update.early import EarlyObserver, EarlyUpdates
from shardwise.update.masters import MasterEdits, take_over
from shardwise.update.tiles import check_element_wise

__all__ = ["Engine"]


class Engine:
    """Shards ``model`` in place according to ``plan`` over ``mesh``.

    The model is left as it is, and all of the device's memory accounted for, until :meth:`take_over` moves the values.

    Args:
        model: any module; parameters may be on the meta device or deferred.
        optimizers: the optimizers that hold its parameters (each parameter in at most one).
        plan: what to do.
        mesh: the ranks.

    Raises:
        ValueError: an optimizer cannot be sharded, holds a tensor that is not a parameter of the model, or two hold the
            same one; or the ranks differ in what they give. Nothing was changed.
        PeerError: another rank cannot build, nothing was changed.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plan: Plan, mesh: Mesh) -> None:
        self.model, self.plan, self.mesh = model, plan, mesh
        self.optimizers = tuple(optimizers)
        with agreed_build(mesh.world, lambda: describe_build(model, optimizers, plan, facts, self.params)):
            for each in optimizers:
                check_element_wise(each)
            check_shardable(model)
            names = all_names(model)
            self.params = [p for p in model.parameters() if p.is_floating_point()]
            facts = parameter_facts(self.params, names, optimizers, plan)
        self.party = mesh.enroll(type(model).__name__)
        shard = plan.shard
        self.layout: Layout = make_layout(facts, model, shard.packing, mesh.shard.size, mesh.replicate.size, shard.kept)
        report = search_report(self.layout)
        if plan.verbose and report is not None and mesh.rank == 0:
            print(report, flush=True)
        self.events = events = Events()
        self.storage = Storage(self.layout, self.params, plan, mesh, events)
        self.ledger = self.storage.ledger
        self.chunks = self.storage.chunks
        self.states = self.storage.states
        self.master_edits = MasterEdits(self.chunks, self.states)
        self.grads = self.storage.make_grads()
        limited = self.ledger.capacity_bytes is not None
        self._state_holders: list[Callable[[Tier], int]] = []
        self._expected_state_bytes = 0
        self.meter = MemoryMeter(self.ledger, mesh.device, plan.tiers.auto, self._foreseen_bytes) if limited else None
        self.pool = self._make_pool()
        self.counts = StepCounts(each.spec.optimizer for each in self.grads.values())
        self.early = early = EarlyObserver(self.grads, self.counts, plan.grad.average)
        self.reducer = Reducer(
            list(self.grads.values()),
            mesh,
            self.ledger,
            keep_whole=plan.shard.reduce == "last",
            overlap=plan.comm.overlap,
            same_order=plan.comm.same_order,
            predivide=plan.comm.predivide,
            party=self.party,
            counts=self.counts,
            events=events,
            observer=early,
        )
        if self.pool.agrees and mesh.shard.starts_together:
            self.reducer.begin_in(self.pool.rounds)
        self.visible = visible = VisibleGrads(self)
        self.passes = BackwardPasses(self.pool, self.reducer, self.meter, events)
        self._scratch_holders: list[Callable[[Tier], int]] = []
        self.unfinished = Unfinished()
        if self.meter is not None:
            events.unit_wanted.listen(self.meter.before_use)
            events.unit_ready.listen(self.meter.after_use)
        events.backward_asked.listen(early.check_pass)
        events.backward_began.listen(early.begin_pass)  # before what it reads is put away
        events.backward_began.listen(visible.begin_pass)
        events.backward_ended.listen(visible.end_pass)
        events.result_came.listen(early.before_result)
        events.result_added.listen(early.after_result)
        events.gradients_dropped.listen(early.dropped)
        self.ledger.watch("masters and optimizer state", self._device_state_bytes)
        self.ledger.watch("update scratch", lambda: self.scratch_bytes(Tier.DEVICE))
        self.hooks: GatherHooks | None = None
        self.closed = False
        self._remove: list[Callable[[], None]] = []
        self._begun = False
        """The model's parameters are the chunks', or about to be."""

    # ---- set-up

    def take_over(self) -> None:
        """The model's parameters become the chunks', with their values, and its passes the engine's. Collective."""
        self._begun = True
        load_initial_values(self.model, self.params, self.storage, self.plan, self.mesh)
        self.master_edits.note()
        self.reducer.allocate()  # after the values: while these are made, the most memory is needed
        self._install_hooks()

    def _make_pool(self) -> ChunkPool:
        shard = self.plan.shard
        transient = sum(c.spec.padded_bytes for c in self.chunks if not c.resident)
        budget = max(int(shard.gathered_fraction * transient), shard.gathered_budget_bytes or 0)
        traced = self.meter if self.plan.tiers.auto is not None else None
        pool = ChunkPool(
            self.layout.units,
            self.chunks,
            self.mesh.shard,
            self.ledger,
            budget_bytes=traced.budget_bytes if traced is not None else lambda: budget,
            prefetch=shard.prefetch if self.plan.comm.overlap else 0,
            # What fits decides what is evicted, and that differs between ranks.
            same_order=self.plan.comm.same_order and self.meter is None,
            party=self.party,
            events=self.events,
        )
        if self.meter is not None:
            self.meter.attach(pool)
        return pool

    def _install_hooks(self) -> None:
        unit_of: dict[int, int] = {}
        blocks: dict[str, list[int]] = {}
        for chunk in self.chunks:
            if not chunk.resident or self._renews_late(chunk):
                unit_of.update({id(param): chunk.spec.unit for param in chunk.params})
        for unit in self.layout.units:
            if unit.module is not None and any(not self.chunks[c].resident for c in unit.chunks):
                blocks.setdefault(unit.module, []).append(unit.index)
        traced = self.meter is not None and not unit_of
        if unit_of:
            self.hooks = GatherHooks(self.model, self.pool, unit_of, blocks, self.passes.note)
            self._remove.append(self.hooks.remove)
        elif traced:
            self._remove += trace_hooks(self.model, self.pool, self._own_units())
        for chunk_index, state in self.grads.items():
            for slot_index, param in enumerate(self.chunks[chunk_index].params):
                on_grad = weakly(self._on_grad, chunk_index, slot_index)
                handles = [param.register_post_accumulate_grad_hook(on_grad)]  # type: ignore[no-untyped-call]
                if traced:  # backward gathers nothing, so its moments are those at which a gradient is complete
                    seen = weakly(self._saw_grad, state.spec.unit)
                    handles += [param.register_post_accumulate_grad_hook(seen)]  # type: ignore[no-untyped-call]
                self.visible.follow(state.spec.slots[slot_index].param, handles[-1])
                self._remove += [handle.remove for handle in handles]
        self.guards = Guards(self.model, self.params, self.chunks, self.layout, self.pool)
        self.model.zero_grad = self._zero_all  # type: ignore[method-assign]
        self._remove += [self.guards.remove, lambda: self.model.__dict__.pop("zero_grad", None) and None]
        before = self.model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        after = self.model.register_forward_hook(self._after_forward)
        self._remove += [before.remove, after.remove]
        if self.meter is not None:
            meter = self.meter
            left = self.model.register_forward_hook(lambda *_: meter.leave(), always_call=True)
            self._remove += [left.remove, meter.leave_all]

    def _own_units(self) -> dict[str, list[int]]:
        """By name of a module, the units of its own parameters."""
        unit_of = {id(param): chunk.spec.unit for chunk in self.chunks for param in chunk.params}
        own = {name: list(module.parameters(recurse=False)) for name, module in self.model.named_modules()}
        return {name: sorted({unit_of[id(p)] for p in params if id(p) in unit_of}) for name, params in own.items()}

    def _saw_grad(self, unit: int, _param: torch.Tensor) -> None:
        self.pool.acquire(unit)

    def by_units(self, stats: MemStats) -> MemStats:
        """A trace of the model's modules becomes one of the units that these use; any other stays what it is."""
        units_of = self.hooks.units_of if self.hooks is not None else self._own_units()
        return of_units(stats, self.model, units_of, self.pool) or stats

    # ---- updates during backward

    def update_early(self, optimizer: int, early: EarlyUpdates) -> None:
        """Hand the gradients of ``optimizer``'s chunks to ``early`` as soon as they are reduced."""
        self.early.by_optimizer[optimizer] = early
        kept = lambda: sum(each.device_bytes for each in self.early.by_optimizer.values())  # noqa: E731
        self.ledger.watch("copies to undo updates with", kept)

    def undo_early(self, what: str) -> None:
        """Before all values are read or written; see :meth:`EarlyUpdates.undo_for`. Masters have what was written.

        Raises:
            RuntimeError: some are neither old nor new; see :class:`Unfinished`.
        """
        self.unfinished.check(what)
        self._undo_guesses(what)
        self.master_edits.take()

    def _undo_guesses(self, what: str) -> None:
        for each in self.early.by_optimizer.values():
            each.undo_for(what)

    def undo_guess(self, optimizer: int) -> None:
        """A gradient of ``optimizer`` is changed, which an update ahead of its step has used."""
        early = self.early.by_optimizer.get(optimizer)
        if early is not None and early.updated:
            early.take_back()

    def take_edits(self, optimizer: int | None = None) -> None:
        """Before an update: what the program wrote to parameters of ``optimizer`` (of all) is what it starts from."""
        if self.master_edits.changed(optimizer):
            self.undo_early("an update of changed parameters")

    def discard_early(self) -> None:
        """Masters are about to be replaced: what was updated ahead of its step no longer matters."""
        for index, each in self.early.by_optimizer.items():
            if each.discard():
                self.unfinished.begin("updates during backward", state_of(index))

    # ---- accounts

    def hold_state(self, state_bytes: Callable[[Tier], int], scratch_bytes: Callable[[Tier], int]) -> None:
        """An optimizer tells how many bytes of state and of scratch memory it has in a tier."""
        self._state_holders.append(state_bytes)
        self._scratch_holders.append(scratch_bytes)

    def expect_state(self, nbytes: int) -> None:
        """An optimizer will keep that many bytes of state on the device from its first step on.

        Raises:
            DeviceMemoryError: with all else that the plan keeps there for good, that is more than the device has.
        """
        self._expected_state_bytes += nbytes
        self.ledger.require(0, "the model and its optimizers")

    def _device_state_bytes(self) -> int:
        masters, state = self.state_bytes(Tier.DEVICE)
        return masters + max(state, self._expected_state_bytes)

    def _foreseen_bytes(self) -> int:
        """Optimizer state on the device that is accounted for and not made yet."""
        return max(self._expected_state_bytes - self.state_bytes(Tier.DEVICE)[1], 0)

    def state_bytes(self, tier: Tier) -> tuple[int, int]:
        """Bytes of masters and of optimizer state in ``tier``."""
        return self.storage.master_bytes(tier), sum(ask(tier) for ask in self._state_holders)

    def scratch_bytes(self, tier: Tier) -> int:
        """Bytes that updates of state in ``tier`` keep for gradients."""
        return sum(ask(tier) for ask in self._scratch_holders)

    # ---- a forward pass

    def _before_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with outside_transforms():
            self.passes.recover()
            self.unfinished.check("a forward pass")
            self.guards.check_forward()
            if self.early.active and torch.is_grad_enabled():
                self.take_edits()
            self.pool.begin_forward(torch.is_grad_enabled())
            self.events.forward_began(torch.is_grad_enabled())
            self._expect_update()
        if self.meter is not None:
            self.meter.enter()
        dtype = self.plan.precision.param_dtype
        if self.plan.precision.cast_inputs and dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return args, kwargs

    def _after_forward(self, _module: nn.Module, _args: object, output: Any) -> Any:
        if self.meter is not None:
            self._look_at_peak(self.meter)
        with outside_transforms():
            self.pool.finish_phase()
            self.pool.end_forward()
            self.guards.after_forward()
            self.events.forward_ended(torch.is_grad_enabled())
            self._expect_update()
        dtype = self.plan.precision.output_dtype
        output = cast_floats(output, dtype) if dtype is not None else output
        if torch.is_grad_enabled():
            each_tensor(output, self.passes.watch)
        return output

    def _look_at_peak(self, meter: MemoryMeter) -> None:
        try:
            meter.forward_ended()
        except DeviceMemoryError as error:
            self.pool.tell(error)  # they wait at the end of their passes
            raise

    def _expect_update(self) -> None:
        if torch.is_grad_enabled():
            self.events.update_expected()

    # ---- gradients

    @torch.no_grad()
    def _on_grad(self, chunk: int, index: int, param: torch.Tensor) -> None:
        state = self.grads[chunk]
        grad = self.visible.take(state.spec.slots[index].param, param)
        self.passes.check_scaled()
        self.passes.note()
        if grad is not None:
            grad = grad.detach()
            self.reducer.add(state, index, grad.to_dense() if grad.is_sparse else grad, self.passes.sync)

    def _zero_all(self, set_to_none: bool = True) -> None:
        """The user's ``model.zero_grad()`` drops what the engine holds too."""
        self.zero_grad()

    def zero_grad(self, optimizer: int | None = None) -> None:
        """Drop the gradients of one optimizer's parameters and of those in none, or of all."""
        self.drop_gradients(optimizer)
        self.visible.clear(optimizer)

    def drop_gradients(self, optimizer: int | None = None) -> None:
        """As :meth:`zero_grad`, but what stands in ``.grad`` stays, and says when it is used that it is gone."""
        self.passes.recover()
        self.reducer.clear(optimizer)
        for each in (optimizer,) if optimizer is None else (optimizer, -1):
            self.passes.forget_tokens(each)
        self.visible.forget(optimizer)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside keep whole gradients on this rank; the next one outside reduces their sum.

        Raises:
            ValueError: the plan reduces at every pass (ZeRO-2/3), so there is nothing to skip.
        """
        if self.plan.shard.reduce == "every":
            raise ValueError(
                f"no_sync() with reduce={self.plan.shard.reduce!r}: this plan keeps only gradient shards (ZeRO-2/3); "
                "call backward several times before step instead, gradients add up"
            )
        if self.plan.streams_gradients and self.plan.grad.average == "mean":
            raise ValueError(
                f"no_sync() with update={self.plan.grad.update!r} and average='mean': updates begin before the number "
                "of passes is known; use average='sum' and divide the loss, or update='step'"
            )
        return self.passes.no_sync()

    # ---- parameters

    @contextlib.contextmanager
    def gathered(self, write_back: bool = False) -> Iterator[None]:
        """Full parameters in place, gathered once (every rank enters). With ``write_back`` changes are kept."""
        with self.mesh.doing("gathered()"):
            self.pool.acquire_all()
            if self.plan.comm.gather_on_use:
                self.mesh.shard.fence()  # nobody writes while a peer's renewal still reads
        self.guards.edits.allow()
        try:
            yield
            self.guards.check_edits(values=False, held=False)
            if write_back:
                with self.mesh.doing("gathered(write_back=True)"):
                    self.write_back()
        finally:
            self.pool.release_all()
            if write_back:
                self.pool.drop_changed()  # each rank's copy has what that rank wrote, and not what the others did
            else:
                self.pool.drop_idle()  # what was written is no part of the model; a graph may still read the rest
            self.guards.edits.accept()

    @torch.no_grad()
    def write_back(self) -> None:
        """Take changed gathered parameters over into shards and masters, each rank its own part of them."""
        self._undo_guesses("taking over gathered parameters")
        group = self.mesh.shard
        group.fence("before an update")
        for chunk in self.chunks:
            if chunk.resident and not chunk.spec.trainable and group.size > 1:
                chunk.exchange.local.copy_(gather_shards(group, chunk.shard))
        outcome = "Some parameters were taken over and some not: repair the disk and load a state."
        with agreed(self.mesh.world, "changed parameters were taken over", outcome, needed=self.storage.uses_disk):
            for chunk in self.chunks:
                with chunk.opened(write=True) as shard:
                    if chunk.full is not None and not chunk.resident:
                        shard.copy_(chunk.full[chunk.shard_start : chunk.shard_end])
                    state = self.states.get(chunk.spec.index)
                    if state is not None:
                        with state.opened(write=True) as master:
                            take_over(shard, master)
        self._commit()
        self.master_edits.note()
        self._renew_resident([chunk for chunk in self.chunks if chunk.spec.trainable])
        self._refuse_graphs(self.chunks)

    def _commit(self, optimizer: int | None = None) -> None:
        """What was written to the disk is from here on what is read."""
        if self.storage.store is not None:
            self.storage.store.commit(optimizer)

    def publish(self, everything: bool = False, optimizer: int | None = None) -> None:
        """After shards were written on every rank: gathered copies are renewed or dropped.

        Args:
            everything: frozen parameters were written too.
            optimizer: it has updated its own chunks, and no other (``None``: all were); what another one has written
                ahead of its step does not count yet, and graphs that need only the others' chunks stay valid.
        """
        self._commit(optimizer)
        updated = [c for c in self.chunks if c.spec.trainable and optimizer in (None, c.spec.optimizer)]
        for chunk in self.chunks if everything else updated:
            chunk.source.forget()  # what was read ahead and not used is the version before
        self._renew_resident(updated)
        self.pool.invalidate(everything)
        if self.meter is not None:
            self.meter.end_step(self.pool.followed)
        self._refuse_graphs(self.chunks if everything else updated)
        self.guards.edits.accept()
        self.master_edits.note(None if everything else optimizer)

    def _refuse_graphs(self, updated: Sequence[Chunk]) -> None:
        """Of before: they were made with other values."""
        for chunk in updated:
            chunk.generation += 1
            if chunk.resident:
                chunk.refuse_graphs()

    def _renew_resident(self, updated: Sequence[Chunk]) -> None:
        group = self.mesh.shard
        self.pool.settle()
        group.fence("after an update")
        for chunk in updated:
            if not (chunk.resident and group.size > 1):
                continue
            if group.one_sided_gather and self._renews_late(chunk):
                chunk.pending = WhenAsked(partial(group.all_gather_in_place, chunk.exchange))
            else:
                chunk.pending = group.all_gather_in_place(chunk.exchange)
            self.pool.renew_later(chunk)
        if not self.plan.comm.gather_on_use:
            self.pool.settle()
            group.fence()

    def _renews_late(self, chunk: Chunk) -> bool:
        late = self.plan.comm.gather_on_use and self.mesh.shard.size > 1
        return late and chunk.resident and chunk.spec.trainable

    def before_update(self) -> None:
        """All ranks have read what they need of the shards, also where gathered arrays show them; they may be written
        until :meth:`publish`.

        Raises:
            RuntimeError: inside :meth:`gathered`, whose parameters would become stale.
        """
        if self.pool.all_held:
            raise RuntimeError(f"an update inside gathered() (all_held={self.pool.all_held}): leave the block first")
        self.pool.settle()
        if not self.plan.tiers.all_on_device:
            synchronize(self.mesh.device)  # uploads still read the shards that the CPU will write
        self.mesh.shard.fence("before an update")
        self.guards.edits.allow()

    def __deepcopy__(self, _memo: object) -> Engine:
        raise TypeError(
            f"a model sharded over {self.mesh.size} ranks cannot be copied: build another one and load state_dict()"
        )

    def close(self) -> None:
        """Remove all hooks. Parameters that are not gathered stay unreadable: gather them first if needed."""
        self.closed = True
        for remove in self._remove:
            remove()
        self._remove.clear()
        if self._begun:
            self.visible.clear()
        self.storage.close()
