"""The global gradient norm, the clip factor and the check for non-finite gradients, over every axis of the mesh.

Source: ``torch.nn.utils.clip_grad_norm_`` (the factor ``max_norm / (norm + 1e-6)``, never above 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwise.core.base.torch_internals import norm_of_each
from shardwise.core.comm import DONE, Group, Handle, together

NORMS = "the norms that .grad is asked for"
Parts = Sequence[torch.Tensor | None]


def _partial(tensors: Sequence[torch.Tensor], p: float, wide: torch.dtype) -> float:
    """Return this rank's share, computed in ``wide`` or wider: the sum of ``|x|**p``, or the maximum for p = inf."""
    return together([0.0, *_shares(tensors, p, wide)], p == math.inf)


def shard_norm(tensor: torch.Tensor, p: float) -> float:
    """Return the norm of one shard, computed like :func:`global_norm`."""
    share = _partial([tensor], p, torch.float32)
    norm = share ** (1.0 / p) if p != math.inf else share
    return norm if math.isfinite(norm) else _partial([tensor], p, torch.float64) ** (1.0 / p if p != math.inf else 1.0)


Ask = Callable[[float, bool], float]
"""Returns the sum of all ranks' numbers, or the largest of them. Collective."""


def _asking(group: Group) -> Ask:
    return lambda mine, largest: group.total(mine, "the gradient norm", largest=largest)[0]


@dataclass(frozen=True)
class ModelParallelParts:
    """The tensor-parallel ranks, which hold other parts of the model.

    Attributes:
        group: the group of those ranks and this one.
        counted: this rank's gradients without those that a lower rank of ``group`` has, too; ``None``: all.
        words: numbers that have to be equal on all of them.
        differ: called on each rank if the numbers differ; raises.
    """

    group: Group
    counted: Sequence[torch.Tensor] | None = None
    words: tuple[float, ...] = ()
    differ: Callable[[], None] | None = None

    def ask(self, mine: float, largest: bool) -> float:
        """Return the sum of the ranks' numbers, or the largest of them. Collective."""
        result, same = self.group.total(mine, "the gradient norm", compared=self.words, largest=largest)
        if self.differ is not None and not all(same):
            self.differ()
        return result


def _combined(
    tensors: Sequence[torch.Tensor], p: float, wide: torch.dtype, ask: Ask, model_parallel: ModelParallelParts | None
) -> float:
    share, largest = _partial(tensors, p, wide), p == math.inf
    if model_parallel is not None:
        # Gradients that do not count must be finite, too.
        if model_parallel.counted is not None and math.isfinite(share):
            share = _partial(model_parallel.counted, p, wide)
        share = model_parallel.ask(ask(share, largest), largest)
    else:
        share = ask(share, largest)
    return share if p == math.inf else float(share ** (1.0 / p))


def global_norm(
    tensors: Sequence[torch.Tensor],
    p: float,
    group: Group | Ask,
    inverse_scale: float,
    known: Sequence[float] = (),
    model_parallel: ModelParallelParts | None = None,
) -> float:
    """Return the p-norm of gradients whose shards lie over ``group``, multiplied by ``inverse_scale``. Collective.

    Args:
        tensors: this rank's gradient shards, 1-D, any float dtype.
        p: order of the norm, ``math.inf`` included.
        group: the ranks that hold the other shards (replicas are not counted twice), or a function that combines
            their numbers.
        inverse_scale: 1 / loss scale, so that the result is the true norm.
        known: norms of further shards of this rank, whose gradients are freed already.
        model_parallel: the tensor-parallel ranks, whose gradients count as well.

    Returns:
        The same value on every rank; NaN or infinite if any gradient is.
    """
    ask = _asking(group) if isinstance(group, Group) else group
    extra = [torch.tensor(known, dtype=torch.float64, device="cpu")] if known else []
    everything = [*tensors, *extra]  # the norm of norms is the norm
    norm = _combined(everything, p, torch.float32, ask, model_parallel)
    # Equal on all ranks, so all of them compute it again.
    if norm == math.inf and p != math.inf:
        # The powers of large finite gradients overflow in fp32; then they are summed again in fp64.
        norm = _combined(everything, p, torch.float64, ask, model_parallel)
    return norm * inverse_scale


PART = 1 << 22
"""Elements whose norm is computed in fp64 at a time."""


