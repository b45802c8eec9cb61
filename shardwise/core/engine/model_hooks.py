"""The engine's hooks on forward passes and gradients of the user's model, and the methods that it replaces."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.core.base.events import Events
from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.checks.guards import refusals_of_wrappers
from shardwise.core.engine.gradients import Gradients
from shardwise.core.engine.load_state_dict import compare_states, load_full
from shardwise.core.engine.mixed_precision import cast_floats, map_tensors
from shardwise.core.engine.parameters import ParameterValues
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.trace.stats import NO_UNIT, MemStats, Moment
from shardwise.core.shards.gather_hooks import GatherHooks, outside_transforms, trace_hooks


# [Note: Order of the hooks around a forward pass]
# On the outermost module the engine's own hook runs before the hooks that gather (both are prepended, and it is
# registered later). It drops a pass that failed and raises for wrong uses before anything is gathered. After the pass
# the gathering hooks release first; then the ranks finish their gathers together, and the engine checks for writes to
# gathered copies. The last hook of a parameter takes the gradient: earlier hooks of the user see it, later ones are
# refused (GradFacade.take).
class ModelHooks:
    """The hooks on one model.

    Args:
        values: the parameter values of the model.
        grads: the gradients of the model.
        events: notified of forward passes.

    Attributes:
        hooks: hooks that gather, or ``None`` if nothing is gathered.
    """

    def __init__(self, values: ParameterValues, grads: Gradients, events: Events) -> None:
        self._values, self._grads, self._events = values, grads, events
        self._shards, self._pool, self._guards, self._meter = values.shards, values.pool, values.guards, values.meter
        self._model = values.shards.model
        self.hooks: GatherHooks | None = None
        self._remove: list[Callable[[], None]] = []

    def install(self) -> None:
        """Install the hooks and the guards against wrong uses."""
        model, pool, chunks, meter = self._model, self._pool, self._shards.chunks, self._meter
        unit_of: dict[int, int] = {}
        blocks: dict[str, list[int]] = {}
        for chunk in chunks:
            if not chunk.resident or self._values.renews_late(chunk):
                unit_of.update({id(param): chunk.spec.unit for param in chunk.params})
        for unit in self._shards.layout.units:
            if unit.module is not None and any(not chunks[c].resident for c in unit.chunks):
                blocks.setdefault(unit.module, []).append(unit.index)
        traced = meter is not None and not unit_of
        if unit_of:
            self.hooks = GatherHooks(model, pool, unit_of, blocks, self._grads.passes.note)
            self._remove.append(self.hooks.remove)
            self._follow(self.hooks)
        elif traced:
            self._remove += trace_hooks(model, pool, self._own_units())
        for entry in self._grads.facade.entries:
            param = entry.param
            on_grad = weakly(self._take_grad, entry.place)
            handles = [param.register_post_accumulate_grad_hook(on_grad)]  # type: ignore[no-untyped-call]
            if traced:  # without gathers in backward, complete gradients mark its progress
                seen = weakly(self._saw_grad, entry.state.spec.unit)
                handles += [param.register_post_accumulate_grad_hook(seen)]  # type: ignore[no-untyped-call]
            entry.hook_id = handles[-1].id
            self._remove += [handle.remove for handle in handles]
        self._guards.install()
        self._remove.append(self._guards.remove)
        self._replace_methods()
        before = model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        after = model.register_forward_hook(self._after_forward)
        self._remove += [before.remove, after.remove]
        if meter is not None:
            left = model.register_forward_hook(lambda *_: meter.leave(), always_call=True)
            self._remove += [left.remove, meter.leave_all]

    def _replace_methods(self) -> None:
        """Replace methods of the user's model that would act on sharded parameters."""
        model, own = self._model, self._model.__dict__
        methods: dict[str, Any] = {"zero_grad": lambda set_to_none=True: self._grads.zero()}
        # Otherwise the error would be about a hook of ours that cannot be pickled.
        methods |= dict.fromkeys(("__reduce_ex__", "__deepcopy__"), self._refuse_copy)
        methods |= {name: each for name, each in refusals_of_wrappers(model).items() if name not in own}
        # A class with its own load_state_dict, and an attribute that exists already, stay.
        if type(model).load_state_dict is nn.Module.load_state_dict and "load_state_dict" not in own:
            methods["load_state_dict"] = self._load_full
        own.update(methods)
        self._remove += [partial(own.pop, name, None) for name in methods]

    def _refuse_copy(self, *_: object) -> Any:
        """Raise for copies of the user's model.

        Raises:
            TypeError: always; ``copy.deepcopy``, ``pickle`` or ``torch.save`` was called.
        """
        raise TypeError(
            f"a {type(self._model).__name__} sharded over {self._shards.mesh.size} ranks cannot be copied or pickled: "
            f"save state_dict() of {self._pool.names.module}, and load it into another model"
        )

    def _load_full(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The user's ``model.load_state_dict()``: every rank calls it, also inside ``gathered(write_back=True)``."""
        with self._shards.mesh.doing("load_state_dict() of the model"):
            if not self._pool.blocks.all_gathered:
                return load_full(self._values, state_dict, strict, assign)
            if self._guards.state_dicts.allows_loads:  # otherwise it raises
                compare_states(self._values, state_dict)
            return nn.Module.load_state_dict(self._model, state_dict, strict, assign)

    def _follow(self, hooks: GatherHooks) -> None:
        """Gather a parameter when a tensor that follows it is read."""
        for chunk in self._shards.chunks:
            for slot, param in zip(chunk.spec.slots, chunk.params, strict=True):
                for follower in chunk.followers_of(slot.param):
                    follower.on_read = partial(hooks.on_read, id(param))  # type: ignore[attr-defined]
                    self._remove.append(partial(setattr, follower, "on_read", None))

    def _own_units(self) -> dict[str, list[int]]:
        """Return the units of each module's own parameters, by module name."""
        unit_of = {id(param): chunk.spec.unit for chunk in self._shards.chunks for param in chunk.params}
        own = {name: list(module.parameters(recurse=False)) for name, module in self._model.named_modules()}
        return {name: sorted({unit_of[id(p)] for p in params if id(p) in unit_of}) for name, params in own.items()}

    def _saw_grad(self, unit: int, _param: torch.Tensor) -> None:
        self._pool.acquire(unit)

    def by_units(self, stats: MemStats) -> MemStats:
        """Convert a trace of ``trace_memory``, which numbers this model's modules, to units; return any other as it
        is."""
        units_of = self.hooks.units_of if self.hooks is not None else self._own_units()
        modules, pool, moments = list(self._model.named_modules()), self._pool, list[Moment]()
        shown = {number: name or type(module).__name__ for number, (name, module) in enumerate(modules)}
        known = all(moment.unit == NO_UNIT or shown.get(moment.unit) == moment.name for moment in stats.moments)
        if not known or set(stats.gathered_bytes) != set(shown):
            return stats
        for moment in stats.moments:
            units = () if moment.unit == NO_UNIT else units_of.get(modules[moment.unit][0], ())
            moments += [replace(moment, unit=unit, name=pool.units[unit].title) for unit in units]
            moments += [] if units else [replace(moment, unit=NO_UNIT)]
        return replace(stats, moments=moments, gathered_bytes={unit: size for unit, size in pool.sizes.items() if size})

    def _before_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        grads, guards, partition = self._grads, self._guards, self._shards.partition
        # The engine's own operations are not part of a transformed function.
        with outside_transforms():
            if self.hooks is None or not self.hooks.running:  # a model may call itself
                grads.passes.recover()
            guards.broken.check("a forward pass")
            guards.check_forward()
            if grads.early.active and torch.is_grad_enabled():
                self._values.take_edits()
            self._pool.begin_forward(torch.is_grad_enabled())
            self._events.forward_began(torch.is_grad_enabled())
            self._expect_update()
            if partition.tp_plan is not None and partition.staging is None and torch.is_grad_enabled():
                grads.batches.note([args, kwargs])
        if self._meter is not None:
            self._meter.enter()
        precision = self._shards.plan.precision
        dtype = precision.param_dtype
        if precision.cast_inputs and dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        return args, kwargs

    def _after_forward(self, _module: nn.Module, _args: object, output: Any) -> Any:
        if self._meter is not None:
            try:
                self._meter.check("in the forward pass")
            except DeviceMemoryError as error:
                self._pool.tell(error)  # the peers wait at the end of their passes
                raise
        with outside_transforms():
            # Peers may still gather units that this rank did not use.
            self._pool.finish_phase()
            self._pool.end_forward()
            if not torch.compiler.is_compiling():
                self._guards.check_edits()  # check for writes to copies that are dropped
            self._events.forward_ended(torch.is_grad_enabled())
            self._expect_update()
        dtype = self._shards.plan.precision.output_dtype
        output = cast_floats(output, dtype) if dtype is not None else output
        if torch.is_grad_enabled():
            map_tensors(output, self._grads.passes.watch)
        return output

    def _expect_update(self) -> None:
        if torch.is_grad_enabled():
            self._events.update_expected()

    def _take_grad(self, place: int, param: torch.Tensor) -> None:
        if not param.requires_grad:
            return  # frozen since the forward pass: it counts as unused
        grads, entry = self._grads, self._grads.facade.entries[place]
        # Take it before an error is raised below, so that it is not there in the next pass.
        grad = grads.facade.take(place, param)
        grads.passes.gradient_came()
        if grad is None:
            return
        if entry.state.chunk.unseen:
            raise RuntimeError(
                f"{self._shards.name(entry.index)} got a gradient, but no forward pass has "
                "gathered it since the last update, so its values were NaN. Use it in forward() of its module or of a "
                "parent (other methods of the model do not gather), or compute the loss inside "
                f"a gathered() block of {self._pool.names.module}"
            )
        with ordinary_tensors():  # with create_graph=True gradients are enabled
            grad = grad.detach() if grad.requires_grad else grad
            grad = grad.to_dense() if grad.is_sparse else grad
            if grads.collected is not None:
                grads.collected.append((entry.state, entry.slot, grad))
            else:
                grads.reducer.add(entry.state, entry.slot, grad, grads.passes.sync)

    def remove(self) -> None:
        """Remove everything from the model."""
        for remove in self._remove:
            remove()
        self._remove.clear()


# [Note: What keeps an engine alive]
# The model refers to its hooks, these to the engine, and the engine to the model: a cycle that Python's collector finds
# when it is unused. The collector does not see post-accumulate hooks of parameters. They refer to the engine weakly, as
# does the object in ``.grad``; otherwise the model would never be freed. A model in use keeps the engine by its other
# hooks.
def weakly(method: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return a hook that calls ``method(*arguments, parameter)`` without keeping the method's object alive."""
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(param: Any) -> Any:
        instance = owner()
        return None if instance is None else function(instance, *arguments, param)

    return hook
