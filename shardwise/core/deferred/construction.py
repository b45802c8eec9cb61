"""Deferred initialization: build a model without memory, then materialize its values one tensor at a time.

There are two ways, which can be combined:

* ``with deferred_init(): model = build()``. The operations on every tensor are recorded (see
  :mod:`shardwise.core.deferred.record`) and replayed later. The values equal those of a normal construction bit for
  bit, with any constructors, and the random generators advance as usual.
* ``with torch.device("meta"): model = build()``. Nothing is recorded, so each module's own ``reset_parameters()`` is
  called in the order of ``named_modules()``, as torch's FSDP2 documents. The values equal a normal construction with
  the same seed if constructors initialize only through ``reset_parameters()``, in the order of registration.

In both cases the random numbers are drawn on the device of the construction (the CPU by default), so the values do not
depend on the device that they are moved to. Every rank must build with the same seed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from shardwise.core.base.torch_internals import (
    can_share_object,
    exchange_content,
    give_subclass,
    move_hooks,
    no_torch_function,
    plain,
    point,
    tensor_holders,
)
from shardwise.core.deferred.record import (
    DeferredParameter,
    DeferredTensor,
    Facade,
    Recorder,
    WriteWatch,
    is_recording,
    mark,
    recorders,
)
from shardwise.core.deferred.replay import META, Cell, Ref, replay, tape_of

TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that do not hold plain tensors."""


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules without memory inside the block; :func:`shardwise.shard` (``build``, ``boost``) creates the values.

    Other tensors of modules (attributes, also in dicts and lists) get their values when the block ends, since nothing
    would request them later. Inside another ``deferred_init()`` it does nothing.

    Inside, ``tensor.device`` is the device that a normal construction would use, and ``device="meta"`` means the CPU.

    Raises:
        RuntimeError: an operation in the block needs the values of a deferred tensor that cannot be replayed.

    Examples:
        >>> with shardwise.deferred_init():
        ...     model = torch.nn.Linear(8, 4)
        >>> session = shardwise.shard(model, torch.optim.AdamW(model.parameters()))
    """
    if is_recording():
        yield
        return
    seen: dict[int, weakref.ref[nn.Module]] = {}

    def notice(module: nn.Module, name: str, value: object) -> None:
        for each in (module, value):
            if isinstance(each, nn.Module):
                seen[id(each)] = weakref.ref(each)

    hooks = [
        module_hooks.register_module_parameter_registration_hook(notice),
        module_hooks.register_module_buffer_registration_hook(notice),
        module_hooks.register_module_module_registration_hook(notice),
    ]

    def leave() -> None:
        built = [module for reference in seen.values() if (module := reference()) is not None]
        _PlainTensors(built).materialize()

    recorder = Recorder(leave)
    try:
        with recorder, Facade(recorder):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        recorder.close()
    leave()


@contextmanager
def paused() -> Iterator[None]:
    """Record nothing inside the block. Models built so far behave as if :func:`deferred_init` had ended."""
    active = recorders()
    for recorder in active:
        recorder.paused = True
    try:
        for recorder in active:
            recorder.leave()
        yield
    finally:
        for recorder in active:
            recorder.paused = False


def is_deferred(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of ``model`` is recorded and has no values yet.

    A model on the meta device without a record is not deferred in this sense; :func:`initial_values` supports both.
    """
    return any(tape_of(tensor) is not None for _, _, tensor, _ in _own_tensors(model.modules()))


def set_buffer(model: nn.Module, names: Sequence[str], tensor: Tensor) -> None:
    """Make ``tensor`` the buffer at each of ``names`` (full names, as :func:`initial_values` yields them).

    Raises:
        KeyError: a name is not that of a buffer.
    """
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf not in module._buffers:
            raise KeyError(
                f"{name!r} is not a buffer of {type(model).__name__}; that module has {sorted(module._buffers)}"
            )
        module._buffers[leaf] = tensor


