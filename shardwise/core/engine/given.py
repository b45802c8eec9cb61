"""The optimizer that a build was given, and that its user still holds: whom its methods and its state answer for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

__all__ = ["PieceState", "as_now", "hand_over", "loaded", "state_given", "state_taken", "state_wanted", "take_back"]

FORWARDED = ("zero_grad", "state_dict", "load_state_dict")
"""Methods that are the sharded optimizer's once there is one."""
REPLACED = ("step", "add_param_group", *FORWARDED)
"""Those, and what the stepper refuses."""


# [Note: What groups hold]
# The param groups of a sharded optimizer hold what they held before, the model's own parameters, and not this rank's
# pieces, which it gets in its step (TileStepper). So what programs do by way of the groups is what they do by way of
# the model: clip_grad_norm_ of group["params"] and loops over .grad meet the gradients (a ShardedGrad each, the same
# number of them on every rank, as calls that all ranks make need it), and requires_grad_() is seen by autograd. Pieces
# have gradients within a step alone, and freezing one does nothing. The state is by pieces, so there asking by a
# parameter, which would find nothing, is an error (PieceState).
class PieceState(defaultdict[Any, Any]):
    """``optimizer.state`` of a sharded optimizer: by this rank's pieces."""

    names: Mapping[int, str] = {}
    """Of the parameters in the groups, by ``id``."""

    @classmethod
    def of(cls, names: Mapping[int, str]) -> PieceState:
        """An empty one, where parameters have these names."""
        made = cls(dict)
        made.names = names
        return made

    def _check(self, key: object) -> None:
        if id(key) in self.names:
            raise RuntimeError(
                f"optimizer.state of {self.names[id(key)]!r}: the state of a sharded optimizer is by this rank's parts "
                "of parameters. Read and write that of a parameter by session.one(parameter).state(key) and "
                "set_state(key, value), all of it by state_dict() and load_state_dict(), on every rank; "
                "state.clear() starts anew"
            )

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dict's."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As a dict's."""
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As a dict's."""
        self._check(key)
        return super().setdefault(key, default)

    def update(self, *given: Any, **named: Any) -> None:
        """As a dict's."""
        entries = dict(*given, **named)
        for key in entries:
            self._check(key)
        super().update(entries)

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(self.default_factory, self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the state of a sharded optimizer ({len(self)} parts of parameters) cannot be copied or pickled: its "
            "parts are this rank's alone; use state_dict(), on every rank"
        )


def hand_over(optimizer: torch.optim.Optimizer, sharded: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """From here on ``optimizer``, which the user holds, drops gradients and gives and takes states as ``sharded``.

    Its state is dropped.

    Args:
        optimizer: the user's.
        sharded: what steps in its place.
        names: of its parameters, by ``id``.
    """
    own = vars(optimizer)
    # Under its own parameters it would be found by nobody, and kept.
    optimizer.state.clear()
    for name in FORWARDED:
        own[name] = getattr(sharded, name)
    if type(own.get("state")) is defaultdict:  # otherwise it is another's, or of a kind that the class needs
        own["state"] = PieceState.of(names)


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """The model is sharded no more: dropping gradients is the class's again. States are of parts still."""
    vars(optimizer).pop("zero_grad", None)


# Hooks on the state, as torch's own methods call them.


def state_wanted(optimizer: torch.optim.Optimizer) -> None:
    """``state_dict()`` begins."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def state_given(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What ``state_dict()`` gives in the end."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        state = _or(hook(optimizer, state), state)
    return state


def state_taken(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What ``load_state_dict()`` takes in the end."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks.values()
    state = dict(state) if hooks else state
    for hook in hooks:
        state = _or(hook(optimizer, state), state)
    return state


def loaded(optimizer: torch.optim.Optimizer) -> None:
    """``load_state_dict()`` ends."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _or(found: dict[str, Any] | None, before: dict[str, Any]) -> dict[str, Any]:
    return before if found is None else found


def as_now(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What gives an optimizer the methods, the parameters and the state back that it has now."""
    own, state = vars(optimizer), optimizer.state
    methods, held = {name: own[name] for name in REPLACED if name in own}, dict(state)
    params = [(group, group["params"]) for group in optimizer.param_groups]

    def give_back() -> None:
        for name in REPLACED:
            own.pop(name, None)
        own.update(methods)
        if optimizer.state is not state:
            optimizer.state = state
        state.clear()
        state.update(held)
        for group, before in params:
            group["params"] = before

    return give_back