class LateNorm:
    """A norm that the step itself does not need: computed on the device and read later.

    Args:
        group: the ranks that hold the other shards. Collective: every rank creates one and makes the same calls.
    """

    def __init__(self, group: Group) -> None:
        (self._shares,) = group.buffers([(group.size, torch.float64)])
        self._group, self._gather = group, DONE

    def note(self, tensors: Sequence[torch.Tensor], p: float, factor: float) -> Callable[[], float]:
        """Begin the p-norm of all ranks' ``tensors``; return a function that reads it before the next call.

        Powers are summed up in fp64, since freed gradients cannot be read again. The norm is multiplied by ``factor``.
        """
        gathered, self._gather = self._gather, DONE
        gathered.wait()
        self._group.fence()  # peers that read this memory are done
        own = self._group.slice_of(self._shares.local, self._group.rank)
        # For p other than 1, 2 and infinity a kernel converts its whole input in new memory; parts bound that.
        parts = [part for each in tensors for part in torch.split(each, PART)]
        kinds = _by_kind(parts).values()
        norms = [norm for own in kinds for norm in norm_of_each([*own.values()], p, torch.float64)]
        own.copy_(torch.linalg.vector_norm(torch.stack(norms), p)) if norms else own.zero_()
        self._group.fence()
        self._gather = self._group.all_gather_in_place(self._shares)
        return partial(self._read, self._gather, p, factor)

    def _read(self, gather: Handle, p: float, factor: float) -> float:
        gather.wait()
        norms = self._shares.local.tolist()
        if p == math.inf:
            return together(norms, True) * factor
        return float(together([norm**p for norm in norms], False) ** (1.0 / p)) * factor


class TileNorm:
    """A norm that the step itself does not need, of a single rank: computed while the update has gradients in cache."""

    def __init__(self) -> None:
        self._p, self._shares = 2.0, list[float]()
        self.collects = False
        """Whether the update has to call :meth:`add`."""

    def note(self, _tensors: Sequence[torch.Tensor], p: float, factor: float) -> Callable[[], float]:
        """Begin the p-norm of the next update's gradients; return a function that reads it, times ``factor``."""
        self._p, self._shares, self.collects = p, [], True
        return lambda: self._read(factor)

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add gradients of an update: 1-D, of one dtype."""
        wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(list(gradients), self._p, dtype=wide)).tolist()
        if not math.isfinite(sum(norms)):  # an infinite norm may be an overflow
            norms = [shard_norm(each, self._p) for each in gradients]
        self._shares += norms

    def _read(self, factor: float) -> float:
        return shard_norm(torch.tensor(self._shares, dtype=torch.float64, device="cpu"), self._p) * factor


def _by_kind(parts: Parts) -> dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]]:
    """Return the tensors with elements by position, for each device and dtype: one kernel takes those of one kind."""
    kinds: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for at, part in enumerate(parts):
        if part is not None and part.numel():
            kinds.setdefault((part.device, part.dtype), {})[at] = part
    return kinds


def _shares(parts: Parts, p: float, wide: torch.dtype) -> list[float]:
    """Return this rank's share of each norm."""
    shares = [0.0] * len(parts)
    for (_, kind), own in _by_kind(parts).items():
        dtype = torch.float64 if kind == torch.float64 else wide
        norms = torch.stack([*norm_of_each([*own.values()], p, dtype)]).double().cpu()
        for at, share in zip(own, (norms if p == math.inf else norms**p).tolist(), strict=True):
            shares[at] = share
    return shares


def each_norm(parts: Parts, p: float, group: Group, tp_group: Group | None, divided: Sequence[bool]) -> list[float]:
    """Return the p-norm of each gradient, computed like :func:`global_norm`, with one exchange for all. Collective.

    Args:
        parts: this rank's part of each gradient, 1-D, any float dtype, or ``None``.
        p: order of the norm, above 0, ``math.inf`` included.
        group: the ranks that hold the other parts.
        tp_group: the tensor-parallel ranks, or ``None``.
        divided: for each gradient, whether the ranks of ``tp_group`` have different parts of it.
    """
    norms: list[float] = []
    for wide in (torch.float32, torch.float64):
        shares = _shares(parts, p, wide)
        shares, _ = group.totals(shares, NORMS, largest=p == math.inf)
        if tp_group is not None:
            summed, _ = tp_group.totals(shares, NORMS, largest=p == math.inf)
            shares = [w if cut else own for w, own, cut in zip(summed, shares, divided, strict=True)]
        norms = [share if p == math.inf else float(share ** (1.0 / p)) for share in shares]
        if p == math.inf or math.inf not in norms:
            break  # otherwise powers of large finite gradients may have overflown in fp32
    return norms


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that limits the global norm to ``max_norm`` (0.0: no clipping)."""
    if max_norm <= 0.0:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    # min() would turn NaN into 1.0, and the step would be taken.
    return factor if math.isnan(factor) else min(1.0, factor)
