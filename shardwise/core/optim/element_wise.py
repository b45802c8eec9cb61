"""Detects whether an optimizer is element-wise, which is required to step flat shards.

Some optimizers are known by name, but a user-defined one may depend on the parameter's norm, its rows and columns, its
size, or the number of calls of ``step()``. Such an optimizer would train when sharded, with different results for every
number of ranks. It is therefore tested: a copy steps a matrix as one parameter, and in flat parts, one after the other.
The test uses a small matrix, and one large enough for code paths that only large matrices take.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.base.torch_internals import without_global_step_hooks

SHAPE, CUT = (3, 4), 5
"""Shape of the small matrix, and the element at which it is split."""
LARGE = (144, 160)
"""Shape of the large matrix, whose first part is as small. Thresholds of known optimizers for another code path are 128
per dimension and 4096 elements, in multiples of 256."""
STEPS = 3
RATE, SLOPE = 0.1, 3.0
"""Learning rate, since the first step of a warm-up has 0; and the size of gradients, large enough for norm clipping."""
TOLERANCE = 1e-3
"""Tolerance relative to the largest change of any element. Rounding errors are a thousandth of that."""
MOST_GROUPS = 8
"""Maximal number of groups that are tested, since some optimizers have a group for every parameter."""
NOT_COPIED: tuple[type, ...] = (torch.optim.Optimizer, nn.Module, *([dist.ProcessGroup] if dist.is_available() else []))
"""Types that an optimizer may delegate to. An optimizer with one of them is not tested: its copy would behave
differently, or wait for other ranks."""
Parts = Sequence[Sequence[Sequence[Tensor]]]
"""By copy of the optimizer and call of its ``step()``: the parameters into which the matrix is split."""
Cut = Callable[[Tensor], Parts]


class NotTriedError(Exception):
    """The optimizer cannot be copied, or its copy cannot be stepped."""


def couples_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer``'s update of an element depends on other elements of its parameter or on the calls.

    A copy of the optimizer steps its own parameters on the CPU, three times, with the options of each group (of at most
    eight groups; the learning rate is 0.1). The optimizer and torch's random number generators are not changed, and no
    hooks run. If the optimizer has an attribute ``element_wise``, True or False, that is used instead.

    The test does not detect differences that appear only after the third step, with other values or with larger
    parameters. An optimizer that draws random numbers counts as element-wise, since its steps differ anyway. So does
    one that cannot be tested: it wraps another optimizer, has modules or process groups, cannot be copied, or cannot be
    stepped in this way (it needs a closure, or a GPU).
    """
    declared = getattr(optimizer, "element_wise", None)
    if declared is not None:
        return not declared
    if not {"param_groups", "state"} <= vars(optimizer).keys():  # a wrapper that forwards them to another optimizer
        return False
    with without_global_step_hooks():
        shapes = itertools.product(_distinct(optimizer.param_groups), (SHAPE, LARGE))
        return any(_differs(optimizer, group, _unsplit, _in_parts, shape) for group, shape in shapes)


def couples_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer``'s update of a parameter depends on other parameters or on the calls of ``step()``.

    The test is that of :func:`couples_elements`, with three matrices: in one call, or split into one and two matrices
    with separate copies, call by call. Optimizers that cannot be tested count as uncoupled.
    """
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        return False
    with without_global_step_hooks():
        return any(_differs(optimizer, group, _together, _apart) for group in _distinct(optimizer.param_groups))


def _distinct(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distinct options without regard to the learning rate, with differences only in text last."""
    changed = []
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        lr = options.get("lr")
        if isinstance(lr, Tensor):
            options["lr"] = torch.full_like(lr, RATE)
        elif isinstance(lr, int | float):
            options["lr"] = RATE
        changed.append(options)
    by_numbers: dict[str, dict[str, Any]] = {}
    for options in changed:
        by_numbers.setdefault(_key(options, texts=False), options)
    distinct: dict[str, dict[str, Any]] = {}
    for options in [*by_numbers.values(), *changed]:
        distinct.setdefault(_key(options, texts=True), options)
    return list(distinct.values())[:MOST_GROUPS]


def _key(options: dict[str, Any], texts: bool) -> str:
    ignored = ("param_names", "initial_lr")
    return repr({k: v for k, v in options.items() if k not in ignored and (texts or not isinstance(v, str))})


def stand_in(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return a copy without state and hooks, whose only group has the options of ``group``."""
    hooks = {name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")}
    # Callable attributes that shadow methods of the class were set by a scheduler or an engine.
    methods = {n for n, v in vars(optimizer).items() if callable(v) and callable(getattr(type(optimizer), n, None))}
    left_out = {"param_groups", "state", "step", *methods, *hooks}
    attributes = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    trial = object.__new__(type(optimizer))
    nobody = nn.Parameter(torch.empty(0, device="meta"))  # replaces all references to the model's parameters
    memo: dict[int, Any] = {id(param): nobody for own in optimizer.param_groups for param in own["params"]}
    memo[id(optimizer)] = trial
    try:
        if any(isinstance(each, NOT_COPIED) for each in _within(attributes)):
            raise NotTriedError
        copied, options = copy.deepcopy((attributes, group), memo)
    except Exception as error:
        raise NotTriedError from error
    made = {"param_groups": [options], "state": defaultdict(dict), **{name: OrderedDict() for name in hooks}}
    vars(trial).update(copied, **made)
    return trial


def _within(value: Any) -> Iterator[Any]:
    """Yield ``value`` and everything that it contains."""
    yield value
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if isinstance(inner, list | tuple | set):
        for each in inner:
            yield from _within(each)


def _differs(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], one: Cut, other: Cut, shape: tuple[int, int] = SHAPE
) -> bool:
    generator = torch.Generator(device="cpu").manual_seed(0)

    def numbers() -> Tensor:  # independent of torch's default device
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    start, slopes = numbers(), [SLOPE * numbers() for _ in range(STEPS)]

    def walk(cut: Cut, seed: int) -> Tensor:
        changed = []
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every GPU
            for number, calls in enumerate(cut(start)):
                trial = stand_in(optimizer, group)
                (options,) = trial.param_groups
                params = [[nn.Parameter(part.clone()) for part in call] for call in calls]
                for slope in slopes:
                    for own, parts in zip(params, cut(slope)[number], strict=True):
                        for param, part in zip(own, parts, strict=True):
                            param.grad = part.clone()
                        vars(trial)["param_groups"] = [options | {"params": own}]
                        try:
                            type(trial).step(trial)
                        except Exception as error:
                            raise NotTriedError from error
                changed += [param.detach().reshape(-1) for own in params for param in own]
        # NaN in both results counts as equal.
        return torch.nan_to_num(torch.cat(changed) - start.reshape(-1))

    try:
        first, second = walk(one, 0), walk(other, 0)
        return not _close(first, second) and _close(first, walk(one, 1))
    except NotTriedError:
        return False


def _unsplit(values: Tensor) -> Parts:
    return [[[values]]]


def _in_parts(values: Tensor) -> Parts:
    flat = values.reshape(-1)
    return [[[flat[:CUT]], [flat[CUT:]]]]


def _together(values: Tensor) -> Parts:
    return [[torch.split(values, 1)]]


def _apart(values: Tensor) -> Parts:
    first, second, third = torch.split(values, 1)
    return [[[first]], [[second], [third]]]


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())
