"""The names under which a module's state is saved, whatever its hooks make of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.core.base.torch_internals import incompatible_keys

__all__ = [
    "EXTRA_STATE",
    "StateNames",
    "call_load_hooks",
    "hand_back",
    "is_extra",
    "is_one_kind",
    "keeper",
    "put_others",
    "takers",
    "with_load_hooks",
]

EXTRA_STATE = "_extra_state"  # what torch appends to a module's name


@dataclass(frozen=True)
class StateNames:
    """What ``module.state_dict()`` lists.

    Attributes:
        order: all names in its order.
        of_parameter: by parameter index, its names (several where it is tied).
        others: buffers and extra state, by name.
    """

    order: Mapping[str, None]
    of_parameter: Mapping[int, Sequence[str]]
    others: Mapping[str, Any]

    def layout(self, params: Sequence[torch.Tensor]) -> dict[str, Any]:
        """By name what is there: parameters (of the right shape, gathered or not), buffers and extra state."""
        found = dict(self.others) | {name: params[i] for i, names in self.of_parameter.items() for name in names}
        return {name: found[name] for name in self.order}

    @classmethod
    def read(cls, model: nn.Module, params: Sequence[nn.Parameter]) -> StateNames:
        """Parameters are told by identity, since state_dict hooks may rename them; and by the name they have in the
        model, since hooks may make something of them (a copy, fewer bits), in place of which the parameter is saved.

        Raises:
            ValueError: what a hook has put under a parameter's name is no parameter of its shape and kind.
        """
        index = {id(param): i for i, param in enumerate(params)}
        own = {n: index[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if id(p) in index}
        of_parameter: dict[int, list[str]] = {}
        others: dict[str, Any] = {}
        state = _listed(model)
        for name, value in state.items():
            if id(value) not in index and name in own:
                _check_made(name, value, params[own[name]])
            place = index.get(id(value), own.get(name))
            if place is not None:
                of_parameter.setdefault(place, []).append(name)
            else:
                others[name] = value
        return cls(dict.fromkeys(state), of_parameter, others)


def _listed(model: nn.Module) -> Mapping[str, Any]:
    """The state of ``model`` with the parameters themselves, where its ``state_dict()`` takes that argument."""
    try:
        parameters = inspect.signature(model.state_dict).parameters.values()
    except (TypeError, ValueError):  # of no function of Python
        return model.state_dict(keep_vars=True)
    taken = any(each.kind is each.VAR_KEYWORD or each.name == "keep_vars" for each in parameters)
    return model.state_dict(keep_vars=True) if taken else model.state_dict()


def _check_made(name: str, value: Any, param: nn.Parameter) -> None:
    if isinstance(value, torch.Tensor) and value.shape == param.shape and is_one_kind(value.dtype, param.dtype):
        return
    kind = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise ValueError(
        f"state_dict() of the model (a hook, or a method of its own) has {kind} under {name!r}, and no parameter: "
        f"the parameter is {param.dtype} of shape {tuple(param.shape)}. Put it under a name of its own, or make it of "
        "what state_dict() of the sharded model gives"
    )


def is_one_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether parameters of ``one`` may be loaded into some of ``other``: packed numbers mean nothing as others."""
    return one is other or (one.is_floating_point and other.is_floating_point)


