"""``wrap``, ``auto_wrap`` and their policy: which modules are gathered on their own.

Source: the interface of FairScale's ``nn.wrap.auto_wrap``, which models of Lightning 1.x call in their
``configure_sharded_model``. Nothing is wrapped here: the module itself comes back, marked, and keeps its names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwise.core.base.remarks import warn_user

__all__ = ["auto_wrap", "chosen_modules", "default_auto_wrap_policy", "enable_wrap", "unit_names", "wrap"]

_MARK = "_shardwise_unit"
LEAVES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)
CONTAINERS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict)


# The policy of the innermost enable_wrap, in a tuple; empty outside of one.
_ENABLED: ContextVar[tuple[Callable[..., bool] | None, ...]] = ContextVar("enabled", default=())


@contextmanager
def enable_wrap(auto_wrap_policy: Callable[..., bool] | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, :func:`wrap` and :func:`auto_wrap` mark modules. A strategy does so around the model's construction.

    Args:
        auto_wrap_policy: what :func:`auto_wrap` asks unless told otherwise.
        wrapper_kwargs: accepted for models that pass FairScale's (``wrapper_cls`` and its arguments). How a unit is
            sharded is the strategy's, so they have no effect, and all but ``wrapper_cls`` warn.
    """
    _warn_of(wrapper_kwargs, "enable_wrap")
    token = _ENABLED.set((auto_wrap_policy,))
    try:
        yield
    finally:
        _ENABLED.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module``, which is gathered and reduced as one; outside :func:`enable_wrap` as it is."""
    _warn_of(wrap_overrides, "wrap")
    if _ENABLED.get():
        module.__dict__[_MARK] = True
    return module


def auto_wrap(module: nn.Module, auto_wrap_policy: Callable[..., bool] | None = None, **kwargs: Any) -> nn.Module:
    """``module`` with those inside marked that the policy chooses, itself included.

    Args:
        module: any.
        auto_wrap_policy: ``f(module, recurse, unwrapped_params, ...) -> bool``; by default that of the context.
        kwargs: see :func:`wrap`.
    """
    _warn_of(kwargs, "auto_wrap")
    for policy in _ENABLED.get():
        for each in chosen_modules(module, auto_wrap_policy or policy or default_auto_wrap_policy):
            each.__dict__[_MARK] = True
    return module


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool = False,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Units of at least ``min_num_params`` elements.

    Args:
        module: the one in question.
        recurse: whether the question is "look inside?" and not "is it a unit?".
        unwrapped_params: its elements that no unit holds yet.
        module_is_root: whether it is the one that ``auto_wrap`` was called with.
        min_num_params: smallest unit, in elements.
        force_leaf_modules: classes that are not looked into; by default MultiheadAttention.
        exclude_wrap_modules: classes that are no units; by default ModuleList and ModuleDict.
        skip_params_check_for_root: the root is a unit whatever its size.
    """
    leaves = tuple(force_leaf_modules) if force_leaf_modules is not None else LEAVES
    excluded = tuple(exclude_wrap_modules) if exclude_wrap_modules is not None else CONTAINERS
    large = unwrapped_params >= min_num_params or (module_is_root and skip_params_check_for_root)
    return large and not isinstance(module, leaves if recurse else excluded)


def chosen_modules(module: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Modules inside ``module``, itself included, that a policy makes units, the innermost first."""
    found: list[nn.Module] = []
    _choose(module, policy, True, found)
    return found


def _choose(module: nn.Module, policy: Callable[..., bool], root: bool, found: list[nn.Module]) -> int:
    """Elements under ``module`` that are in units now."""
    takes_root = "module_is_root" in inspect.signature(policy).parameters
    ask = functools.partial(policy, **({"module_is_root": root} if takes_root else {}))
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not ask(module=module, recurse=True, unwrapped_params=numel):
        return 0
    wrapped = sum(_choose(child, policy, False, found) for child in module.children())
    if ask(module=module, recurse=False, unwrapped_params=numel - wrapped):
        found.append(module)
        return numel
    return wrapped


def unit_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the marked modules of ``model`` that hold parameters, in module order."""
    return tuple(
        name
        for name, module in model.named_modules()
        if name and module.__dict__.get(_MARK) and next(module.parameters(), None) is not None
    )


def _warn_of(arguments: dict[str, Any], what: str) -> None:
    given = sorted(set(arguments) - {"wrapper_cls"})
    if given:
        warn_user(
            f"{what}({', '.join(given)}): how units are sharded is the strategy's choice; give these to "
            "DDPFullyShardedStrategy"
        )
