"""Parameters, buffers and other tensors of modules that share memory without being one object.

Plain torch updates shared memory twice, once for each parameter, and all tensors see both updates. After sharding, each
parameter has its own memory, so they would differ after the first update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise.core.base.tensors import extent
from shardwise.core.base.torch_internals import no_torch_function, storage_id
from shardwise.core.deferred.record import DeferredTensor

PARAMETER = "parameter"
REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes in which modules keep registered parameters, buffers and modules by name."""


@dataclass(frozen=True)
class _Span:
    """A tensor and the bytes between its first and its last element, ``[start, end)`` of ``memory``."""

    name: str
    tensor: Tensor
    kind: str
    """``"parameter"``, ``"buffer"``, or ``"attribute"`` of a module that is neither."""
    memory: tuple[str, int]
    start: int
    end: int

    @property
    def is_parameter(self) -> bool:
        return self.kind == PARAMETER

    @property
    def trained(self) -> bool:
        return self.is_parameter and self.tensor.requires_grad


def check_no_shared_storage(model: nn.Module) -> None:
    """Check that no two parameters share an element, and that no buffer or other attribute of a module shares one with
    a trainable parameter.

    Neighbors in one memory (the flat weights of an LSTM) do not share elements. Deferred tensors and tensors on the
    meta device have no addresses; they share values if they have a common storage.

    Raises:
        ValueError: two tensors share an element; the message names both.
    """
    with no_torch_function():
        spans = sorted(_spans(model), key=lambda each: (each.memory, each.start))
        reaching: list[_Span] = []
        for each in spans:
            reaching = [other for other in reaching if other.memory == each.memory and other.end > each.start]
            for other in reaching:
                matters = each.trained or other.trained or (each.is_parameter and other.is_parameter)
                if matters and _share(each, other):
                    _refuse(*sorted((other, each), key=lambda span: not span.is_parameter))
            reaching.append(each)


def _spans(model: nn.Module) -> Iterator[_Span]:
    named: list[tuple[str, Tensor, str]] = [(name, tensor, PARAMETER) for name, tensor in model.named_parameters()]
    named += [(name, tensor, "buffer") for name, tensor in model.named_buffers()]
    known = {id(tensor) for _, tensor, _ in named}
    named += [(name, each, "attribute") for name, each in _attributes(model) if id(each) not in known]
    for name, tensor, kind in named:
        if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        if tensor.is_meta:
            memory, start = ("meta", storage_id(storage)), int(tensor.storage_offset()) * tensor.itemsize
        elif storage.data_ptr():
            memory, start = (str(tensor.device), 0), tensor.data_ptr()
        else:
            continue  # a subclass whose values are elsewhere
        yield _Span(name, tensor, kind, memory, start, start + extent(tensor) * tensor.itemsize)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield plain tensors among the attributes of modules, also in their lists, tuples and dicts.

    Tensors with a graph are left out, because each forward pass makes them again. The weight that
    ``torch.nn.utils.spectral_norm`` stores next to a parameter ``weight_orig`` is left out, too.
    """
    for path, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key in REGISTERED or f"{key}_orig" in module._parameters:
                continue
            name = f"{path}.{key}" if path else key
            for label, each in _items(value):
                if type(each) in (Tensor, DeferredTensor) and each.grad_fn is None:
                    yield name + label, each


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(f"[{at}]", each) for at, each in enumerate(value)]
    return [(f"[{key!r}]", each) for key, each in value.items()] if isinstance(value, dict) else [("", value)]


def _share(one: _Span, other: _Span) -> bool:
    """Return whether two tensors with overlapping ranges have a common byte."""
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    # For example, columns of one matrix. Mark the bytes of one in a mask of both.
    start, end = min(one.start, other.start), max(one.end, other.end)
    # The mask has a flag for each byte of both ranges; only few tensors get here.
    marked = torch.zeros(end - start, dtype=torch.bool, device="cpu")
    _bytes(one, marked, start).fill_(True)
    return bool(_bytes(other, marked, start).any())


def _bytes(span: _Span, marked: Tensor, origin: int) -> Tensor:
    size, strides = span.tensor.itemsize, [stride * span.tensor.itemsize for stride in span.tensor.stride()]
    return marked.as_strided((*span.tensor.shape, size), (*strides, 1), span.start - origin)


def _refuse(first: _Span, other: _Span) -> NoReturn:
    nbytes = min(first.end, other.end) - max(first.start, other.start)
    if other.is_parameter:
        raise ValueError(
            f"{first.name} {tuple(first.tensor.shape)} and {other.name} {tuple(other.tensor.shape)} lie in the same "
            f"memory ({nbytes} bytes) but are two parameters, which would part once sharded: make them one object "
            f"({other.name} = {first.name}), or give {other.name} memory of its own (clone()), before sharding"
        )
    raise ValueError(
        f"{other.kind} {other.name} {tuple(other.tensor.shape)} lies in the memory of the parameter {first.name} "
        f"({nbytes} bytes) and would no longer follow it once sharded: give it memory of its own (clone()) before "
        "sharding, or read the parameter where it is used"
    )