def keeper(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """The module that has a tensor under this name of a state; ``None``: the state's was made from something else."""
    path, _, last = name.rpartition(".")
    owner = modules.get(path)
    return owner if isinstance(getattr(owner, last, None), torch.Tensor) else None


def is_extra(name: str, value: Any) -> bool:
    """Whether an entry of a state is kept as it is, not as a tensor: extra state, and whatever else is no tensor."""
    return name.endswith(EXTRA_STATE) or not isinstance(value, torch.Tensor)


def _is_copied(owner: nn.Module | None, last: str, held: torch.Tensor) -> bool:
    """Whether the state has a copy of what the module has under the name (torchmetrics)."""
    return owner is not None and held.numel() > 0 and getattr(owner, last).data_ptr() != held.data_ptr()


def takers(modules: Mapping[str, nn.Module], name: str, watches: Callable[[Any], bool] = lambda _: False) -> list[str]:
    """Which modules may take back what was made for a state under ``name``, by a ``_load_from_state_dict`` or a hook of
    their own: the one it is of first, then those around it. ``watches``: of a hook, that it is none of the user's."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        module = modules.get(name)
        if module is not None and (
            type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
            or any(not watches(hook) for hook in module._load_state_dict_pre_hooks.values())
        ):
            found.append(name)
    return found


def hand_back(
    modules: Mapping[str, nn.Module], values: Mapping[str, Any], made: Mapping[str, Sequence[str]]
) -> list[str]:
    """Give what modules have made for a state back to them, each together with its other ``values``.

    Args:
        modules, values: see :func:`put_others`.
        made: names of these, each with its :func:`takers`.

    Returns:
        What none has taken.
    """
    left = dict(made)
    for place in range(max(map(len, made.values()), default=0)):
        for path in dict.fromkeys(chain[place] for chain in left.values() if place < len(chain)):
            asked = [name for name, chain in left.items() if path in chain[place : place + 1]]
            beside = (n for n in values if n.rpartition(".")[0] == path and n not in made)
            given = {name: values[name] for name in (*beside, *asked) if not name.endswith(EXTRA_STATE)}
            unexpected = list[str]()
            modules[path]._load_from_state_dict(given, f"{path}." if path else "", {}, True, [], unexpected, [])
            # Of what is of a module in it, a module says nothing.
            refused = {n for n in asked if n in given and (n in unexpected or n.rpartition(".")[0] != path)}
            left = {name: chain for name, chain in left.items() if name not in asked or name in refused}
    return list(left)


def put_others(
    modules: Mapping[str, nn.Module], own: Mapping[str, Any], values: Mapping[str, Any], later: Collection[str] = ()
) -> None:
    """Load what are no parameters: buffers, extra state, and what modules list by a ``state_dict()`` of their own.

    Args:
        modules: the user's model's, by name.
        own: what its ``state_dict()`` has now.
        values: some of that, anew: tensors of the same shapes, extra state, or whatever else a module saves.
        later: names of modules that get what they take by a method of their own from :func:`hand_back`.

    Raises:
        ValueError: no module has saved it; nothing has changed.
    """
    by_module: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        held = own[name]
        if name.endswith(EXTRA_STATE):
            continue
        if not isinstance(held, torch.Tensor):
            if path not in modules:
                raise ValueError(f"{name}={value!r:.80}: the model has no module {path!r} that takes it")
            by_module.setdefault(path, {})[name] = value
        elif _is_copied(keeper(modules, name), last, held):
            by_module.setdefault(path, {})[name] = value.to(held.device, held.dtype, copy=True)
    apart = {name for given in by_module.values() for name in given}
    for name, value in values.items():
        if name.endswith(EXTRA_STATE):
            modules[name.removesuffix(EXTRA_STATE).rstrip(".")].set_extra_state(value)
        elif name not in apart:
            own[name].copy_(value)
    # A module takes these as it gives them, by a method of its own: all at once, since they may go together.
    for path, given in by_module.items():
        if path in later:
            continue
        modules[path]._load_from_state_dict(given, f"{path}." if path else "", {}, False, [], [], [])


def with_load_hooks(model: nn.Module, named: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """By name, the modules that have hooks for what was loaded, and those that are ``named``; children first, as torch
    calls hooks. A module in two places comes twice."""
    for name, child in model.named_children():
        yield from with_load_hooks(child, named, f"{prefix}{name}.")
    if model._load_state_dict_post_hooks or prefix.rstrip(".") in named:
        yield prefix.rstrip("."), model


def call_load_hooks(module: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Those of one module.

    Raises:
        AssertionError: one returned something; as in torch, they change the lists.
    """
    keys = incompatible_keys(missing, unexpected)
    for hook in module._load_state_dict_post_hooks.values():
        if hook(module, keys) is not None:
            raise AssertionError(
                f"a hook for loads of {type(module).__name__} (register_load_state_dict_post_hook) returned a value: "
                "it returns None, and changes missing_keys and unexpected_keys in place"
            )
