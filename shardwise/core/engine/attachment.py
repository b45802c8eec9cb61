"""What the engine installs on the user's model: hooks on forward passes and gradients, and replaced methods."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.core.checks.guards import Guards, refusals_of_wrappers
from shardwise.core.checks.state_dict_guard import StateDictGuard
from shardwise.core.engine.casts import cast_floats, each_tensor
from shardwise.core.engine.loading import compare_states, load_full
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.trace.stats import NO_UNIT, MemStats, Moment
from shardwise.core.shards.hooks import GatherHooks, outside_transforms, trace_hooks
from shardwise.core.shards.meter import MemoryMeter
from shardwise.core.shards.pool import ChunkPool

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["Attachment", "of_units", "weakly"]


# [Note: Order of the hooks around a forward pass]
# On the outermost module the engine's own hook runs before the hooks that gather (both are prepended, it is registered
# later): it drops a pass that failed and refuses wrong uses before anything is gathered. After the pass the gathering
# hooks release first; then the ranks finish their gathers together, and writes to gathered copies are looked for.
# Gradients are taken by the last hook of a parameter: earlier hooks of the user see them, later ones are refused
# (GradFacade.take).
class Attachment:
    """The hooks on one model.

    Args:
        engine: of the model.

    Attributes:
        hooks: those that gather, or ``None`` if nothing is gathered.
        own_state: watches ``state_dict`` of the user's modules, after :meth:`install`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places = engine.facade.places
        self._kept: list[tuple[ChunkGrads, int, torch.Tensor]] | None = None
        self.hooks: GatherHooks | None = None
        self.own_state: StateDictGuard
        self._remove: list[Callable[[], None]] = []

    def install(self) -> Guards:
        """Install the hooks, and return the guards against wrong uses."""
        engine = self._engine
        unit_of: dict[int, int] = {}
        blocks: dict[str, list[int]] = {}
        for chunk in engine.chunks:
            if not chunk.resident or engine.values.renews_late(chunk):
                unit_of.update({id(param): chunk.spec.unit for param in chunk.params})
        for unit in engine.layout.units:
            if unit.module is not None and any(not engine.chunks[c].resident for c in unit.chunks):
                blocks.setdefault(unit.module, []).append(unit.index)
        traced = engine.meter is not None and not unit_of
        if unit_of:
            self.hooks = GatherHooks(engine.model, engine.pool, unit_of, blocks, engine.passes.note)
            self._remove.append(self.hooks.remove)
            self._follow(self.hooks)
        elif traced:
            self._remove += trace_hooks(engine.model, engine.pool, self._own_units())
        for place, (state, slot) in enumerate(self._places):
            param = state.chunk.params[slot]
            on_grad = weakly(self._on_grad, place)
            handles = [param.register_post_accumulate_grad_hook(on_grad)]  # type: ignore[no-untyped-call]
            if traced:  # backward gathers nothing, so complete gradients are its moments
                seen = weakly(self._saw_grad, state.spec.unit)
                handles += [param.register_post_accumulate_grad_hook(seen)]  # type: ignore[no-untyped-call]
            engine.facade.follow(place, handles[-1])
            self._remove += [handle.remove for handle in handles]
        guards = Guards(engine.model, engine.params, engine.chunks, engine.layout, engine.pool)
        self._remove.append(guards.remove)
        self._own_methods(guards)
        before = engine.model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        after = engine.model.register_forward_hook(self._after_forward)
        self._remove += [before.remove, after.remove]
        if engine.meter is not None:
            meter = engine.meter
            left = engine.model.register_forward_hook(lambda *_: meter.leave(), always_call=True)
            self._remove += [left.remove, meter.leave_all]
        return guards

    def _own_methods(self, guards: Guards) -> None:
        """Replace methods of the user's model that would act on sharded parameters."""
        engine, own = self._engine, self._engine.model.__dict__
        staged = engine.staging is not None
        check = partial(engine.broken.check, "a state")
        rooms = engine.params, engine.chunks, engine.layout, engine.pool
        self.own_state = StateDictGuard(engine.model, *rooms, staged, check, guards.check_structure)
        self._remove.append(self.own_state.remove)
        methods: dict[str, Any] = {"zero_grad": self._zero_all}
        # Otherwise the error would be about a hook of ours that cannot be pickled.
        methods |= dict.fromkeys(("__reduce_ex__", "__deepcopy__"), self._refuse_copy)
        methods |= {name: each for name, each in refusals_of_wrappers(engine.model).items() if name not in own}
        # A class with its own load_state_dict, and an attribute that exists already, stay.
        if type(engine.model).load_state_dict is nn.Module.load_state_dict and "load_state_dict" not in own:
            methods["load_state_dict"] = self._load_whole
        own.update(methods)
        self._remove += [partial(_drop, own, name) for name in methods]

    def _refuse_copy(self, *_: object) -> Any:
        """Raises:
        TypeError: ``copy.deepcopy``, ``pickle`` or ``torch.save`` of the user's model.
        """
        engine = self._engine
        raise TypeError(
            f"a {type(engine.model).__name__} sharded over {engine.mesh.size} ranks cannot be copied or pickled: "
            "save state_dict() of what boost/build returned, and load it into another model"
        )

    def _load_whole(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The user's ``model.load_state_dict()``: every rank calls it, also inside ``gathered(write_back=True)``."""
        engine = self._engine
        with engine.mesh.doing("load_state_dict() of the model"):
            if not engine.pool.blocks.all_held:
                return load_full(engine, state_dict, strict, assign)
            if self.own_state.kept:  # otherwise it raises
                compare_states(engine, state_dict)
            return nn.Module.load_state_dict(engine.model, state_dict, strict, assign)

    def _follow(self, hooks: GatherHooks) -> None:
        """Gather a parameter when a tensor that follows it is read."""
        for chunk in self._engine.chunks:
            for slot, param in zip(chunk.spec.slots, chunk.params, strict=True):
                for follower in chunk.followers_of(slot.param):
                    follower.on_read = partial(hooks.on_read, id(param))  # type: ignore[attr-defined]
                    self._remove.append(partial(setattr, follower, "on_read", None))

    def _own_units(self) -> dict[str, list[int]]:
        """Return the units of each module's own parameters, by module name."""
        engine = self._engine
        unit_of = {id(param): chunk.spec.unit for chunk in engine.chunks for param in chunk.params}
        own = {name: list(module.parameters(recurse=False)) for name, module in engine.model.named_modules()}
        return {name: sorted({unit_of[id(p)] for p in params if id(p) in unit_of}) for name, params in own.items()}

    def _saw_grad(self, unit: int, _param: torch.Tensor) -> None:
        self._engine.pool.acquire(unit)

    def by_units(self, stats: MemStats) -> MemStats:
        """Convert a trace of the model's modules to units; return any other trace as it is."""
        engine = self._engine
        units_of = self.hooks.units_of if self.hooks is not None else self._own_units()
        return of_units(stats, engine.model, units_of, engine.pool) or stats

    def _before_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        engine = self._engine
        # The engine's own operations are not part of a transformed function.
        with outside_transforms():
            if self.hooks is None or not self.hooks.running:  # a model may call itself
                engine.passes.recover()
            engine.broken.check("a forward pass")
            engine.guards.check_forward()
            if engine.early.active and torch.is_grad_enabled():
                engine.values.take_edits()
            engine.pool.begin_forward(torch.is_grad_enabled())
            engine.events.forward_began(torch.is_grad_enabled())
            self._expect_update()
            if engine.tp_plan is not None and engine.staging is None and torch.is_grad_enabled():
                engine.batches.note(args, kwargs)
        if engine.meter is not None:
            engine.meter.enter()
        dtype = engine.plan.precision.param_dtype
        if engine.plan.precision.cast_inputs and dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return args, kwargs

    def _after_forward(self, _module: nn.Module, _args: object, output: Any) -> Any:
        engine = self._engine
        if engine.meter is not None:
            self._look_at_peak(engine.meter)
        with outside_transforms():
            # Peers may still gather what this rank did not use.
            engine.pool.finish_phase()
            engine.pool.end_forward()
            engine.guards.after_forward()
            engine.events.forward_ended(torch.is_grad_enabled())
            self._expect_update()
        dtype = engine.plan.precision.output_dtype
        output = cast_floats(output, dtype) if dtype is not None else output
        if torch.is_grad_enabled():
            each_tensor(output, engine.passes.watch)
        return output

    def _look_at_peak(self, meter: MemoryMeter) -> None:
        try:
            meter.forward_ended()
        except DeviceMemoryError as error:
            self._engine.pool.tell(error)  # the peers wait at the end of their passes
            raise

    def _expect_update(self) -> None:
        if torch.is_grad_enabled():
            self._engine.events.update_expected()

    def _on_grad(self, place: int, param: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # only with create_graph=True; otherwise it is off already
            with torch.no_grad():
                self._take_grad(place, param)
        else:
            self._take_grad(place, param)

    def _take_grad(self, place: int, param: torch.Tensor) -> None:
        if not param.requires_grad:
            return  # frozen since the forward pass: it counts as unused
        engine, (state, slot) = self._engine, self._places[place]
        # Taken before anything raises below: it must not be there in the next pass.
        grad = engine.facade.take(place, param)
        engine.passes.gradient_came()
        if grad is None:
            return
        if state.chunk.unseen:
            raise RuntimeError(
                f"{engine.facade.name(state.spec.slots[slot].param)} got a gradient, but no forward pass has "
                "gathered it since the last update, so its values were NaN. Use it in forward() of its module or of a "
                "parent (other methods of the model do not gather), or compute the loss inside "
                "`with model.gathered():` of what boost/build returned"
            )
        if grad.requires_grad:
            grad = grad.detach()
        grad = grad.to_dense() if grad.is_sparse else grad
        if self._kept is not None:
            self._kept.append((state, slot, grad))
        else:
            engine.reducer.add(state, slot, grad, engine.passes.sync)

    @contextlib.contextmanager
    def kept(self) -> Iterator[list[tuple[ChunkGrads, int, torch.Tensor]]]:
        """Collect the gradients of a pass inside the block for :meth:`hand_on`."""
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None

    def hand_on(self, kept: list[tuple[ChunkGrads, int, torch.Tensor]]) -> None:
        """Reduce gradients of an earlier pass as those of the current one."""
        engine = self._engine
        for state, slot, grad in kept:
            engine.reducer.add(state, slot, grad, engine.passes.sync)
        kept.clear()

    def _zero_all(self, set_to_none: bool = True) -> None:
        """The user's ``model.zero_grad()``."""
        self._engine.zero_grad(set_to_none=set_to_none)

    def remove(self) -> None:
        """Remove everything from the model."""
        for remove in self._remove:
            remove()
        self._remove.clear()


def _drop(own: dict[str, Any], name: str) -> None:
    own.pop(name, None)


def of_units(
    stats: MemStats, model: nn.Module, units_of: Mapping[str, Sequence[int]], pool: ChunkPool
) -> MemStats | None:
    """Convert a trace of ``trace_memory``, which numbers modules, to units; ``None`` if it is not of ``model``.

    Args:
        stats: the trace.
        model: the model that is trained.
        units_of: the units that each module uses, by module name.
        pool: of the units.
    """
    modules = list(model.named_modules())
    shown = {number: name or type(module).__name__ for number, (name, module) in enumerate(modules)}
    if set(stats.gathered_bytes) != set(shown):
        return None
    moments: list[Moment] = []
    for moment in stats.moments:
        if moment.unit == NO_UNIT:
            moments.append(moment)
        elif shown.get(moment.unit) != moment.name:
            return None
        else:
            units = units_of.get(modules[moment.unit][0], ())
            moments += [replace(moment, unit=unit, name=pool.units[unit].title) for unit in units]
            moments += [] if units else [replace(moment, unit=NO_UNIT)]
    return replace(stats, moments=moments, gathered_bytes={unit: size for unit, size in pool.sizes.items() if size})


# [Note: What keeps an engine alive]
# The model refers to its hooks, these to the engine, and the engine to the model: a cycle that Python's collector finds
# when it is unused. The collector does not see post-accumulate hooks of parameters. They refer to the engine weakly, as
# does the object in ``.grad``; otherwise the model would never be freed. A model in use keeps the engine by its other
# hooks.
def weakly(method: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return a hook that calls ``method(*arguments, parameter)`` without keeping the method's object alive."""
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(param: Any) -> Any:
        found = owner()
        return None if found is None else function(found, *arguments, param)

    return hook
