"""Steps any element-wise torch optimizer over this rank's shards, a cache-sized tile at a time.

A *piece* is the part of one parameter in this rank's shard (at most a tile long). The optimizer steps this flat tensor
as a parameter, so per-parameter state such as Adam's step count is exactly torch's, also for parameters that some steps
do not use. The optimizer's param groups keep the model's own parameters ([Note: What groups hold]). A *tile* is a run
of neighboring pieces that are stepped in one call. The cast of the gradient, the unscaling and clipping, and the cast
of the result run while the data is in cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.torch_version import TorchVersion

from shardwise.core.base.tensors import ordinary_tensors
from shardwise.core.base.torch_internals import copy_each, labelled, plain, point
from shardwise.core.checks.param_groups import ParamGroups, check_modes
from shardwise.core.grads.chunk_grads import ChunkGrads
from shardwise.core.grads.norm import TileNorm
from shardwise.core.memory.tier import Tier
from shardwise.core.optim.element_wise import couples_elements, couples_parameters
from shardwise.core.optim.nested_state import tensors_of
from shardwise.core.optim.state_form import constructed_state
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.layout import span_text
from shardwise.core.update.master_weights import ChunkState, UploadSlots
from shardwise.core.update.tile_plan import TILE_NUMEL, ShardRange, TileRange
from shardwise.plan.precision import HALF_DTYPES

NEVER = ("lbfgs", "sparseadam")
"""Names of optimizers whose update of a parameter needs other parameters, or gradients that are not arrays."""
WHOLE_TENSORS = ("muon", "adafactor", "shampoo", "soap", "lamb", "lars", "novograd", "came")
"""Names of optimizers that need a parameter's shape or norm."""
OURS = ("shardwise.core.optim", "shardwise.nn")
OF_TORCH_OR_OURS = ("torch.optim", *OURS)
"""Modules whose optimizers are known to be element-wise, except the names above and classes that declare otherwise."""
NOTHING: dict[str, Any] = {}
"""The state of a piece that the optimizer has not stepped."""
HAS_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused kernels only read gradients; others may write (``SGD(nesterov=True, foreach=True)`` does)."""
ADAGRAD_ON_GPUS = TorchVersion(torch.__version__.split("+")[0]) >= "2.12"
"""Whether torch has Adagrad's fused kernel for GPUs; before 2.12 its step raises there."""


@dataclass(frozen=True, eq=False)
class ParamShard(ShardRange):
    """A range of the shard, and ``value``, which holds its elements."""

    value: nn.Parameter


@dataclass(frozen=True, eq=False)
class UpdateTile(TileRange):
    """Neighboring pieces of one chunk, with their values."""

    pieces: tuple[ParamShard, ...]
    chunk: Chunk
    grads: ChunkGrads
    state: ChunkState


class PendingTile(NamedTuple):
    """A tile to be updated.

    Attributes:
        active: the pieces to update, at least one.
        reduced: the gradient of the shard.
        shard: receives the result (1-D, in memory); ``None``: the shard is not written.
    """

    tile: UpdateTile
    active: Sequence[ParamShard]
    reduced: torch.Tensor
    shard: torch.Tensor | None


