"""``apex.amp`` at ``opt_level="O2"``, in plain torch: half weights, fp32 masters, a fixed loss scale."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from shardwise.colossalai.interface import OptimizerWrapper
from torch import nn
from torch.utils._pytree import tree_map


class Masters:
    """The fp32 masters of an optimizer's parameters, and the scale of its losses."""

    def __init__(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        self.scale = scale
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            made = [nn.Parameter(param.detach().clone().float()) for param in group["params"]]
            self.pairs += zip(group["params"], made, strict=True)
            group["params"] = made

    def take(self) -> None:
        """Give the masters the gradients of the weights, unscaled."""
        for weight, master in self.pairs:
            master.grad = None if weight.grad is None else weight.grad.float() / self.scale

    def give(self) -> None:
        """Cast the masters into the weights."""
        with torch.no_grad():
            for weight, master in self.pairs:
                weight.copy_(master)

    def clear(self) -> None:
        """Forget all gradients."""
        for weight, master in self.pairs:
            weight.grad = master.grad = None


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, opt_level: str = "O2", loss_scale: float = 1.0, **_others: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights become half, and the optimizer one of masters."""
    if opt_level != "O2":
        raise NotImplementedError(f"opt_level={opt_level!r}: the stand-in has 'O2'")
    model.half()
    masters = Masters(optimizer, loss_scale)  # of the weights as they are now
    model.forward = _cast(model.forward)
    step = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        gradients = [master.grad for _, master in masters.pairs if master.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            step(*args, **kwargs)
            masters.give()

    optimizer.masters = masters
    optimizer.step = stepped
    optimizer.zero_grad = lambda set_to_none=True: masters.clear()
    return model, optimizer


def _to(dtype: torch.dtype, each: Any) -> Any:
    return each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each


def _cast(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def halved(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(partial(_to, torch.float16), (args, kwargs))
        return tree_map(partial(_to, torch.float32), forward(*args, **kwargs))

    return halved


@contextmanager
def scale_loss(
    loss: torch.Tensor, optimizer: torch.optim.Optimizer, delay_unscale: bool = False
) -> Iterator[torch.Tensor]:
    """Give the scaled loss; masters have unscaled gradients afterwards."""
    yield loss.float() * optimizer.masters.scale
    if not delay_unscale:
        optimizer.masters.take()


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """The masters."""
    for group in getattr(optimizer, "optim", optimizer).param_groups:
        yield from group["params"]


class Scaled(OptimizerWrapper):
    """Has ``backward(loss)``, as ColossalAI's wrapper of apex."""

    def backward(self, loss: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        """Backward of the scaled loss."""
        with scale_loss(loss, self.optim) as scaled:
            scaled.backward()


def convert_to_apex_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp_config: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """ColossalAI's way to it."""
    model, optimizer = initialize(model, optimizer, **amp_config)
    return model, Scaled(optimizer)
