"""A policy, carried out as cuts: :class:`PolicyArchitecture` is what a plan takes as its architecture."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn

from shardwise.checked import refuse
from shardwise.plan import TensorPlan
from shardwise.shardformer.layer import ParallelModule
from shardwise.shardformer.policies.base_policy import ModulePolicyDescription, Policy
from shardwise.shardformer.shard.shard_config import config_over
from shardwise.tensor import Cutting, Site

__all__ = ["PolicyArchitecture"]

STEP = re.compile(r"(?P<name>\w+)(?P<indices>(\[\d+\])*)")


class PolicyArchitecture:
    """What a policy says, asked anew for every model. Nothing is changed but what a ``Cutting`` remembers.

    Args:
        policy: the user's.
        plan: what the policy is told beside the number of ranks.
    """

    def __init__(self, policy: Policy, plan: TensorPlan) -> None:
        self.policy = policy
        self.plan = plan

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.policy).__name__})"

    def collect(self, model: nn.Module, cutting: Cutting) -> None:
        """Tell ``cutting`` what the policy says of ``model``.

        Raises:
            ValueError, TypeError: a layer is not there or cannot be cut, or the policy finds none, or it gives another
                model, other modules or other parameters back.
            NotImplementedError: it replaces parameters, or names a layer that is none of ours.
        """
        policy = self.policy
        before = _things(model)
        policy.set_model(model)
        policy.set_shard_config(config_over(cutting.axis.size, self.plan))
        _same(model, before, policy.preprocess)
        found = 0
        for key, description in policy.module_policy().items():
            for name, module in model.named_modules():
                if type(module) is key or type(module).__name__ == key:
                    found += 1
                    _describe(Site(cutting, self.plan, module), name or type(model).__name__, description)
        if not found:
            raise ValueError(f"{self!r} names no class that a {type(model).__name__} has: give one for this model")
        left = cutting.uncovered(model)
        if left:
            raise ValueError(
                f"{self!r} leaves {', '.join(left)} whole, tied to a layer that is cut: cut it as well, or untie it"
            )
        _same(model, before, policy.postprocess)


def _things(model: nn.Module) -> dict[str, int]:
    """The model's modules and parameters, by name."""
    found: dict[str, int] = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    return found | {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}


def _same(model: nn.Module, before: dict[str, int], process: Callable[[], nn.Module]) -> None:
    """Call a policy's own step, which may look but not change.

    Raises:
        ValueError: it did.
    """
    given = process()
    step = getattr(process, "__qualname__", repr(process))
    if given is not model:
        raise ValueError(f"{step}() returned {type(given).__name__}, not the model that the policy was given")
    after = _things(model)
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if changed:
        raise ValueError(
            f"{step}() changed {', '.join(changed[:3])} of the model: leave that out. A vocabulary is padded where it "
            "is cut, and tied weights stay tied; other changes belong before boost"
        )


def _describe(site: Site, name: str, description: ModulePolicyDescription) -> None:
    module, cutting = site.module, site.cutting
    if description.param_replacement:
        refuse(f"param_replacement of {name}", description.param_replacement, "cut layers with sub_module_replacement")
    for path, value in (description.attribute_replacement or {}).items():
        owner, _, last = path.rpartition(".")
        holder = _at(module, owner, f"attribute_replacement {path!r} of {name}") if owner else module
        cutting.sets(holder, **{last: value})
    for method, function in (description.method_replacement or {}).items():
        cutting.sets(module, **{method: MethodType(function, module)})
    for each in description.sub_module_replacement or []:
        where = f"{name}.{each.suffix}"
        if _at(module, each.suffix, where, missing_is_none=each.ignore_if_not_exist) is None:
            continue
        if not (isinstance(each.target_module, type) and issubclass(each.target_module, ParallelModule)):
            refuse(f"target_module of {where}", each.target_module, "give a class of shardwise.shardformer.layer")
        owner, _, last = each.suffix.replace("[", ".").replace("]", "").rpartition(".")
        inside = replace(site, module=module.get_submodule(owner))
        try:
            each.target_module.collect(inside, last, **(each.kwargs or {}))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{where} as {each.target_module.__name__}: {error}") from error


def _at(module: nn.Module, path: str, where: str, missing_is_none: bool = False) -> Any:
    """What is at ``path`` below ``module``: names with dots, entries of lists in brackets.

    Raises:
        ValueError: nothing is; says ``where``.
    """
    found: Any = module
    for step in path.split("."):
        match = STEP.fullmatch(step)
        if match is None:
            raise ValueError(f"{where}: {step!r} is no name; give names with dots, and numbers in brackets")
        found = getattr(found, match["name"], None)
        for index in re.findall(r"\d+", match["indices"]):
            found = found[int(index)] if found is not None and int(index) < len(found) else None
        if found is None:
            break
    if found is None and not missing_is_none:
        raise ValueError(f"{where}: a {type(module).__name__} has no {path!r}")
    return found
