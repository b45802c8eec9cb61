"""Architectures: rules by module class, either built in, registered, or derived from a transformers model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.core.base.validate import UnknownModelError
from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.known_models import TABLES
from shardwise.core.parallel.tensor.module_rules import Attention, Embedding, Experts, Head, Mlp
from shardwise.core.parallel.tensor.sequence import Sequences, lists_of_layers
from shardwise.core.parallel.tensor.tp_plan import ModuleRules, Rule, TPPlan
from shardwise.plan import TensorPlan


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    Attributes:
        name: used in error messages.
        modules: rules by class name. The rules of a class also apply to its subclasses. Layers without a rule are
            replicated on every rank.

    Examples:
        >>> from shardwise import Architecture, Attention, Embedding, Head, Mlp
        >>> rules = Architecture(
        ...     "my-model",
        ...     {
        ...         "SelfAttention": (Attention(query="q", key="k", value="v", out="o"),),
        ...         "FeedForward": (Mlp(columns=("gate", "up"), rows=("down",)),),
        ...         "MyModel": (Embedding("embed_tokens"), Head("lm_head")),
        ...     },
        ... )
    """

    name: str
    modules: Mapping[str, tuple[Rule, ...]]


_KNOWN: dict[str, Architecture] = {name: Architecture(name, modules) for name, modules in TABLES.items()}


def register_architecture(architecture: Architecture) -> Callable[[], None]:
    """Register rules for the modules of an architecture. Call it on every rank before the build.

    To replace the rules of a known architecture for one model, use ``TensorPlan(architecture=...)``.

    Args:
        architecture: the rules of each class of modules.

    Returns:
        A function that removes the architecture again.

    Raises:
        ValueError: an architecture of this name, or with rules for one of these classes, is registered already.

    Examples:
        >>> from shardwise import Architecture, Mlp, register_architecture
        >>> rules = {"FeedForward": (Mlp(columns=("gate", "up"), rows=("down",)),)}
        >>> remove = register_architecture(Architecture("my-model", rules))
    """
    if architecture.name in _KNOWN:
        raise ValueError(f"architecture {architecture.name!r} is registered already; use another name")
    for name, other in _KNOWN.items():
        both = sorted(set(other.modules) & set(architecture.modules))
        if both:
            raise ValueError(
                f"architecture {architecture.name!r} has rules for {', '.join(both)}, and so does {name!r}. Leave them "
                "out, or pass the architecture to the plan (TensorPlan(architecture=...)), which then uses no other"
            )
    _KNOWN[architecture.name] = architecture

    def take_back() -> None:
        if _KNOWN.get(architecture.name) is architecture:
            del _KNOWN[architecture.name]

    return take_back


def known_architectures() -> tuple[str, ...]:
    """Return the names of all registered architectures, sorted.

    Examples:
        >>> "llama" in shardwise.known_architectures()
        True
    """
    return tuple(sorted(_KNOWN))


