"""Optimizers whose step gives a parameter other memory, where torch's write into what it has.

``p.data = p.data - lr * p.grad``, ``p.set_(...)`` and ``torch.utils.swap_tensors`` are as good in plain PyTorch. But
here a parameter's memory is a part of a shard, of a master or of a disk's buffer, which are read after the step. So the
values go there, and the parameter gets that memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.core.base.extent import extent
from shardwise.core.base.torch_internals import plain, point
from shardwise.core.optim.nested_state import tensors_of

__all__ = ["memory_kept"]


@contextmanager
def memory_kept(
    optimizer: torch.optim.Optimizer, values: Sequence[torch.Tensor], named: Callable[[int], str]
) -> Iterator[None]:
    """Behind the block, a step of ``optimizer``, the memory that ``values`` have had has what they were given.

    Casts as ``copy_`` does. What the optimizer keeps of the memory as it was (``state["before"] = p.data``) stays what
    it was. Called without gradients.

    Args:
        named: of the value at a position, for errors.

    Raises:
        RuntimeError: a value was given another shape.
    """
    kept = [plain(value) for value in values]
    try:
        yield
    except BaseException:
        _bring_back(optimizer, values, kept)
        raise
    for at, shape in _bring_back(optimizer, values, kept).items():
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() gives {named(at)} values of shape {tuple(shape)} where it was given "
            f"{tuple(kept[at].shape)} of it: leave the shape as it is"
        )


def _bring_back(
    optimizer: torch.optim.Optimizer, values: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
) -> dict[int, torch.Size]:
    """By position, values of another shape, which is dropped."""
    moved = [at for at, (value, own) in enumerate(zip(values, kept, strict=True)) if not _is(value, own)]
    if not moved:
        return {}
    for old in _held(optimizer, [values[at] for at in moved]):
        if any(_overlap(old, kept[at]) for at in moved):
            point(old, plain(old).clone())
    homes = {_storage(own) for own in kept}
    given = {at: plain(values[at]) for at in moved}
    # Parameters may have exchanged memory, or show theirs in another order.
    given = {at: new.clone() if _storage(new) in homes else new for at, new in given.items()}
    for at, new in given.items():
        if new.shape == kept[at].shape:
            kept[at].copy_(new)
        point(values[at], kept[at])
    return {at: new.shape for at, new in given.items() if new.shape != kept[at].shape}


def _is(value: torch.Tensor, own: torch.Tensor) -> bool:
    same = value.data_ptr() == own.data_ptr() and value.dtype is own.dtype and value.device == own.device
    return same and value.shape == own.shape and value.stride() == own.stride()


def _held(optimizer: torch.optim.Optimizer, values: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What it keeps: as state of ``values``, or among its attributes. Not parameters."""
    attributes = [value for name, value in list(vars(optimizer).items()) if name not in ("state", "param_groups")]
    states = [optimizer.state.get(value) for value in values]
    return (each for each in tensors_of([attributes, states]) if type(each) is torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or not one.numel() or one.device != other.device:
        return False
    return max(one.data_ptr(), other.data_ptr()) < min(_end(one), _end(other))


def _end(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr()) + (extent(tensor) * tensor.itemsize if tensor.numel() else 0)
