"""The step of the user's optimizer without its hooks, which run once a step and not once a tile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

__all__ = ["BareStep", "has_pre_hooks", "run_post_hooks", "run_pre_hooks"]


class BareStep:
    """Steps param groups of its own with the user's optimizer, whose ``param_groups`` and hooks nobody sees change.

    Another thread may be stepping while the user's program reads them. So a stand-in steps: it is the optimizer in all
    else, for it has the same attributes and state. Only an optimizer that cannot be stood in for (its ``step`` is no
    method of its class, or its groups are another's) gets the groups itself for the time of :meth:`hidden`.

    The wrappers of ``step`` that run hooks (also those for all optimizers) and count for schedulers are left out; what
    somebody else has put in its place is called as it is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        own = vars(optimizer).get("step")
        function: Any = type(optimizer).step
        if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
            function = own.__func__ if isinstance(own, MethodType) and own.__self__ is optimizer else None
        # Torch marks the class's own step when it has wrapped it, at the first instance.
        elif getattr(function, "hooked", False):
            function = function.__wrapped__
        stand_in = None if function is None else _stand_in(optimizer)
        self._stands_in, self._steps = stand_in is not None, stand_in if stand_in is not None else optimizer
        self._step: Any = own if function is None else MethodType(function, self._steps)
        self.module: str = getattr(self._step, "__module__", None) or ""
        """Where the step was written."""

    def step(self, group: dict[str, Any]) -> None:
        """One step of ``group`` alone; inside of :meth:`hidden`."""
        self._steps.param_groups = [group]
        self._step()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, hooks on its steps do not run either where its ``step`` calls that of its base class, and a step that
        drops gradients drops those of its groups alone."""
        if self._stands_in:
            yield
            return
        optimizer, own = self._optimizer, vars(self._optimizer)
        drop, groups = own.get("zero_grad"), optimizer.param_groups
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        try:  # before the first change, since an interrupt may come at any call; none is made on the way back
            own.pop("zero_grad", None)
            optimizer._optimizer_step_pre_hooks = OrderedDict()
            optimizer._optimizer_step_post_hooks = OrderedDict()
            yield
        finally:
            if drop is not None:
                own["zero_grad"] = drop
            optimizer._optimizer_step_pre_hooks = before
            optimizer._optimizer_step_post_hooks = after
            optimizer.param_groups = groups


OWN = ("param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""What a stand-in has for itself."""


def _stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """An optimizer whose attributes are those of ``optimizer``, now and later, but for :data:`OWN`."""
    kind = type(optimizer)
    if not set(OWN) <= vars(optimizer).keys() or any(hasattr(kind, name) for name in OWN):
        return None
    space: dict[str, Any] = {"__slots__": OWN, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    # A step that drops the gradients it has used means those of its groups, not all that a user's call drops.
    space["zero_grad"] = property(lambda self: MethodType(kind.zero_grad, self))
    try:
        metaclass: Any = type(kind)
        stand_in: torch.optim.Optimizer = object.__new__(metaclass(kind.__name__, (kind,), space))
    except Exception:  # the class takes no others below it, such as one that registers them by name
        return None
    stand_in.__dict__ = optimizer.__dict__  # slots come before it
    stand_in.param_groups = []
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return stand_in


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`run_pre_hooks` calls any."""
    return bool(optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)


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