def cut_model(model: nn.Module, axis: Axis, plan: TensorPlan) -> TPPlan:
    """Collect which layers of ``model`` are sharded over ``axis``. The model is not changed.

    Args:
        model: unsharded; only the shapes of its parameters are used.
        axis: the ranks.
        plan: if it has an ``architecture``, only that one is used: an :class:`Architecture`, or any object with a
            method ``collect(model, tp_plan)``.

    Raises:
        UnknownModelError: the model is of no registered architecture.
        ValueError: the plan's architecture has no rules for the model, or a layer cannot be sharded over so many ranks.
    """
    sequences = Sequences(axis) if plan.sequence is not None else None
    tp_plan, matched = TPPlan(axis, sequences), False
    if hasattr(plan.architecture, "collect"):
        if plan.sequence is not None:
            raise ValueError(
                f"sequence={plan.sequence!r} with {plan.architecture!r}: only an Architecture of rules says where the "
                "layers of a model begin and end; leave sequence None"
            )
        plan.architecture.collect(model, tp_plan)
        return tp_plan
    known = _KNOWN.values() if plan.architecture is None else [plan.architecture]
    rules = {name: each for architecture in known for name, each in architecture.modules.items()}
    if plan.sequence is not None:
        _divide_sequences(model, tp_plan, plan, rules)
    for name, module in model.named_modules():
        for rule in _rules_of(module, rules):
            matched = True
            try:
                rule.collect(ModuleRules(tp_plan, plan, module))
            except (TypeError, ValueError) as error:
                where = f"{name} ({type(module).__name__})" if name else "the model itself"
                raise ValueError(
                    f"{type(model).__name__} cannot be cut over {axis.size} ranks: {where}: {error}"
                ) from error
    if not matched:
        raise (UnknownModelError if plan.architecture is None else ValueError)(_unknown(model, plan))
    left = tp_plan.uncovered(model)
    if left:
        raise ValueError(
            f"{type(model).__name__} cannot be cut over {axis.size} ranks: {', '.join(left)} are tied to "
            "sharded layers, and no rule says how their other modules use them. Add a rule to the architecture (Head, "
            "Embedding or Unused), or untie them"
        )
    _check_replicated(model, tp_plan)
    if plan.sequence is not None:
        tp_plan.allreduce_replicated_grads()
    return tp_plan


def _check_replicated(model: nn.Module, tp_plan: TPPlan) -> None:
    unexplained = tp_plan.unexplained(model)
    if unexplained:
        raise ValueError(
            f"{type(model).__name__} cannot be cut over {tp_plan.axis.size} ranks: {', '.join(unexplained)} are "
            "replicated inside of a block of sharded layers, and no rule names their module. Their gradients might be "
            "sums over the ranks. Move them out of the block, freeze them (requires_grad=False), or pass "
            "TensorPlan(architecture=) with a rule that names their module (`grad_allreduce`: between the sharded "
            "layers; `replicated`: before or after them)"
        )


def _divide_sequences(
    model: nn.Module, tp_plan: TPPlan, plan: TensorPlan, rules: Mapping[str, tuple[Rule, ...]]
) -> None:
    def attends(module: nn.Module) -> bool:
        return any(getattr(rule, "attends", False) for rule in _rules_of(module, rules))

    names = {id(module): name for name, module in model.named_modules()}
    layer_lists = lists_of_layers(model, attends)
    for body, layers in layer_lists:
        tp_plan.layers(body, layers, names[id(layers)])
    if not layer_lists and any(_rules_of(module, rules) for module in model.modules()):
        raise ValueError(
            f"sequence={plan.sequence!r}: {type(model).__name__} has no list of layers (nn.ModuleList) that all hold "
            "sharded attention, so there is no place to divide sequences; leave sequence None"
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
            f"architecture {plan.architecture.name!r} has rules for {classes}, and {type(model).__name__} has no "
            "module of these classes; pass the architecture that describes the model"
        )
    own = (
        "; or use the model's own plan: TensorPlan(architecture=shardwise.propose_architecture(model))"
        if getattr(model, "_tp_plan", None)
        else ""
    )
    return (
        f"{type(model).__name__} cannot be cut: it has no module of a known architecture. Train it with tp=1, or "
        "describe it with shardwise.register_architecture(Architecture(name, {class name: rules})) (see "
        f'"Which layers are split" in docs/hybrid-parallel.md){own}. Known: {", ".join(known_architectures())}'
    )


Styles = dict[str, str]
"""By the name of a submodule or parameter: the sharding style that the plan gives it."""

COLUMNS, ROWS, PACKED, GRAD_ALLREDUCE = "colwise", "rowwise", "packed_colwise", "replicated_with_grad_allreduce"
CUT = {COLUMNS, ROWS, PACKED, GRAD_ALLREDUCE}
# Outputs that are gathered, and inputs that are split from replicated ones, may be replicated instead. Experts are
# found by their parameters.
REPLICATED = {"colwise_gather_output", "rowwise_split_input", "moe_tp_experts", "replicate"}


