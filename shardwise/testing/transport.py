"""Pickling between the caller and the ranks of a pool: everything by value, functions and classes by name.

multiprocessing's own pickler would hand tensors over as shared memory served by a thread of the sender. Here they are
copied: a result stays valid after its rank was killed, and no rank can change the caller's tensors.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["Source", "Task", "dump", "find_function", "load", "load_module", "make_task"]

_MAIN = "__main__"
_MAIN_IN_RANK = "__mp_main__"


@dataclass(frozen=True)
class Source:
    """Where a module can be found again: the name objects refer to it by, the name to import, and its file."""

    name: str
    import_name: str | None
    file: str | None


@dataclass(frozen=True)
class Task:
    """One call, ready to be sent: the function's place, the modules the arguments need, the pickled arguments."""

    cwd: str
    sys_path: tuple[str, ...]
    sources: tuple[Source, ...]
    module: Source
    qualname: str
    arguments: bytes

    @property
    def label(self) -> str:
        """``module.function``, for messages."""
        return f"{self.module.import_name or self.module.file}:{self.qualname}"


class _Pickler(pickle.Pickler):
    """Notes the modules of all functions and classes, and copies plain tensors faster than torch's own reduction."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            self.modules.add(obj.__module__)
        elif type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            return _rebuild_tensor, _take_apart(obj)
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )


def _take_apart(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Dense tensors in another dimension order (a transposed parameter) keep that order.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.detach().permute(order)
    if not flat.is_contiguous():
        order, flat = list(range(tensor.dim())), tensor.detach()
    flat = flat.contiguous()
    data = bytearray(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"")
    parameter = type(tensor) is torch.nn.Parameter
    return data, tensor.dtype, tuple(flat.shape), tuple(order), tensor.requires_grad and tensor.is_leaf, parameter


def _rebuild_tensor(
    data: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    requires_grad: bool,
    parameter: bool,
) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    inverse = [order.index(dim) for dim in range(len(order))]
    tensor = flat.permute(inverse)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def dump(obj: object) -> tuple[bytes, set[str]]:
    """``obj`` pickled by value, and the names of the modules that are needed to load it."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    return buffer.getvalue(), pickler.modules


def load(data: bytes) -> Any:
    """The inverse of :func:`dump`. Only for data from a process that this one started, or was started by."""
    return pickle.loads(data)


def _source(name: str) -> Source:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    file = os.path.abspath(file) if file and os.path.exists(file) else None
    if name != _MAIN:
        return Source(name, name, file)
    spec = getattr(module, "__spec__", None)  # set when started with python -m
    return Source(name, spec.name if spec is not None else None, file)


def _resolve(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def make_task(fn: Callable[..., object], args: tuple[object, ...]) -> Task:
    """``fn(*args)`` as data.

    Raises:
        ValueError: ``fn`` cannot be found by its name in another process (lambda, nested or interactive function).
    """
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise ValueError(f"{fn!r} has no qualified name; give a function defined at the top level of a module")
    try:
        same = _resolve(sys.modules[module], qualname) is fn
    except (KeyError, AttributeError):
        same = False
    if not same:
        raise ValueError(
            f"{module}.{qualname} is not what {fn!r} is: ranks look functions up by name, "
            "so give one defined at the top level of a module (no lambda, no nested function)"
        )
    arguments, names = dump(args)
    sources = {name: _source(name) for name in sorted(names | {module})}
    if _MAIN in sources and sources[_MAIN].file is None:
        raise ValueError(
            f"{qualname} or an argument of it is defined in an interactive session or on standard input, "
            "where ranks cannot import it from; move it into a file"
        )
    own = sources.pop(module)
    return Task(os.getcwd(), tuple(sys.path), tuple(sources.values()), own, qualname, arguments)


def _same_file(module: ModuleType, file: str | None) -> bool:
    known = getattr(module, "__file__", None)
    return file is None or known is None or os.path.realpath(known) == os.path.realpath(file)


def _from_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file!r}; give functions from Python source files")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def load_module(source: Source) -> ModuleType:
    """Import a module of the caller in this process: by its name, or where that fails from its file."""
    if source.name == _MAIN:
        return _load_main(source)
    module = sys.modules.get(source.name)
    if module is None:
        try:
            module = importlib.import_module(source.name)
        except ModuleNotFoundError as error:
            # Only a missing module of this name or above it is ours to repair, not a failing import inside it.
            missing = error.name or ""
            if source.file is None or not f"{source.name}.".startswith(f"{missing}."):
                raise
            return _from_file(source.name, source.file)
    if source.file is not None and not _same_file(module, source.file):
        return _from_file(source.name, source.file)
    return module


def _load_main(source: Source) -> ModuleType:
    module = sys.modules.get(_MAIN_IN_RANK)
    if module is None or source.file is None or getattr(module, "__file__", None) != source.file:
        if source.import_name is not None and not source.import_name.endswith(_MAIN):
            module = importlib.import_module(source.import_name)
        elif source.file is not None:
            module = _from_file(_MAIN_IN_RANK, source.file)
        else:
            raise ImportError(f"the caller's main module has no file ({source}); move the function into a file")
    sys.modules[_MAIN_IN_RANK] = sys.modules[_MAIN] = module
    return module


def find_function(task: Task) -> Callable[..., object]:
    """The task's function in this process, with every module its arguments need imported."""
    if list(task.sys_path) != sys.path:
        sys.path[:] = task.sys_path
        importlib.invalidate_caches()
    for source in task.sources:
        load_module(source)
    found: Callable[..., object] = _resolve(load_module(task.module), task.qualname)
    return found
