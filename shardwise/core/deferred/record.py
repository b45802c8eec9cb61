"""Recording of tensor operations without executing them: tensors become meta tensors with a tape for a later replay.

Three parts intercept the operations:

* :class:`Recorder` (below autograd) redirects creations to the meta device and records each operation that creates or
  writes.
* :class:`Facade` (above autograd) answers queries on recorded tensors as the real tensors would, so that code that
  reads ``device`` or ``is_meta`` takes the branches of a normal construction.
* :class:`DeferredTensor` and :class:`DeferredParameter` are the types of recorded tensors after the context has ended.
  They continue to record, so ``model.half()`` and ``parameter.data.mul_(2)`` work.

A random operation is executed once while it is recorded, on temporary memory, so that the generator advances exactly as
in a normal construction. The generator state before it is stored for the replay.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.base.device import default_generator
from shardwise.core.base.torch_internals import (
    DispatchMode,
    dispatch_modes,
    give_subclass,
    no_subclass_dispatch,
    no_torch_function,
    parse_to,
    version_of,
    without_modes,
)
from shardwise.core.deferred.replay import (
    META,
    OWN_GENERATOR,
    Cell,
    Constant,
    Operation,
    Ref,
    ReplayCache,
    Tape,
    map_leaves,
    replay,
    start_tape,
    tape_of,
    tensors_in,
)

aten = torch.ops.aten


def _aten(*names: str) -> frozenset[str]:
    return frozenset("aten::" + name for name in names)


# Operations that write every element of self without reading it.
_OVERWRITES = _aten(
    *("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "bernoulli_"),
)
# Operations that leave the memory that they allocate uninitialized.
_EMPTY = _aten("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
# Operations that read only shape, strides and type of their first argument.
_LIKE = _EMPTY | _aten(
    *("rand_like", "randn_like", "randint_like", "zeros_like", "ones_like", "full_like"),
    *("new_zeros", "new_ones", "new_full"),
)
# Operations that change arguments (the running statistics) without a note in their schema.
_CHANGES_SILENTLY = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
_sequence = itertools.count()


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that ``func`` changes."""
    values = [args[index] for index in _CHANGES_SILENTLY.get(func._schema.name, ()) if index < len(args)]
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return tensors_in(values)


