"""Norms and activations of a model in kernels of their own: the modules stay the model's, with parameters and names.

transformers is never imported. Of a norm it is tried out what it computes, so that copies and variants are found, and
what computes something else is left.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.remarks import warn_user

__all__ = ["Kernels", "compile_activations", "fuse_norms", "kernels_of"]

Undo = list[tuple[Any, str, Any]]
"""Owner, name of an attribute, and its value before."""
OPERATIONS = {
    "NewGELUActivation",
    "FastGELUActivation",
    "QuickGELUActivation",
    "AccurateGELUActivation",
    "ClippedGELUActivation",
    "LaplaceActivation",
    "ReLUSquaredActivation",
}
"""transformers' activations that are written in several operations. The others are one kernel as they are."""
OWN_KERNEL = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
TRIED_ROWS = 5
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""In which dtypes a norm is tried out, and how far off another order of its roundings may be."""


@dataclass(frozen=True)
class Kernels:
    """What a model is asked to compute by.

    Attributes:
        flash: torch's kernels for attention.
        norms: one kernel for each norm.
        activations: one for each activation.
    """

    flash: bool = False
    norms: bool = False
    activations: bool = False


def kernels_of(arguments: Any) -> Kernels:
    """What ``enable_...`` arguments of these names mean."""
    a, every = arguments, arguments.enable_all_optimization
    return Kernels(
        every or a.enable_flash_attention, every or a.enable_fused_normalization, every or a.enable_jit_fused
    )


# ---- norms


class _Fused(nn.Module):
    """A norm whose weight and input have one dtype; else it is the module's own."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            own: Tensor = super().forward(x)
            return own
        return self.fused(x, self.weight, _eps(self))

    @staticmethod
    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        raise NotImplementedError(f"a norm of {tuple(weight.shape)} with eps={eps}; report this")


class _RootMeanSquare(_Fused):
    @staticmethod
    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)


class _OnePlus(_Fused):
    """Gemma's, whose weight is what is added to one; in 16 bits that sum would round it away."""

    @staticmethod
    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype.itemsize < 4:
            return functional.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)
        return functional.rms_norm(x, weight.shape, 1.0 + weight, eps)


class _Layer(_Fused):
    """A layer norm without a bias (Cohere's)."""

    @staticmethod
    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x, weight.shape, weight, None, eps)


KINDS: tuple[type[_Fused], ...] = (_RootMeanSquare, _OnePlus, _Layer)


def fuse_norms(model: nn.Module, undo: Undo) -> None:
    """Have the norms of ``model`` computed by torch's own kernels, where it is known what they compute.

    Warns:
        UserWarning: there are none, or all are left as they are.
    """
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    found = [(module, kind) for module in norms if (kind := _kind(module)) is not None]
    for module, kind in found:
        undo.append((module, "__class__", type(module)))
        module.__class__ = _both(kind, type(module))
    if not found and not any(isinstance(module, OWN_KERNEL) for module in norms):
        names = ", ".join(sorted({type(module).__name__ for module in norms})) or "none"
        warn_user(
            f"enable_fused_normalization=True without effect in a {type(model).__name__}: no norm of it is known "
            f"({names})"
        )


def _eps(module: Any) -> float:
    eps: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return eps


def _kind(module: nn.Module) -> type[_Fused] | None:
    """Which of :data:`KINDS` computes what the module does; tried with numbers of its own, so that its parameters may
    be anywhere and no random number is drawn."""
    own, weight = type(module), module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    plain = len(module._parameters) == 1 and not module._buffers and not module._modules
    if isinstance(module, (*OWN_KERNEL, _Fused)) or not plain or weight is None or weight.dim() != 1:
        return None
    if not isinstance(eps, float) or "forward" in vars(module) or len(inspect.signature(own.forward).parameters) != 2:
        return None
    kinds = list(KINDS)
    for dtype in CLOSE:  # what a norm of 16 bits returns is not always in 16 bits
        found, expected = _tried(module, kinds, weight.numel(), eps, dtype)
        kinds = [kind for kind, y in zip(kinds, found, strict=True) if _close(y, expected)]
    return kinds[0] if kinds else None


