"""Select the modules that are sharded as units, and initialize meta parameters before that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.core.base.validate import refuse


def unit_modules(
    root: nn.Module,
    policy: Callable[..., Any] | None,
    ignored: set[nn.Module],
    always: tuple[type[nn.Module], ...] = (),
) -> list[nn.Module]:
    """Return the modules to shard, children before parents, ``root`` last.

    A module with a tied parameter that a module outside of it also has is not a unit.

    Args:
        root: the model.
        policy: an FSDP1 ``auto_wrap_policy``: a torch policy object, or ``f(module, recurse, nonwrapped_numel)``.
        ignored: modules that are never a unit.
        always: classes whose instances are units under any policy, if they have parameters.

    Raises:
        NotImplementedError: a ``CustomPolicy`` that returns arguments for a module.
    """
    chosen: set[nn.Module] = set()
    if policy is not None and hasattr(policy, "_run_policy"):
        options: dict[nn.Module, dict[str, Any]] = policy._run_policy(root, ignored, {})
        for module, own in options.items():
            if own:
                refuse("auto_wrap_policy", own, f"{type(module).__name__} asks for arguments of its own; return True")
        chosen = set(options)
    elif policy is not None:
        _recurse(root, policy, ignored, chosen)
    chosen |= {m for m in root.modules() if isinstance(m, always) and next(m.parameters(), None) is not None}
    chosen.discard(root)
    # modules() lists parents first, so the reverse order has children before their parents.
    units = [m for m in reversed(list(root.modules())) if m in chosen and m not in ignored]
    owners = _owners_of_tied(root)
    return [*(unit for unit in units if _can_be_unit(unit, owners)), root]


def _owners_of_tied(root: nn.Module) -> list[set[nn.Module]]:
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    return [modules for modules in owners.values() if len(modules) > 1]


def _can_be_unit(module: nn.Module, owners_of_tied: list[set[nn.Module]]) -> bool:
    """Return False for containers without a forward, and for modules that share a tied parameter with an outer module.

    ``fully_shard`` requires all owners of a tied parameter in one unit, so such a module is part of the outer unit.
    """
    inner = set(module.modules())
    is_complete = all(owners <= inner or not owners & inner for owners in owners_of_tied)
    return is_complete and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _recurse(module: nn.Module, policy: Callable[..., Any], ignored: set[nn.Module], chosen: set[nn.Module]) -> int:
    """Return the number of elements under ``module`` that are in units, as FSDP1's recursion counts them."""
    skipped = {p for inner in module.modules() if inner in ignored for p in inner.parameters(recurse=False)}
    numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in skipped)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(_recurse(c, policy, ignored, chosen) for c in module.children() if c not in ignored)
    if policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        chosen.add(module)
        return numel
    return wrapped


def materialize(
    model: nn.Module,
    ignored: set[nn.Module],
    device: torch.device,
    init: Callable[[nn.Module], None] | None,
) -> None:
    """Initialize meta parameters and buffers, module by module: ``init(module)``, else ``reset_parameters()``.

    Raises:
        ValueError: a module with its own meta tensors has no ``reset_parameters`` and there is no ``init``, or ``init``
            left some of them on the meta device.
    """
    for name, module in model.named_modules():
        if module in ignored or not _meta(module):
            continue
        if init is not None:
            init(module)
        else:
            module.to_empty(device=device, recurse=False)
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"{name or 'the model'} ({type(module).__name__}) has meta parameters and no reset_parameters(); "
                    "give param_init_fn"
                )
            reset()
        if _meta(module):
            raise ValueError(
                f"param_init_fn left {', '.join(_meta(module))} of {name or 'the model'} on meta; give it values"
            )


def _meta(module: nn.Module) -> list[str]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_meta]
