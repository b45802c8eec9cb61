"""Pack parameters into units and chunks: pure arithmetic, without tensors or processes, and equal on every rank.

A *unit* is a parameter group in FSDP2's sense: its parameters are gathered together. A *chunk* is the part of a unit
with one dtype, trainability, optimizer and gradient dtype: one flat array, padded so that it divides evenly over the
shard group. Each parameter lies within one chunk. If an optimizer needs whole tensors, each parameter also lies within
one rank's shard; see [Note: Whole tensors].
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul

import torch
from torch import nn

from shardwise.core.comm import Bounds
from shardwise.core.parallel.tensor import Part
from shardwise.plan import ByModule, ByNumel, BySearch, ByTensor, Packing, ParamGroupPlan

ALIGN_BYTES = 64  # a cache line, and what vector and tensor-core kernels want of a weight's address


@dataclass(frozen=True)
class ParamInfo:
    """The properties of a parameter that packing reads."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    optimizer: int
    """Index of the optimizer that holds it, -1 for none."""
    group: int
    """Index of its param group in that optimizer, -1 for none."""
    part: Part | None = None
    """This rank's part of a tensor-parallel parameter, of which ``shape`` is the shape."""
    earlier: bool = False
    """Whether an earlier pipeline stage has the parameter, too."""

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full parameter, as it is saved."""
        return self.shape if self.part is None else self.part.full_shape

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class ParamSpan:
    """Parameter ``param`` (index into the facts) occupies ``[start, start + numel)`` of its chunk."""

    param: int
    start: int
    numel: int
    shape: torch.Size

    @cached_property
    def end(self) -> int:
        return self.start + self.numel

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        if not self.shape:
            return ()
        # Contiguous; like torch, count an empty dimension as one of size 1.
        return tuple(accumulate((max(size, 1) for size in reversed(self.shape[1:])), mul, initial=1))[::-1]

    def view(self, array: torch.Tensor) -> torch.Tensor:
        """Return the parameter's part of ``array`` (1-D, contiguous, in chunk coordinates), in its shape."""
        # One call to torch instead of a slice and a view: every parameter is pointed twice a gather.
        return array.as_strided(self.shape, self._strides, array.storage_offset() + self.start)


