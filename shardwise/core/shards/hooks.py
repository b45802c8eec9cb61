"""What runs around modules and saved tensors so that parameters are gathered exactly while they are read.

Forward: a module that owns parameters acquires and pins its units before, and unpins them after. Backward: autograd
keeps a note instead of a gathered weight (saved-tensor hooks), and the weight is gathered again when the note is read;
so eviction needs no knowledge of the graph. Where other saved-tensor hooks are active (activation checkpointing), they
get what is no weight. What autograd saves where ours cannot be (inside ``torch.func.grad``, hooks pushed within a
module's forward) is an array, which it keeps, or the parameter itself, whose unit the pool then does not evict: right
in both cases, and dearer in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.core.base.torch_internals import (
    current_graph_task,
    in_transform,
    is_transformed,
    pop_saved_hooks,
    push_saved_hooks,
    saved_hooks_enabled,
    storage_id,
    top_saved_hooks,
    version_of,
)
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.compiled import outside_compile, same_number, skipped_in_compile, while_tracing
from shardwise.core.shards.pool import ChunkPool
from shardwise.core.shards.transforms import outside_transforms

__all__ = ["GatherHooks", "in_backward", "trace_hooks"]


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return current_graph_task() != -1


# [Note: Saved tensors become notes]
# Autograd saves what an operation's backward will read. A saved view of a gathered array would keep all of that array,
# so the whole model by the end of the forward pass. Hence, while modules run, saved-tensor hooks put a _Note in the
# place of every tensor that lies in a gathered array: which chunk, and the view's size, strides and offset. When
# backward reads the note the chunk is gathered, if it is not, and the view is made again. Backward needs no knowledge
# of modules then, and a graph that is walked twice, or in part, gathers what it reads.
# * Which tensors: asked by storage, not by parameter, because operations save views (a transposed weight).
# * When it is valid: as long as the chunk's generation, which counts updates, is that of the note; saved tensors have
#   version counters for that, a note has none.
# * Other hooks (activation checkpointing, save_on_cpu) that are active when a module with parameters begins: ours go on
#   top and hand on what is no weight (_Composed).
# * Where ours cannot be (most torch.func transforms; hooks pushed inside a module's own forward): a saved view keeps
#   its array, a saved parameter is not evicted; see [Note: Who counts as a reader]. Right, and dearer in memory.
@dataclass(frozen=True)
class _Note:
    """Stands for a view of a gathered chunk among autograd's saved tensors."""

    chunk: Chunk
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    generation: int


@dataclass(frozen=True)
class _Kept:
    """Any other saved tensor. Autograd leaves it to hooks to notice that a value was changed after it was saved."""

    tensor: torch.Tensor
    version: int


def _keep(tensor: torch.Tensor) -> _Kept:
    # Itself it would hold the graph that saves it, which would never be freed; the version counter is shared.
    return _Kept(tensor.detach(), version_of(tensor))


@dataclass(frozen=True)
class _Other:
    """What the hooks that were active before ours made of a tensor that is no weight."""

    packed: object


@dataclass
class _Frame:
    """A module that runs.

    Attributes:
        pins: units that are pinned until it ends.
        pack: of the saved-tensor hooks that were pushed for it, if any were.
    """

    module: nn.Module
    pins: list[int] = field(default_factory=list)
    pack: Callable[..., Any] | None = None