def adopt(param: Tensor, data: Tensor) -> None:
    """Make ``param``, real or on the meta device, use ``data`` of any shape, dtype and device, without a copy.

    The object stays the same, so optimizers, tied modules and Python weak references keep it. ``requires_grad``, its
    Python attributes and its hooks are kept, too. A deferred parameter becomes a plain ``nn.Parameter``.

    Raises:
        RuntimeError: an autograd graph or C++ code still refers to a meta ``param``.
    """
    data = plain(data)
    with no_torch_function():
        deferred = isinstance(param, DeferredTensor | DeferredParameter)
        if not deferred and can_share_object(param, data):
            point(param, data)
            return
        uses = tensor_holders(param)
        if uses > 1:
            raise RuntimeError(
                f"a meta tensor of shape {tuple(param.shape)} is held {uses - 1} times by an autograd graph or by C++ "
                "code, so it cannot be given values; drop the outputs of forwards that ran on the meta device first"
            )
        kind: type = type(param)
        if deferred:
            kind = nn.Parameter if isinstance(param, nn.Parameter) else torch.Tensor
        made: Tensor = give_subclass(kind, data, param.requires_grad)
        move_hooks(param, made)
        param.__class__ = kind
        exchange_content(param, made)


# ---- values ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Slot:
    """A parameter or buffer of one module. ``names`` is empty if an earlier module yields the tensor."""

    module: nn.Module
    leaf: str
    tensor: Tensor | None
    names: tuple[str, ...]
    is_parameter: bool
    bare: bool  # on the meta device without a record
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def table(self) -> dict[str, Any]:
        return self.module._parameters if self.is_parameter else self.module._buffers


def _own_tensors(modules: Iterator[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor, bool]]:
    for module in modules:
        for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for leaf, tensor in table.items():
                if tensor is not None:
                    yield module, leaf, tensor, is_parameter


def _slots(model: nn.Module) -> dict[nn.Module, list[_Slot]]:
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for _, leaf, tensor, _ in _own_tensors(iter((module,))):
            names.setdefault(id(tensor), []).append(f"{path}.{leaf}" if path else leaf)
    slots: dict[nn.Module, list[_Slot]] = {module: [] for module in model.modules()}
    for module, leaf, tensor, is_parameter in _own_tensors(model.modules()):
        full_names = tuple(dict.fromkeys(names.pop(id(tensor), ())))
        with no_torch_function():
            bare = tensor.device == META and tape_of(tensor) is None
            stride = tensor.stride() if tensor.layout is torch.strided else ()
            geometry = (tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad)
        slots[module].append(_Slot(module, leaf, tensor, full_names, is_parameter, bare, *geometry))
    return slots


def initial_values(
    model: nn.Module, device: torch.device
) -> Iterator[tuple[tuple[str, ...], nn.Parameter | Tensor, Tensor, bool]]:
    """Yield every distinct parameter and buffer of ``model`` with its initial value, one at a time.

    Yields ``(names, tensor, value, is_parameter)``. ``names`` are all full names of the object ``tensor`` (several if
    it is tied), in the order of ``model.modules()``, each module's parameters before its buffers. ``value`` is
    detached, on ``device``, and has the full shape. For a real tensor, it is its own memory (moved to ``device`` if
    that differs). A deferred tensor is replayed. One on the bare meta device is initialized by its module (see the
    module docstring), together with that module's other tensors. No references are kept: the memory of ``value`` is
    free when the caller drops it. The model is not changed; :func:`adopt` and :func:`set_buffer` set values, during the
    iteration or later.

    A tied tensor on the bare meta device gets its values from the first module that has it.

    Raises:
        RuntimeError: called inside ``deferred_init()``; or a module on the bare meta device cannot initialize its
            values.
    """
    if is_recording():
        raise RuntimeError(
            f"initial_values() of {type(model).__name__} was called inside deferred_init(); leave that context first"
        )
    slots = _slots(model)
    makers = _Makers(model, slots)
    made: dict[int, Tensor] = {}
    for module, own in slots.items():
        if any(slot.bare for slot in own):
            made.update(makers.make(module))
        queue = deque(own)
        own.clear()
        while queue:
            slot = queue.popleft()
            tensor, slot.tensor = slot.tensor, None
            if tensor is None or not slot.names:
                continue
            # The value is not bound to a name here, so that only the consumer holds it.
            yield slot.names, tensor, _value(tensor, made.pop(id(slot), None), device), slot.is_parameter


