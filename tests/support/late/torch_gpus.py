"""Access to private parts of torch that makes a torch without GPUs believe that there is one."""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def arguments_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Yield the arguments of an operation, each with its entry in the schema."""
    known = op._schema.arguments
    by_name = {argument.name: argument for argument in known}
    return [*zip(known, args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]


def as_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU's kernel of an operation on tensors of any device: useful where it reads no value."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def device_kernels(call: Callable[..., Any], over_all: Sequence[str]) -> object:
    """Make ``call(op, *args, **kwargs)`` every operation's kernel for GPUs, as long as the result lives.

    ``over_all`` are operations of ``aten`` that have a kernel for all devices, which would precede it.
    """
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    every.fallback(call, "CUDA")  # type: ignore[no-untyped-call]
    for name in over_all:
        own.impl(name, functools.partial(call, getattr(torch.ops.aten, name).default), "CUDA")  # type: ignore[no-untyped-call]
    return every, own


_YES = (2, 3, 4)
"""``isBuilt``, ``isAvailable``, ``hasPrimaryContext`` in ``AcceleratorHooksInterface``'s table, from entry 2."""


@contextlib.contextmanager
def gpus_that_do_nothing() -> Iterator[None]:
    """Make torch, built without GPUs, believe inside this context that there is one, which is current and has one
    stream.

    Autograd asks for it in two ways that Python cannot set. Torch's own no-op guard can be installed only over one that
    finds no device, so that is installed first; and three of the answers that it gets from CUDA are replaced.
    """
    libraries = Path(torch.__file__).parent / "lib"
    _give_guard(ctypes.CDLL(str(libraries / "libc10.so")))
    hooks = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))["_ZN2at6detail12getCUDAHooksEv"]
    hooks.restype = ctypes.c_void_p
    methods = ctypes.c_void_p.from_address(hooks())
    before, yes = methods.value, ctypes.CFUNCTYPE(ctypes.c_bool)(lambda: True)
    table = (ctypes.c_void_p * 256).from_buffer_copy(ctypes.string_at((before or 0) - 16, 2048))
    for place in _YES:
        table[2 + place] = ctypes.cast(yes, ctypes.c_void_p).value
    answers: dict[str, Any] = {"_lazy_init": lambda: None, "get_device_capability": lambda device=None: (8, 0)}
    cuda = sys.modules["torch.cuda"]
    own = {name: getattr(cuda, name) for name in answers}
    vars(cuda).update(answers)
    methods.value = ctypes.addressof(table) + 16
    try:
        yield
    finally:
        methods.value = before
        vars(cuda).update(own)


def _give_guard(library: ctypes.CDLL) -> None:
    register = library["_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"]
    register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
    none = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    methods = (ctypes.c_void_p * 64)(*[ctypes.cast(none, ctypes.c_void_p).value] * 64)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
    register(1, ctypes.addressof(guard))
    torch._C._ensureCUDADeviceGuardSet()
