"""``LightningModule.toggle_optimizer`` for a sharded module.

Lightning's own remembers what required gradients until it is untoggled: where a step fails in between, or toggles
twice, the others stay frozen for good.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.session import Session

__all__ = ["Toggling"]

NAMES = ("toggle_optimizer", "untoggle_optimizer")


class Toggling:
    """Takes the place of the two methods on one module, unless its class has its own.

    Args:
        session: the module's.
        module: a LightningModule.
        base: Lightning's class.
    """

    def __init__(self, session: Session, module: nn.Module, base: type) -> None:
        self._optimizers = session.optimizers
        self._held = [(p, holder) for p, holder in zip(session.params, session.holders(), strict=True) if holder >= 0]
        self._before: list[bool] = []
        for name, own in zip(NAMES, (self.toggle, self.untoggle), strict=True):
            if getattr(type(module), name) is getattr(base, name):
                module.__dict__[name] = own

    @staticmethod
    def remove(module: nn.Module) -> None:
        """Give the module Lightning's methods back, and its parameters what a failed step left toggled."""
        for name in NAMES:
            owner = getattr(module.__dict__.pop(name, None), "__self__", None)
            if isinstance(owner, Toggling):
                owner.untoggle()

    def toggle(self, optimizer: Any) -> None:
        """Until :meth:`untoggle` only parameters of ``optimizer`` require gradients, of those that an optimizer has.

        Raises:
            ValueError: it is none of the module's.
        """
        own = getattr(optimizer, "_optimizer", optimizer)
        found = [index for index, each in enumerate(self._optimizers) if each is own]
        if not found:
            raise ValueError(f"toggle_optimizer({optimizer!r:.80}): give one of self.optimizers()")
        if not self._before:
            self._before = [param.requires_grad for param, _ in self._held]
        for (param, holder), before in zip(self._held, self._before, strict=True):
            param.requires_grad_(before and holder == found[0])

    def untoggle(self, optimizer: Any = None) -> None:
        """Parameters require gradients as they did before; there is only one set of them, whoever toggled."""
        if self._before:
            for (param, _), before in zip(self._held, self._before, strict=True):
                param.requires_grad_(before)
            self._before = []