@dataclass(frozen=True)
class ChunkSpec:
    """A flat array of ``padded_numel`` elements, of which rank ``r`` has ``bounds[r]`` to ``bounds[r + 1]``."""

    index: int
    unit: int
    title: str
    """The title of its unit."""
    dtype: torch.dtype
    trainable: bool
    optimizer: int
    slots: tuple[ParamSpan, ...]
    bounds: Bounds
    """Offsets of the ranks' shards, and the end of the last shard. No shard is empty."""
    reshard_after_forward: bool | None
    """False: stays gathered (small tensors of ``ByTensor``, and what the plan says). True: freed after forward.
    None: the plan's budget decides."""
    unsplit: bool = False
    """Each parameter lies in one rank's shard, where the optimizer gets it in its shape."""

    @property
    def padded_numel(self) -> int:
        return self.bounds[-1]

    def shard_numel(self, rank: int) -> int:
        """Return the elements of the shard of ``rank``, padding included."""
        return self.bounds[rank + 1] - self.bounds[rank]

    @cached_property
    def shard_offsets(self) -> Bounds | None:
        """``bounds`` if shards differ in length, otherwise ``None``."""
        if isinstance(self.bounds, range):
            return None
        return self.bounds if len({end - start for start, end in pairwise(self.bounds)}) > 1 else None

    @property
    def padded_bytes(self) -> int:
        return self.padded_numel * self.dtype.itemsize

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges without a parameter (alignment and tail), as ``(start, end)``."""
        gaps, at = [], 0
        for slot in self.slots:
            if slot.start > at:
                gaps.append((at, slot.start))
            at = slot.end
        if at < self.padded_numel:
            gaps.append((at, self.padded_numel))
        return tuple(gaps)


@dataclass(frozen=True)
class UnitSpec:
    """Chunks that are gathered together.

    Attributes:
        module: the FQN of the block that it covers, or ``None``.
        title: name of the unit in messages, pictures and profiles: the module, or parameters.
    """

    index: int
    chunks: tuple[int, ...]
    module: str | None
    title: str


@dataclass(frozen=True)
class Layout:
    """The whole packing. ``where[i]`` is the (chunk index, slot) of parameter ``i``."""

    facts: tuple[ParamInfo, ...]
    units: tuple[UnitSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    where: tuple[tuple[int, ParamSpan], ...]
    searched_numel: int | None = None
    """Chunk size in elements that a search chose. ``None`` without a search."""


@dataclass(frozen=True)
class _Bin:
    """The parameters of one unit."""

    params: list[int]
    module: str | None = None
    reshard_after_forward: bool | None = None


def _bins_by_numel(facts: Sequence[ParamInfo], params: Iterable[int], chunk_numel: int) -> list[_Bin]:
    bins: list[_Bin] = []
    used = 0
    for index in params:
        numel = facts[index].numel
        if not bins or used + numel > chunk_numel:
            bins.append(_Bin([]))
            used = 0
        bins[-1].params.append(index)
        used += numel
    return bins


def span_text(names: Sequence[str]) -> str:
    """Return the first and the last of ``names``, or the only one."""
    return " to ".join(dict.fromkeys([names[0], names[-1]]))


def module_units(model: nn.Module, packing: ByModule) -> list[str]:
    """Return the FQNs of the modules that are units of their own, in module order, none inside another.

    Raises:
        ValueError: a class in ``unit_classes`` does not occur in the model.
    """
    names: list[str] = []
    seen_classes: set[str] = set()
    for name, module in model.named_modules():
        if any(name == unit or name.startswith(unit + ".") for unit in names):
            continue
        for child_name, child in module.named_children():
            class_name = type(child).__name__
            in_list = not packing.unit_classes and isinstance(module, nn.ModuleList | nn.Sequential)
            if class_name in packing.unit_classes or in_list:
                seen_classes.add(class_name)
                if next(child.parameters(), None) is not None:
                    names.append(f"{name}.{child_name}" if name else child_name)
    missing = set(packing.unit_classes) - seen_classes
    if missing:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(f"unit_classes={sorted(missing)} are not in the model; its classes are {known}")
    return names


def _bins_by_module(facts: Sequence[ParamInfo], model: nn.Module, packing: ByModule) -> list[_Bin]:
    """Return one bin per unit, without the parameters of units inside it.

    Other parameters are grouped by the root's children, or, where the units are named, by size.
    """
    modules = {name for name, _ in model.named_modules()}
    missing = [name for name in packing.unit_names if name not in modules]
    if missing:
        raise ValueError(f"unit_names={missing} are not modules of the model; use names of its named_modules()")
    units = sorted(packing.unit_names or module_units(model, packing), key=lambda name: -name.count("."))
    bins: dict[str, _Bin] = {}
    unplaced: list[int] = []
    for index, fact in enumerate(facts):
        name = fact.names[0]
        unit = next((u for u in units if name.startswith(u + ".")), None)
        if unit is None and packing.unit_names:
            unplaced.append(index)
        else:
            key = unit if unit is not None else "<rest>" + (name.split(".")[0] if "." in name else "")
            bins.setdefault(key, _Bin([], module=unit)).params.append(index)
    size = sum(fact.numel for fact in facts) if packing.rest_numel is None else packing.rest_numel
    return sorted([*bins.values(), *_bins_by_numel(facts, unplaced, size)], key=lambda each: each.params[0])


def _bins(facts: Sequence[ParamInfo], model: nn.Module, packing: ByNumel | ByTensor | ByModule) -> list[_Bin]:
    if isinstance(packing, ByModule):
        return _bins_by_module(facts, model, packing)
    if isinstance(packing, ByTensor):
        small = [0 < fact.numel <= packing.persist_numel for fact in facts]
        return [_Bin([i], reshard_after_forward=False if stays else None) for i, stays in enumerate(small)]
    share = -(-sum(f.numel for f in facts) // packing.min_chunks)
    limit = packing.chunk_numel if packing.min_chunks == 1 else min(packing.chunk_numel, share)
    return _bins_by_numel(facts, range(len(facts)), limit)


def _split_by_group(
    bins: Sequence[_Bin], facts: Sequence[ParamInfo], model: nn.Module, groups: Sequence[ParamGroupPlan]
) -> list[_Bin]:
    """Divide bins, so that all parameters of a bin have the same options.

    Raises:
        ValueError: a name is not in the model, or a shared parameter has names with different options.
    """
    options = {name: group.reshard_after_forward for group in groups for name in group.names}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    known = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    for unknown in [name for name in options if name not in known]:
        near = difflib.get_close_matches(unknown, known, 3, 0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "use names of named_modules()"
        raise ValueError(f"{unknown!r} in the plan's groups (reshard_after_forward) is not a name in the model: {hint}")
    divided: list[_Bin] = []
    for bin_ in bins:
        parts: dict[tuple[str, bool | None], list[int]] = {}
        for index in bin_.params:
            name = _group_name(facts[index], options)
            module = name if name in modules else ""  # parameters that are named one by one share a unit
            parts.setdefault((module, options.get(name, bin_.reshard_after_forward)), []).append(index)
        for (name, option), params in parts.items():
            inside = name and (bin_.module is None or name.startswith(bin_.module + "."))
            divided.append(_Bin(params, name if inside else bin_.module, option))
    return divided


def _group_name(fact: ParamInfo, options: Mapping[str, bool]) -> str:
    """Return the longest name in ``options`` that is a parameter's, or of a module around it; ``""`` for none."""
    matches: list[str] = []
    for name in fact.names:
        matches += [each for each in accumulate(name.split("."), "{}.{}".format) if each in options][-1:]
    if len({options[each] for each in matches}) > 1:
        raise ValueError(
            f"{', '.join(fact.names)} is one parameter, and its names {matches} have different options in the plan's "
            "groups: give them the same"
        )
    return matches[0] if matches else ""


