"""Counters of a process: live tensors and their bytes, and resident memory."""

import gc
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.core.base.torch_internals import storage_id


def live_tensors() -> Iterator[Tensor]:
    """Return every tensor that a Python object references in this process, with the gradients of leaves.

    Tensors that only the autograd graph references (activations saved for backward) have no Python object and are
    missing: count while no graph is alive. In a rank of a pool, tensors of imported modules are left out.
    """
    gc.collect()
    for obj in gc.get_objects():
        # type(), since isinstance() runs the __class__ property of lazy stand-in objects.
        if issubclass(type(obj), Tensor):
            yield obj
            if obj.is_leaf and obj.grad is not None:
                yield obj.grad


def live_tensor_bytes(device: torch.device | str | None = None) -> int:
    """Return the bytes of the distinct storages behind :func:`live_tensors`, on ``device`` or on all devices.

    Views count once, and so do several storages of one memory (a mapping shared with peers has two); an expanded tensor
    counts its storage, not its shape; meta tensors count nothing.
    """
    wanted = torch.device(device) if device is not None else None
    sizes: dict[tuple[torch.device, int], int] = {}
    with warnings.catch_warnings(action="ignore"):
        for tensor in live_tensors():
            if tensor.is_meta or tensor.layout is not torch.strided:
                continue
            if wanted is not None and wanted not in (tensor.device, torch.device(tensor.device.type)):
                continue
            try:
                storage = tensor.untyped_storage()
                place = storage.data_ptr() or storage_id(storage)
            except (NotImplementedError, RuntimeError):  # wrapper subclasses without a storage of their own
                continue
            sizes[tensor.device, place] = max(storage.nbytes(), sizes.get((tensor.device, place), 0))
    return sum(sizes.values())


def resident_bytes(field: str) -> int:
    """Return ``VmRSS``, or ``VmHWM``: its maximum since :func:`forget_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def forget_peak() -> bool:
    """Reset the peak of resident memory to its present value; ``False`` if this kernel cannot."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True
