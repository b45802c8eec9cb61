"""Values for the tensors of modules built under deferred construction that are neither parameters nor buffers.

Nothing would request their values later, so they get them when the construction ends, wherever a module stores them:
as an attribute, or in nested dicts, lists, tuples, sets and dataclasses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.base.torch_internals import no_torch_function
from shardwise.core.deferred.record import mark
from shardwise.core.deferred.replay import META, Cell, Ref, replay, tape_of

__all__ = ["make_plain"]

_TABLES = ("_parameters", "_buffers", "_modules")


def make_plain(modules: Iterable[nn.Module], adopt: Callable[[Tensor, Tensor], None]) -> None:
    """Materialize all plain tensors of ``modules``, and of modules in their containers.

    Object identity and views of common memory are preserved. A buffer that is also stored elsewhere gets its values
    now, in place; parameters are not changed.

    Args:
        modules: all modules of a construction.
        adopt: sets the values of a tensor in place.
    """
    walk = _Walk(adopt)
    for module in modules:
        walk.add(module)
    walk.run()


class _Walk:
    def __init__(self, adopt: Callable[[Tensor, Tensor], None]) -> None:
        self._adopt = adopt
        self._modules: dict[int, nn.Module] = {}
        self._waiting: deque[nn.Module] = deque()
        self._buffers: set[int] = set()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """By ``id``: the tensor, whose reference keeps the id valid, and its values."""
        self._memory: dict[Cell, torch.UntypedStorage] = {}
        self._visited: dict[int, object] = {}

    def add(self, module: nn.Module) -> None:
        if id(module) not in self._modules:
            self._modules[id(module)] = module
            self._waiting.append(module)
            self._buffers.update(id(each) for each in module._buffers.values() if each is not None)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                mark(tensor)

    def run(self) -> None:
        while self._waiting:
            attributes = self._waiting.popleft().__dict__
            for name, value in list(attributes.items()):
                if name not in _TABLES:
                    made = self._walked(value)
                    if made is not value:
                        attributes[name] = made

    def _walked(self, value: Any) -> Any:
        """Return ``value`` with materialized tensors: the same object if it is mutable."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            self.add(value)
            return value
        inside = isinstance(value, dict | list | tuple | set | frozenset | deque)
        if not inside and (isinstance(value, type) or not is_dataclass(value)):
            return value
        if id(value) in self._visited:
            return value  # also one that contains itself
        self._visited[id(value)] = value
        return self._container(value) if inside else self._dataclass(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict | list | deque):
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                made = self._walked(each)
                if made is not each:
                    value[key] = made
            return value
        parts = list(value)
        made_parts = [self._walked(each) for each in parts]
        if all(made is each for made, each in zip(made_parts, parts, strict=True)):
            return value
        if isinstance(value, set):
            value.clear()
            value.update(made_parts)
            return value
        return type(value)(*made_parts) if hasattr(value, "_fields") else type(value)(made_parts)

    def _dataclass(self, value: Any) -> Any:
        for field in fields(value):
            each = getattr(value, field.name, None)
            made = self._walked(each)
            if made is not each:
                object.__setattr__(value, field.name, made)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tape_of(tensor) is None:
            return tensor
        if id(tensor) in self._buffers:
            self._adopt(tensor, self._values(tensor))
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._values(tensor).requires_grad_(tensor.requires_grad)
        return self._made[id(tensor)][1]

    def _values(self, tensor: Tensor) -> Tensor:
        tape = tape_of(tensor)
        assert tape is not None
        with no_torch_function(), torch.no_grad():
            if tape.cell not in self._memory:
                whole = torch.empty(0, dtype=torch.uint8, device=META)
                whole.set_(tensor.untyped_storage())
                self._memory[tape.cell] = replay(whole).untyped_storage()
            return Ref.of(tensor, tape, tape.head).on(self._memory[tape.cell])
