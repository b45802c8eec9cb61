"""An architecture made of the plan that a model of transformers brings itself."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from shardwise.core.parallel.tensor.architecture import Architecture
from shardwise.core.parallel.tensor.rules import Attention, Embedding, Experts, Head, Mlp
from shardwise.core.parallel.tensor.site import Rule

__all__ = ["propose_architecture"]

Styles = dict[str, str]
"""By the name of a module or parameter below its parent, how the plan cuts it."""

COLUMNS, ROWS, PACKED, ALIKE = "colwise", "rowwise", "packed_colwise", "replicated_with_grad_allreduce"
CUT = {COLUMNS, ROWS, PACKED, ALIKE}
# What is gathered at once, or cut from what all have, is right when it is whole; experts are found by their parameters.
WHOLE = {"colwise_gather_output", "rowwise_split_input", "moe_tp_experts", "replicate"}


def propose_architecture(model: nn.Module) -> Architecture:
    """What ``model._tp_plan`` says, as rules, for :attr:`shardwise.plan.TensorPlan.architecture`.

    Sizes are checked when the model is cut. The logits are gathered, since nobody says what the model does with them.

    Args:
        model: of transformers, whole.

    Raises:
        ValueError: it has no plan, or one with something that rules cannot say.
    """
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise ValueError(
            f"{type(model).__name__} brings no plan of its own (_tp_plan): describe it with an Architecture"
        )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found: dict[str, dict[str, Rule]] = {}
    for parent, styles in _by_parent(model, plan).items():
        module = model.get_submodule(parent)
        rules = _rules(parent, module, styles, head)
        known = found.setdefault(type(module).__name__, {})
        for what, rule in rules.items():
            if known.setdefault(what, rule) != rule:
                raise ValueError(f"{parent}: the plan cuts other {type(module).__name__}s in another way")
    modules = {name: tuple(rules.values()) for name, rules in found.items() if rules}
    return Architecture(f"{type(model).__name__}, by its own plan", modules)


def _by_parent(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Styles]:
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found: dict[str, Styles] = {}
    for pattern, style in plan.items():
        if style not in CUT | WHOLE | {"embedding_rowwise"}:
            raise ValueError(f"the plan of {type(model).__name__} has {pattern}: {style!r}, which no rule says")
        shape = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(shape.fullmatch, names):
            parent, _, leaf = name.rpartition(".")
            found.setdefault(parent, {})[leaf] = style
    return found


def _rules(parent: str, module: nn.Module, styles: Styles, head: nn.Module | None) -> dict[str, Rule]:
    """By a word for what they cut."""
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
            f"{parent} ({type(module).__name__}): the plan says nothing of {', '.join(left)}, beside layers that it "
            "cuts, so their gradients might be sums: describe the model with an Architecture"
        )
    if by_style[PACKED]:
        if len(by_style[PACKED]) != 1 or len(rows) != 1 or columns:
            raise ValueError(f"{parent} ({type(module).__name__}): {styles} is no layer of experts that rules can say")
        rules["experts"] = Experts(columns=by_style[PACKED][0], rows=rows[0])
    elif _is_attention(columns):
        if len(columns) != 3 or len(rows) != 1 or not hasattr(module, "head_dim"):
            raise ValueError(f"{parent} ({type(module).__name__}): {styles} is no attention that rules can say")
        query, key, value = sorted(columns, key=lambda leaf: "qkv".index(leaf[0]))
        rules["attention"] = Attention(query=query, key=key, value=value, out=rows[0], alike=by_style[ALIKE])
    elif columns and rows and not by_style[ALIKE]:
        rules["mlp"] = Mlp(columns=columns, rows=rows)
    else:
        raise ValueError(f"{parent} ({type(module).__name__}): {styles} are no layers that rules can say")
    return rules


def _is_attention(columns: tuple[str, ...]) -> bool:
    return sorted(leaf[0] for leaf in columns if leaf[1:2] in ("", "_")) == ["k", "q", "v"]
