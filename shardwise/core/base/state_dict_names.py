"""Names in a module's ``state_dict()``, including changes by hooks, and loading of entries that are not parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.core.base.torch_internals import incompatible_keys

EXTRA_STATE = "_extra_state"  # torch's suffix of extra state after a module's name


@dataclass(frozen=True)
class StateNames:
    """The contents of ``module.state_dict()``.

    Attributes:
        order: all names, in order.
        of_parameter: names by parameter index (several for a tied parameter).
        buffers_and_extra: buffers and extra state by name.
    """

    order: Mapping[str, None]
    of_parameter: Mapping[int, Sequence[str]]
    buffers_and_extra: Mapping[str, Any]

    def layout(self, params: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return parameters (of the full shape, gathered or not), buffers and extra state by name."""
        full = {name: params[index] for index, names in self.of_parameter.items() for name in names}
        return {name: full[name] if name in full else self.buffers_and_extra[name] for name in self.order}

    @classmethod
    def read(cls, model: nn.Module, params: Sequence[nn.Parameter]) -> StateNames:
        """Read the names of ``model``.

        Parameters are recognized by identity, since state_dict hooks may rename them, and by their name in the model,
        since hooks may replace them (by a copy, or fewer bits); the parameter is saved instead.

        Raises:
            ValueError: a hook has put something else than a tensor of the parameter's shape under its name.
        """
        index = {id(param): i for i, param in enumerate(params)}
        own = {n: index[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if id(p) in index}
        of_parameter: dict[int, list[str]] = {}
        extra: dict[str, Any] = {}
        state = _listed(model)
        for name, value in state.items():
            if id(value) not in index and name in own:
                _check_made(name, value, params[own[name]])
            place = index.get(id(value), own.get(name))
            if place is not None:
                of_parameter.setdefault(place, []).append(name)
            else:
                extra[name] = value
        return cls(dict.fromkeys(state), of_parameter, extra)


def _listed(model: nn.Module) -> Mapping[str, Any]:
    """Return the state of ``model``, with the parameters themselves if its ``state_dict()`` takes ``keep_vars``."""
    try:
        parameters = inspect.signature(model.state_dict).parameters.values()
    except (TypeError, ValueError):  # not a Python function
        return model.state_dict(keep_vars=True)
    passed = any(each.kind is each.VAR_KEYWORD or each.name == "keep_vars" for each in parameters)
    return model.state_dict(keep_vars=True) if passed else model.state_dict()


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
    """Return whether parameters of dtype ``one`` can be loaded as ``other``; packed integers cannot."""
    return one is other or (one.is_floating_point and other.is_floating_point)


def keeper(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """Return the module with a tensor of this name. ``None`` if the entry was computed from other values."""
    path, _, last = name.rpartition(".")
    owner = modules.get(path)
    return owner if isinstance(getattr(owner, last, None), torch.Tensor) else None


def is_extra(name: str, value: Any) -> bool:
    """Return whether an entry is extra state, or anything else that is not a tensor."""
    return name.endswith(EXTRA_STATE) or not isinstance(value, torch.Tensor)


def _is_copied(owner: nn.Module | None, last: str, saved: torch.Tensor) -> bool:
    """Return whether the state has a copy of the module's tensor (torchmetrics)."""
    return owner is not None and saved.numel() > 0 and getattr(owner, last).data_ptr() != saved.data_ptr()


def takers(modules: Mapping[str, nn.Module], name: str, watches: Callable[[Any], bool] = lambda _: False) -> list[str]:
    """Return the modules that may load a computed entry ``name``: the module of that name, then its parents.

    These have a ``_load_from_state_dict`` or a load hook of their own; ``watches(hook)`` is True for our own hooks.
    """
    names = []
    while name:
        name = name.rpartition(".")[0]
        module = modules.get(name)
        if module is not None and (
            type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
            or any(not watches(hook) for hook in module._load_state_dict_pre_hooks.values())
        ):
            names.append(name)
    return names


def hand_back(
    modules: Mapping[str, nn.Module], values: Mapping[str, Any], made: Mapping[str, Sequence[str]]
) -> list[str]:
    """Load computed entries into the modules that made them, each together with its other ``values``.

    Args:
        modules, values: see :func:`load_entries`.
        made: names of computed entries, each with its :func:`takers`.

    Returns:
        The names that no module has loaded.
    """
    left = dict(made)
    for place in range(max(map(len, made.values()), default=0)):
        for path in dict.fromkeys(chain[place] for chain in left.values() if place < len(chain)):
            computed = [name for name, chain in left.items() if path in chain[place : place + 1]]
            stored = (n for n in values if n.rpartition(".")[0] == path and n not in made)
            entries = {name: values[name] for name in (*stored, *computed) if not name.endswith(EXTRA_STATE)}
            unexpected = list[str]()
            modules[path]._load_from_state_dict(entries, f"{path}." if path else "", {}, True, [], unexpected, [])
            # A module does not report entries of its children.
            refused = {n for n in computed if n in entries and (n in unexpected or n.rpartition(".")[0] != path)}
            left = {name: chain for name, chain in left.items() if name not in computed or name in refused}
    return list(left)


def load_entries(
    modules: Mapping[str, nn.Module], own: Mapping[str, Any], values: Mapping[str, Any], later: Collection[str] = ()
) -> None:
    """Load buffers, extra state, and other entries that modules save by a ``state_dict()`` of their own.

    Args:
        modules: the modules of the user's model by name.
        own: the model's present ``state_dict()``.
        values: new values of some entries: tensors of the same shapes, extra state, or other objects.
        later: names of modules that :func:`hand_back` loads.

    Raises:
        ValueError: no module can load an entry. Nothing has changed.
    """
    by_module: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        present = own[name]
        if name.endswith(EXTRA_STATE):
            continue
        if not isinstance(present, torch.Tensor):
            if path not in modules:
                raise ValueError(
                    f"{name}={value!r:.80}: the model has no module {path!r} to load it into; leave it out"
                )
            by_module.setdefault(path, {})[name] = value
        elif _is_copied(keeper(modules, name), last, present):
            by_module.setdefault(path, {})[name] = value.to(present.device, present.dtype, copy=True)
    apart = {name for entries in by_module.values() for name in entries}
    for name, value in values.items():
        if name.endswith(EXTRA_STATE):
            modules[name.removesuffix(EXTRA_STATE).rstrip(".")].set_extra_state(value)
        elif name not in apart:
            own[name].copy_(value)
    # Load all entries of a module at once by its own method, since they may depend on each other.
    for path, entries in by_module.items():
        if path not in later:
            modules[path]._load_from_state_dict(entries, f"{path}." if path else "", {}, False, [], [], [])


def with_load_hooks(model: nn.Module, named: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with load_state_dict post-hooks, and those in ``named``, by name; children first, as in torch.

    A module in two places comes twice.
    """
    for name, child in model.named_children():
        yield from with_load_hooks(child, named, f"{prefix}{name}.")
    if model._load_state_dict_post_hooks or prefix.rstrip(".") in named:
        yield prefix.rstrip("."), model


def call_load_hooks(module: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Call the load_state_dict post-hooks of one module, which may change the lists.

    Raises:
        AssertionError: a hook returned a value, as in torch.
    """
    keys = incompatible_keys(missing, unexpected)
    for hook in module._load_state_dict_post_hooks.values():
        if hook(module, keys) is not None:
            raise AssertionError(
                f"a load_state_dict post-hook of {type(module).__name__} returned a value; return None, and change "
                "missing_keys and unexpected_keys in place"
            )