def propose_architecture(model: nn.Module) -> Architecture:
    """Convert ``model._tp_plan`` to an :class:`Architecture` for ``TensorPlan(architecture=...)``.

    Sizes are checked when the model is sharded. Logits are gathered.

    Args:
        model: a transformers model, unsharded.

    Returns:
        The rules, for ``TensorPlan(architecture=...)``.

    Raises:
        ValueError: the model has no plan, or its plan has an entry that no rule covers.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> llama = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
        >>> rules = shardwise.propose_architecture(llama)
    """
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan of its own (_tp_plan); describe it with an "
            "Architecture"
        )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    by_class: dict[str, dict[str, Rule]] = {}
    for parent, styles in _by_parent(model, plan).items():
        module = model.get_submodule(parent)
        rules = _rules(parent, module, styles, head)
        known = by_class.setdefault(type(module).__name__, {})
        for what, rule in rules.items():
            if known.setdefault(what, rule) != rule:
                raise ValueError(f"{parent}: the plan cuts other {type(module).__name__}s in another way")
    modules = {name: tuple(rules.values()) for name, rules in by_class.items() if rules}
    return Architecture(f"{type(model).__name__}, by its own plan", modules)


def _by_parent(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Styles]:
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    by_parent: dict[str, Styles] = {}
    for pattern, style in plan.items():
        if style not in CUT | REPLICATED | {"embedding_rowwise"}:
            raise ValueError(f"the plan of {type(model).__name__} has {pattern}: {style!r}, which no rule says")
        shape = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(shape.fullmatch, names):
            parent, _, leaf = name.rpartition(".")
            by_parent.setdefault(parent, {})[leaf] = style
    return by_parent


def _rules(parent: str, module: nn.Module, styles: Styles, head: nn.Module | None) -> dict[str, Rule]:
    """Return the rules by the name of the module or parameter that they shard."""
    rules: dict[str, Rule] = {}
    for leaf, style in styles.items():
        child = getattr(module, leaf)
        if style == "embedding_rowwise":
            rules[leaf] = Embedding(leaf)
        elif child is head and head is not None:
            rules[leaf] = Head(leaf)
    by_style = {style: tuple(leaf for leaf, each in styles.items() if each == style) for style in CUT}
    columns, rows = by_style[COLUMNS], by_style[ROWS]
    if not any(by_style.values()):
        return rules
    left = sorted({name for name, _ in module.named_parameters() if name.split(".")[0] not in styles})
    if left:
        raise ValueError(
            f"{parent} ({type(module).__name__}): the plan says nothing of {', '.join(left)}, next to layers that it "
            "shards, so their gradients might be sums; describe the model with an Architecture"
        )
    if by_style[PACKED]:
        if len(by_style[PACKED]) != 1 or len(rows) != 1 or columns:
            raise ValueError(f"{parent} ({type(module).__name__}): {styles} is no layer of experts that rules can say")
        rules["experts"] = Experts(columns=by_style[PACKED][0], rows=rows[0])
    elif _is_attention(columns):
        if len(columns) != 3 or len(rows) != 1 or not hasattr(module, "head_dim"):
            raise ValueError(f"{parent} ({type(module).__name__}): {styles} is no attention that rules can say")
        query, key, value = sorted(columns, key=lambda leaf: "qkv".index(leaf[0]))
        same = by_style[GRAD_ALLREDUCE]
        rules["attention"] = Attention(query=query, key=key, value=value, out=rows[0], grad_allreduce=same)
    elif columns and rows and not by_style[GRAD_ALLREDUCE]:
        rules["mlp"] = Mlp(columns=columns, rows=rows)
    else:
        raise ValueError(f"{parent} ({type(module).__name__}): {styles} are no layers that rules can say")
    return rules


def _is_attention(columns: tuple[str, ...]) -> bool:
    return sorted(leaf[0] for leaf in columns if leaf[1:2] in ("", "_")) == ["k", "q", "v"]