def _tried(
    module: nn.Module, kinds: Sequence[type[_Fused]], numel: int, eps: float, dtype: torch.dtype
) -> tuple[list[Tensor], Any]:
    """What each of ``kinds`` and the module itself make of the same numbers: some as large as activations are, some as
    small as shows where ``eps`` is added. ``None`` of a module that needs something else."""
    weight = torch.linspace(0.5, 1.5, numel, dtype=dtype)
    x = torch.sin(torch.arange(1.0, TRIED_ROWS * numel + 1)).view(TRIED_ROWS, numel) + 0.3
    x = torch.cat([x, x * max(eps, 1e-12) ** 0.5]).to(dtype)
    own = type(module)
    stand_in = object.__new__(own)
    vars(stand_in).update(vars(module))
    vars(stand_in)["_parameters"] = {"weight": weight}
    with torch.no_grad():
        try:
            expected = own.forward(stand_in, x)
        except Exception:  # whatever it needs beside, it is no norm that is known
            expected = None
        return [kind.fused(x, weight, eps) for kind in kinds], expected


def _close(found: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return bool(((found - expected).abs() <= CLOSE[found.dtype] * (1 + expected.abs())).all())


# ---- activations


class _Compiled(nn.Module):
    """An activation that torch compiles where it runs on a GPU, and whose own forward pass is taken elsewhere.

    Attributes:
        own: its class.
    """

    own: type[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.own not in _REFUSED:
            try:
                compiled: Tensor = _compiled(self.own)(self, x)
                return compiled
            except Exception as error:
                _REFUSED.add(self.own)
                warn_user(
                    f"torch.compile of {self.own.__name__} failed ({error!s:.200}): it is computed as it is written"
                )
        y: Tensor = super().forward(x)
        return y


_REFUSED: set[type[nn.Module]] = set()
_OF_CLASS: dict[type[nn.Module], Callable[..., Tensor]] = {}


def _compiled(own: type[nn.Module]) -> Callable[..., Tensor]:
    if own not in _OF_CLASS:
        _OF_CLASS[own] = torch.compile(own.forward, dynamic=True)
    return _OF_CLASS[own]


def compile_activations(model: nn.Module, undo: Undo) -> None:
    """Have activations that are several operations compiled to one kernel each, on a GPU, by Triton.

    Warns:
        UserWarning: there is nothing to compile, or nothing to compile it for or with.
    """
    found = [m for m in model.modules() if type(m).__name__ in OPERATIONS and not isinstance(m, _Compiled)]
    reason = ""
    if not found:
        reason = "its activations are one kernel each, or unknown"
    elif not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        found, reason = [], "it takes a GPU and Triton; on a CPU torch.compile needs a compiler of its own"
    if reason:
        warn_user(f"enable_jit_fused=True without effect in a {type(model).__name__}: {reason}")
    for module in found:
        undo.append((module, "__class__", type(module)))
        module.__class__ = _both(_Compiled, type(module), {"own": type(module)})


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _both(kind: type[nn.Module], own: type[nn.Module], more: Mapping[str, Any] = {}) -> type[nn.Module]:
    """A class that is still the user's module's: ``isinstance``, names and attributes go on."""
    if (kind, own) not in _CLASSES:

        def reduce(self: nn.Module, protocol: Any) -> Any:
            alone = type(self) is _CLASSES[kind, own]
            return (_blank, (kind, own, more), vars(self)) if alone else object.__reduce_ex__(self, protocol)

        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__reduce_ex__": reduce, **more}
        _CLASSES[kind, own] = type(own.__name__, (kind, own), names)
    return _CLASSES[kind, own]


def _blank(kind: type[nn.Module], own: type[nn.Module], more: Mapping[str, Any]) -> nn.Module:
    """What a pickled module is filled into: pickle finds classes by name, and that of its class is the user's."""
    return object.__new__(_both(kind, own, more))
