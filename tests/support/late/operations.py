"""Operations on tensors of the late device: queued on its streams, with results that exist at once and are empty."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.core.base.torch_internals import each_leaf, map_leaves_of, without_modes
from tests.support.late.streams import Access
from tests.support.late.torch_gpus import arguments_of, as_on_cpu, device_kernels

aten = torch.ops.aten
# They read no value: the result has the same storage.
VIEWS = {
    aten.as_strided.default,
    aten.view.default,
    aten.view.dtype,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Storage,
    aten.set_.source_Tensor,
    aten.set_.default,
}
# Torch has kernels for all devices for these, which look up the device's own in a table that only C++ can fill.
OVER_ALL = ("copy_",)


class Operations:
    """The functions that torch's dispatcher calls for tensors of GPUs.

    Args:
        present: the device that exists at the moment.
    """

    def __init__(self, present: Callable[[], Any]) -> None:
        self._present = present
        self._kernels = device_kernels(self._call, OVER_ALL)

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        device = self._present()
        with device.schedule.lock, without_modes():
            if op in VIEWS:
                device.current  # noqa: B018 (a node of autograd that only makes views runs, too)
                return as_on_cpu(op, *args, **kwargs)
            if op in (aten.empty.memory_format, aten.empty_strided.default):
                return self._empty(device, op, args, kwargs)
            device.memory.collect()
            if op is aten.copy_.default and args[0].device != args[1].device:
                return self._copy(device, *args, **kwargs)
            if op is aten._foreach_copy_.default and args[0][0].device != args[1][0].device:
                return [self._copy(device, *pair, *args[2:], **kwargs) for pair in zip(*args[:2], strict=True)]
            if op is aten._local_scalar_dense.default:
                device.current.synchronize()
                return as_on_cpu(op, device.memory.block_of(args[0]).same(args[0]))
            result = _Call(device, op, args, kwargs).give()
            device.schedule.after_giving()
            return result

    def _empty(self, device: Any, op: Any, args: Any, kwargs: Any) -> Tensor:
        known = {key: kwargs[key] for key in ("dtype", "memory_format") if kwargs.get(key) is not None}
        like = op(*args, **known, device="meta")
        return device.memory.allocate(like.size(), like.stride(), like.dtype, device.current)

    def _copy(self, device: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy between the host and the device. Only page-locked memory can be read or written later."""
        upload = target.is_cuda
        here, there = (source, target) if upload else (target, source)
        region = device.pinned_region(here)
        there_same = device.memory.block_of(there).same(there) if there.numel() else None
        if there_same is None:
            return target
        same = region.same(here) if region is not None else here.detach()
        accesses = [device.memory.block_of(there).access(there, upload)]
        if region is not None:
            if not upload and non_blocking and not device.schedule.uses(region.history):
                as_on_cpu(aten.fill_.Scalar, same, _poison_of(same.dtype))
            accesses.append(region.access(here, not upload))
        to, of = (there_same, same) if upload else (same, there_same)
        device.current.give(lambda: _quietly(lambda: to.copy_(of)), "a copy", accesses)
        if region is None or not non_blocking:
            device.current.synchronize()
        device.schedule.after_giving()
        return target


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else 255 if dtype is torch.uint8 else -1


def _quietly(run: Callable[[], Any]) -> None:
    with torch.no_grad(), without_modes():
        run()


class _Call:
    """One operation: its inputs and outputs, its results, and how to run it later."""

    def __init__(self, device: Any, op: Any, args: Any, kwargs: Any) -> None:
        self._device, self._op, self._args, self._kwargs = device, op, args, kwargs
        changed = [v for a, v in arguments_of(op, args, kwargs) if a.alias_info is not None and a.alias_info.is_write]
        self._written = {id(leaf) for leaf in each_leaf(changed) if isinstance(leaf, Tensor)}
        self._tensors = {id(leaf): leaf for leaf in each_leaf((args, kwargs)) if isinstance(leaf, Tensor)}

    def give(self) -> Any:
        """Return its results."""
        metas = {key: self._meta(tensor) for key, tensor in self._tensors.items()}
        back = {id(meta): self._tensors[key] for key, meta in metas.items()}
        try:
            # Operations without results have no shapes to infer, and not always a way to infer them (fused optimizers).
            args, kwargs = self._put(self._args, metas), self._put(self._kwargs, metas, "meta")
            likes = self._op(*args, **kwargs) if self._op._schema.returns else None
        except (RuntimeError, NotImplementedError):
            return self._now()
        for key, meta in metas.items():
            if key in self._written and meta.size() != self._tensors[key].size():
                self._grow(self._tensors[key], meta)
        result = map_leaves_of(Tensor, lambda like: back[id(like)] if id(like) in back else self._new(like), likes)
        leaves = enumerate(each_leaf(result))
        fresh = [(i, t) for i, t in leaves if isinstance(t, Tensor) and id(t) not in self._tensors]
        sames = {key: self._same(tensor) for key, tensor in self._tensors.items()}
        args, kwargs = self._put(self._args, sames), self._put(self._kwargs, sames, "cpu")
        targets = [(i, self._same(t)) for i, t in fresh]
        op, run = self._op, self._device.drawing(self._op, kwargs)

        def later() -> None:  # holds no tensor of the program: what the program drops is free
            with run:
                found = each_leaf(op(*args, **kwargs))
            for index, target in targets:
                if found[index].numel() == target.numel():  # the CPU leaves out what a GPU would save for backward
                    target.copy_(found[index])

        self._device.keep_inputs([tensor for tensor in self._tensors.values() if self._access(tensor, False)])
        accesses = [a for t in self._tensors.values() for a in self._access(t, id(t) in self._written)]
        accesses += [a for _, t in fresh for a in self._access(t, True)]
        self._device.current.give(lambda: _quietly(later), str(self._op.name()), accesses)
        return result

    def _now(self) -> Any:
        """Run now: the shape of the result depends on values, so the host waits."""
        self._device.current.synchronize()
        sames = {key: self._same(tensor) for key, tensor in self._tensors.items()}
        back = {id(same): self._tensors[key] for key, same in sames.items()}
        found = self._op(*self._put(self._args, sames), **self._put(self._kwargs, sames, "cpu"))

        def made(value: Tensor) -> Tensor:
            if id(value) in back:
                return back[id(value)]
            new = self._new(value)
            _quietly(lambda: self._same(new).copy_(value))
            return new

        return map_leaves_of(Tensor, made, found)

    def _put(self, values: Any, by: dict[int, Tensor], device: str | None = None) -> Any:
        put = map_leaves_of(Tensor, lambda tensor: by[id(tensor)], values)
        if device is not None and put.get("device") is not None:
            put = {**put, "device": torch.device(device)}
        return put

    def _meta(self, tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    def _same(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.detach()
        if not tensor.numel():
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        return self._device.memory.block_of(tensor).same(tensor)

    def _access(self, tensor: Tensor, write: bool) -> list[Access]:
        if not tensor.is_cuda or not tensor.numel():
            return []
        return [self._device.memory.block_of(tensor).access(tensor, write)]

    def _new(self, like: Tensor) -> Tensor:
        return self._device.memory.allocate(like.size(), like.stride(), like.dtype, self._device.current)

    def _grow(self, tensor: Tensor, like: Tensor) -> None:
        new = self._new(like)
        shape = list(like.size()), like.stride()
        as_on_cpu(aten.set_.source_Storage_storage_offset, tensor, new.untyped_storage(), 0, *shape)
