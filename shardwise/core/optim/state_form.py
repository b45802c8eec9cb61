"""The keys and shapes of an optimizer's state, to recognize the state of another optimizer in a file.

A copy of the optimizer steps a small parameter with the options of a group, and its state is inspected.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.base.torch_internals import without_global_step_hooks
from shardwise.core.optim.element_wise import NotTriedError, stand_in
from shardwise.core.optim.nested_state import flat, outline

SAME_STATE = frozenset({"Adam", "AdamW", "CPUAdam", "FusedAdam", "HybridAdam", "DeepSpeedCPUAdam"})
"""Classes that continue each other's state. They may differ in weight decay."""
OF_THE_CLASS = frozenset({"decoupled_weight_decay"})
"""Options that distinguish two classes."""
NOTED = frozenset({"params", "param_names", "initial_lr"})
"""Keys of a group that no optimizer reads."""
MOST_STEPPED = 1 << 24
"""Largest parameter that is stepped to find the shapes of its state."""
MOST_TRIED = 1 << 16
"""Size of the parameter that replaces a larger one."""


@dataclass(frozen=True)
class SavedForm:
    """The form of the state of one parameter in a file.

    Attributes:
        shape: shape of the parameter.
        keys: keys of its state; for tensors with whether they are floating-point, for other values with ``None``.
    """

    shape: tuple[int, ...]
    keys: tuple[tuple[str, bool | None], ...]

    @classmethod
    def of(cls, shape: Sequence[int], entry: Mapping[str, Any]) -> SavedForm:
        """Return the form of the state ``entry``, whose tensors have a ``dtype``."""
        kinds = {key: getattr(value, "dtype", None) for key, value in outline(entry).items() if value is not None}
        floats = {key: None if kind is None else bool(kind.is_floating_point) for key, kind in kinds.items()}
        return cls(tuple(shape), tuple(sorted(floats.items())))


