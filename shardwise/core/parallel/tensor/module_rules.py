"""Rules that declare, as data, how modules of one class are sharded by tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from shardwise.core.parallel.tensor.loss import CausalLoss, Generate
from shardwise.core.parallel.tensor.shard_spec import Heads, ShardSpec, shares
from shardwise.core.parallel.tensor.tp_plan import ModuleRules, Rule

ACTIVATIONS = ("act_fn", "act", "activation_fn", "gelu_impl", "intermediate.intermediate_act_fn")
"""Attribute paths under which models store the activation of an MLP."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Shard attention by heads: each rank computes some heads, with their projections.

    Paths are names of submodules, relative to the module of the rule. An empty path means that the module has none.

    Attributes:
        query: the linear layer that projects to queries.
        key: the linear layer that projects to keys.
        value: the linear layer that projects to values.
        fused: one layer that projects to queries, keys and values, or, together with ``query``, to keys and values.
        layout: order of the outputs of ``fused``: all queries, all keys, all values (``"blocks"``), or the queries, key
            and value of each key/value head (``"groups"``).
        out: the output projection.
        core: the module that computes attention and has the attributes below; empty: the module itself.
        head_dim: name of the attribute with the size of a head.
        heads: names of the attributes with the number of query heads, which are set to the number of this rank.
        kv_heads: the same for the number of key/value heads.
        groups: the same for the number of query heads per key/value head.
        widths: the same for the number of elements of all query heads.
        config: attributes of the module's configuration from which it reads the number of query heads.
        grad_allreduce: modules that are applied to each head (norms), with one weight for all heads or a row per head.
        biases: embeddings with one number per head.
        arguments: names of forward arguments that have values for all heads (alibi).
        crossed: names of forward arguments that provide keys and values of another sequence (cross-attention).
        replicated: modules before the projections or after ``out`` whose parameters are replicated on all ranks.

    Examples:
        >>> rule = shardwise.Attention(query="q_proj", key="k_proj", value="v_proj", out="o_proj")
    """

    attends: ClassVar[bool] = True
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    layout: Literal["blocks", "groups"] = "blocks"
    out: str
    core: str = ""
    head_dim: str = "head_dim"
    heads: tuple[str, ...] = ("num_heads", "num_attention_heads")
    kv_heads: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads")
    groups: tuple[str, ...] = ("num_key_value_groups",)
    widths: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    grad_allreduce: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    crossed: tuple[str, ...] = ("encoder_hidden_states", "key_value_states")
    replicated: tuple[str, ...] = ()

    def collect(self, rules: ModuleRules) -> None:
        core = rules.child(self.core)
        size = _number(core, self.head_dim)
        heads, kv_heads = self._counts(rules, size)
        cut = Heads.over(heads, kv_heads, rules.ranks)
        if rules.has(self.query):
            rules.columns(self.query, cut.of_query(size), core)
            for path in (self.key, self.value):
                if path:
                    rules.columns(path, cut.of_kv(size), core)
            if self.fused:
                rules.columns(self.fused, cut.of_kv(size, 2), core)
        else:
            rules.columns(self.fused, cut.of_all(size) if self.layout == "blocks" else cut.of_groups(size), core)
        columns = tuple(filter(rules.has, (self.query, self.key, self.value, self.fused)))
        rules.block(core, columns, self.crossed)
        rules.rows(self.out, cut.of_query(size))
        self._of_heads(rules, core, cut, (heads, kv_heads))
        rules.replicated(self.replicated)
        rules.sharded_region(columns, (self.out,))
        q, kv = cut.counts(rules.rank)
        of = (heads, kv_heads, heads // kv_heads, heads * size)
        attributes = self.heads, self.kv_heads, self.groups, self.widths
        for names, full, own in zip(attributes, of, (q, kv, q // kv, q * size), strict=True):
            _set(rules, core, names, full, own)
        if self.config:
            _set(rules, core.config, self.config, heads, q, only_check=True)
            rules.tp_plan.sets(core, config=ConfigView(core.config, dict.fromkeys(self.config, q)))

    def _of_heads(self, rules: ModuleRules, core: nn.Module, cut: Heads, counts: tuple[int, int]) -> None:
        """Apply the rules to norms, biases and arguments that belong to heads."""
        (heads, kv_heads), size = counts, _number(core, self.head_dim)
        for path in filter(rules.has, self.grad_allreduce):
            norm = rules.child(path)
            shape = [tuple(param.shape) for param in norm.parameters()]
            if all(each == (size,) for each in shape):
                rules.tp_plan.grad_allreduce(norm)
            elif shape in ([(heads, size)], [(kv_heads, size)]):
                rows = cut.of_query(1) if shape[0][0] == heads else cut.of_kv(1)
                rules.tp_plan.per_head(norm, ShardSpec(0, shape[0][0], rows))
            else:
                raise ValueError(f"{path} has parameters of {shape}, not of one head ({size}) or one row a head")
        for path in filter(rules.has, self.biases):
            bias = rules.child(path)
            if not isinstance(bias, nn.Embedding):
                raise TypeError(f"{path} is a {type(bias).__name__}: give an nn.Embedding")
            rules.tp_plan.features(bias, ShardSpec(1, heads, cut.of_query(1)))
        for name in self.arguments:
            rules.tp_plan.of_heads(core, name, heads, cut.query[rules.rank])

    def _counts(self, rules: ModuleRules, size: int) -> tuple[int, int]:
        """Return the numbers of query heads and of key/value heads of the unsharded module."""
        heads = _divided(self.out, rules.size(self.out, False), size)
        if rules.has(self.query) and self.key:
            return heads, _divided(self.key, rules.size(self.key, True), size)
        rows = _divided(self.fused, rules.size(self.fused, True), size)
        return heads, _divided(self.fused, rows if rules.has(self.query) else rows - heads, 2)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Shard multi-head latent attention by heads. Keys and values of all heads come from one small latent vector, which
    is replicated together with the positional part of the keys.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. The names are those of transformers.

    Attributes:
        query: candidate paths of the layer that projects to queries; the first that exists is used.
        before: paths of the layers that compute the input of ``query``.
        latent, norm: paths of the layer that computes the latent vector, and of its norm.
        key_value: path of the layer that projects the latent vector to keys and values.
        out: path of the output projection.
    """

    attends: ClassVar[bool] = True
    query: tuple[str, ...] = ("q_b_proj", "q_proj")
    before: tuple[str, ...] = ("q_a_proj", "q_a_layernorm")
    latent: str = "kv_a_proj_with_mqa"
    norm: str = "kv_a_layernorm"
    key_value: str = "kv_b_proj"
    out: str = "o_proj"

    def collect(self, rules: ModuleRules) -> None:
        core = rules.module
        positioned, plain, value = (_number(core, f"{name}head_dim") for name in ("qk_", "qk_nope_", "v_"))
        heads = _divided(self.out, rules.size(self.out, False), value)
        cut = Heads.over(heads, heads, rules.ranks)
        query = next(filter(rules.has, self.query), self.query[0])
        rules.columns(query, cut.of_query(positioned), core)
        rules.columns(self.key_value, cut.of_query(plain + value), core)
        rules.tp_plan.block(core)
        rules.rows(self.out, cut.of_query(value))
        rules.tp_plan.enters(rules.child(self.latent), rules.layers(self.key_value)[0])
        rules.tp_plan.grad_allreduce(rules.child(self.norm))
        rules.replicated(self.before)
        rules.sharded_region((query, self.key_value), (self.out,))
        if len(rules.layers(self.key_value)) > 1:
            raise ValueError(
                f"{self.key_value} has an adapter, which would be between two cuts: leave it out of the targets"
            )
        _set(rules, core, ("num_heads",), heads, cut.counts(rules.rank)[0])


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Shard the intermediate dimension of an MLP.

    Attributes:
        columns: paths of the layers whose outputs are sharded (column-parallel); these outputs have the same size.
        rows: paths of the layers whose inputs are sharded (row-parallel).
        blocks: number of matrices that are concatenated in each layer of ``columns`` (2: gate and up in one layer).
        grad_allreduce: paths of the modules between them (activations) whose parameters are single numbers that apply
            to all elements.
        replicated: paths of modules before or after these layers whose parameters are replicated on all ranks.

    Examples:
        >>> rule = shardwise.Mlp(columns=("gate_proj", "up_proj"), rows=("down_proj",))
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    blocks: int = 1
    grad_allreduce: tuple[str, ...] = ACTIVATIONS
    replicated: tuple[str, ...] = ()

    def collect(self, rules: ModuleRules) -> None:
        for path in self.columns:
            size = rules.size(path, True)
            inner = _divided(path, size, self.blocks)
            if inner < rules.ranks:
                raise ValueError(f"{path} has {inner} outputs, fewer than {rules.ranks} ranks; cut over fewer")
            cut = ShardSpec.of_sizes(0, [shares(inner, rules.ranks)] * self.blocks)
            rules.columns(path, cut.ranges, rules.module)
        rules.block(rules.module, self.columns)
        for path in self.rows:
            rules.rows(path, ShardSpec.of_sizes(0, [shares(rules.size(path, False), rules.ranks)]).ranges)
        for path in filter(rules.has, self.grad_allreduce):
            rules.grad_allreduce(path)
        rules.replicated(self.replicated)
        rules.sharded_region(self.columns, self.rows)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Shard the intermediate dimension of every expert. Experts are stacked in parameters of shape
    ``[experts, outputs, inputs]``.

    Attributes:
        columns: name of the column-parallel parameter; it may hold gate and up concatenated.
        rows: name of the row-parallel parameter.
        widths: names of attributes that hold the intermediate size.
        grad_allreduce: see :class:`Mlp`.
    """

    columns: str = "gate_up_proj"
    rows: str = "down_proj"
    widths: tuple[str, ...] = ("intermediate_dim",)
    grad_allreduce: tuple[str, ...] = ACTIVATIONS

    def collect(self, rules: ModuleRules) -> None:
        first, last = (getattr(rules.module, name, None) for name in (self.columns, self.rows))
        if not isinstance(first, nn.Parameter) or not isinstance(last, nn.Parameter) or last.dim() != 3:
            raise TypeError(f"it has no stacked parameters {self.columns} and {self.rows} of three dimensions")
        inner = last.shape[2]
        if inner < rules.ranks:
            raise ValueError(f"each expert has {inner} elements inside, fewer than {rules.ranks} ranks; cut over fewer")
        sizes = shares(inner, rules.ranks)
        blocks = _divided(self.columns, first.shape[1], inner)
        cuts = {self.columns: ShardSpec.of_sizes(1, [sizes] * blocks), self.rows: ShardSpec.of_sizes(2, [sizes])}
        rules.tp_plan.experts(rules.module, cuts)
        for path in filter(rules.has, self.grad_allreduce):
            rules.grad_allreduce(path)
        rules.tp_plan.sharded_region(rules.module, [rules.module], [last.shape[1]])
        _set(rules, rules.module, self.widths, inner, sizes[rules.rank])


@dataclass(frozen=True)
class Router:
    """Handle a router, which assigns tokens to experts. Its first output are the scores, which the model may return."""

    def collect(self, rules: ModuleRules) -> None:
        rules.tp_plan.router(rules.module)


@dataclass(frozen=True)
class Requires:
    """Require a value of an attribute; other values do not support sharding.

    Attributes:
        name: name of the attribute; modules without it are accepted.
        value: the required value.
    """

    name: str
    value: Any

    def collect(self, rules: ModuleRules) -> None:
        actual = getattr(rules.module, self.name, self.value)
        if actual != self.value:
            raise ValueError(f"{self.name}={actual!r} needs whole layers: give {self.name}={self.value!r}")


@dataclass(frozen=True)
class Either:
    """Choose among rules for layers whose names changed between versions; the first whose module exists applies.

    Attributes:
        rules: pairs of a path and the rules that apply if a module has this path.
    """

    rules: tuple[tuple[str, tuple[Rule, ...]], ...]

    @property
    def attends(self) -> bool:
        return any(getattr(rule, "attends", False) for _, rules in self.rules for rule in rules)

    def collect(self, rules: ModuleRules) -> None:
        for path, own in self.rules:
            if rules.has(path):
                for rule in own:
                    rule.collect(rules)
                return
        raise ValueError(f"it has none of {', '.join(path for path, _ in self.rules)}: give a rule for this class")


@dataclass(frozen=True)
class Embedding:
    """Shard the rows of an embedding (vocabulary-parallel), with padding.

    Attributes:
        path: path of the embedding.

    Examples:
        >>> rule = shardwise.Embedding("embed_tokens")
    """

    path: str

    def collect(self, rules: ModuleRules) -> None:
        module = rules.child(self.path)
        if not isinstance(module, nn.Embedding):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise TypeError(f"{self.path} is a {kind}: only an nn.Embedding can be cut, without an adapter")
        rules.tp_plan.vocabulary(module, rules.vocabulary(module.num_embeddings))


@dataclass(frozen=True)
class Head:
    """Shard the outputs of the last layer (vocabulary-parallel), with the same padding as the embedding.

    Attributes:
        path: path of the linear layer.
        parallel: whether logits may stay sharded: the model uses them only element-wise or in its ``loss_function``.

    Examples:
        >>> rule = shardwise.Head("lm_head")
    """

    path: str
    parallel: bool = False

    def collect(self, rules: ModuleRules) -> None:
        vocabulary = rules.size(self.path, True)
        rows = rules.vocabulary(vocabulary)
        stays = rules.plan.parallel_output and self.parallel and _is_causal(rules.module)
        rules.columns(self.path, rows.ranges, padded=rows.size - vocabulary, gathers=not stays)
        if stays:
            own: dict[str, Any] = {"_loss_function": CausalLoss(rules.tp_plan.axis, rows, vocabulary)}
            if hasattr(rules.module, "generate"):
                own["generate"] = Generate(rules.module, rules.layers(self.path))
            rules.tp_plan.sets(rules.module, **own)


@dataclass(frozen=True)
class Unused:
    """Declare a parameter that is tied to one of another module and that the module itself does not use.

    Attributes:
        name: name of the parameter.
    """

    name: str

    def collect(self, rules: ModuleRules) -> None:
        rules.tp_plan.holds(rules.module, self.name)


def _is_causal(model: nn.Module) -> bool:
    """Return True if logits are used only by transformers' causal loss, which has a sharded implementation. A forward
    pass that replaces transformers' own may use them in other ways, so the result is False for it."""
    if getattr(getattr(model, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        return False
    kinds = type(model).__mro__
    own = next(kind for kind in kinds if "forward" in vars(kind)).__module__
    changed = "forward" in vars(model) or not own.startswith("transformers.")
    return not (changed and any(kind.__module__.startswith("transformers.models.") for kind in kinds))


def _number(owner: Any, name: str) -> int:
    value = getattr(owner, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"a {type(owner).__name__} has {name}={value!r}: a rule names the size of a head, a number")
    return value


def _divided(path: str, size: int, unit: int) -> int:
    if size % unit:
        raise ValueError(f"{path} has a size of {size}, which is no multiple of {unit}")
    return size // unit


def _set(
    rules: ModuleRules, owner: Any, names: tuple[str, ...], full: int, own: int, *, only_check: bool = False
) -> None:
    for name in [each for each in names if each in vars(owner)]:
        value = getattr(owner, name)
        if value != full:
            raise ValueError(f"{name} is {value}, and its layers are for {full}")
        if not only_check:
            rules.tp_plan.sets(owner, **{name: own})


class ConfigView:
    """A view of a model's configuration for one module that overrides some values and forwards all other names."""

    def __init__(self, config: Any, values: dict[str, Any]) -> None:
        vars(self).update(values, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # copy.copy() looks names up before it sets any attribute
            raise AttributeError(name)
        return getattr(self._config, name)
