"""Which rules are for which classes of modules, and what they make of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.core.base.checked import UnknownModelError
from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.cutting import Cutting
from shardwise.core.parallel.tensor.sequence import Sequences, lists_of_layers
from shardwise.core.parallel.tensor.site import Rule, Site
from shardwise.core.parallel.tensor.tables import TABLES
from shardwise.plan import TensorPlan

__all__ = ["Architecture", "cut_model", "known_architectures", "register_architecture"]


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    Attributes:
        name: for messages.
        modules: by the name of a module's class, or of one that it is derived from, what is cut in it. What no rule
            names is whole on every rank.
    """

    name: str
    modules: Mapping[str, tuple[Rule, ...]]


_KNOWN: dict[str, Architecture] = {name: Architecture(name, modules) for name, modules in TABLES.items()}


def register_architecture(architecture: Architecture) -> Callable[[], None]:
    """From here on models with these classes can be cut. On every rank. To cut one with other rules than it has, give
    them to the plan instead.

    Returns:
        a function that takes it back.

    Raises:
        ValueError: there is one of this name, or with a class of the same name.
    """
    if architecture.name in _KNOWN:
        raise ValueError(f"there is an architecture {architecture.name!r} already: give another name")
    for name, other in _KNOWN.items():
        both = sorted(set(other.modules) & set(architecture.modules))
        if both:
            raise ValueError(
                f"architecture {architecture.name!r} has rules for {', '.join(both)}, as {name!r} has: leave them out, "
                "or give it to the plan (TensorPlan(architecture=...)), where it counts alone"
            )
    _KNOWN[architecture.name] = architecture

    def take_back() -> None:
        if _KNOWN.get(architecture.name) is architecture:
            del _KNOWN[architecture.name]

    return take_back


def known_architectures() -> tuple[str, ...]:
    """Names of the architectures that can be cut, in alphabetical order."""
    return tuple(sorted(_KNOWN))


def cut_model(model: nn.Module, axis: Axis, plan: TensorPlan) -> Cutting:
    """Collect what of ``model`` is cut over ``axis``. Nothing is changed; every rank collects the same.

    Args:
        model: whole, with parameters of any kind (their shapes count).
        axis: the ranks.
        plan: how; its ``architecture`` counts alone where it has one: an :class:`Architecture`, or any object with a
            method ``collect(model, cutting)``.

    Raises:
        UnknownModelError: the model is of no known architecture.
        ValueError: it has nothing that the plan's own describes, or cannot be cut over so many ranks.
    """
    sequences = Sequences(axis) if plan.sequence is not None else None
    cutting, found = Cutting(axis, sequences), False
    if hasattr(plan.architecture, "collect"):
        if plan.sequence is not None:
            raise ValueError(
                f"sequence={plan.sequence!r} with {plan.architecture!r}: only an Architecture of rules says where the "
                "layers of a model begin and end; leave sequence None"
            )
        plan.architecture.collect(model, cutting)
        return cutting
    known = _KNOWN.values() if plan.architecture is None else [plan.architecture]
    rules = {name: each for architecture in known for name, each in architecture.modules.items()}
    if plan.sequence is not None:
        _divide_sequences(model, cutting, plan, rules)
    for name, module in model.named_modules():
        for rule in _rules_of(module, rules):
            found = True
            try:
                rule.collect(Site(cutting, plan, module))
            except (TypeError, ValueError) as error:
                where = f"{name} ({type(module).__name__})" if name else "the model itself"
                raise ValueError(
                    f"{type(model).__name__} cannot be cut over {axis.size} ranks: {where}: {error}"
                ) from error
    if not found:
        raise (UnknownModelError if plan.architecture is None else ValueError)(_unknown(model, plan))
    left = cutting.uncovered(model)
    if left:
        raise ValueError(
            f"{type(model).__name__} cannot be cut over {axis.size} ranks: {', '.join(left)} would be a part, tied to "
            "a layer that is cut, and no rule says how it is used there: add one to the architecture (Head, Embedding, "
            "or Unused), or untie it"
        )
    _check_whole(model, cutting)
    if plan.sequence is not None:
        cutting.sum_whole()
    return cutting


def _check_whole(model: nn.Module, cutting: Cutting) -> None:
    unexplained = cutting.unexplained(model)
    if unexplained:
        raise ValueError(
            f"{type(model).__name__} cannot be cut over {cutting.axis.size} ranks: {', '.join(unexplained)} would be "
            "whole among layers that are cut, and no rule says whether each rank uses them for its part, so their "
            "gradients might be sums: move them out of the block, freeze them (requires_grad=False), or give "
            "TensorPlan(architecture=) with a rule that names their module (`alike`: between these layers; `beside`: "
            "before or behind them)"
        )


def _divide_sequences(
    model: nn.Module, cutting: Cutting, plan: TensorPlan, rules: Mapping[str, tuple[Rule, ...]]
) -> None:
    def attends(module: nn.Module) -> bool:
        return any(getattr(rule, "attends", False) for rule in _rules_of(module, rules))

    names = {id(module): name for name, module in model.named_modules()}
    found = lists_of_layers(model, attends)
    for body, layers in found:
        cutting.layers(body, layers, names[id(layers)])
    if not found and any(_rules_of(module, rules) for module in model.modules()):
        raise ValueError(
            f"sequence={plan.sequence!r}: {type(model).__name__} has no list of layers (nn.ModuleList) that all hold "
            "attention which is cut, so it is not known where sequences could be divided; leave sequence None"
        )


def _rules_of(module: nn.Module, rules: Mapping[str, tuple[Rule, ...]]) -> tuple[Rule, ...]:
    for kind in type(module).__mro__:
        if kind.__name__ in rules:
            return rules[kind.__name__]
    return ()


def _unknown(model: nn.Module, plan: TensorPlan) -> str:
    if plan.architecture is not None:
        classes = ", ".join(sorted(plan.architecture.modules))
        return (
            f"{type(model).__name__} has no module that architecture {plan.architecture.name!r} has rules for "
            f"({classes}): give the one that describes it"
        )
    own = (
        "; or use the plan that it brings: TensorPlan(architecture=shardwise.propose_architecture(model))"
        if getattr(model, "_tp_plan", None)
        else ""
    )
    return (
        f"{type(model).__name__} cannot be cut: it has no module of a known architecture "
        f"({', '.join(known_architectures())}). Describe it: "
        "shardwise.register_architecture(Architecture(name, {class name: rules})), see "
        '"An architecture for tensor parallelism" in CONTRIBUTING.md' + own
    )
