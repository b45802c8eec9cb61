"""``wrap``, ``auto_wrap``, ``enable_wrap`` and policies: which modules are wrapped by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwise.strategies.wrapping import chosen_modules, default_auto_wrap_policy

__all__ = ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"]

Policy = Callable[..., bool]
# Policy and arguments of the innermost enable_wrap; empty outside of one.
_ENABLED: ContextVar[tuple[tuple[Policy | None, dict[str, Any]], ...]] = ContextVar("enabled", default=())


@contextmanager
def enable_wrap(auto_wrap_policy: Policy | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, :func:`wrap` and :func:`auto_wrap` wrap modules; outside they return them as they are.

    Args:
        auto_wrap_policy: what :func:`auto_wrap` asks unless told otherwise.
        wrapper_kwargs: ``wrapper_cls`` and the arguments that it is called with beside the module.

    Raises:
        TypeError: no ``wrapper_cls``.
    """
    if "wrapper_cls" not in wrapper_kwargs:
        raise TypeError(f"enable_wrap({', '.join(wrapper_kwargs)}): give wrapper_cls=FullyShardedDataParallel as well")
    token = _ENABLED.set(((auto_wrap_policy, wrapper_kwargs),))
    try:
        yield
    finally:
        _ENABLED.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` wrapped; ``wrap_overrides`` go before the arguments of :func:`enable_wrap`."""
    for _, arguments in _ENABLED.get():
        own = {**arguments, **getattr(module, "wrapper_config", {}), **wrap_overrides}
        wrapped: nn.Module = own.pop("wrapper_cls")(module, **own)
        return wrapped
    return module


def auto_wrap(module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any) -> nn.Module:
    """``module`` with those inside wrapped that the policy chooses, itself included."""
    for policy, _ in _ENABLED.get():
        chosen = {id(each) for each in chosen_modules(module, auto_wrap_policy or policy or default_auto_wrap_policy)}
        return _wrapped(module, chosen, {}, kwargs)
    return module


def _wrapped(module: nn.Module, chosen: set[int], done: dict[int, nn.Module], kwargs: dict[str, Any]) -> nn.Module:
    """A module that is in several places is wrapped once."""
    if id(module) not in done:
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = _wrapped(child, chosen, done, kwargs)
        done[id(module)] = wrap(module, **kwargs) if id(module) in chosen else module
    return done[id(module)]


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Modules with an attribute ``wrapper_config``: a dict of the arguments that they are wrapped with."""
    return True if recurse else hasattr(module, "wrapper_config")
