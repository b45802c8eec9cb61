"""The norm of a step's gradients, and what a program limits and divides them by before the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from shardwise.core.base.checked import number
from shardwise.core.checks.hyper_parameters import HyperParameters
from shardwise.core.engine.limit import Limited
from shardwise.core.engine.other_parts import Counting
from shardwise.core.grads.grads import ChunkGrads
from shardwise.core.grads.norm import clip_factor, global_norm

if TYPE_CHECKING:
    from shardwise.core.engine.updates import TileUpdates

__all__ = ["Norms"]

UNSCALE = "unscale()"


class Norms(Limited):
    """Of a sharded optimizer."""

    index: int
    _states: list[ChunkGrads]
    _counting: Counting | None
    _updates: TileUpdates
    _settings: HyperParameters
    _norm: Callable[[], float] | None
    _hooked: bool

    def divisor(self) -> float:
        """What accumulated gradients are divided by: loss scale, and number or tokens of the passes. Collective.

        What was put into ``.grad`` by hand is taken over first.
        """
        self.engine.passes.reduce_rest()
        self.engine.visible.collect()
        return self.engine.visible.divisor(self.index)

    def _reduced(self) -> list[torch.Tensor]:
        found = [state.reduced for state in self._states]
        return [each for each in found if each is not None]

    def _global_norm(
        self, p: float, inverse: float, known: Sequence[float] = (), refusal: Exception | None = None
    ) -> float:
        others = self._counting.others(self._settings, refusal) if self._counting is not None else None
        return global_norm(self._reduced(), p, self._ask, inverse, known, others)

    def _ask(self, mine: float, largest: bool) -> float:
        """The sum of all ranks' shares of the norm, or the largest of them. What the ranks are about to update with
        rides along.

        Raises:
            RuntimeError: on every rank, where they have changed other gradients by hand.
            ValueError: the same, where they have other settings.
        """
        engine, settings = self.engine, self._settings
        hooked = self.scaler is not None and self._updates.hooked
        riding = [engine.visible.by_hand.mark(self.index), float(hooked), *settings.beside_norm()]
        found, same = engine.mesh.shard.total(mine, "the gradient norm", engine.party, riding, largest)
        if not same[0]:
            engine.visible.by_hand.compare(self.index)
        self._hooked = hooked or not same[1]
        if not all(same[2:]):
            settings.explain()
        return found

    @property
    def _clip(self) -> float:
        """A factor of the next step. The engine has it, so that wrappers that share our methods do."""
        return self.engine.visible.clip.get(self.index, 1.0)

    def get_grad_norm(self, norm_type: float | None = None) -> float | None:
        """The global norm of the last step's gradients before clipping: averaged, unscaled; ``None`` before a step.

        Raises:
            ValueError: ``norm_type`` is given, and not the one that the plan has steps compute.
        """
        of_steps = self.engine.plan.grad.norm_type
        if norm_type not in (None, of_steps):
            raise ValueError(
                f"norm_type={norm_type}: step() computes the norm of p={of_steps:g} (norm_type of the plugin); "
                "clip_grad_by_norm returns any other before the step"
            )
        return self._norm() if self._norm is not None else None

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip the gradients that the next :meth:`step` applies; returns their norm before. Every rank calls it.

        Args:
            max_norm: of all parameters' gradients together, averaged over the ranks and unscaled.
            norm_type: p of the p-norm, ``math.inf`` included.
            error_if_nonfinite: a norm that is not finite is an error, on every rank; otherwise nothing is clipped then.

        Raises:
            ValueError: ``max_norm`` or ``norm_type`` is not positive.
            RuntimeError: gradients are not kept (``update="backward"``); or see ``error_if_nonfinite``.
        """
        number("norm_type", norm_type, "(0, inf]", "p > 0, or math.inf")
        number("max_norm", max_norm, "(0, inf]", "a positive norm")
        self._check_kept(f"clip_grad_by_norm({max_norm})")
        inverse = 1.0 / self.divisor()
        norm = self._global_norm(norm_type, inverse) * self._clip
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_by_norm({max_norm}): the norm of the gradients is {norm}; call zero_grad(), or leave "
                "error_if_nonfinite False"
            )
        factor = clip_factor(norm, max_norm) if math.isfinite(norm) else 1.0
        self.engine.visible.note(self.index, "clip_grad_by_norm()", max_norm, factor)
        return norm

    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Limit every element of the gradients that the next :meth:`step` applies to ``[-clip_value, clip_value]``.

        Averaged over the ranks and unscaled, that is. If one is not finite nothing is limited, so that under a loss
        scale the step is still skipped. Every rank calls it.

        Raises:
            ValueError: ``clip_value`` is not positive.
            RuntimeError: gradients are not kept.
        """
        number("clip_value", clip_value, "(0, inf]", "a positive value")
        self._check_kept(f"clip_grad_by_value({clip_value})")
        inverse = 1.0 / self.divisor()
        self.engine.visible.note(self.index, "clip_grad_by_value()", clip_value)
        if math.isfinite(self._global_norm(math.inf, inverse)):
            limit = clip_value * self.engine.visible.scale(self.index)
            for gradient in self._reduced():
                bound = min(limit, torch.finfo(gradient.dtype).max)
                gradient.clamp_(-bound, bound)

    def unscale(self, scale: float) -> bool:
        """Divide what the next :meth:`step` applies by ``scale``, that losses were multiplied by. Every rank calls it.

        Once: called again for the same gradients it divides nothing.

        Returns:
            Whether all of it is finite, on every rank.
        """
        number("scale", scale, "(0, inf)", "a loss scale > 0")
        self._check_kept(f"unscale({scale})")
        norm = self._global_norm(math.inf, 1.0 / self.divisor())
        if not self.unscaled:
            self.engine.visible.note(self.index, UNSCALE, scale, 1.0 / scale)
        return math.isfinite(norm)

    @property
    def unscaled(self) -> bool:
        """Whether :meth:`unscale` was called for the gradients that are held now."""
        return any(call == UNSCALE for call, _ in self.engine.visible.asked.get(self.index, ()))

    def _check_kept(self, call: str) -> None:
        self.engine.check_open(call)
        if self.engine.plan.grad.update == "backward":
            raise RuntimeError(
                f"{call} with update={self.engine.plan.grad.update!r}: gradients have been used already; use "
                "update='step'"
            )
