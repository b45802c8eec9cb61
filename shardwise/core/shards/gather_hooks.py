"""Hooks on modules and on saved tensors, so that parameters are gathered exactly while they are read.

Forward: a module that owns parameters acquires and pins its units before its forward, and unpins them after it (FSDP2's
pre-forward and post-forward hooks). Backward: saved-tensor hooks save a reference to the chunk instead of a view of a
gathered weight, and gather the chunk when autograd reads it, so eviction needs no knowledge of the graph. Other active
saved-tensor hooks (activation checkpointing) get every tensor that is not a weight. Where no saved-tensor hooks are
possible (inside ``torch.func.grad``, hooks pushed within a module's forward) autograd keeps the gathered array, or the
parameter itself, whose unit the pool then does not evict: correct, but it costs memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.core.base.torch_internals import (
    compiles_frames,
    current_graph_task,
    in_transform,
    is_transformed,
    never_compiled,
    pop_saved_hooks,
    push_saved_hooks,
    saved_hooks_enabled,
    storage_id,
    top_saved_hooks,
    version_of,
    without_transforms,
)
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.gather import ChunkPool

# ---- torch.compile


# [Note: Blocks share compiled code]
# Blocks of one class are compiled once, and each call is checked against the guards of the compiled code. After eight
# recompilations torch gives up on a function and runs it uncompiled. So our hooks must not make blocks differ:
# * Guards look at the ids of hooks. Torch counts them up over all modules; ours are the same on each (same_number).
# * A hook that gathers runs outside any graph and is not compiled either (outside_compile): its arguments and the
#   gradient mode differ from call to call.
def outside_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook that runs outside any compiled graph; it breaks the graph before and after the module.

    Outside compiled code the hook is called directly, because switching the compiler off takes longer than most hooks.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def outside(*args: Any) -> Any:
        return disabled(*args) if compiles_frames() else hook(*args)

    return never_compiled(outside)


def skipped_in_compile(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook that does nothing inside a compiled block, whose own hooks have gathered the units already."""

    def unless_compiling(*args: object) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return unless_compiling


def while_tracing(call: Callable[[], None]) -> Callable[[], None]:
    """Wrap a function that is called when a graph is traced, and left out of the graph."""

    def now() -> None:
        call()

    constant: Callable[[], None] = torch.compiler.assume_constant_result(now)  # type: ignore[no-untyped-call]
    return constant


def same_number(handle: RemovableHandle) -> RemovableHandle:
    """Give a hook that was just registered an id that depends only on how many of these hooks its module has.

    torch counts ids from 0 up over all modules; these count from -1 down per module. The order of the hooks stays.
    """
    hooks = handle.hooks_dict_ref()
    assert hooks is not None
    number = min([0, *(key for key in hooks if isinstance(key, int))]) - 1
    for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        named = ref()
        if named is not None and handle.id in named:
            items = [(number if key == handle.id else key, hook) for key, hook in named.items()]
            named.clear()
            named.update(items)
    handle.id = number
    return handle


# ---- autograd


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return current_graph_task() != -1


def outside_transforms() -> AbstractContextManager[None]:
    """Return a context in which tensors are made and written as outside of any ``torch.func`` transform."""
    return without_transforms() if in_transform() else nullcontext()


# [Note: Saved tensors become notes]
# Autograd saves the tensors that an operation's backward will read. A saved view of a gathered array would keep all of
# that array, and so the whole model by the end of the forward pass. Hence saved-tensor hooks, active while modules run,
# save a _SavedView in place of every tensor that lies in a gathered array: the chunk, and the view's size, strides and
# offset. When backward reads it, the chunk is gathered if it is not, and the view is made again. Backward needs no
# knowledge of modules then, and a graph that is walked twice, or in part, gathers exactly what it reads.
# * The hooks look tensors up by storage, not by parameter, because operations save views (a transposed weight).
# * A _SavedView is valid as long as the chunk's generation, which counts updates, is the same. Saved tensors have
#   version counters for that.
# * If other hooks (activation checkpointing, save_on_cpu) are active when a module with parameters begins, ours go on
#   top and pass every tensor that is not a weight on to them (_pack_on_top).
# * Where no hooks are possible (most torch.func transforms; hooks pushed inside a module's own forward) a saved view
#   keeps its array, and a saved parameter is not evicted; see [Note: Who counts as a reader].
@dataclass(frozen=True)
class _SavedView:
    """Replaces a view of a gathered chunk among autograd's saved tensors."""

    chunk: Chunk
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    generation: int