def _by_state_keys(active: Sequence[ParamShard], entries: Sequence[dict[str, Any]]) -> Iterable[Sequence[ParamShard]]:
    """Group pieces whose state has the same keys: a fused kernel takes momentum of all pieces or of none.

    On a GPU the kernel needs the step count on the device; loaded state and Adagrad's state have it elsewhere.
    """
    device = active[0].value.device
    if device.type == "cpu" and len(set(map(tuple, entries))) == 1:
        missing = [key for entry in entries for key, value in entry.items() if value is None]
        if not missing:
            return (active,)
    by_keys = dict[frozenset[str], list[ParamShard]]()
    for piece, entry in zip(active, entries, strict=True):
        step = entry.get("step") if device.type != "cpu" else None
        if isinstance(step, torch.Tensor) and step.device != device:
            entry["step"] = step.to(device, torch.float32)
        by_keys.setdefault(frozenset([key for key, value in entry.items() if value is not None]), []).append(piece)
    return by_keys.values()


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` needs whole parameters with their shapes; otherwise flat parts are enough.

    Optimizers of other libraries step small matrices to find out, and are unchanged afterwards.

    Raises:
        ValueError: neither works, because the update of a parameter depends on others or on how often ``step()`` is
            called, or because the optimizer is ``differentiable`` or ``capturable``.
    """
    name = type(optimizer).__name__
    names = {base.__name__.lower() for base in type(optimizer).__mro__}
    if not names.isdisjoint(NEVER):
        raise ValueError(
            f"optimizer {name} works on all parameters at once, but each rank updates its own: use one that updates "
            "each by itself (AdamW)"
        )
    check_modes(f"optimizer {name}", optimizer.param_groups)
    why = getattr(optimizer, "couples_parameters", "")
    if why:
        raise ValueError(f"optimizer {name} cannot be sharded: {why}")
    if getattr(optimizer, "whole_tensors", False):  # trusted, like element_wise
        return True
    named = not names.isdisjoint(WHOLE_TENSORS)
    if not is_foreign(optimizer) or (not named and not couples_elements(optimizer)):
        return named
    if (not named and getattr(optimizer, "element_wise", None) is False) or couples_parameters(optimizer):
        raise ValueError(
            f"optimizer {name} gives parameters other values in one call of step() than in several, as shards are "
            "stepped: use one whose update of a parameter depends on nothing else (AdamW); or give it the attribute "
            "element_wise=True or whole_tensors=True, if its update of an element or of a tensor does not, or if the "
            "difference is wanted"
        )
    return True


def is_foreign(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class belongs to neither torch nor shardwise."""
    return not type(optimizer).__module__.startswith(OF_TORCH_OR_OURS)


def make_tiles(grads: ChunkGrads, state: ChunkState, ranges: Sequence[TileRange]) -> list[UpdateTile]:
    """Return the tiles of one chunk. Tiles on a disk get their values when they are read."""
    chunk = state.chunk
    if state.on_disk:
        dtype = state.dtype or chunk.spec.dtype
        values = torch.full((), float("nan"), dtype=dtype, device="cpu").expand(chunk.shard_numel)
    else:
        values = state.master if state.master is not None else chunk.shard
    tiles = []
    for span in ranges:
        pieces = list[ParamShard]()
        for piece in span.pieces:
            own, shape = values[piece.start : piece.end], chunk.spec.slots[piece.slot].shape
            own = own.view(shape) if chunk.spec.unsplit and len(shape) > 1 else own
            pieces.append(ParamShard(**vars(piece), value=nn.Parameter(own, requires_grad=True)))
        tiles.append(UpdateTile(span.group, tuple(pieces), chunk, grads, state))
    return tiles


class BareStep:
    """Steps one param group of a user's optimizer, without its step hooks and without counting for schedulers.

    It skips the wrappers of ``step`` that run hooks and count. If the program has replaced ``step``, it calls the
    replacement unchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._step: Any = vars(optimizer).get("step")
        if self._step is None or hasattr(self._step, "_wrapped_by_lr_sched"):
            function: Any = type(optimizer).step
            # Torch marks the class's own step after it has wrapped it, at the first instance.
            self._step = MethodType(function.__wrapped__ if getattr(function, "hooked", False) else function, optimizer)
        self.module: str = getattr(self._step, "__module__", None) or ""
        """The module that defines the step."""

    def step(self, group: dict[str, Any]) -> None:
        """Step ``group`` alone; called inside :meth:`hidden`."""
        self._optimizer.param_groups = [group]
        self._step()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Return a context in which the optimizer has no hooks, because its ``step`` may call that of its base class.

        A step that drops gradients drops only those of its group there. Groups and hooks are restored at the end.
        """
        optimizer, own = self._optimizer, vars(self._optimizer)
        drop, groups = own.get("zero_grad"), optimizer.param_groups
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        try:
            own.pop("zero_grad", None)
            optimizer._optimizer_step_pre_hooks = OrderedDict()
            optimizer._optimizer_step_post_hooks = OrderedDict()
            yield
        finally:
            if drop is not None:
                own["zero_grad"] = drop
            optimizer._optimizer_step_pre_hooks = before
            optimizer._optimizer_step_post_hooks = after
            optimizer.param_groups = groups


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether :func:`run_pre_hooks` calls any hook."""
    return bool(optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)


def run_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks on this optimizer's steps and on those of all optimizers, in torch's order.

    They run once for each step, not once for each tile, and before gradients and options are used.

    Raises:
        RuntimeError: a hook changes the arguments of ``step``, which has no arguments here.
    """
    hooks = chain(torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
    for hook in hooks:
        if (result := hook(optimizer, (), {})) is not None:
            raise RuntimeError(
                f"a step_pre_hook of {type(optimizer).__name__} returned {result!r}: a sharded step takes no arguments "
                "that a hook could change; return None"
            )


def run_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks after a step, as :func:`run_pre_hooks` does those before it."""
    hooks = chain(optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values())
    for hook in hooks:
        hook(optimizer, (), {})


def _memory_of(value: torch.Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.dtype, value.device, value.shape, value.stride()


@contextmanager
def same_memory(name: str, values: Sequence[torch.Tensor], named: Callable[[int], str]) -> Iterator[None]:
    """Copy back assignments of a step: ``p.data = p.data - lr * p.grad`` gives a parameter other memory.

    A parameter's memory is part of a shard, a master or a disk buffer, which are read after the step. So at the end of
    the block, which is a step, the values are copied there (cast as ``copy_`` does) and the parameter points there
    again. Called without gradients.

    Args:
        name: The optimizer's class, for errors.
        values: The parameters that are stepped.
        named: Names the value at a position, for errors.

    Raises:
        RuntimeError: A value was assigned another shape.
    """
    originals = [plain(value) for value in values]
    shapes: dict[int, tuple[int, ...]] = {}
    try:
        yield
    finally:
        moved = [at for at, own in enumerate(originals) if _memory_of(values[at]) != _memory_of(own)]
        # Copies first: parameters may have exchanged memory, or have theirs in another order.
        assigned = {at: plain(values[at]).clone() for at in moved}
        for at, new in assigned.items():
            point(values[at], originals[at])
            if new.shape == originals[at].shape:
                originals[at].copy_(new)
            else:
                shapes[at] = tuple(new.shape)
    for at, shape in shapes.items():
        raise RuntimeError(
            f"{name}.step() gives {named(at)} values of shape {shape} where it was given {tuple(originals[at].shape)} "
            "of it: leave the shape as it is"
        )


# See [Note: Masters apart from parameters] for the values of a tile.
class TileStepper:
    """Runs a torch optimizer over tiles. It owns the scratch memory for gradients in the update's dtype.

    Args:
        named: returns the name of a piece's parameter for errors, from its index among the facts.
        slots: copy updated masters on the host to shards on a GPU.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tiles: Sequence[UpdateTile],
        named: Callable[[int], str] = "param {}".format,
        slots: UploadSlots | None = None,
    ) -> None:
        self.optimizer, self.tiles, self._named = optimizer, tuple(tiles), named
        self.slots = slots or UploadSlots()
        self._scratch: dict[tuple[torch.dtype, Tier], torch.Tensor] = {}
        self._state_dtypes: dict[torch.dtype, dict[str, torch.dtype]] = {}
        self._generation = 0
        """Number of events that may have changed the size of the state."""
        self._counted = -1, Counter[Tier]()
        self.param_groups = ParamGroups(optimizer)
        self._bare = BareStep(optimizer)
        self._fused: set[int] = set()
        """Groups for which shardwise chose torch's fused kernel."""
        self.foreign, self._ours = is_foreign(optimizer), type(optimizer).__module__.startswith(OURS)
        self._may_move = self.foreign or not self._bare.module.startswith(OF_TORCH_OR_OURS)
        """Whether the step of the optimizer may assign other memory to parameters."""
        self.norm: TileNorm | None = None
        """Receives the gradients that an update reads, if it needs them."""

    @contextmanager
    def stepping(self, factor: float) -> Iterator[Callable[[Sequence[tuple[UpdateTile, torch.Tensor | None]]], None]]:
        """Return a function that updates tiles for one step, each with the shard (1-D, in memory) that receives the
        masters.

        Every piece that has a gradient is updated with ``factor`` times it. Values and state of the tiles must be in
        memory, and the tiles must have the same properties; see :meth:`step_tiles`. The function does not run the
        user's step hooks; see :func:`run_pre_hooks`.
        """
        with torch.no_grad(), self.groups() as groups:

            def update(tiles: Sequence[tuple[UpdateTile, torch.Tensor | None]]) -> None:
                active = [(tile, shard, self.active(tile)) for tile, shard in tiles]
                pending = [
                    PendingTile(tile, pieces, tile.grads.reduced, shard)
                    for tile, shard, pieces in active
                    if pieces and tile.grads.reduced is not None
                ]
                if pending:
                    self.step_tiles(pending, factor, groups)

            yield update

    @staticmethod
    def active(tile: UpdateTile) -> Sequence[ParamShard]:
        """Return the pieces of a tile that have a gradient."""
        grads = tile.grads
        if not grads.present:
            return ()
        touched = grads.used_globally
        if len(touched) == len(grads.spec.slots):
            return tile.pieces
        return [piece for piece in tile.pieces if piece.slot in touched]

    @labelled("update", lambda _, pending, *__: span_text([each.tile.chunk.spec.title for each in pending]))
    def step_tiles(self, pending: Sequence[PendingTile], factor: float, groups: list[dict[str, Any]]) -> None:
        """Update each tile with ``factor`` times its gradient, in one call of the optimizer, and its shard if it is
        given.

        All tiles have one param group, one tier, and the same dtypes of values and gradients. Called without gradients.
        """
        first, value = pending[0].tile, pending[0].active[0].value
        group = self._group_for(groups, first.group, value)
        parts = [each.reduced[each.active[0].start : each.active[-1].end] for each in pending]
        elsewhere = parts[0].dtype != value.dtype or parts[0].device != value.device
        only_reads = self._ours or (bool(group.get("fused")) and not self.foreign)
        copied = elsewhere or factor != 1.0 or not only_reads
        if copied:
            # Not in place: peers may still read exchange memory. The cast comes first: scaling in 16 bits would round
            # the gradient twice.
            numels = [each.numel() for each in parts]
            scratch = self._scratch_for(sum(numels), value, first.state.tier)
            copies = list(torch.split(scratch, numels))
            copy_each(copies, parts)
            parts = copies
        if self.norm is not None and self.norm.collects:
            self.norm.add([scratch] if copied else parts)
        if factor != 1.0:
            scratch.mul_(factor)
        active = [piece for each in pending for piece in each.active]
        shaped = first.chunk.spec.unsplit
        for each, part in zip(pending, parts, strict=True):  # a part has the elements between pieces, too
            for piece in each.active:
                grad = part[piece.start - each.active[0].start : piece.end - each.active[0].start]
                piece.value.grad = grad.view(piece.value.shape) if shaped else grad
        if self._may_move:
            name = type(self.optimizer).__name__
            with same_memory(name, [piece.value for piece in active], lambda at: self._named(active[at].param)):
                self._call(group, active)
        else:
            self._call(group, active)
        for piece in active:
            piece.value.grad = None
        self._round([each for each in pending if each.shard is not None])

    def _round(self, pending: Sequence[PendingTile]) -> None:
        """Copy updated masters into the shards."""
        to, values = list[torch.Tensor](), list[torch.Tensor]()
        for tile, active, _, shard in pending:
            assert shard is not None
            if tile.state.master is not None:
                first, last = active[0].start, active[-1].end
                to.append(shard[first:last])
                values.append(tile.state.master[first:last])
            elif tile.state.dtype is not None:
                to += [shard[piece.start : piece.end] for piece in active]
                values += [piece.value.view(-1) for piece in active]
        if to and to[0].device != values[0].device:
            for shard, value in zip(to, values, strict=True):
                self.slots.copy(shard, value)
        elif to:
            copy_each(to, values)

    def _call(self, group: dict[str, Any], active: Sequence[ParamShard]) -> None:
        before = {key: value for key, value in group.items() if key != "params"}
        entries = self._entries(active)
        size = sum(map(len, entries))
        # One group with the active pieces of these tiles: the optimizer's own loop steps nothing else.
        for pieces in _by_state_keys(active, entries) if group.get("fused") else (active,):
            group["params"] = [piece.value for piece in pieces]
            self._bare.step(group)
        # Optimizers make state at the first step of a piece, and keep its size.
        if sum(map(len, self._entries(active) if self.foreign or NOTHING in entries else entries)) != size:
            self.state_changed()
        changed = [key for key, value in group.items() if key != "params" and before.get(key) is not value]
        if changed:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() changes its param group ({changed}), and would do so once a "
                "tile, so it cannot be sharded; use an optimizer whose state belongs to parameters"
            )

    def element_dtypes(self, like: torch.Tensor, index: int = 0) -> dict[str, torch.dtype]:
        """Return by key the state for each element of a parameter like ``like`` in a param group.

        To find out, the optimizer steps a parameter of two elements in each dimension, which is then dropped.
        """
        optimizer = self.optimizer
        # Two elements, so that a count of shape (1,) is not taken for state of each element.
        probe = nn.Parameter(torch.zeros((2,) * like.dim(), dtype=like.dtype, device=like.device))
        probe.grad = torch.zeros_like(probe)
        with self.groups() as groups, torch.random.fork_rng(devices=[]):
            group = self._group_for(groups, index, probe)
            made = constructed_state(optimizer, group, probe)
            if made:
                optimizer.state[probe] = made
            self._call(group, [ParamShard(slot=0, param=0, offset=0, start=0, end=2, value=probe)])
        state = optimizer.state.pop(probe, {})
        return {k: v.dtype for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == probe.shape}

    def dtype_for(self, key: str, stored: torch.dtype, like: torch.Tensor) -> torch.dtype:
        """Return the dtype for per-element state of a parameter like ``like`` that was ``stored`` in another dtype.

        It is the parameter's dtype, as in torch. State is in 16 bits only if the optimizer itself keeps it so (CPUAdam
        has fp32 moments for any parameter).
        """
        if not stored.is_floating_point:
            return stored
        if like.dtype not in HALF_DTYPES or stored == like.dtype:
            return like.dtype
        if like.dtype not in self._state_dtypes:
            self._state_dtypes[like.dtype] = self.element_dtypes(like)
        return self._state_dtypes[like.dtype].get(key, like.dtype)

    def _scratch_for(self, numel: int, like: torch.Tensor, tier: Tier) -> torch.Tensor:
        key = (like.dtype, Tier.HOST if tier is Tier.DISK else tier)
        have = self._scratch.get(key)
        if have is None or have.numel() < numel:
            with ordinary_tensors():
                have = self._scratch[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return have[:numel]

    def scratch_bytes(self, tier: Tier) -> int:
        """Return memory for gradients in the update's dtype, kept between steps. For state on a disk it is host
        memory."""
        return sum(scratch.nbytes for (_, where), scratch in self._scratch.items() if where is tier)

    def _entries(self, pieces: Sequence[ParamShard]) -> list[dict[str, Any]]:
        state = self.optimizer.state
        if isinstance(state, dict):  # independent of an overridden get(), which is for users
            return [dict.get(state, piece.value, NOTHING) for piece in pieces]
        return [state.get(piece.value, NOTHING) for piece in pieces]

    def state_changed(self) -> None:
        """Record that state was made, dropped, replaced or moved. The next query computes the size of state again."""
        self._generation += 1

    def state_bytes(self, tier: Tier) -> int:
        """Return the bytes of optimizer state of the tiles whose home is ``tier``."""
        generation, counted = self._counted
        if generation != self._generation:
            generation = self._generation  # read before counting: another thread may be updating
            counted = Counter[Tier]()
            for tile in self.tiles:
                # Lists: another thread may be updating.
                entries = [list(entry.values()) for entry in self._entries(tile.pieces)]
                counted[tile.state.tier] += sum(value.nbytes for value in tensors_of(entries))
            self._counted = generation, counted
        return counted[tier]

    @contextmanager
    def groups(self) -> Iterator[list[dict[str, Any]]]:
        """Return working copies of the param groups, with torch's fused kernel if the user left the choice to torch."""
        optimizer = self.optimizer
        work = [dict(group) for group in self.param_groups.now]
        chosen = set[int]()
        for index, group in enumerate(work):
            free = group.get("fused", False) is None and not group.get("foreach")
            if free and isinstance(optimizer, HAS_FUSED) and not isinstance(group.get("lr"), torch.Tensor):
                group["fused"], group["foreach"] = True, False
                chosen.add(index)
        self._fused = chosen
        with self._bare.hidden():
            yield work

    def _group_for(self, groups: Sequence[dict[str, Any]], index: int, value: torch.Tensor) -> dict[str, Any]:
        """Return the working copy for values like this one: tiles of one group may be on two devices."""
        group = groups[index]
        if index not in self._fused or not self._fuses_wrongly(value):
            return group
        return {**group, "fused": None, "foreach": self.param_groups.now[index].get("foreach")}

    def _fuses_wrongly(self, value: torch.Tensor) -> bool:
        """Return whether torch's kernel is missing or wrong: SGD's on a CPU gives wrong 16-bit values (torch 2.13)."""
        if isinstance(self.optimizer, torch.optim.Adagrad):
            return value.device.type != "cpu" and not ADAGRAD_ON_GPUS
        on_cpu = isinstance(self.optimizer, torch.optim.SGD) and value.device.type == "cpu"
        return on_cpu and value.dtype in HALF_DTYPES


def runs(tiles: Iterable[UpdateTile]) -> Iterator[list[UpdateTile]]:
    """Return ``tiles`` in calls of tiles with the same param group, home, device, and dtypes of values and gradients,
    each of at most one tile's maximum of elements."""
    open_runs = dict[tuple[Any, ...], tuple[list[UpdateTile], int]]()
    for tile in tiles:
        value, grads = tile.pieces[0].value, tile.grads
        key = tile.group, tile.state.tier, value.device, value.dtype, grads.dtype, grads.accumulate_dtype
        run, numel = open_runs.get(key, ([], 0))
        if run and numel + tile.numel > TILE_NUMEL[value.device.type]:
            yield run
            run, numel = [], 0
        run.append(tile)
        open_runs[key] = run, numel + tile.numel
    for run, _ in open_runs.values():
        yield run