def options_for(optimizer: torch.optim.Optimizer, saved_class: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options of a group that ``optimizer`` loads.

    It loads all options of its own class, and of another class those that its own groups have, too.
    """
    if saved_class == type(optimizer).__name__:
        return dict(options)
    known = {*_defaults(optimizer), *NOTED, *(key for group in optimizer.param_groups for key in group)}
    left_out = OF_THE_CLASS if saved_class else frozenset[str]()
    return {key: value for key, value in options.items() if key in known and key not in left_out}


class StateForm:
    """The form of the state of one optimizer.

    Args:
        optimizer: the user's optimizer; it is not changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._keys: dict[tuple[str, tuple[int, ...]], dict[str, bool | None] | None] = {}
        self._shapes: dict[tuple[str, tuple[int, ...]], dict[str, tuple[int, ...]] | None] = {}

    def keys_of(self, options: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, bool | None] | None:
        """Return the keys of the state of a parameter of that shape after a step, as in :class:`SavedForm`.

        ``None``: unknown, see :func:`shardwise.core.optim.element_wise.couples_elements`.
        """
        plain = {key: value for key, value in options.items() if key not in NOTED}
        key = (repr(plain), shape)
        if key not in self._keys:
            self._keys[key] = self._try(plain, shape)
        return self._keys[key]

    def has_shape(self, options: Mapping[str, Any], shape: tuple[int, ...], key: str, stored: tuple[int, ...]) -> bool:
        """Return True if the state ``key`` of a parameter of ``shape`` has the shape ``stored`` after a step, such as
        rows and columns of a factored state. For a parameter too large to test, the sizes in ``stored`` have to be its
        own.
        """
        plain = {name: value for name, value in options.items() if name not in NOTED}
        place = (repr(plain), shape)
        if place not in self._shapes:
            self._shapes[place] = None
            if math.prod(shape) <= MOST_STEPPED:
                with contextlib.suppress(NotTriedError, TypeError):
                    made = flat(self._step(plain, shape)).items()
                    self._shapes[place] = {k: tuple(v.shape) for k, v in made if isinstance(v, Tensor)}
        known = self._shapes[place]
        return {*stored} <= {1, *shape} if known is None else known.get(key) == stored

    def _try(self, options: dict[str, Any], shape: tuple[int, ...]) -> dict[str, bool | None] | None:
        declared = getattr(self._optimizer, "state_keys", None)
        if declared is not None:
            return dict.fromkeys(declared, True)
        try:
            return dict(SavedForm.of(shape, self._step(options, shape)).keys)
        except NotTriedError:
            return None

    def _step(self, options: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the state of a parameter of ``shape`` after one step.

        Raises:
            NotTriedError: the optimizer wraps another one, or cannot be stepped in this way.
        """
        if not {"param_groups", "state"} <= vars(self._optimizer).keys():
            raise NotTriedError
        failure: Exception | None = None
        param = nn.Parameter(torch.ones(shape, device="cpu", dtype=torch.float32))
        param.grad = torch.ones_like(param)
        with without_global_step_hooks(), torch.random.fork_rng(devices=[]):
            for made in (False, True):
                trial = stand_in(self._optimizer, options)
                if made:
                    trial.state[param] = constructed_state(self._optimizer, options, param)
                trial.param_groups[0]["params"] = [param]
                try:
                    type(trial).step(trial)
                    return dict(trial.state.get(param, {}))
                except Exception as error:  # state that it expects may be made in the constructor
                    failure = error
        raise NotTriedError from failure

    def misfit(
        self, saved_class: str, options: Mapping[str, Any], saved_options: Mapping[str, Any], saved: SavedForm
    ) -> str | None:
        """Return why this optimizer cannot continue a state, or ``None``.

        Args:
            saved_class: the class that created the state; empty if unknown.
            options: the options that it would continue with.
            saved_options: the options that it was created with.
            saved: the form of the state.
        """
        dimensions = len(saved.shape)
        reason = self._misfit(saved_class, options, saved_options, saved, (2,) * dimensions)
        if reason is None or not dimensions:
            return reason
        # Some optimizers keep another state for large parameters, such as 8-bit moments from 4096 elements.
        size = min(math.prod(saved.shape), MOST_TRIED)
        return self._misfit(saved_class, options, saved_options, saved, (size, *(1,) * (dimensions - 1)))

    def _misfit(
        self,
        saved_class: str,
        options: Mapping[str, Any],
        saved_options: Mapping[str, Any],
        saved: SavedForm,
        tried: tuple[int, ...],
    ) -> str | None:
        own, stored = self.keys_of(options, tried), dict(saved.keys)
        if own is None:
            return None if not saved_class or self.continues(saved_class) else "another class made it"
        if _other_numbers(own, stored):
            return "it holds numbers of another kind"
        if self._is_own(saved_class):
            changed = self.keys_of(saved_options, tried)
            lacking = stored and changed != own and own.keys() - stored.keys()
            return f"{', '.join(sorted(lacking))} is missing for the options of its group" if lacking else None
        if stored.keys() == own.keys() or (not stored and (not saved_class or self.continues(saved_class))):
            return None
        surplus_only = own.keys() <= stored.keys() and not saved_class
        if surplus_only and {*saved_options} - NOTED <= {*_defaults(self._optimizer), *options}:
            return None
        return f"it has {_listed(stored)}, where {type(self._optimizer).__name__} keeps {_listed(own)}"

    def _is_own(self, saved_class: str) -> bool:
        return saved_class in (each.__name__ for each in type(self._optimizer).__mro__)

    def continues(self, saved_class: str) -> bool:
        """Return True if the class keeps the same state."""
        own = {each.__name__ for each in type(self._optimizer).__mro__}
        return saved_class in own or (saved_class in SAME_STATE and bool(own & SAME_STATE))


def _defaults(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return getattr(optimizer, "defaults", {})  # a wrapper of another library may have none


def _other_numbers(own: Mapping[str, bool | None], stored: Mapping[str, bool | None]) -> bool:
    """Return True if integer tensors replace floating-point ones; a step count may be either."""
    both = (own.keys() & stored.keys()) - {"step"}
    return any(stored[key] != own[key] for key in both if None not in (stored[key], own[key]))


def _listed(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys)) or "no state"


def constructed_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return the state that the constructor of ``optimizer``'s class creates for ``param`` with the options of
    ``group``.

    An example is Adagrad's sums. Empty for a class that creates its state in a step or cannot be constructed from its
    ``defaults``.
    """
    kind = type(optimizer)
    try:
        named = inspect.signature(kind).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in named.values())
        defaults = {key: value for key, value in _defaults(optimizer).items() if takes_all or key in named}
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return dict(kind([{**options, "params": [param]}], **defaults).state.get(param, {}))
    except Exception:  # of any kind, since the class is the user's
        return {}


def makes_state_at_once(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the constructor creates state."""
    param = nn.Parameter(torch.ones(2, 2, device="cpu", dtype=torch.float32))
    return any(constructed_state(optimizer, group, param) for group in optimizer.param_groups[:1])


def check_full_state(
    optimizer: torch.optim.Optimizer, full: Mapping[str, Any], shapes: Iterable[Iterable[Sequence[int]]]
) -> None:
    """Check that ``full``, a ``state_dict()`` with as many parameters in each group, fits this optimizer.

    Args:
        optimizer: the user's own.
        full: ``state`` and ``param_groups``.
        shapes: shapes of the optimizer's parameters, by group and position.

    Raises:
        ValueError: the state is of another optimizer.
    """
    form, judged = StateForm(optimizer), set[tuple[int, SavedForm]]()
    for place, (own, theirs, sizes) in enumerate(
        zip(optimizer.param_groups, full["param_groups"], shapes, strict=True)
    ):
        saved_options = {key: value for key, value in theirs.items() if key not in NOTED}
        options = own | options_for(optimizer, "", saved_options)
        for number, shape in zip(theirs["params"], sizes, strict=True):
            entry = full["state"].get(number)
            saved = SavedForm.of(shape, entry) if entry else None
            if saved is None or (place, saved) in judged:
                continue
            judged.add((place, saved))
            reason = form.misfit("", options, saved_options, saved)
            if reason is not None:
                raise ValueError(
                    f"this is not a state of {type(optimizer).__name__}: for parameter {number} in group {place} "
                    f"{reason}; load it into an optimizer of the class that made it"
                )