@dataclass(frozen=True)
class _SavedTensor:
    """Any other saved tensor. Hooks have to check themselves that it was not changed after it was saved."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class _SavedByOthers:
    """The result of the pack hook that was active before ours, for a tensor that is not a weight."""

    packed: object


@dataclass
class _Frame:
    """A running module.

    Attributes:
        pins: units that are pinned until it ends.
        pack: the pack hook that was pushed for it, if any.
    """

    module: nn.Module
    pins: list[int] = field(default_factory=list)
    pack: Callable[..., Any] | None = None


class _Running(threading.local):
    """A thread's running modules, innermost last, and the saved-tensor hooks pushed for them."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.packs: list[Callable[..., Any]] = []


class _Parameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name; to read one during a pass gathers it.

    For models that use a child's weight without calling the child, such as ``F.linear(x, self.embedding.weight)``.

    ``torch.compile`` traces the read, and cannot tell a parameter of the running module from another's. Parameters that
    are not gathered have zero strides, which the graph's guards compare: a read of one, when traced or later, breaks
    the graph and gathers.

    Args:
        items: the parameters by name.
        on_read: gathers a parameter by its ``id``, outside any graph.
        probes: for each transient parameter one of the same chunk that has strides, or ``None``.
        on_trace: called when a graph is traced that reads a resident parameter, whose renewal may be under way.
    """

    def __init__(
        self,
        items: dict[str, nn.Parameter | None],
        on_read: Callable[[int], None],
        probes: dict[str, nn.Parameter | None],
        on_trace: Callable[[], None],
    ) -> None:
        super().__init__(items)
        self._on_read, self._on_trace, self._probes = on_read, on_trace, probes
        self._break_and_read = outside_compile(on_read)
        # Also while ``torch.func.functional_call`` has something in its place, which may wrap it.
        self._ids = {name: id(param) for name, param in items.items() if param is not None}

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if not torch.compiler.is_compiling():
            # Before the parameter is looked up: a reference held during the gather would count as a reader.
            if name in self._ids:
                self._on_read(self._ids[name])
            return super().__getitem__(name)
        param = super().__getitem__(name)
        if param is not None and name not in self._probes:
            self._on_trace()
        elif param is not None:
            probe = self._probes[name]
            if probe is None or not any(probe.stride()):
                self._break_and_read(id(param))
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self.items()),))


class GatherHooks:
    """The hooks of one model whose parameters are gathered on use; :meth:`remove` removes them.

    Args:
        model: the user's module.
        pool: the pool of the model's chunks.
        unit_of: unit by ``id`` of parameter, transient ones only.
        units_of_module: the units that cover exactly one module, by the FQN of the module.
        in_backward_pass: called at a gather during backward, so that the end of the pass is noticed.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: ChunkPool,
        unit_of: dict[int, int],
        units_of_module: dict[str, list[int]],
        in_backward_pass: Callable[[], None],
    ) -> None:
        self.model, self.pool, self._unit_of = model, pool, unit_of
        self._in_backward_pass = in_backward_pass
        self._names = {id(param): name for name, param in model.named_parameters()}
        self.units_of: dict[str, list[int]] = {}
        """By FQN of a module: the units that it acquires before its forward."""
        self._running = _Running()
        never_compiled(compiles_frames)  # called from a frame that is not compiled, it would be one to compile
        self._saved_hooks = outside_compile(self._pack), outside_compile(self._unpack)
        self._hooks_on_top = outside_compile(self._pack_on_top), outside_compile(self._unpack_on_top)
        self._handles: list[Any] = []
        self._swapped: list[nn.Module] = []
        self._settles = False
        probes = _probes(pool)
        on_trace = while_tracing(self._on_trace)
        for name, module in model.named_modules():
            own = {unit_of[id(p)] for p in module._parameters.values() if p is not None and id(p) in unit_of}
            blocks = units_of_module.get(name, [])
            units = sorted(own | set(blocks))
            around = {u for block, inner in units_of_module.items() if name.startswith(block + ".") for u in inner}
            self.units_of[name] = units
            # The root always has a frame: code in its forward may read any parameter.
            if units or module is model:
                self._install(module, units, covered=bool(units) and around.issuperset(units))
            if own:
                swapped = {n: probes[id(p)] for n, p in module._parameters.items() if id(p) in probes}
                module._parameters = _Parameters(module._parameters, self.on_read, swapped, on_trace)
                self._swapped.append(module)

    def _install(self, module: nn.Module, units: list[int], covered: bool) -> None:
        def before(module: nn.Module, _args: object) -> None:
            if not (covered and self._holds_all(module, units)):
                self._enter(module, units)

        def after(module: nn.Module, _args: object, _output: object) -> None:
            self._leave(module)

        if covered:
            before, after = skipped_in_compile(before), skipped_in_compile(after)
        else:
            before, after = outside_compile(before), outside_compile(after)
        self._handles.append(same_number(module.register_forward_pre_hook(before, prepend=True)))
        # Also after an exception. After an interrupt torch calls no hooks; see unwind().
        self._handles.append(same_number(module.register_forward_hook(after, always_call=True)))

    def _holds_all(self, module: nn.Module, units: list[int]) -> bool:
        """Whether an outer module has pinned ``units`` and our saved-tensor hooks are on top.

        ``module`` needs no frame then, and :meth:`_leave` finds none.
        """
        running = self._running
        if not running.frames or not running.packs or in_transform() or self.pool.ledger.capacity_bytes is not None:
            return False  # under a capacity each use is measured
        pins, top = running.frames[-1].pins, top_saved_hooks()
        if top is None or top[0] is not running.packs[-1] or [u for u in units if u not in pins]:
            return False
        return module not in [frame.module for frame in running.frames]  # a module that calls itself

    def _enter(self, module: nn.Module, units: list[int]) -> None:
        frames = self._running.frames
        frame = _Frame(module, pack=self._push_saved_hooks())
        # Before its units are pinned, so that _leave unpins them after any exception.
        frames.append(frame)
        if self._settles and len(frames) == 1:
            self.pool.settle()
        for unit in units:
            frame.pins.append(unit)
            self._acquire(unit, frame)

    def _leave(self, module: nn.Module) -> None:
        frames = self._running.frames
        # After an exception the hooks of modules that were never entered run too.
        if module not in [frame.module for frame in frames]:
            return
        left = False
        while frames and not left:
            frame = frames[-1]
            for unit in frame.pins:
                self.pool.unpin(unit, frame)
            if frame.pack is not None:
                self._pop_saved_hooks(frame.pack)
            left = frame.module is module
            frames.pop()

    @property
    def running(self) -> bool:
        """Whether a module's forward is running in this thread."""
        return bool(self._running.frames)

    def unwind(self) -> None:
        """Leave every module after a ``KeyboardInterrupt``, after which torch ran no hooks."""
        if self._running.frames and not in_backward():
            self._leave(self._running.frames[0].module)

    def explain(self, error: BaseException) -> None:
        """Explain an ``error`` that a forward pass raised.

        Raises:
            RuntimeError: the error came from a transform inside the forward pass, which allows no saved-tensor hooks.
        """
        if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
            raise RuntimeError(
                f"torch.func inside the forward pass of a {type(self.model).__name__} whose parameters are gathered on "
                f"use ({str(error)[:60]}...): take torch.autograd.grad(..., create_graph=True) there, apply the "
                "transform to the whole model, or shard it at stage 2"
            ) from error

    def _acquire(self, unit: int, holder: object = None) -> None:
        if not in_transform():
            self.pool.acquire(unit, holder)
            return
        with outside_transforms():
            self.pool.acquire(unit, holder)
            self.pool.used_in_transform(unit)

    def on_read(self, param: int) -> None:
        """Gather the unit of the parameter with this ``id``, which is about to be read, during a pass."""
        unit = self._unit_of.get(param)
        if unit is None:
            return
        if self._running.frames:
            frame = self._running.frames[-1]
            if unit not in frame.pins:
                frame.pins.append(unit)
                try:
                    self._acquire(unit, frame)
                except Exception:  # nothing was gathered; after Ctrl-C it may be pinned
                    frame.pins.remove(unit)
                    raise
        elif in_backward():  # a recomputation, or a hook; no pin is needed, since the reader holds the parameter
            self._in_backward_pass()
            self._acquire(unit)

    def _on_trace(self) -> None:
        """Renew parameters before each forward pass from now on, since a compiled graph reads them without a hook."""
        self._settles = True
        self.pool.settle()

    # ---- saved tensors

    def _push_saved_hooks(self) -> Callable[..., Any] | None:
        """Push the engine's hooks on top of active hooks, unless they are on top. Return the pushed pack hook."""
        outer = top_saved_hooks()
        packs = self._running.packs
        if outer is not None and packs and outer[0] is packs[-1]:
            return None
        if not saved_hooks_enabled():
            return None  # some torch.func transforms allow none
        pack, unpack = self._saved_hooks
        if outer is not None:
            pack, unpack = partial(self._hooks_on_top[0], outer[0]), partial(self._hooks_on_top[1], outer[1])
        push_saved_hooks(pack, unpack)
        packs.append(pack)
        return pack

    def _pop_saved_hooks(self, pack: Callable[..., Any]) -> None:
        """Pop the hooks with ``pack``, if they are there. Hooks that a program pushed on top stay, for it to pop."""
        packs, above = self._running.packs, list[tuple[Callable[..., Any], Callable[..., Any]]]()
        if not packs or packs[-1] is not pack:
            return
        while (top := top_saved_hooks()) is not None and top[0] is not pack:
            above.append(top)
            pop_saved_hooks()
        if top is not None:
            pop_saved_hooks()
        for outer in reversed(above):
            push_saved_hooks(*outer)
        packs.pop()

    def saved_view(self, tensor: torch.Tensor) -> _SavedView | None:
        """Return what to save for a view of a gathered chunk, or ``None`` for any other tensor."""
        # A subclass may have its values elsewhere, or none.
        if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
            return None
        if tensor.layout is not torch.strided or is_transformed(tensor):
            return None
        chunk = self.pool.by_storage.get(storage_id(tensor.untyped_storage()))
        if chunk is None or tensor.dtype != chunk.spec.dtype:
            if type(tensor) is nn.Parameter and id(tensor) in self._unit_of:
                self._check_there(tensor)
            return None
        return _SavedView(chunk, tensor.size(), tensor.stride(), tensor.storage_offset(), chunk.generation)

    def _check_there(self, param: nn.Parameter) -> None:
        """Raise if an operation saves a parameter that is not gathered.

        Raises:
            RuntimeError: the parameter is NaN, because it is not gathered.
        """
        unit = self.pool.units[self._unit_of[id(param)]]
        if any(self.pool.chunks[index].is_absent(param) for index in unit.chunks):
            raise RuntimeError(
                f"{self._names.get(id(param), 'a parameter')} {tuple(param.shape)} was used in a forward pass while it "
                "was NaN: it is gathered for its module's own forward, and where it is read as an attribute "
                "(self.layer.weight), not by iterating over parameters(). Read it by name, or make the pass inside "
                f"a gathered() block of {self.pool.names.module}"
            )

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor | _SavedView:
        # Detached, since the tensor itself would hold the graph that saves it; the version counter is shared.
        return self.saved_view(tensor) or _SavedTensor(tensor.detach(), version_of(tensor))

    def _unpack(self, saved: _SavedTensor | _SavedView) -> torch.Tensor:
        if isinstance(saved, _SavedTensor):
            if version_of(saved.tensor) != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {saved.tensor.dtype} of shape {tuple(saved.tensor.shape)} is at version "
                    f"{version_of(saved.tensor)} and was saved at version {saved.version}; "
                    "torch.autograd.set_detect_anomaly(True) names the operation that saved it"
                )
            return saved.tensor
        return self.read(saved)

    def _pack_on_top(self, hook: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> _SavedView | _SavedByOthers:
        """Give other hooks every tensor that is not a weight."""
        return self.saved_view(tensor) or _SavedByOthers(hook(tensor))

    def _unpack_on_top(self, hook: Callable[[Any], torch.Tensor], saved: _SavedView | _SavedByOthers) -> torch.Tensor:
        return hook(saved.packed) if isinstance(saved, _SavedByOthers) else self.read(saved)

    def read(self, saved: _SavedView) -> torch.Tensor:
        """Return the view that was saved, gathering its chunk if need be."""
        chunk = saved.chunk
        if saved.generation != chunk.generation:
            names = ", ".join(self._names.get(id(param), "?") for param in chunk.params[:3])
            raise RuntimeError(
                f"{names}, ... were updated {chunk.generation - saved.generation} times since the forward pass of this "
                "backward pass; make the backward pass before optimizer.step()"
            )
        self._in_backward_pass()
        self._acquire(chunk.spec.unit)
        assert chunk.full is not None
        return chunk.full.as_strided(saved.size, saved.stride, saved.offset)

    def remove(self) -> None:
        """Remove all hooks; the parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        for module in self._swapped:
            module._parameters = dict(module._parameters.items())
        self._handles.clear()
        self._swapped.clear()


def trace_hooks(model: nn.Module, pool: ChunkPool, units_of: dict[str, list[int]]) -> list[Callable[[], None]]:
    """Report uses of units to the memory trace where nothing is gathered. Return functions that remove the hooks.

    A compiled block reports nothing, and stays one graph.
    """
    handles = []
    for name, module in model.named_modules():
        if units_of.get(name):

            def before(_module: nn.Module, _args: object, units: tuple[int, ...] = tuple(units_of[name])) -> None:
                for unit in units:
                    pool.acquire(unit)

            handles.append(same_number(module.register_forward_pre_hook(skipped_in_compile(before))))
    return [handle.remove for handle in handles]


def _probes(pool: ChunkPool) -> dict[int, nn.Parameter | None]:
    """Return for each transient parameter by ``id`` itself, or another one of its chunk if it has no strides."""
    probes: dict[int, nn.Parameter | None] = {}
    for chunk in pool.chunks:
        if not chunk.resident:
            other = next((param for param in chunk.params if param.dim()), None)
            probes |= {id(param): param if param.dim() else other for param in chunk.params}
    return probes
