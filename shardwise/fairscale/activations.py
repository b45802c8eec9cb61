"""``checkpoint_wrapper``: a module whose activations are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_wrapper"]


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """``module``, whose ``forward`` keeps its inputs alone for the backward pass, and then runs again.

    Running statistics of BatchNorm move once, as without it. Random numbers are the same again. Copies of ``module`` do
    the same with their own weights.

    Args:
        module: it comes back as it is, with another ``forward``.
        offload_to_cpu: the inputs that are kept are kept in host memory.
    """
    module.__dict__["forward"] = _Recomputed(module, offload_to_cpu)
    return module


class _Recomputed:
    """The other ``forward``. A copy of the module has a copy of it, which runs that; a closure would be shared."""

    def __init__(self, module: nn.Module, offload: bool) -> None:
        own: Any = module.forward
        self._module, self._offload = module, offload
        self._method = getattr(own, "__self__", None) is module  # not one that a program has set
        self._function: Callable[..., Any] = own.__func__ if self._method else own

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*([self._module] if self._method else []), *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _still(self._module)

        with torch.autograd.graph.save_on_cpu() if self._offload else nullcontext():
            return checkpoint(self._run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _still(module: nn.Module) -> AbstractContextManager[None]:
    """Running statistics in ``module`` do not move."""
    return _tracking_nothing([each for each in module.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)])


@contextmanager
def _tracking_nothing(modules: list[Any]) -> Iterator[None]:
    # A momentum of nothing leaves the statistics as they are, and the graph as it was: they are part of it.
    before = [(each.momentum, each.num_batches_tracked) for each in modules]
    counts = [None if count is None else count.clone() for _, count in before]
    for each in modules:
        each.momentum = 0.0
    try:
        yield
    finally:
        for each, (momentum, count), counted in zip(modules, before, counts, strict=True):
            each.momentum = momentum
            if count is not None:
                count.copy_(counted)