def _value(tensor: Tensor, made: Tensor | None, device: torch.device) -> Tensor:
    if made is not None:
        return made.to(device)
    return (plain(tensor) if tape_of(tensor) is None else replay(tensor)).to(device)


class _Makers:
    """Initializes the tensors of modules on the bare meta device, through the modules' own initialization."""

    def __init__(self, model: nn.Module, slots: dict[nn.Module, list[_Slot]]) -> None:
        self._slots = {module: list(own) for module, own in slots.items()}
        self._paths = {module: path or type(module).__name__ for path, module in model.named_modules()}
        self._done: set[nn.Module] = set()
        self._rules: dict[nn.Module, Callable[[nn.Module], None]] = {}
        for module in model.modules():  # parents before children, so the innermost model's rule stays
            rule: Any = getattr(module, "_init_weights", None)
            if callable(rule) and hasattr(module, "config"):
                self._rules.update((child, rule) for child in module.modules())
        for module in model.modules():
            self._refuse_second_pass(module)

    def _refuse_second_pass(self, module: nn.Module) -> None:
        """Raise for modules that initialize their children again (nn.Transformer), which would be left out."""
        own_rule = hasattr(module, "reset_parameters") or module in self._rules
        second_pass = hasattr(module, "_reset_parameters") and not self._slots[module]
        if second_pass and not own_rule and any(slot.bare for child in module.modules() for slot in self._slots[child]):
            raise RuntimeError(
                f"{self._paths[module]} ({type(module).__name__}) initializes the modules inside it a second time, in "
                "_reset_parameters(), which cannot be done one module at a time on the meta device; build the model "
                "under shardwise's deferred_init() in place of torch.device('meta')"
            )

    def make(self, module: nn.Module) -> dict[int, Tensor]:
        """Return the values of ``module``'s bare tensors by the id of their slots; {} if they were returned before."""
        if module in self._done:
            return {}
        modules, steps = self._plan(module)
        slots = [slot for each in modules for slot in self._slots[each]]
        self._done.update(modules)
        if not steps and not any(slot.names for slot in slots):
            return {}
        if not steps:
            self._fail(slots, f"{type(module).__name__} has no reset_parameters()")
        return self._run(slots, steps)

    def _plan(self, module: nn.Module) -> tuple[list[nn.Module], list[Callable[[], object]]]:
        steps: list[Callable[[], object]] = []
        own_rule = hasattr(module, "reset_parameters")
        if own_rule:
            steps.append(module.reset_parameters)  # type: ignore[arg-type]
        if module in self._rules:
            rule = self._rules[module]
            steps.append(lambda: rule(module))
        elif not own_rule and hasattr(module, "_reset_parameters"):
            # nn.MultiheadAttention: the constructor creates its children first, then initializes them and itself.
            children = [child for child in module.modules() if child is not module]
            steps = [child.reset_parameters for child in children if hasattr(child, "reset_parameters")]  # type: ignore[misc]
            return [module, *children], [*steps, module._reset_parameters]  # type: ignore[list-item]
        return [module], steps

    def _run(self, slots: list[_Slot], steps: list[Callable[[], object]]) -> dict[int, Tensor]:
        """Set temporary real tensors in the modules, initialize, and restore the modules' own tensors."""
        originals = [slot.table[slot.leaf] for slot in slots]
        for slot in slots:
            stand_in = torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device="cpu")
            slot.table[slot.leaf] = nn.Parameter(stand_in, slot.requires_grad) if slot.is_parameter else stand_in
        try:
            with torch.no_grad(), WriteWatch([slot.table[slot.leaf] for slot in slots]) as watch:
                for step in steps:
                    step()
            results = [slot.table[slot.leaf].detach() for slot in slots]
        finally:
            for slot, original in zip(slots, originals, strict=True):
                slot.table[slot.leaf] = original
        values = [(slot, result) for slot, result in zip(slots, results, strict=True) if slot.bare and slot.names]
        missed = [slot for slot, result in values if result.numel() and not watch.saw(result)]
        if missed:
            self._fail(missed, "its initialization did not write to them")
        return {id(slot): result for slot, result in values}

    def _fail(self, slots: list[_Slot], reason: str) -> None:
        names = ", ".join(slot.leaf for slot in slots if slot.bare)
        module = slots[0].module
        raise RuntimeError(
            f"{self._paths[module]} ({type(module).__name__}) is on the meta device and its tensors [{names}] have no "
            f"initial values: {reason}. Write all of them in its reset_parameters(), or build the model under "
            "shardwise's deferred_init() in place of torch.device('meta')"
        )


