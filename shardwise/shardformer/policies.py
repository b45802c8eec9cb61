"""Policies: descriptions of a model's sharded layers. :class:`PolicyArchitecture` translates one for a plan."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shardwise.core.base.validate import refuse
from shardwise.core.parallel.tensor import ModuleRules, TPPlan
from shardwise.plan import TensorPlan
from shardwise.shardformer.layer import ParallelModule
from shardwise.shardformer.shard_config import ShardConfig, config_over

STEP = re.compile(r"(?P<name>\w+)(?P<indices>(\[\d+\])*)")
Key = str | type[nn.Module]
Described = dict[Key, "ModulePolicyDescription"]


@dataclass
class SubModuleReplacementDescription:
    """How one layer of a module is sharded.

    Attributes:
        suffix: path of the layer in the module: ``"self_attn.q_proj"``, ``"layers[0].fc"``.
        target_module: a class of :mod:`shardwise.shardformer.layer`.
        kwargs: the arguments of that class.
        ignore_if_not_exist: skip it if the module has no such layer.

    Examples:
        >>> from shardwise.shardformer import SubModuleReplacementDescription
        >>> from shardwise.shardformer.layer import Linear1D_Col
        >>> up = SubModuleReplacementDescription("mlp.up", Linear1D_Col)
    """

    suffix: str
    target_module: type[ParallelModule]
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """Changes of each module of a class.

    Attributes:
        attribute_replacement: attributes with other values in sharded modules, by dotted name.
        param_replacement: an error: parameters stay the model's own; shard layers with ``sub_module_replacement``.
        sub_module_replacement: the layers that are sharded, and how.
        method_replacement: functions that replace methods, by name.

    Examples:
        >>> from shardwise.shardformer import ModulePolicyDescription, SubModuleReplacementDescription
        >>> from shardwise.shardformer.layer import Linear1D_Col, Linear1D_Row
        >>> up = SubModuleReplacementDescription("up", Linear1D_Col)
        >>> down = SubModuleReplacementDescription("down", Linear1D_Row)
        >>> description = ModulePolicyDescription(sub_module_replacement=[up, down])
    """

    attribute_replacement: dict[str, Any] | None = None
    param_replacement: list[Callable[[nn.Module], None]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None


class Policy(ABC):
    """Base class of policies for :meth:`ShardFormer.optimize` or ``HybridParallelPlugin(custom_policy=...)``.

    Attributes:
        model: the unsharded model.
        shard_config: number of ranks (``tensor_parallel_size``), and the other options.
        is_causal: a value that only the policy itself reads.
    """

    def __init__(self) -> None:
        self.shard_config: ShardConfig | None = None
        self.model: nn.Module | None = None
        self.is_causal: bool | None = None

    def set_model(self, model: nn.Module) -> None:
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the configuration, and check it with :meth:`config_sanity_check`."""
        self.shard_config = shard_config
        self.config_sanity_check()

    @property
    def pipeline_stage_manager(self) -> None:
        """Return None, because there is no pipeline."""
        return None

    @abstractmethod
    def config_sanity_check(self) -> None:
        """Raise an error if ``shard_config`` does not fit the model."""

    @abstractmethod
    def preprocess(self) -> nn.Module:
        """Return the model with the same modules and parameters. Called first."""

    @abstractmethod
    def module_policy(self) -> Described:
        """Return the description of modules by class, or by a class's name."""

    @abstractmethod
    def postprocess(self) -> nn.Module:
        """Return the model with the same modules and parameters; tied weights stay tied. Called last."""

    def append_or_create_submodule_replacement(
        self,
        description: SubModuleReplacementDescription | list[SubModuleReplacementDescription],
        policy: Described,
        target_key: Key,
    ) -> Described:
        """Add layers to the description of ``target_key`` in ``policy``."""
        added = [description] if isinstance(description, SubModuleReplacementDescription) else list(description)
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        entry.sub_module_replacement = [*(entry.sub_module_replacement or []), *added]
        return policy

    def append_or_create_method_replacement(
        self, description: dict[str, Callable[..., Any]], policy: Described, target_key: Key
    ) -> Described:
        """Add methods to the description of ``target_key`` in ``policy``."""
        entry = policy.setdefault(target_key, ModulePolicyDescription())
        entry.method_replacement = {**(entry.method_replacement or {}), **description}
        return policy

    def get_held_layers(self) -> list[nn.Module]:
        """Return the layers of a pipeline stage. Not used yet."""
        raise NotImplementedError(f"{type(self).__name__}.get_held_layers: the model is not split; remove the call")

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        """Return the parameters that stages share: none."""
        return []

    def tie_weight_check(self) -> bool:
        """Return True if the model's input and output embeddings are one parameter."""
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())  # type: ignore[union-attr, operator]
        return all(end is not None for end in ends) and ends[0].weight is ends[1].weight