# Source: the behavior of ColossalAI's ``search_chunk_configuration`` (the argument table of ``GeminiPlugin``): start
# at the largest parameter once outliers above mean + 3 sigma are dropped, step by ``interval``, keep the least waste.
def search_chunk_numel(numels: Sequence[int], packing: BySearch) -> int:
    """Return Gemini's chunk size in elements: the uniform size that wastes least space at the ends of chunks.

    Ties go to the smaller size. A model below the minimum is one chunk.
    """
    total = sum(numels)
    if total <= packing.min_chunk_numel:
        return max(total, 1)
    mean = total / len(numels)
    sigma = math.sqrt(sum((n - mean) ** 2 for n in numels) / len(numels))
    largest = max(n for n in numels if n <= mean + 3 * sigma)
    interval = packing.interval_numel
    start = _round_up(max(packing.min_chunk_numel, largest), interval)
    candidates = range(start, start + packing.search_range_numel + 1, interval)
    return min(candidates, key=lambda size: (waste_numel(numels, size), size))


def waste_numel(numels: Sequence[int], chunk_numel: int) -> int:
    """Return the elements left empty when ``numels`` are packed in order into chunks of ``chunk_numel``.

    Larger parameters get chunks of their own.
    """
    waste = used = 0
    for numel in numels:
        if numel > chunk_numel:
            continue
        if used + numel > chunk_numel:
            waste, used = waste + chunk_numel - used, 0
        used += numel
    return waste + (chunk_numel - used if used else 0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _place(facts: Sequence[ParamInfo], params: Sequence[int], itemsize: int) -> tuple[list[ParamSpan], int]:
    align = max(1, ALIGN_BYTES // itemsize)
    slots, at = [], 0
    for index in params:
        fact = facts[index]
        # Tiny parameters (norms, biases) lie close together; only what a matrix kernel reads is aligned.
        at = _round_up(at, align) if fact.numel >= 16 * align else at
        slots.append(ParamSpan(index, at, fact.numel, fact.shape))
        at += fact.numel
    return slots, at


# [Note: Whole tensors]
# An optimizer that needs whole tensors gets each tensor on one rank, which alone stores and updates it. The largest
# tensor of a chunk is placed first, and each goes to the rank with the fewest bytes so far, over all chunks. So for any
# number of chunks, the loads of two ranks differ by at most the largest tensor. Shards of a chunk then differ in
# length, and the group has to be able to exchange such shards (Group.uneven). Otherwise all shards of a chunk are
# padded to the length of the longest one.
def _pack_unsplit(
    facts: Sequence[ParamInfo], params: Sequence[int], itemsize: int, replicas: int, loads: list[int], uneven: bool
) -> tuple[list[ParamSpan], Bounds]:
    """Return the slots of a chunk, each in one shard, and the bounds of the shards. ``loads``, the bytes of each rank,
    are increased."""
    ranks = range(len(loads))
    own, by_rank = list(loads) if uneven else [0 for _ in ranks], [list[int]() for _ in ranks]
    for index in sorted(params, key=lambda index: -facts[index].numel):
        rank = own.index(min(own))
        own[rank] += facts[index].numel * itemsize
        by_rank[rank].append(index)
    if not uneven:  # the fullest shard goes to the rank that has the least
        fullest = sorted(ranks, key=lambda rank: -own[rank])
        source = dict(zip(sorted(ranks, key=lambda rank: loads[rank]), fullest, strict=True))
        own, by_rank = [loads[rank] + own[source[rank]] for rank in ranks], [by_rank[source[rank]] for rank in ranks]
    loads[:] = own
    shards = [_place(facts, sorted(each), itemsize)[0] for each in by_rank]
    step = math.lcm(ALIGN_BYTES // itemsize, replicas)
    lengths = [_round_up(max(1, slots[-1].end if slots else 0), step) for slots in shards]
    if not uneven:
        lengths = [max(lengths)] * len(lengths)
    bounds = tuple(accumulate(lengths, initial=0))
    moved = [replace(slot, start=slot.start + at) for at, slots in zip(bounds, shards, strict=False) for slot in slots]
    return moved, bounds


def make_layout(
    facts: Sequence[ParamInfo],
    model: nn.Module,
    packing: Packing,
    shard_size: int,
    replicate_size: int,
    groups: Sequence[ParamGroupPlan] = (),
    unsplit: Collection[int] = (),
    uneven: bool = True,
) -> Layout:
    """Pack parameters into units and chunks.

    Args:
        facts: the parameters, in module order.
        model: the module whose names ``packing`` refers to.
        packing: how parameters are grouped.
        shard_size: every chunk divides by it.
        replicate_size: every shard divides by it.
        groups: options of the modules with some names, whose parameters are in chunks of their own.
        unsplit: indices of optimizers that need whole tensors; see [Note: Whole tensors].
        uneven: whether shards of their chunks may differ in length.
    """
    loads = [0] * shard_size
    units: list[UnitSpec] = []
    chunks: list[ChunkSpec] = []
    where: dict[int, tuple[int, ParamSpan]] = {}
    searched: int | None = None
    if isinstance(packing, BySearch):
        searched = search_chunk_numel([fact.numel for fact in facts], packing) if facts else 1
        packing = ByNumel(chunk_numel=searched)
    bins = _bins(facts, model, packing)
    for unit_index, bin_ in enumerate(_split_by_group(bins, facts, model, groups) if groups else bins):
        keyed: dict[tuple[torch.dtype, bool, int], list[int]] = {}
        for index in bin_.params:
            fact = facts[index]
            keyed.setdefault((fact.dtype, fact.trainable, fact.optimizer), []).append(index)
        first, title = len(chunks), bin_.module or span_text([facts[index].names[0] for index in bin_.params])
        for (dtype, trainable, optimizer), params in keyed.items():
            tensors = trainable and optimizer in unsplit
            if tensors:
                slots, bounds = _pack_unsplit(facts, params, dtype.itemsize, replicate_size, loads, uneven)
            else:
                slots, numel = _place(facts, params, dtype.itemsize)
                step = math.lcm(replicate_size, ALIGN_BYTES // dtype.itemsize)
                if numel < 16 * step * shard_size:  # only tiny shards begin anywhere, as tiny parameters do
                    step = replicate_size
                length = _round_up(max(numel, 1), shard_size * step) // shard_size
                bounds = range(0, shard_size * length + 1, length)
            spec = ChunkSpec(
                index=len(chunks),
                unit=unit_index,
                title=title,
                dtype=dtype,
                trainable=trainable,
                optimizer=optimizer,
                slots=tuple(slots),
                bounds=bounds,
                reshard_after_forward=bin_.reshard_after_forward,
                unsplit=tensors,
            )
            where.update({slot.param: (spec.index, slot) for slot in slots})
            chunks.append(spec)
        units.append(UnitSpec(unit_index, tuple(range(first, len(chunks))), bin_.module, title))
    return Layout(tuple(facts), tuple(units), tuple(chunks), tuple(where[i] for i in range(len(facts))), searched)


def search_report(layout: Layout) -> str | None:
    """Return one line on the searched chunk size and the space that packing by it leaves empty, if there was a search.

    A chunk is only as long as its parameters: equal shards and aligned starts leave the rest empty.
    """
    if layout.searched_numel is None:
        return None
    dtypes = dict.fromkeys(chunk.dtype for chunk in layout.chunks)
    sizes = ", ".join(f"{layout.searched_numel * d.itemsize} bytes of {str(d).removeprefix('torch.')}" for d in dtypes)
    padded = sum(chunk.padded_bytes for chunk in layout.chunks)
    empty = sum((end - start) * chunk.dtype.itemsize for chunk in layout.chunks for start, end in chunk.gaps)
    return (
        f"chunk search: {layout.searched_numel} elements a chunk ({sizes or 'no parameters'}), chunks: "
        f"{len(layout.chunks)}, empty: {empty} of {padded} bytes ({empty / max(padded, 1):.2%})"
    )
