"""Whether an optimizer updates each element by itself, which is what makes it possible to step flat shards.

Of some optimizers the name tells, but anybody may write another whose update needs the parameter's norm, its rows and
columns, or a count of the calls of ``step()``. Sharded, it would train, and give another result for every number of
ranks. So it is tried out: a small matrix is stepped whole, and in flat parts, one after the other.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["couples_elements"]

SHAPE, CUT = (3, 4), 5
"""The matrix, and the element at which it is cut."""
STEPS = 3
RATE, SLOPE = 0.1, 3.0
"""Learning rate, since that of a warm-up's first step is 0; and the size of gradients, which limits of norms meet."""
TOLERANCE = 1e-3
"""Of the largest change of any element. Rounding is a thousandth of that."""


def couples_elements(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether what ``optimizer`` does to an element depends on the others of its parameter, or on how it is called.

    It is asked to step parameters of its own on ``device``, three times, with the options of each of its groups (but a
    learning rate of 0.1); afterwards its groups, its state, its attributes and torch's random numbers are as before.
    An attribute ``element_wise`` of the optimizer, True or False, is believed instead.

    Not found is what shows only later than in the third step, or in other numbers. An optimizer that draws random
    numbers counts as element-wise, since its steps differ anyway; so does one that cannot be stepped like this at all
    (that needs a closure, or a GPU): it will fail by itself.
    """
    said = getattr(optimizer, "element_wise", None)
    if said is not None:
        return not said
    groups = _distinct([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    try:
        return any(_differs(optimizer, group, device) for group in groups)
    except Exception:
        return False


def _distinct(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that differ in more than the learning rate, which is replaced."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        lr = group.get("lr")
        rate = torch.full_like(lr, RATE) if isinstance(lr, Tensor) else RATE if isinstance(lr, int | float) else lr
        changed = group | ({"lr": rate} if "lr" in group else {})
        found.setdefault(repr({k: v for k, v in changed.items() if k not in ("param_names", "initial_lr")}), changed)
    return list(found.values())


@contextlib.contextmanager
def _as_before(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Inside the block the optimizer has no state and no hooks; afterwards all is as it was."""
    attributes = vars(optimizer)
    before = dict(attributes)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            attributes["state"] = defaultdict(dict)
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                attributes[hooks] = type(before.get(hooks, {}))()
            yield
        finally:
            attributes.clear()
            attributes.update(before)


def _differs(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=generator)
    slopes = [SLOPE * torch.randn(SHAPE, generator=generator) for _ in range(STEPS)]
    # The user's step, not what a scheduler or somebody else put in its place.
    step = type(optimizer).step

    def walk(cut: Callable[[Tensor], Sequence[Tensor]], seed: int) -> Tensor:
        params = [nn.Parameter(part.to(device, copy=True)) for part in cut(start)]
        with _as_before(optimizer, device):
            _seed(device, seed)
            for slope in slopes:
                for param, part in zip(params, cut(slope), strict=True):
                    param.grad = part.to(device, copy=True)
                    optimizer.param_groups = [group | {"params": [param]}]
                    step(optimizer)
        flat = torch.cat([param.detach().reshape(-1).float().cpu() for param in params])
        # What is NaN in both is the same.
        return torch.nan_to_num(flat - start.reshape(-1))

    whole, parts = walk(_whole, 0), walk(_in_parts, 0)
    return not _alike(whole, parts) and _alike(whole, walk(_whole, 1))


def _whole(values: Tensor) -> Sequence[Tensor]:
    return [values]


def _in_parts(values: Tensor) -> Sequence[Tensor]:
    flat = values.reshape(-1)
    return [flat[:CUT], flat[CUT:]]


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())


def _seed(device: torch.device, seed: int) -> None:
    """Only of what the optimizer can use here: torch.manual_seed would change every GPU's."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
