"""Questions about torch, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.torch_version import TorchVersion

__all__ = ["instrument_w_nvtx", "is_compile_supported", "is_compiling", "required_torch_version"]

F = TypeVar("F", bound=Callable[..., object])


def is_compile_supported() -> bool:
    """True."""
    return True


def is_compiling() -> bool:
    """Whether torch compiles what runs."""
    return torch.compiler.is_compiling()


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is neither older nor newer, such as ``min_version=2.1``.

    Raises:
        ValueError: neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError(f"required_torch_version({min_version=}, {max_version=}): give one of them")
    found = TorchVersion(torch.__version__.split("+")[0])
    old = min_version is not None and found < str(min_version)
    return not old and not (max_version is not None and found > str(max_version))


def instrument_w_nvtx(func: F) -> F:
    """``func`` itself: there is no profiler to tell."""
    return func
