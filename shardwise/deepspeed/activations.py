"""Tensors that wait for backward: divided over ranks, moved to the host, or side by side in buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.device import copy_ahead, page_locked, record_event, sent_ahead, wait_event
from shardwise.extent import extent

__all__ = ["Keeper", "Kept"]


class Keeper:
    """Keeps tensors in one way.

    Args:
        group: every rank of it keeps one part; ``None``: whole tensors are kept.
        host: in the host's memory, page-locked where there is CUDA.
        contiguous: in buffers of several tensors of one size.
        number: tensors in a buffer; ``None``: the first buffer of a size holds one, each further one as many as all
            before it.

    Attributes:
        bytes: see :func:`shardwise.deepspeed.checkpointing.held_bytes`.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, host: bool, contiguous: bool, number: int | None) -> None:
        self.group, self.host = group, host
        self.bytes = {"device": 0, "host": 0, "to_host": 0}
        self._buffers = _Buffers(number) if contiguous else None
        self._local = threading.local()

    @property
    def changes_anything(self) -> bool:
        """Whether tensors are kept in another way than as they are."""
        return self.group is not None or self.host or self._buffers is not None

    @property
    def inside(self) -> bool:
        """Whether this thread runs a function that is checkpointed, for the first time or again."""
        return getattr(self._local, "depth", 0) > 0

    @contextmanager
    def within(self) -> Iterator[None]:
        """Around such a function."""
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def reset(self) -> None:
        """Forget buffers' free places and what was counted as moved."""
        self.bytes["to_host"] = 0
        if self._buffers is not None:
            self._buffers.drop_free()

    def keep(self, value: Any) -> Any:
        """A :class:`Kept` of a floating tensor; other values as they are."""
        if type(value) is not Tensor or value.layout is not torch.strided or not value.is_floating_point():
            return value
        parts = dist.get_world_size(self.group) if self.group is not None else 1
        if value.numel() < max(parts, 1) or _overlaps(value):
            return value
        return Kept(self, value.detach(), parts, value.requires_grad)

    def take(self, numel: int, like: Tensor) -> tuple[Tensor, _Place | None]:
        """Memory for ``numel`` elements, and its place where it is part of a buffer."""
        device = torch.device("cpu") if self.host else like.device
        pin = self.host and like.device.type == "cuda"
        if self._buffers is not None:
            place = self._buffers.take(numel, like.dtype, device, pin)
            return place.tensor, place
        return _allocate(numel, like.dtype, device, pin), None

    def count(self, nbytes: int) -> None:
        """That much more (or, negative, less) is kept."""
        self.bytes["host" if self.host else "device"] += nbytes
        if self.host and nbytes > 0:
            self.bytes["to_host"] += nbytes


class Kept:
    """One tensor, or this rank's part of it, until the graph that needs it is gone."""

    def __init__(self, keeper: Keeper, value: Tensor, parts: int, requires_grad: bool) -> None:
        self._keeper, self._parts, self._requires_grad = keeper, parts, requires_grad
        self._shape, self._stride, self.device = value.shape, value.stride(), value.device
        self._dense = extent(value) == value.numel()
        self._numel = value.numel()
        # A dense tensor in the order of its memory: it comes back with its strides, and kernels choose by those.
        flat = value.as_strided((self._numel,), (1,)) if self._dense else value.reshape(-1)
        share = -(-self._numel // parts)
        start = share * dist.get_rank(keeper.group) if keeper.group is not None else 0
        mine = flat[start : start + share]
        self._kept, self._place = keeper.take(share, value)
        copy_ahead(self._kept[: mine.numel()], mine)
        self._copied: Any = None
        if self._kept.device != value.device:
            self._copied = record_event(value.device)
        self._nbytes = share * value.element_size()
        keeper.count(self._nbytes)

    def __del__(self) -> None:
        if hasattr(self, "_nbytes"):
            self._keeper.count(-self._nbytes)

    @torch.no_grad()
    def restore(self) -> Tensor:
        """The tensor as it was: shape, strides, device and bits. With a group, all its ranks call it."""
        if self._copied is not None:
            wait_event(self.device, self._copied)
        kept = sent_ahead(self._kept, self.device)
        if self._parts > 1:
            flat = torch.empty(kept.numel() * self._parts, dtype=kept.dtype, device=kept.device)
            # As bytes, so that every backend takes every dtype.
            dist.all_gather_into_tensor(flat.view(torch.uint8), kept.view(torch.uint8), group=self._keeper.group)
        else:
            flat = kept.clone() if kept is self._kept else kept
        flat = flat[: self._numel]
        if self._dense:
            value = flat.as_strided(self._shape, self._stride)
        else:
            value = torch.empty_strided(self._shape, self._stride, dtype=flat.dtype, device=self.device)
            value.copy_(flat.view(self._shape))
        return value.requires_grad_(self._requires_grad)


class _Place:
    """One tensor's part of a buffer; free again when nobody holds this any more."""

    def __init__(self, tensor: Tensor, free: list[Tensor]) -> None:
        self.tensor, self._free = tensor, free

    def __del__(self) -> None:
        self._free.append(self.tensor)


class _Buffers:
    """By size, dtype and device: buffers of several tensors, and which places in them are free."""

    def __init__(self, number: int | None) -> None:
        self._number = number
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._made: dict[tuple[int, torch.dtype, torch.device], int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, pin: bool) -> _Place:
        key = (numel, dtype, device)
        free = self._free.setdefault(key, [])
        if not free:
            count = self._number or max(self._made.get(key, 0), 1)
            self._made[key] = self._made.get(key, 0) + count
            whole = _allocate(count * numel, dtype, device, pin)
            free.extend(reversed(whole.split(numel)))  # type: ignore[no-untyped-call]
        return _Place(free.pop(), free)

    def drop_free(self) -> None:
        # New lists: places that are in use return to the old ones, and so go with their buffers.
        self._free, self._made = {}, {}


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, pin: bool) -> Tensor:
    if pin:
        return page_locked((numel,), dtype)
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    # Where the host stands for a device too, memory made by an operation counts as the device's; this does not.
    storage = torch.UntypedStorage(numel * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,), (1,))


def _overlaps(value: Tensor) -> bool:
    """Whether two elements of ``value`` may share memory (``expand``)."""
    extent = 1
    sizes = [(stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    for stride, size in sorted(sizes):
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False
