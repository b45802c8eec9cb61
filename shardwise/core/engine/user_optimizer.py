"""The user's own optimizer after a build: its methods are those of the sharded optimizer, and its state is sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

FORWARDED = ("zero_grad", "add_param_group", "state_dict", "load_state_dict")
"""Methods that redirect to the sharded optimizer, whose ``add_param_group`` raises."""
REPLACED = ("step", *FORWARDED)


# [Note: What groups hold]
# The param groups of a sharded optimizer hold the model's own parameters, as before the build. The optimizer gets this
# rank's shards only within its step (TileStepper). So a program may use the groups as before: clip_grad_norm_ of
# group["params"] and loops over .grad see the gradients (a ShardedGrad each, equally many on every rank, since these
# calls are collective), and autograd sees requires_grad_(). Shards have gradients only within a step. The keys of the
# state are shards, so a lookup by a parameter, which would find nothing, raises (ShardState).
class ShardState(defaultdict[Any, Any]):
    """``optimizer.state`` of a sharded optimizer, keyed by this rank's shards of parameters."""

    names: Mapping[int, str] = {}
    """Names of the parameters in the groups, by ``id``."""

    def _check(self, key: object) -> None:
        if id(key) in self.names:
            raise RuntimeError(
                f"optimizer.state[{self.names[id(key)]!r}]: the state of a sharded optimizer is not keyed by "
                "parameters. Use session.one(parameter).state(key) and set_state(key, value) for one parameter, and "
                "state_dict() and load_state_dict() for all, on every rank; state.clear() resets it"
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

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dict's."""
        self._check(key)
        return super().get(key, default)

    def update(self, *entries: Any, **named: Any) -> None:
        """As a dict's."""
        for key, value in dict(*entries, **named).items():
            self[key] = value

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(self.default_factory, self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the state of a sharded optimizer ({len(self)} shards of parameters) cannot be copied or pickled: it is "
            "this rank's part only; use state_dict(), on every rank"
        )


def redirect(optimizer: torch.optim.Optimizer, sharded: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Redirect the methods :data:`FORWARDED` of the user's ``optimizer`` to ``sharded``, and clear its state.

    Args:
        optimizer: the user's.
        sharded: the optimizer that steps instead.
        names: names of the optimizer's parameters, by ``id``.
    """
    own = vars(optimizer)
    optimizer.state.clear()  # it is keyed by parameters
    for name in FORWARDED:
        own[name] = getattr(sharded, name)
    if type(own.get("state")) is defaultdict:  # otherwise the class needs this type
        own["state"] = state = ShardState(dict)
        state.names = names


def after_hooks(hooks: Mapping[int, Any], optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` as ``hooks`` on it change it."""
    for hook in hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state


def snapshot(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores the methods, parameters and state that the optimizer has now."""
    own, state = vars(optimizer), optimizer.state
    methods, entries = {name: own[name] for name in REPLACED if name in own}, dict(state)
    params = [(group, group["params"]) for group in optimizer.param_groups]

    def restore() -> None:
        for name in REPLACED:
            own.pop(name, None)
        own.update(methods)
        if optimizer.state is not state:
            optimizer.state = state
        state.clear()
        state.update(entries)
        for group, before in params:
            group["params"] = before

    return restore
