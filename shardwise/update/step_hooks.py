"""The step of the user's optimizer without its hooks, which run once a step and not once a tile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

__all__ = ["bare_step", "run_post_hooks", "run_pre_hooks", "without_hooks"]


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Its ``step``, without the wrappers that run hooks (also those for all optimizers) and count for schedulers.

    What somebody else has put in its place is left as it is.
    """
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return own  # type: ignore[no-any-return]
    function = type(optimizer).step
    # Torch marks the class's own step when it has wrapped it, at the first instance.
    if getattr(function, "hooked", False):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return MethodType(function, optimizer)


def run_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Hooks on this optimizer's steps and on those of all optimizers, in torch's order.

    Raises:
        RuntimeError: one wants to change the arguments of ``step``, which has none here.
    """
    hooks = chain(torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
    for hook in hooks:
        if (result := hook(optimizer, (), {})) is not None:
            raise RuntimeError(
                f"a step_pre_hook of {type(optimizer).__name__} returned {result!r}: a sharded step takes no arguments "
                "that a hook could change; return None"
            )


def run_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """See :func:`run_pre_hooks`."""
    hooks = chain(optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values())
    for hook in hooks:
        hook(optimizer, (), {})


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, hooks on its steps do not run either where its ``step`` calls that of its base class."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = before
        optimizer._optimizer_step_post_hooks = after