def _is_view(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _gives_tensors(func: Any) -> bool:
    return any("Tensor" in str(value.type) for value in func._schema.returns)


def _meta_twin(leaf: object) -> object:
    if isinstance(leaf, Tensor) and leaf.device != META:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
    return None if isinstance(leaf, torch.Generator) else leaf


class _Mode(DispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to avoid dynamo's disable wrapper, which would import the compiler (seconds)."""
        return False


class Recorder(_Mode):
    """A mode in which new tensors are meta tensors with a tape from which :func:`replay` computes their values.

    Operations on real tensors that change or view them run as usual. Reads of values (``.item()``, ``bool(tensor)``)
    are answered correctly, by a replay of that tensor.

    Raises (from the recorded program):
        RuntimeError: an operation needs values that cannot be replayed.
        NotImplementedError: an operation would record a tensor without a plain storage, for example a sparse one.

    Attributes:
        leave: materializes the plain tensors that were constructed so far.
        paused: whether operations run as usual.
    """

    def __init__(self, leave: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.leave, self.paused = leave, False
        self._cache = ReplayCache()
        self._states: weakref.WeakValueDictionary[bytes, Tensor] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        with no_torch_function():
            return self._dispatch(func, tuple(args), dict(kwargs or {}))

    def close(self) -> None:
        """Free the memory that was cached for data-dependent reads."""
        self._cache.clear()

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in((args, kwargs))
        written = _written(func, args, kwargs)
        recorded = [tensor for tensor in inputs if tape_of(tensor) is not None]
        if any(tensor.device == META and tape_of(tensor) is None for tensor in inputs):
            if any(tape_of(tensor) is not None for tensor in written):
                raise RuntimeError(
                    f"{func} writes from a plain meta tensor, which has no values, into a deferred one; make it "
                    "inside deferred_init() too"
                )
            return func(*args, **kwargs)
        if not recorded:
            changes_real = bool(inputs) and (bool(written) or _is_view(func) or not _gives_tensors(func))
            if changes_real and func is not aten.lift_fresh.default:
                return func(*args, **kwargs)
        elif torch.Tag.data_dependent_output in func.tags or (written and not any(map(tape_of, written))):
            return self.really(func, args, kwargs)
        # The result of lift_fresh shares the memory of its argument, which a replayed in-place operation would change.
        return self._record(aten.clone.default if func is aten.lift_fresh.default else func, args, kwargs, written)

    def really(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` with real values instead of recorded tensors."""

        def real(leaf: object) -> object:
            return replay(leaf, self._cache) if isinstance(leaf, Tensor) and tape_of(leaf) is not None else leaf

        try:
            args, kwargs = map_leaves(real, (args, kwargs))
        except Exception as error:
            raise RuntimeError(
                f"{func} needs the values of a deferred tensor, and replaying it failed ({error}); build this module "
                "outside deferred_init()"
            ) from error
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        inputs = tensors_in((args, kwargs))
        device = _device_of(func, inputs, kwargs)
        if "device" in kwargs:
            kwargs["device"] = device
        unread = _unread_first(func, args)

        def noted(leaf: object) -> object:
            if isinstance(leaf, torch.Generator):
                return OWN_GENERATOR
            if not isinstance(leaf, Tensor):
                return leaf
            tape = tape_of(leaf)
            if tape is None:
                return Constant(leaf, version_of(leaf))
            return Ref.of(leaf, tape, None if leaf is unread else tape.head)

        notes = map_leaves(noted, (args, kwargs))  # before the operation runs, since it may resize its arguments
        tapes = [tape for tape in map(tape_of, written) if tape is not None]
        reads = [(tape.cell, None if leaf is unread else tape.head) for leaf in inputs if (tape := tape_of(leaf))]
        state = self._advance(func, args, kwargs, device, unread)
        output = self._shape(func, args, kwargs)
        creates = _start_tapes(func, output, device)
        if func._schema.name not in _EMPTY and (creates or tapes):
            operation = Operation(
                order=next(_sequence),
                func=func,
                args=notes[0],
                kwargs=notes[1],
                reads=tuple(reads),
                writes=tuple(tape.cell for tape in tapes),
                creates=tuple((index, ref) for index, ref, _ in creates),
                state=state,
                device=device,
                default_dtype=torch.get_default_dtype(),
            )
            for tape in (*tapes, *(tape for _, _, tape in creates)):
                tape.head = operation
        return output

    def _shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the meta outputs. If the meta device cannot infer them (data-dependent shapes), run the operation."""
        meta_args, meta_kwargs = map_leaves(_meta_twin, (args, kwargs))
        if "device" in kwargs:
            meta_kwargs["device"] = META
        try:
            return func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            if _written(func, args, kwargs) or _is_view(func):
                raise
        default = default_generator(torch.device("cpu"))
        before = default.get_state()
        try:
            return map_leaves(_meta_twin, self.really(func, args, kwargs))
        finally:
            default.set_state(before)

    def _advance(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, unread: object
    ) -> Tensor | None:
        """Run a random operation to advance the generator, and return the state before it; None if it is not random."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = kwargs.get("generator") or default_generator(device)
        state = generator.get_state()

        def dummy(leaf: object) -> object:
            if leaf is not unread or not isinstance(leaf, Tensor):
                return leaf
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

        self.really(func, *map_leaves(dummy, (args, kwargs)))
        return self._states.setdefault(hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest(), state)


def _device_of(func: Any, inputs: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the result in a normal construction.

    A meta device among the arguments mostly comes from torch itself (it creates the right side of ``x[0] = 1`` on the
    device of ``x``) and means the device of the recorded tensors.
    """
    requested = kwargs.get("device")
    if requested is not None and torch.device(requested) != META:
        return torch.device(requested)
    # A CPU scalar may be combined with tensors on any device, so tensors with dimensions have priority.
    for tensor in sorted(inputs, key=lambda tensor: tensor.dim() == 0):
        tape = tape_of(tensor)
        return tensor.device if tape is None else tape.cell.device
    return torch.device("cpu")


def _unread_first(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return the first argument if the operation does not depend on its values."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    tape = None if first is None else tape_of(first)
    if first is None or tape is None:
        return None
    if func._schema.name in _LIKE:
        return first
    covers_cell = first.is_contiguous() and first.numel() * first.element_size() == tape.cell.nbytes
    reads_cell = any(tape_of(other) is tape for other in tensors_in(args[1:]))
    return first if func._schema.name in _OVERWRITES and covers_cell and not reads_cell else None


def _start_tapes(func: Any, output: Any, device: torch.device) -> list[tuple[int, Ref, Tape]]:
    """Start a tape for every storage that ``func`` created; return (index of the output tensor, geometry, tape)."""
    created = []
    fresh: set[Tape] = set()
    for index, tensor in enumerate(tensors_in(output)):
        if tensor.layout != torch.strided:
            raise NotImplementedError(
                f"{func} makes a tensor of layout {tensor.layout}, which cannot be deferred; build this module outside "
                "deferred_init()"
            )
        tape = tape_of(tensor)
        if tape is None and tensor.device == META:
            tape = Tape(Cell(device, tensor.untyped_storage().nbytes()), None)
            start_tape(tensor, tape)
            fresh.add(tape)
        if tape is not None and tape in fresh:
            created.append((index, Ref.of(tensor, tape, None), tape))
    return created


# ---- queries on recorded tensors -------------------------------------------------------------------------------------

_READ_VALUES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_SHOW = {torch.Tensor.__repr__, torch.Tensor.__format__}
_FACTS: dict[object, Callable[[torch.device], object]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}


def _read_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_modes(), no_torch_function():
        values = func(replay(args[0]), *args[1:], **kwargs)
    if hasattr(values, "setflags"):
        values.setflags(write=False)  # the array is a copy, so a write would be lost: make it an error
    return values


class Facade(TorchFunctionMode):
    """Makes recorded tensors look real: ``device`` is the requested one, and a move to it has no effect.

    Args:
        recorder: the recorder of these tensors.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) and not self._recorder.paused else None
        tape = None if first is None else tape_of(first)
        if tape is None:
            return func(*args, **kwargs)
        if func in _FACTS:
            return _FACTS[func](tape.cell.device)
        if func in _READ_VALUES:
            return _read_values(func, args, kwargs)
        if func in _SHOW:
            with no_torch_function():
                return func(*args, **kwargs)
        rewrite = _REWRITES.get(func)
        return func(*args, **kwargs) if rewrite is None else rewrite(tape.cell.device, *args, **kwargs)


def _to(device: torch.device, tensor: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    """Run Tensor.to without the device if it is the tensor's own, in which case torch returns the same memory."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copied = kwargs.pop("copy", False) or (len(args) > 0 and args[-1] is True and args.count(True) > 1)
    where, dtype, _, memory_format = parse_to(*args, **kwargs)
    options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
    if where is not None and torch.device(where) not in (device, META):
        options["device"] = where
    return tensor.to(dtype=dtype or tensor.dtype, copy=copied, **options)


def _cpu(device: torch.device, tensor: Tensor, /, **kwargs: Any) -> Tensor:
    return _to(device, tensor, torch.device("cpu"), **kwargs)


def _new_tensor(device: torch.device, tensor: Tensor, /, data: Any, **kwargs: Any) -> Tensor:
    kwargs["dtype"] = kwargs.get("dtype") or tensor.dtype
    kwargs["device"] = kwargs.get("device") or device
    return torch.tensor(data, **kwargs)


def _tensor(device: torch.device, tensor: Tensor, /, *, requires_grad: bool = False, **kwargs: Any) -> Tensor:
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    return tensor.detach().to(copy=True, **{"dtype": tensor.dtype, **kwargs}).requires_grad_(requires_grad)


def _as_tensor(device: torch.device, tensor: Tensor, /, dtype: Any = None, **kwargs: Any) -> Tensor:
    return tensor.to(dtype=dtype or tensor.dtype, **{key: value for key, value in kwargs.items() if value is not None})


_REWRITES: dict[object, Callable[..., Tensor]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.new_tensor: _new_tensor,
    torch.tensor: _tensor,
    torch.as_tensor: _as_tensor,
    torch.asarray: _as_tensor,
}


def recorders() -> list[Recorder]:
    """Return the recorders that are active in this thread, outermost first."""
    return [mode for mode in dispatch_modes() if isinstance(mode, Recorder) and not mode.paused]


def is_recording() -> bool:
    """Return True if a Recorder is active in this thread."""
    return bool(recorders())


class _Recorded:
    """Methods of deferred tensors: operations on them are recorded, also after the context has ended."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ_VALUES:
            return _read_values(func, args, kwargs)
        with no_subclass_dispatch():
            if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") or is_recording():
                output = func(*args, **kwargs)
            else:
                with Recorder() as recorder:
                    output = func(*args, **kwargs)
                recorder.close()
        if isinstance(output, Tensor):
            return mark(output)
        return map_leaves(mark, output) if type(output) in (list, tuple) else output

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            result = self.detach().clone()
            if isinstance(self, nn.Parameter):
                with no_subclass_dispatch():
                    result = give_subclass(DeferredParameter, result, self.requires_grad)
            result.__dict__.update(copy.deepcopy(self.__dict__, memo))
            memo[id(self)] = result
        return memo[id(self)]  # type: ignore[no-any-return]


class DeferredTensor(_Recorded, torch.Tensor):
    """A deferred buffer or other tensor: a meta tensor on which operations are recorded."""


class DeferredParameter(_Recorded, nn.Parameter):
    """A deferred parameter: a meta tensor on which operations are recorded."""


def mark(value: Any) -> Any:
    """Change the type of a recorded plain tensor to the deferred one, in place, and return ``value``."""
    if isinstance(value, Tensor) and type(value) in (torch.Tensor, nn.Parameter) and tape_of(value) is not None:
        value.__class__ = DeferredTensor if type(value) is torch.Tensor else DeferredParameter
    return value


class WriteWatch(_Mode):
    """Records which storages of the ``watched`` tensors are written while it is active."""

    def __init__(self, watched: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {tensor.untyped_storage().data_ptr() for tensor in watched}
        self._seen: set[int] = set()

    def saw(self, tensor: Tensor) -> bool:
        """Return True if ``tensor``'s memory was written, or is not watched at all (the tensor was replaced)."""
        address = tensor.untyped_storage().data_ptr()
        return address in self._seen or address not in self._watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._seen.update(tensor.untyped_storage().data_ptr() for tensor in _written(func, args, kwargs))
        return func(*args, **kwargs)
