"""What the engine puts on the user's model: hooks around forward passes, on gradients, and ``zero_grad``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.core.checks.guards import Guards, refusals_of_wrappers
from shardwise.core.checks.state_dict_guard import StateDictGuard
from shardwise.core.engine.casts import cast_floats, each_tensor
from shardwise.core.engine.loading import compare_given, load_whole
from shardwise.core.engine.outside_trace import of_units
from shardwise.core.engine.weak import weakly
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.memory.trace.stats import MemStats
from shardwise.core.shards.hooks import GatherHooks, trace_hooks
from shardwise.core.shards.meter import MemoryMeter
from shardwise.core.shards.transforms import outside_transforms

if TYPE_CHECKING:
    from shardwise.core.engine.engine import Engine

__all__ = ["Attachment"]


# [Note: Order of the hooks around a forward pass]
# On the outermost module the engine's own hook comes before those that gather (both are put in front, it is the later
# one): a pass that failed is dropped, and wrong uses are refused, before anything is gathered for this one. After the
# pass those that gather let go first; then the ranks finish their gathers together, and what was written to copies is
# looked for. Gradients are taken by the last hook of a parameter: what was hooked before the build sees them, what
# comes later is refused (VisibleGrads.take).
class Attachment:
    """To one model.

    Args:
        engine: of the model; its rooms do what a hook asks for.

    Attributes:
        hooks: those that gather, where anything is gathered.
        own_state: watches the states of the user's modules, once installed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places = engine.visible.places
        self._kept: list[tuple[ChunkGrads, int, torch.Tensor]] | None = None
        self.hooks: GatherHooks | None = None
        self.own_state: StateDictGuard
        self._remove: list[Callable[[], None]] = []

    def install(self) -> Guards:
        """From now on the model's passes are the engine's. What watches over it."""
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
            if traced:  # backward gathers nothing, so its moments are those at which a gradient is complete
                seen = weakly(self._saw_grad, state.spec.unit)
                handles += [param.register_post_accumulate_grad_hook(seen)]  # type: ignore[no-untyped-call]
            engine.visible.follow(place, handles[-1])
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
        """Of the user's model: those that mean the engine's parameters."""
        engine, own = self._engine, self._engine.model.__dict__
        staged = engine.staging is not None
        check = partial(engine.broken.check, "a state")
        rooms = engine.params, engine.chunks, engine.layout, engine.pool
        self.own_state = StateDictGuard(engine.model, *rooms, staged, check, guards.check_structure)
        self._remove.append(self.own_state.remove)
        methods: dict[str, Any] = {"zero_grad": self._zero_all}
        # Else what is said is of the first of our hooks that cannot be pickled.
        methods |= dict.fromkeys(("__reduce_ex__", "__deepcopy__"), self._refuse_copy)
        methods |= {name: each for name, each in refusals_of_wrappers(engine.model).items() if name not in own}
        # A class that loads in its own way, and whatever stands there already, goes first.
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
            f"a {type(engine.model).__name__} sharded over {engine.mesh.size} ranks cannot be copied or pickled: save "
            "state_dict() of what boost/build returned, and load that into another one"
        )

    def _load_whole(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The user's ``model.load_state_dict()``: every rank calls it, inside ``gathered(write_back=True)`` as well."""
        engine = self._engine
        with engine.mesh.doing("load_state_dict() of the model"):
            if not engine.pool.blocks.all_held:
                return load_whole(engine, state_dict, strict, assign)
            if self.own_state.kept:  # otherwise it is refused
                compare_given(engine, state_dict)
            return nn.Module.load_state_dict(engine.model, state_dict, strict, assign)

    def _follow(self, hooks: GatherHooks) -> None:
        """Whoever reads what follows a parameter gathers that."""
        for chunk in self._engine.chunks:
            for slot, param in zip(chunk.spec.slots, chunk.params, strict=True):
                for follower in chunk.followers_of(slot.param):
                    follower.on_read = partial(hooks.on_read, id(param))  # type: ignore[attr-defined]
                    self._remove.append(partial(setattr, follower, "on_read", None))

    def _own_units(self) -> dict[str, list[int]]:
        """By name of a module, the units of its own parameters."""
        engine = self._engine
        unit_of = {id(param): chunk.spec.unit for chunk in engine.chunks for param in chunk.params}
        own = {name: list(module.parameters(recurse=False)) for name, module in engine.model.named_modules()}
        return {name: sorted({unit_of[id(p)] for p in params if id(p) in unit_of}) for name, params in own.items()}

    def _saw_grad(self, unit: int, _param: torch.Tensor) -> None:
        self._engine.pool.acquire(unit)

    def by_units(self, stats: MemStats) -> MemStats:
        """A trace of the model's modules becomes one of the units that these use; any other stays what it is."""
        engine = self._engine
        units_of = self.hooks.units_of if self.hooks is not None else self._own_units()
        return of_units(stats, engine.model, units_of, engine.pool) or stats

    def _before_forward(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        engine = self._engine
        # What the engine does for itself is no part of a function that is transformed.
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
            if engine.cutting is not None and engine.staging is None and torch.is_grad_enabled():
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
            self._engine.pool.tell(error)  # they wait at the end of their passes
            raise

    def _expect_update(self) -> None:
        if torch.is_grad_enabled():
            self._engine.events.update_expected()

    def _on_grad(self, place: int, param: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in passes that make a graph; elsewhere it is off, and to say so again takes time
            with torch.no_grad():
                self._take_grad(place, param)
        else:
            self._take_grad(place, param)

    def _take_grad(self, place: int, param: torch.Tensor) -> None:
        if not param.requires_grad:
            return  # frozen since the forward pass: autograd adds nothing, and it counts as not used
        engine, (state, slot) = self._engine, self._places[place]
        # Taken first, whatever is refused below: it must not stand there at the next pass.
        grad = engine.visible.take(place, param)
        engine.passes.gradient_came()
        if grad is None:
            return
        if state.chunk.unseen:
            raise RuntimeError(
                f"{engine.visible.name(state.spec.slots[slot].param)} got a gradient, and was not there when it was "
                "used: no forward pass has gathered it since the last update, and outside of one it is NaN. Use it in "
                "forward() of its module or of one around it (a method of the model that the loop calls is none), or "
                "make the loss inside `with model.gathered():` of what boost/build returned"
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
        """Gradients of a pass inside wait for :meth:`hand_on` of what this gives."""
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None

    def hand_on(self, kept: list[tuple[ChunkGrads, int, torch.Tensor]]) -> None:
        """Gradients of an earlier pass become the running one's, as if it had made them."""
        engine = self._engine
        for state, slot, grad in kept:
            engine.reducer.add(state, slot, grad, engine.passes.sync)
        kept.clear()

    def _zero_all(self, set_to_none: bool = True) -> None:
        """The user's ``model.zero_grad()`` drops what the engine holds too."""
        self._engine.zero_grad(set_to_none=set_to_none)

    def remove(self) -> None:
        """Take all of it off the model again."""
        for remove in self._remove:
            remove()
        self._remove.clear()


def _drop(own: dict[str, Any], name: str) -> None:
    own.pop(name, None)