class _PlainTensors:
    """Gives values to the tensors of modules that are neither parameters nor buffers.

    Nothing would request their values later, so they get them when the construction ends, wherever a module stores
    them: as an attribute, or in nested dicts, lists, tuples, sets and dataclasses. Object identity and views of common
    memory are preserved. A buffer that is also stored elsewhere gets its values now, in place; parameters are not
    changed.

    Args:
        modules: modules of the construction; modules in their containers are added.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._waiting: deque[nn.Module] = deque()
        self._buffers: set[int] = set()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """By ``id``: the tensor, whose reference keeps the id valid, and its values."""
        self._memory: dict[Cell, torch.UntypedStorage] = {}
        self._visited: dict[int, object] = {}
        for module in modules:
            self._add(module)

    def _add(self, module: nn.Module) -> None:
        if id(module) not in self._modules:
            self._modules[id(module)] = module
            self._waiting.append(module)
            self._buffers.update(id(each) for each in module._buffers.values() if each is not None)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                mark(tensor)

    def materialize(self) -> None:
        """Give values to the tensors of all modules."""
        while self._waiting:
            attributes = self._waiting.popleft().__dict__
            for name, value in list(attributes.items()):
                if name not in TABLES:
                    new = self._with_values(value)
                    if new is not value:
                        attributes[name] = new

    def _with_values(self, value: Any) -> Any:
        """Return ``value`` with materialized tensors: the same object if it is mutable."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            self._add(value)
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
                new = self._with_values(each)
                if new is not each:
                    value[key] = new
            return value
        parts = list(value)
        new_parts = [self._with_values(each) for each in parts]
        if all(new is each for new, each in zip(new_parts, parts, strict=True)):
            return value
        if isinstance(value, set):
            value.clear()
            value.update(new_parts)
            return value
        return type(value)(*new_parts) if hasattr(value, "_fields") else type(value)(new_parts)

    def _dataclass(self, value: Any) -> Any:
        for field in fields(value):
            each = getattr(value, field.name, None)
            new = self._with_values(each)
            if new is not each:
                object.__setattr__(value, field.name, new)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tape_of(tensor) is None:
            return tensor
        if id(tensor) in self._buffers:
            adopt(tensor, self._values(tensor))
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._values(tensor).requires_grad_(tensor.requires_grad)
        return self._made[id(tensor)][1]

    def _values(self, tensor: Tensor) -> Tensor:
        tape = tape_of(tensor)
        assert tape is not None
        with no_torch_function(), torch.no_grad():
            if tape.cell not in self._memory:
                storage = torch.empty(0, dtype=torch.uint8, device=META)
                storage.set_(tensor.untyped_storage())
                self._memory[tape.cell] = replay(storage).untyped_storage()
            return Ref.of(tensor, tape, tape.head).on(self._memory[tape.cell])