class _Running(threading.local):
    """The modules that run in a thread, innermost last, and our saved-tensor hooks there."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.packs: list[Callable[..., Any]] = []


class _Parameters(dict[str, nn.Parameter | None]):
    """A module's parameters; reading one that is not gathered during a pass gathers it.

    For models that use a child's weight without calling the child, such as ``F.linear(x, self.embedding.weight)``.

    ``torch.compile`` traces the read, and cannot tell a parameter of the module that runs from another's. Whether it is
    gathered shows in its strides, which are zero if not, and which the graph's guards compare: a read that finds
    nothing gathered, when traced or later, breaks the graph and gathers.

    Args:
        items: the parameters by name.
        on_read: gathers a parameter by its ``id``, outside any graph.
        probes: for the transient ones, a parameter of the same chunk that has strides; ``None`` if none has.
        on_trace: called when a graph is traced that reads a resident one, whose renewal may be under way.
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
            # Before the parameter is at hand: who holds one while it is gathered reads it.
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
    """Installs the hooks of one model's transient chunks; :meth:`remove` takes them away.

    Args:
        model: the user's module.
        pool: its chunks.
        unit_of: unit index by ``id`` of parameter, transient ones only.
        units_of_module: units whose block is exactly this module, by FQN.
        in_backward_pass: called when a gather happens during backward, so that its end is noticed.
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
        """By name of a module: what it acquires before its forward pass."""
        self._running = _Running()
        self._saved_hooks = outside_compile(self._pack), outside_compile(self._unpack)
        self._handles: list[Any] = []
        self._swapped: list[nn.Module] = []
        self._settles = False
        probes = _probes(pool)
        on_trace = while_tracing(self._on_trace)
        for name, module in model.named_modules():
            own = {unit_of[id(p)] for p in module._parameters.values() if p is not None and id(p) in unit_of}
            blocks = units_of_module.get(name, [])
            units = sorted(own | set(blocks))
            around = {u for block, held in units_of_module.items() if name.startswith(block + ".") for u in held}
            self.units_of[name] = units
            # The root always has a frame: code in its forward may read any parameter.
            if units or module is model:
                self._install(module, units, covered=bool(units) and around.issuperset(units))
            if own:
                found = {n: probes[id(p)] for n, p in module._parameters.items() if id(p) in probes}
                module._parameters = _Parameters(module._parameters, self.on_read, found, on_trace)
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
        # Also after an exception; after an interrupt torch calls no hooks, see unwind().
        self._handles.append(same_number(module.register_forward_hook(after, always_call=True)))

    def _holds_all(self, module: nn.Module, units: list[int]) -> bool:
        """Whether the module around ``module`` has pinned its ``units`` until after it, and our saved-tensor hooks are
        on top: it needs no frame. It leaves none then (:meth:`_leave`)."""
        running = self._running
        if not running.frames or not running.packs or in_transform() or self.pool.ledger.capacity_bytes is not None:
            return False  # under a capacity each use is measured
        pins, top = running.frames[-1].pins, top_saved_hooks()
        if top is None or top[0] is not running.packs[-1] or [u for u in units if u not in pins]:
            return False
        return module not in [frame.module for frame in running.frames]  # one that calls itself

    def _enter(self, module: nn.Module, units: list[int]) -> None:
        frames = self._running.frames
        frame = _Frame(module, pack=self._push_saved_hooks())
        # Noted down before its units are pinned: whatever comes, _leave unpins them.
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
            frames.pop()  # only now: whoever is interrupted here leaves it again

    @property
    def running(self) -> bool:
        """Whether a module is in its forward pass in this thread."""
        return bool(self._running.frames)

    def unwind(self) -> None:
        """After an interruption of a forward pass that ran no hooks (``KeyboardInterrupt``): leave every module."""
        if self._running.frames and not in_backward():
            self._leave(self._running.frames[0].module)

    def explain(self, error: BaseException) -> None:
        """A forward pass raised ``error``.

        Raises:
            RuntimeError: it came from a transform inside the forward pass, which takes no saved-tensor hooks around it.
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
        """The parameter with this ``id`` is about to be read: in a pass, its unit is gathered."""
        unit = self._unit_of.get(param)
        if unit is None:
            return
        if self._running.frames:
            frame = self._running.frames[-1]
            if unit not in frame.pins:
                frame.pins.append(unit)
                try:
                    self._acquire(unit, frame)
                except Exception:  # after an interrupt it may be pinned
                    frame.pins.remove(unit)
                    raise
        elif in_backward():  # a recomputation, or a hook; no pin is needed, since the reader holds the parameter
            self._in_backward_pass()
            self._acquire(unit)

    def _on_trace(self) -> None:
        """A graph reads renewed parameters without asking: from now on they are renewed before each forward pass."""
        self._settles = True
        self.pool.settle()

    # ---- saved tensors

    def _push_saved_hooks(self) -> Callable[..., Any] | None:
        """Ours go on top of others that are active, unless they are there already. Returns what was pushed."""
        others = top_saved_hooks()
        packs = self._running.packs
        if others is not None and packs and others[0] is packs[-1]:
            return None
        if not saved_hooks_enabled():
            return None  # some torch.func transforms take none
        pack, unpack = self._saved_hooks
        if others is not None:
            composed = _Composed(self, *others)
            pack, unpack = composed.pack, composed.unpack
        push_saved_hooks(pack, unpack)
        packs.append(pack)
        return pack

    def _pop_saved_hooks(self, pack: Callable[..., Any]) -> None:
        """Those with ``pack``, if they are there. What a program has put on top of them stays, for it to pop."""
        packs, above = self._running.packs, list[tuple[Callable[..., Any], Callable[..., Any]]]()
        if not packs or packs[-1] is not pack:
            return
        while (top := top_saved_hooks()) is not None and top[0] is not pack:
            above.append(top)
            pop_saved_hooks()
        if top is not None:
            pop_saved_hooks()
        for others in reversed(above):
            push_saved_hooks(*others)
        packs.pop()

    def note_of(self, tensor: torch.Tensor) -> _Note | None:
        """What stands for a view of a gathered chunk; ``None`` for any other tensor."""
        # A subclass may have its values elsewhere, or none: it is kept as it is.
        if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
            return None
        if tensor.layout is not torch.strided or is_transformed(tensor):
            return None
        chunk = self.pool.by_storage.get(storage_id(tensor.untyped_storage()))
        if chunk is None or tensor.dtype != chunk.spec.dtype:
            if type(tensor) is nn.Parameter and id(tensor) in self._unit_of:
                self._check_there(tensor)
            return None
        return _Note(chunk, tensor.size(), tensor.stride(), tensor.storage_offset(), chunk.generation)

    def _check_there(self, param: nn.Parameter) -> None:
        """Raises:
        RuntimeError: an operation that saves it has computed with what stands for it while it is not gathered.
        """
        unit = self.pool.units[self._unit_of[id(param)]]
        if any(self.pool.chunks[index].is_absent(param) for index in unit.chunks):
            raise RuntimeError(
                f"{self._names.get(id(param), 'a parameter')} {tuple(param.shape)} was used in a forward pass while it "
                "was NaN: it is gathered for its module's own forward, and where it is read as an attribute "
                "(self.layer.weight), not by iterating over parameters(). Read it by name, or make the pass inside "
                "`with model.gathered():` of what boost/build returned"
            )

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Note:
        return self.note_of(tensor) or _keep(tensor)

    def _unpack(self, saved: _Kept | _Note) -> torch.Tensor:
        if isinstance(saved, _Kept):
            if version_of(saved.tensor) != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {saved.tensor.dtype} of shape {tuple(saved.tensor.shape)} is at version "
                    f"{version_of(saved.tensor)} and was saved at version {saved.version}; "
                    "torch.autograd.set_detect_anomaly(True) names the operation that saved it"
                )
            return saved.tensor
        return self.read(saved)

    def read(self, saved: _Note) -> torch.Tensor:
        """The view that a note stands for, gathered if need be."""
        chunk = saved.chunk
        if saved.generation != chunk.generation:
            names = ", ".join(self._names.get(id(param), "?") for param in chunk.params[:3])
            raise RuntimeError(
                f"{names}, ... were updated {chunk.generation - saved.generation} times since the forward pass of this "
                "backward pass; make the backward pass before optimizer.step()"
            )
        self._in_backward_pass()
        self._acquire(chunk.spec.unit)
        full = chunk.full
        if full is None:
            raise RuntimeError(f"unit {chunk.spec.unit} has full={full} right after its gather; report this")
        return full.as_strided(saved.size, saved.stride, saved.offset)

    def remove(self) -> None:
        """Take all hooks away; the parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        for module in self._swapped:
            module._parameters = dict(module._parameters.items())
        self._handles.clear()
        self._swapped.clear()


class _Composed:
    """Saved-tensor hooks on top of others: weights become notes, and the others get what is left."""

    def __init__(
        self, ours: GatherHooks, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self._ours, self._pack, self._unpack = ours, pack, unpack

    @outside_compile
    def pack(self, tensor: torch.Tensor) -> _Note | _Other:
        return self._ours.note_of(tensor) or _Other(self._pack(tensor))

    @outside_compile
    def unpack(self, saved: _Note | _Other) -> torch.Tensor:
        return self._unpack(saved.packed) if isinstance(saved, _Other) else self._ours.read(saved)


def trace_hooks(model: nn.Module, pool: ChunkPool, units_of: dict[str, list[int]]) -> list[Callable[[], None]]:
    """Where nothing is gathered, only the memory trace wants to know which units are used when: modules report it.

    A compiled block reports nothing, and stays one graph. Returns what takes the hooks away.
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
    """For each transient parameter by ``id``: itself, or where it has no strides another one of its chunk."""
    found: dict[int, nn.Parameter | None] = {}
    for chunk in pool.chunks:
        if not chunk.resident:
            other = next((param for param in chunk.params if param.dim()), None)
            found |= {id(param): param if param.dim() else other for param in chunk.params}
    return found
