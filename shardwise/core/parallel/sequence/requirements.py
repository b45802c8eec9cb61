"""Models that support sequence parallelism: a table by class name, and the checks of a model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from shardwise.core.base.rng import dropouts_of
from shardwise.core.base.validate import UnknownModelError
from shardwise.core.parallel.module_classes import modules_in_table
from shardwise.core.parallel.sequence.attention import ORIGINALS, original_of
from shardwise.plan.parallel import SequencePlan


@dataclass(frozen=True)
class SequenceBody:
    """The module in which each rank has a part of the sequences during the forward pass.

    It takes ``input_ids`` or ``inputs_embeds`` and ``attention_mask``, uses transformers' masks and attention, and
    returns ``last_hidden_state``.

    Attributes:
        end: the submodule after which ranks have full sequences again; ``""``: the body itself.
        positions: how the model computes missing ``position_ids``: ``"count"`` (0, 1, 2, ...), ``"mask"`` (counted
            without padding), or ``"none"`` (the model has no positions).
        packed: positions that restart mark another packed sequence, which does not attend to the one before.

    Examples:
        >>> body = shardwise.SequenceBody(end="norm", positions="count")
    """

    end: str = ""
    positions: Literal["count", "mask", "none"] = "count"
    packed: bool = True


_LIKE_LLAMA = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Gemma2", "Cohere", "GPTNeoX")
_LATENT = ("DeepseekV2", "DeepseekV3")

TABLES: dict[str, SequenceBody] = {f"{name}Model": SequenceBody() for name in _LIKE_LLAMA + _LATENT} | {
    "BertModel": SequenceBody(end="encoder", packed=False),
    "BloomModel": SequenceBody(positions="none", packed=False),
    "FalconModel": SequenceBody(packed=False),
    "GPT2Model": SequenceBody(),
    "GPTJModel": SequenceBody(),
    "Gemma3TextModel": SequenceBody(),
    "OPTDecoder": SequenceBody(positions="mask", packed=False),
}
"""Entries by the class name of the body."""


def known_sequences() -> tuple[str, ...]:
    """Return the names of all registered classes, sorted.

    Examples:
        >>> "LlamaModel" in shardwise.known_sequences()
        True
    """
    return tuple(sorted(TABLES))


def register_sequence(class_name: str, body: SequenceBody) -> None:
    """Register where a model class shards and gathers its sequences. Call it on every rank before the build.

    Args:
        class_name: name of the class.
        body: how the class uses positions, and where full sequences begin again.

    Examples:
        >>> shardwise.register_sequence("MyDecoder", shardwise.SequenceBody(end="norm"))
    """
    TABLES[class_name] = body


_CAUSAL = ("ForCausalLM", "LMHeadModel")
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Requirements:
    """The properties of a model that sequence parallelism needs.

    Attributes:
        body: the module in which ranks have parts of the sequences.
        table: the requirements by class name.
        heads: modules around it whose loss may be computed from parts.
        configs: the configurations of the body's modules.
    """

    body: nn.Module
    table: SequenceBody
    heads: tuple[nn.Module, ...]
    configs: tuple[Any, ...]


def required(model: nn.Module, plan: SequencePlan, ranks: int, parts: int = 1) -> Requirements:
    """Check that ``ranks`` ranks can divide the model's sequences.

    Args:
        model: a transformers model, or a module around one.
        plan: the mode.
        ranks: sequence-parallel ranks.
        parts: tensor-parallel ranks.

    Raises:
        UnknownModelError: the model's class is not registered.
        ValueError: the model or the plan uses a feature that does not work with divided sequences.
    """
    who = type(model).__name__
    body, table = _body(model, plan)
    configs = _configs(body)
    if not configs:
        raise ValueError(
            f"{type(body).__name__} has no transformers configuration, which sequence parallelism needs to replace its "
            "attention; use sp=1"
        )
    for config in configs:
        if original_of(config._attn_implementation) not in ORIGINALS:
            raise ValueError(
                f"{who} has attn_implementation={config._attn_implementation!r}, which does not work with sequences "
                f"divided over {ranks} ranks; use one of {', '.join(ORIGINALS)}"
            )
        for name in ("output_attentions", "output_router_logits", "is_encoder_decoder"):
            if getattr(config, name, False):
                raise ValueError(
                    f"{name}={getattr(config, name)} in the configuration of {who} does not work with sequences "
                    f"divided over {ranks} ranks; set it to False, or use sp=1"
                )
        if getattr(config, "layerdrop", 0.0) > 0:
            raise ValueError(
                f"layerdrop={config.layerdrop} in the configuration of {who}: the {ranks} sequence-parallel ranks "
                "would skip different layers; set it to 0"
            )
    if plan.mode == "ring_attn":
        inner = plan.inner_ring or ranks
        if ranks % inner:
            raise ValueError(
                f"inner_ring={inner} does not divide the {ranks} sequence-parallel ranks; use a divisor of {ranks}"
            )
        _refuse_dropout(who, body)
    elif plan.inner_ring is not None:
        raise ValueError(f"inner_ring={plan.inner_ring} needs mode='ring_attn', not {plan.mode!r}; leave it None")
    else:
        number = _heads_of(configs[0])
        if number is not None and number // parts < ranks:
            cut = f" over {parts} tensor-parallel ranks" if parts > 1 else ""
            raise ValueError(
                f"{number} attention heads of {who}{cut} are too few for {ranks} sequence-parallel ranks with "
                f"mode={plan.mode!r}; use at most {max(number // parts, 1)} ranks, or mode='ring_attn'"
            )
    causal = [module for module in model.modules() if _loss_of_parts(module)]
    heads = tuple(module for module in causal if any(each is body for each in module.modules()))
    return Requirements(body, table, heads, configs)


def _body(model: nn.Module, plan: SequencePlan) -> tuple[nn.Module, SequenceBody]:
    if plan.architecture is not None:
        if not isinstance(plan.architecture, SequenceBody):
            raise ValueError(
                f"architecture={plan.architecture!r:.60} is not a shardwise.SequenceBody; pass one, or None"
            )
        return model, plan.architecture
    bodies = [(module, body) for _, module, body in modules_in_table(model, TABLES)]
    if not bodies:
        raise UnknownModelError(
            f"the sequences of a {type(model).__name__} cannot be divided: it has no module of a known class "
            f"({', '.join(known_sequences())}). Describe it with shardwise.register_sequence(class name, "
            "SequenceBody(...))"
        )
    if len(bodies) > 1:
        raise ValueError(
            f"{type(model).__name__} has several bodies ({', '.join(type(module).__name__ for module, _ in bodies)}): "
            "only the sequences of one can be divided; use sp=1"
        )
    return bodies[0]


def _configs(body: nn.Module) -> tuple[Any, ...]:
    configs: dict[int, Any] = {}
    for module in body.modules():
        config = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            configs.setdefault(id(config), config)
    return tuple(configs.values())


def _heads_of(config: Any) -> int | None:
    heads = getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def _refuse_dropout(who: str, body: nn.Module) -> None:
    """Raise an error if attention has dropout; found by the names of rates and modules."""
    for owner, name in dropouts_of(body.modules()):
        of_attention = "attention" in name or "attn" in name
        if isinstance(owner, nn.Dropout):
            names = [n for m in body.modules() for n, child in m.named_children() if child is owner]
            parents = [type(m).__name__ for m in body.modules() if any(child is owner for child in m.children())]
            of_attention = any("att" in each for each in names) or any("SelfAttention" in each for each in parents)
        if of_attention and getattr(owner, name) > 0:
            raise ValueError(
                f"{who} has attention dropout {getattr(owner, name)} ({type(owner).__name__}), which mode='ring_attn' "
                "does not support. Set it to 0 in the model's configuration (attention_dropout, attn_pdrop, "
                "attention_probs_dropout_prob), or use mode='all_to_all'"
            )


def _loss_of_parts(module: nn.Module) -> bool:
    """True for causal language models with transformers' own forward pass and loss.

    Other forward passes may use hidden states and logits in ways that need full sequences.
    """
    named = any(kind.__name__.endswith(_CAUSAL) for kind in type(module).__mro__)
    function = inspect.unwrap(type(module).forward)
    own = getattr(function, "__module__", "").startswith("transformers.models.")
    uses = "loss_function" in getattr(getattr(function, "__code__", None), "co_names", ())
    return named and own and uses and getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss"


def rotary_by_length(module: nn.Module) -> bool:
    """True if the frequencies of rotary embeddings depend on the sequence length."""
    kind = vars(module).get("rope_type", "")
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return any(name in each for each in kinds if isinstance(each, str) for name in _BY_LENGTH)
