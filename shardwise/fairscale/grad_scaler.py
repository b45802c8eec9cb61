"""``ShardedGradScaler``: a program's own loss scale over sharded optimizers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.build import ShardedOptimizer, sharded_of
from shardwise.checked import number, whole
from shardwise.fairscale.oss import OSS

__all__ = ["ShardedGradScaler"]


class Found(NamedTuple):
    """What a round has of an optimizer: whether its gradients were finite, and the steps that it had ended before that
    of the round; ``None``: this was skipped."""

    finite: bool
    ended: int | None


# [Note: A round of steps]
# From one update() to the next each optimizer is unscaled once and stepped once, as under torch. A round may end
# without update(): by an exception, or an interrupt, and the program goes on with zero_grad() and other gradients.
# These carry the scale still, so what has been divided is asked of the engine, which forgets it with the gradients
# (``unscaled``); and whether the step was made, which an interrupt behind it must not hide, of the optimizer's count.
class ShardedGradScaler:
    """Scales losses, takes the scale out of gradients, and skips steps whose gradients are not finite on any rank.

    It has the methods and states of ``torch.amp.GradScaler``, for optimizers of ``FullyShardedDataParallel`` and
    :class:`OSS`.

    Args:
        init_scale: the first scale.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps that were not skipped.
        backoff_factor: the scale is multiplied by it after a step that was.
        growth_interval: in steps.
        enabled: ``False``: the scale is 1 and steps are always taken.
        process_group: no effect: ranks of the model agree.

    Raises:
        TypeError, ValueError: a number out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        number("init_scale", init_scale, "(0, inf)", "a loss scale > 0")
        number("growth_factor", growth_factor, "(1, inf)", "a factor > 1")
        number("backoff_factor", backoff_factor, "(0, 1)", "a factor in (0, 1)")
        whole("growth_interval", growth_interval, 1, what="a number of steps")
        self._scale, self._growth_tracker, self._enabled = float(init_scale), 0, enabled
        self._growth_factor, self._backoff_factor = float(growth_factor), float(backoff_factor)
        self._growth_interval = growth_interval
        self._found: dict[int, Found] = {}
        """By optimizer, of this round."""

    def scale(self, outputs: Any) -> Any:
        """A loss, or a list of them, times the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            wide = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
            return wide * self._scale
        return type(outputs)(self.scale(each) for each in outputs)

    def unscale_(self, optimizer: Any) -> None:
        """Take the scale out of the gradients of ``optimizer``, before they are clipped. Every rank calls it.

        Raises:
            RuntimeError: called twice, or after :meth:`step`, before :meth:`update`.
            ValueError: ``optimizer`` belongs to no sharded model.
        """
        if not self._enabled:
            return
        own = _sharded(optimizer)
        if id(optimizer) in self._found:
            raise RuntimeError(
                f"unscale_({type(optimizer).__name__}) for the second time since the last update(), or behind step(): "
                "call update() at the end of each iteration"
            )
        self._unscale(optimizer, own)

    def _unscale(self, optimizer: Any, own: ShardedOptimizer) -> Found:
        found = self._found[id(optimizer)] = Found(own.unscale(self._scale), own.steps_ended)
        return found

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(...)``, unless a gradient is not finite. Every rank calls it.

        Raises:
            RuntimeError: called twice before :meth:`update`.
            ValueError: ``optimizer`` belongs to no sharded model.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        own, found = _sharded(optimizer), self._found.get(id(optimizer))
        if found is not None and (found.ended is None or own.steps_ended > found.ended):
            raise RuntimeError(
                f"step({type(optimizer).__name__}) for the second time since the last update(): call update() behind "
                "the steps of each iteration, also where an exception or Ctrl-C has left one between the two"
            )
        if found is None or not own.unscaled:
            found = self._unscale(optimizer, own)
        if found.finite:
            return optimizer.step(*args, **kwargs)
        self._found[id(optimizer)] = Found(False, None)
        return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale: a round of steps is over.

        Args:
            new_scale: instead of what the steps say.

        Raises:
            RuntimeError: no step was made since the last one.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._found:
            raise RuntimeError(f"update() without a step (unscaled={len(self._found)}): call scaler.step(optimizer)")
        elif not all(found.finite for found in self._found.values()):
            self._scale, self._growth_tracker = self._scale * self._backoff_factor, 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale, self._growth_tracker = self._scale * self._growth_factor, 0
        self._found = {}

    def get_scale(self) -> float:
        """What losses are multiplied by now."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """See the argument."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.amp.GradScaler`` has it."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, of this class or of torch's.

        Raises:
            RuntimeError: it is empty.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(f"load_state_dict({state_dict}): the state is of a scaler that was not enabled")
        self._scale = float(state_dict["scale"])
        self._growth_factor, self._backoff_factor = state_dict["growth_factor"], state_dict["backoff_factor"]
        self._growth_interval, self._growth_tracker = state_dict["growth_interval"], state_dict["_growth_tracker"]


def _sharded(optimizer: Any) -> ShardedOptimizer:
    own = optimizer.sharded if isinstance(optimizer, OSS) else sharded_of(optimizer)
    if own is None:
        raise ValueError(
            f"{type(optimizer).__name__} belongs to no sharded model: make it of a FullyShardedDataParallel's "
            "parameters, or as OSS, and call the model before"
        )
    return own