class PolicyArchitecture:
    """The rules of a policy, collected again for every model. All changes of a model are recorded in its ``TPPlan``.

    Args:
        policy: the user's policy.
        plan: options for the policy in addition to the number of ranks.
    """

    def __init__(self, policy: Policy, plan: TensorPlan) -> None:
        self.policy = policy
        self.plan = plan

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.policy).__name__})"

    def collect(self, model: nn.Module, tp_plan: TPPlan) -> None:
        """Add the rules of the policy for ``model`` to ``tp_plan``.

        Raises:
            ValueError, TypeError: a layer does not exist or cannot be sharded, or the policy has no layers, or it
                returns another model, other modules or other parameters.
            NotImplementedError: the policy replaces parameters, or names an unknown layer.
        """
        policy = self.policy
        before = _things(model)
        policy.set_model(model)
        policy.set_shard_config(config_over(tp_plan.axis.size, self.plan))
        _same(model, before, policy.preprocess)
        result = 0
        for key, description in policy.module_policy().items():
            for name, module in model.named_modules():
                if type(module) is key or type(module).__name__ == key:
                    result += 1
                    _describe(ModuleRules(tp_plan, self.plan, module), name or type(model).__name__, description)
        if not result:
            raise ValueError(f"{self!r} names no class that a {type(model).__name__} has: give one for this model")
        left = tp_plan.uncovered(model)
        if left:
            raise ValueError(
                f"{self!r} leaves {', '.join(left)} whole, tied to a layer that is cut: cut it as well, or untie it"
            )
        _same(model, before, policy.postprocess)


def _things(model: nn.Module) -> dict[str, int]:
    """Return the ids of the model's modules and parameters by name."""
    result: dict[str, int] = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    return result | {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}


def _same(model: nn.Module, before: dict[str, int], process: Callable[[], nn.Module]) -> None:
    """Call a policy's own step, which may read but not change the model.

    Raises:
        ValueError: the policy changed the model.
    """
    returned = process()
    step = getattr(process, "__qualname__", repr(process))
    if returned is not model:
        raise ValueError(f"{step}() returned {type(returned).__name__}, not the model that the policy was given")
    after = _things(model)
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if changed:
        raise ValueError(
            f"{step}() changed {', '.join(changed[:3])} of the model: leave that out. A vocabulary is padded where it "
            "is cut, and tied weights stay tied; other changes belong before boost"
        )


def _describe(rules: ModuleRules, name: str, description: ModulePolicyDescription) -> None:
    module, tp_plan = rules.module, rules.tp_plan
    if description.param_replacement:
        refuse(f"param_replacement of {name}", description.param_replacement, "cut layers with sub_module_replacement")
    for path, value in (description.attribute_replacement or {}).items():
        owner, _, last = path.rpartition(".")
        holder = _at(module, owner, f"attribute_replacement {path!r} of {name}") if owner else module
        tp_plan.sets(holder, **{last: value})
    for method, function in (description.method_replacement or {}).items():
        tp_plan.sets(module, **{method: MethodType(function, module)})
    for each in description.sub_module_replacement or []:
        where = f"{name}.{each.suffix}"
        if _at(module, each.suffix, where, missing_is_none=each.ignore_if_not_exist) is None:
            continue
        if not (isinstance(each.target_module, type) and issubclass(each.target_module, ParallelModule)):
            refuse(f"target_module of {where}", each.target_module, "give a class of shardwise.shardformer.layer")
        owner, _, last = each.suffix.replace("[", ".").replace("]", "").rpartition(".")
        inside = replace(rules, module=module.get_submodule(owner))
        try:
            each.target_module.collect(inside, last, **(each.kwargs or {}))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{where} as {each.target_module.__name__}: {error}") from error


def _at(module: nn.Module, path: str, where: str, missing_is_none: bool = False) -> Any:
    """Return the object at ``path`` in ``module``: dotted names, with list entries in brackets.

    Raises:
        ValueError: there is no such object; the message has ``where``.
    """
    result: Any = module
    for step in path.split("."):
        match = STEP.fullmatch(step)
        if match is None:
            raise ValueError(f"{where}: {step!r} is no name; give names with dots, and numbers in brackets")
        result = getattr(result, match["name"], None)
        for index in re.findall(r"\d+", match["indices"]):
            result = result[int(index)] if result is not None and int(index) < len(result) else None
        if result is None:
            break
    if result is None and not missing_is_none:
        raise ValueError(f"{where}: a {type(module).__name__} has no {path!r}")
    return result
