"""Who reads a sharded gradient: two tools of torch would take what they are given for all there is."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

__all__ = ["Readers"]

CLIPPING, OF_ALL = torch.nn.utils.clip_grad.__name__, ("clip_grad_norm_", "get_total_norm", "_get_total_norm")
"""Functions of torch, and their module, that take what they are given for all gradients."""


class Readers:
    """Of one engine's gradients.

    Args:
        params: the parameters that have them.
        optimizers: those that the engine steps, whose groups, which hold the parameters as well, any wrapper may have.
        stages: pipeline ranks, each of which has its own.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], stages: int
    ) -> None:
        self._params, self._optimizers, self._stages = tuple(params), tuple(optimizers), stages
        self._judged: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def check(self, name: str, what: str) -> None:
        """Whoever has called may use ``what`` of the gradient of ``name``.

        Raises:
            RuntimeError: an optimizer that has whole parameters reads their gradients, to update them beside the
                engine; or torch clips those of a pipeline's stage alone.
        """
        frame, stages = sys._getframe(1), self._stages
        while frame.f_back is not None:
            frame = frame.f_back
            if stages > 1 and frame.f_code.co_name in OF_ALL and frame.f_globals.get("__name__") == CLIPPING:
                raise RuntimeError(
                    f"torch's {frame.f_code.co_name} on one of {stages} pipeline ranks: it would be the norm of this "
                    "rank's stages alone; give max_norm to the plugin, or call optimizer.clip_grad_by_norm"
                )
            if frame.f_code.co_name == "step":
                caller = frame.f_locals.get("self")
                if isinstance(caller, torch.optim.Optimizer) and self._has_ours(caller):
                    raise RuntimeError(
                        f"{what} of {name}.grad by step() of a {type(caller).__name__} that was made on "
                        "the parameters of a sharded model: it would train nothing; make the optimizer before "
                        "boost/build, pass it, and step what boost/build returned"
                    )

    def _has_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        judged = self._judged.get(optimizer)
        if judged is None or judged[0] != len(groups):
            own = {id(param) for param in self._params}
            stepped = {id(group) for each in self._optimizers for group in each.param_groups}
            others = (group for group in groups if id(group) not in stepped)
            found = any(id(param) in own for group in others for param in group["params"])
            judged = self._judged[optimizer] = len(groups), found
        return judged[1]
