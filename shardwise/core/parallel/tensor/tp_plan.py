"""Collects which parameters of a model are sharded by tensor parallelism, and installs the sharded layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shardwise.core.base.rng import Dropouts, RankRng, dropouts_of
from shardwise.core.base.torch_internals import point
from shardwise.core.parallel.module_classes import mixed_class
from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.layers import (
    Columns,
    CutLayer,
    Drops,
    Enters,
    Experts,
    Features,
    GradAllReduce,
    Guard,
    PerHead,
    Rows,
    Vocabulary,
    out_dim,
)
from shardwise.core.parallel.tensor.sequence import (
    Block,
    Body,
    Divided,
    Layer,
    Place,
    Router,
    Sequences,
    hidden_name,
    inside,
)
from shardwise.core.parallel.tensor.shard_spec import Part, Range, Ranges, ShardSpec
from shardwise.plan import TensorPlan


# [Note: What cutting a model changes]
# Modules are sharded in place: each stays the same object with the same parameter objects, so that ties, hooks,
# optimizer references and names remain valid. Its class becomes a subclass of both the user's class and ours, which
# replaces the forward pass; attributes that hold sizes (a number of heads) are set to those of the part. Until
# install(), only this object changes, so every unsupported case raises an error before the model is modified. Parameter
# values are sharded by cut_values(), or by an engine that shards each full value as it receives it.
class TPPlan:
    """The tensor-parallel partition of one model over one axis. Every rank of the axis collects the same plan.

    Args:
        axis: the ranks.
        sequences: the sequences in the model's layers, if each rank has its own tokens there (sequence parallelism).
    """

    def __init__(self, axis: Axis, sequences: Sequences | None = None) -> None:
        self.axis, self.sequences = axis, sequences
        self.private = RankRng(axis.rank)
        self._inside: dict[int, str] = {}
        self._gathered: set[int] = set()
        self._around: dict[tuple[int, type[nn.Module]], tuple[nn.Module, dict[str, Any]]] = {}
        self._parts: dict[int, tuple[nn.Parameter, Part]] = {}
        self._layers: dict[int, tuple[nn.Module, type[nn.Module], dict[str, Any]]] = {}
        self._holders: set[tuple[int, str]] = set()
        self._blocks: dict[int, tuple[nn.Module, list[nn.Module], set[int]]] = {}
        self._replicated: set[int] = set()
        self._attributes: list[tuple[Any, str, Any]] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    # ---- what to shard

    def columns(self, module: nn.Module, cut: ShardSpec, gathers: bool = False, owner: nn.Module | None = None) -> None:
        """Shard the outputs of a layer ("column-parallel"). Its input is replicated.

        Args:
            module: an unsharded ``nn.Linear`` or transformers' ``Conv1D``.
            cut: how to shard the output; its dimension is that of the weight (``out_dim``).
            gathers: whether the outputs are gathered, so that all ranks get the full output.
            owner: a module that contains the computation from this layer up to the row-parallel one; dropout in it uses
                a separate random number stream on each rank.

        Raises:
            TypeError, ValueError: the module is not a supported layer, or ``cut`` has another dimension or size.
        """
        dim = out_dim(module)
        self._check(module, cut, dim)
        parts = {"weight": cut}
        if getattr(module, "bias", None) is not None:
            parts["bias"] = ShardSpec(0, cut.size, cut.ranges)
        sequences = self.sequences if self.divides(module) else None
        own: dict[str, Any] = {"_gathers": gathers, "_copies": sequences is None}
        own["_private"] = self._region(owner) if owner is not None and sequences is None else None
        self._take(module, parts, Columns, **own)
        self._say_size(module, cut, ("out_features", "nf"))

    def rows(self, module: nn.Module, cut: ShardSpec) -> None:
        """Shard the inputs of a layer ("row-parallel"). The outputs are all-reduced, and the bias is added once.

        Args:
            module: see :meth:`columns`.
            cut: how to shard the input; its dimension is the other dimension of the weight.

        Raises:
            TypeError, ValueError: see :meth:`columns`.
        """
        self._check(module, cut, 1 - out_dim(module))
        sequences = self.sequences if self.divides(module) else None
        leaves = self.private if sequences is None else None
        self._take(module, {"weight": cut}, Rows, _leaves=leaves, _sequences=sequences)
        self._say_size(module, cut, ("in_features", "nx"))

    def vocabulary(self, module: nn.Embedding, cut: ShardSpec) -> None:
        """Shard the rows of an embedding ("vocabulary-parallel").

        Args:
            module: the unsharded embedding.
            cut: has dimension 0 and one range per rank. It may be larger than the vocabulary; the additional rows are
                zeros that no input refers to.

        Raises:
            ValueError: ``cut`` does not fit, or the embedding changes its weight in the forward pass (``max_norm``).
        """
        if cut.dim != 0 or any(len(ranges) != 1 for ranges in cut.ranges) or cut.size < module.num_embeddings:
            raise ValueError(
                f"an embedding of {module.num_embeddings} rows cut in dim {cut.dim} of {cut.size} with {cut.ranges}: "
                "give dim 0, one range a rank, and at least as many rows"
            )
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(
                f"{module} cannot be cut: max_norm={module.max_norm}, scale_grad_by_freq={module.scale_grad_by_freq} "
                f"and sparse={module.sparse} need whole rows or counts of all ranks; leave them out"
            )
        kind = type(module)
        code = getattr(kind.forward, "__code__", None)
        if kind.forward is not nn.Embedding.forward and "super" not in getattr(code, "co_names", ()):
            raise ValueError(
                f"a {kind.__name__} finds its rows by itself, so it cannot be cut: call super().forward(ids) in its "
                "forward pass"
            )
        self._take(module, {"weight": cut}, Vocabulary)

    def features(self, module: nn.Embedding, cut: ShardSpec) -> None:
        """Shard the columns of an embedding (a bias for each head).

        Raises:
            ValueError: ``cut`` has another dimension or size.
        """
        if cut.dim != 1 or cut.size != module.embedding_dim:
            raise ValueError(
                f"rows of {module.embedding_dim} cut in dim {cut.dim} of {cut.size}: give dim 1 and "
                f"{module.embedding_dim}"
            )
        self._take(module, {"weight": cut}, Features)

    def per_head(self, module: nn.Module, cut: ShardSpec) -> None:
        """Shard the rows of ``module.weight`` by heads (a norm with a row for each head)."""
        self._take(module, {"weight": cut}, PerHead)

    def experts(self, module: nn.Module, cuts: dict[str, ShardSpec]) -> None:
        """Shard the intermediate dimension of every expert.

        Args:
            module: takes tokens, expert indices and weights, and returns tokens.
            cuts: how to shard its parameters (``[experts, outputs, inputs]``), by name.
        """
        self._take(module, cuts, Experts, _sequences=self.sequences if self.divides(module) else None)

    def enters(self, module: nn.Module, behind: nn.Module) -> None:
        """Declare that each rank uses the replicated output of ``module`` for its own part: in the column-parallel
        layer ``behind``, and possibly elsewhere."""
        if self.divides(module):  # all gradients are partial there
            return
        self._swap(module, Enters, {"_axis": self.axis})
        _, kind, own = self._layers[id(behind)]
        assert kind is Columns
        own["_copies"] = False

    def grad_allreduce(self, module: nn.Module) -> None:
        """Declare that each rank uses the replicated module for its own part, so its gradients are all-reduced."""
        if self.divides(module):  # gradients of all replicated modules are all-reduced there
            return
        self._swap(module, GradAllReduce, {"_axis": self.axis})

    def sharded_region(self, module: nn.Module, holders: Sequence[nn.Module], widths: Sequence[int]) -> None:
        """Declare that layers in ``module`` are sharded, so that the use of replicated modules in it must be declared,
        too.

        Args:
            module: contains the sharded layers.
            holders: the modules that have these layers as direct children: ``module`` itself or modules below it.
            widths: sizes of the inputs and outputs of the region, which are replicated.
        """
        _, among, known = self._blocks.setdefault(id(module), (module, [], set()))
        among += holders
        known.update(widths)

    def replicated(self, module: nn.Module) -> None:
        """Declare a module before or after sharded layers. Its gradients are complete on each rank."""
        self._replicated.update(id(each) for each in module.modules())

    def drops(self, module: nn.Module, own: bool) -> None:
        """Declare a dropout between two sharded layers, on sharded (``own``) or on replicated activations."""
        self._swap(module, Drops, {"_private": self.private, "_own": own})

    def of_heads(self, owner: nn.Module, name: str, heads: int, own: Range) -> None:
        """Slice the argument ``name`` of ``owner``, which has values for all ``heads``, to the range ``own``."""
        names = list(inspect.signature(type(owner).forward).parameters)
        self._guard(owner)[name] = (names.index(name) - 1 if name in names else -1, heads, *own)

    def holds(self, module: nn.Module, name: str) -> None:
        """Declare that the module has a parameter of a sharded layer that it does not use itself."""
        self._holders.add((id(module), name))

    def sets(self, owner: Any, **values: Any) -> None:
        """Set attributes of ``owner`` to values of the part (a number of heads)."""
        self._attributes += [(owner, name, value) for name, value in values.items()]

    def _check(self, module: nn.Module, cut: ShardSpec, dim: int) -> None:
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        if cut.dim != dim or cut.size < weight.shape[dim]:
            raise ValueError(
                f"a {type(module).__name__} with a weight of {tuple(weight.shape)} cut in dim {cut.dim} of {cut.size}: "
                f"give dim {dim} and {weight.shape[dim]}"
            )

    def _take(self, module: nn.Module, cuts: dict[str, ShardSpec], kind: type[CutLayer], **own: Any) -> None:
        for name, cut in cuts.items():
            if cut.ranks != self.axis.size:
                raise ValueError(f"a cut for {cut.ranks} ranks over an axis of {self.axis.size}: give one range a rank")
            param: nn.Parameter = getattr(module, name)
            part = Part(param.shape, cut, self.axis.rank)
            _, before = self._parts.setdefault(id(param), (param, part))
            if before != part:  # tied parameters must be sharded in the same way
                raise ValueError(
                    f"{name} of a {type(module).__name__} is cut as {before.cut} already, and now as {cut}"
                )
        own |= {"_axis": self.axis, "_parts": {name: self._parts[id(getattr(module, name))][1] for name in cuts}}
        if kind in (Columns, PerHead):
            shared = {name: self._parts[id(getattr(module, name))][1].shared_ranges() for name in cuts}
            own["_shared"] = {name: each for name, each in shared.items() if each is not None}
        self._swap(module, kind, own)

    def _swap(self, module: nn.Module, kind: type[nn.Module], own: dict[str, Any]) -> None:
        """Schedule a class change of the module to ``kind``; a module in several places is visited repeatedly."""
        _, before, before_own = self._layers.setdefault(id(module), (module, kind, own))
        if before is not kind or before_own != own:
            raise ValueError(
                f"a {type(module).__name__} is cut as {before.__name__} already, and now as {kind.__name__}"
            )

    def _region(self, owner: nn.Module) -> tuple[RankRng, Dropouts] | None:
        dropouts = dropouts_of(owner.modules())
        if dropouts:
            self._guard(owner)
        return (self.private, dropouts) if dropouts else None

    def _guard(self, owner: nn.Module) -> dict[str, tuple[int, int, int, int]]:
        """Return the per-head arguments of a module that will become a guard."""
        _, kind, own = self._layers.setdefault(id(owner), (owner, Guard, {"_leaves": self.private, "_of_heads": {}}))
        if kind is not Guard:
            raise ValueError(f"a {type(owner).__name__} is cut as {kind.__name__} already, and holds layers that are")
        of_heads: dict[str, tuple[int, int, int, int]] = own["_of_heads"]
        return of_heads

    def _say_size(self, module: nn.Module, cut: ShardSpec, names: tuple[str, str]) -> None:
        """Set the size attributes of the module to those of its part, since models reshape outputs by them."""
        self.sets(module, **{name: cut.numel(self.axis.rank) for name in names if name in vars(module)})

    # ---- sequence parallelism: each rank has its own tokens

    def divides(self, module: nn.Module) -> bool:
        """Return True if the module is in one of the layers between which sequences are sharded."""
        return id(module) in self._inside

    def layers(self, body: nn.Module, layers: nn.ModuleList | nn.Sequential, name: str) -> None:
        """Shard sequences between these layers, so that each rank has its own tokens. Call this before the methods that
        shard modules in them.

        Args:
            body: the module whose forward pass runs the layers.
            layers: all of the layers, in order.
            name: name of the list, for messages.

        Raises:
            ValueError: the body skips layers at random, or a layer processes a sequence in chunks.
        """
        if getattr(body, "layerdrop", 0):
            raise ValueError(
                f"a {type(body).__name__} with layerdrop={body.layerdrop} may leave out the layer where sequences are "
                "divided or gathered: give layerdrop=0"
            )
        assert self.sequences is not None
        self._wrap(body, Body, _sequences=self.sequences)
        for index, each in enumerate(layers):
            layer = inside(each)
            if getattr(layer, "chunk_size_feed_forward", 0):
                raise ValueError(
                    f"a {type(layer).__name__} with chunk_size_feed_forward={layer.chunk_size_feed_forward} takes a "
                    "sequence in pieces, and a rank has not all of it: give chunk_size_feed_forward=0"
                )
            own = {"_sequences": self.sequences, "_hidden": hidden_name(layer)}
            self._wrap(layer, Divided, _private=self.private, _dropouts=dropouts_of(layer.modules()), **own)
            self._wrap(each, Layer, _place=Place(layers, index), **own)
            self._inside.update((id(module), f"{name}.{index}") for module in each.modules())

    def is_layer(self, module: nn.Module) -> bool:
        """Return True if the module is one of these layers."""
        return (id(module), Divided) in self._around

    def block(self, module: nn.Module, crossed: Sequence[str] = ()) -> None:
        """Gather the first argument of ``module`` over the ranks, since the sharded layers begin there.

        Args:
            module: contains the first sharded layers, or is one of them.
            crossed: names of arguments that are replicated (another sequence).
        """
        if not self.divides(module):
            return
        names = list(inspect.signature(module.forward).parameters)
        places = {name: names.index(name) if name in names else -1 for name in crossed}
        own = {"_hidden": hidden_name(module), "_crossed": places}
        self._wrap(module, Block, _sequences=self.sequences, **own)
        self._gathered.update(id(each) for each in module.modules())

    def router(self, module: nn.Module) -> None:
        """Declare that the module computes scores of tokens, which the model may return."""
        if self.divides(module):
            self._wrap(module, Router, _sequences=self.sequences)

    def allreduce_replicated_grads(self) -> None:
        """All-reduce the gradients of everything that is replicated in the layers. Call this after the methods that
        shard modules.

        Raises:
            ValueError: no rule declared where the tokens for a sharded layer are gathered.
        """
        modules = {id(module): module for parent, _ in self._around.values() for module in parent.modules()}
        for key, where in self._inside.items():
            module = modules[key]
            _, kind, _ = self._layers.get(key, _NOTHING)
            if kind is Columns and key not in self._gathered:
                raise ValueError(
                    f"{where}: no rule says where the block of a {type(module).__name__} begins that is cut by "
                    "columns, so it would get a rank's own tokens; use sequence=None, or have its rule tell Site.block"
                )
            if kind is not Rows and any(id(p) not in self._parts for p in module._parameters.values() if p is not None):
                self._wrap(module, GradAllReduce, _axis=self.axis)

    def _wrap(self, module: nn.Module, kind: type[nn.Module], **own: Any) -> None:
        """Wrap the forward pass of the module in that of ``kind``, in addition to other changes of its class."""
        self._around.setdefault((id(module), kind), (module, own))

    # ---- queries

    def part_of(self, param: nn.Parameter) -> Part | None:
        """Return the part of a parameter that this rank has, or ``None`` if the parameter is replicated."""
        entry = self._parts.get(id(param))
        return None if entry is None else entry[1]

    def uncovered(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that will be sharded but are in modules that expect full parameters."""
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name, param in module._parameters.items()
            if id(param) in self._parts
            and name not in self._layers.get(id(module), _NOTHING)[2].get("_parts", ())
            and (id(module), name) not in self._holders
        ]

    def unexplained(self, model: nn.Module) -> list[str]:
        """Return the names of replicated trainable parameters among sharded layers for which no rule declared whether
        each rank uses them for its own part, in which case their gradients would have to be all-reduced.

        Vectors as wide as the replicated activations are left out, since they do not fit between two sharded layers.
        """
        within: dict[int, set[int]] = {}
        for module, holders, widths in self._blocks.values():
            inner_blocks = [each for each in module.modules() if each is not module and id(each) in self._blocks]
            elsewhere = {id(each) for other in inner_blocks for each in other.modules()}
            # A module that contains other regions is a layer of the model, with residuals: most of it is replicated.
            tops = [each for each in holders if each is not module] if inner_blocks else [module]
            for each in (each for top in tops for each in top.modules() if id(each) not in elsewhere):
                within.setdefault(id(each), set()).update(widths)
        declared = (GradAllReduce, Enters, Rows)
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            if id(module) in within and id(module) not in self._replicated and not self.divides(module)
            if self._layers.get(id(module), _NOTHING)[1] not in declared
            for name, param in module._parameters.items()
            if param is not None
            and param.requires_grad
            and id(param) not in self._parts
            and not (param.dim() == 1 and param.numel() in within[id(module)])
        ]

    # ---- install and remove

    def cut_values(self) -> None:
        """Replace the value of each parameter by this rank's part of it."""
        for param, part in self._parts.values():
            point(param, part.of(param.detach()))

    def install(self) -> None:
        """Change the classes and attributes of the model's modules, so that its layers are sharded."""
        around = [(module, kind, own) for (_, kind), (module, own) in self._around.items()]
        for module, kind, own in [*self._layers.values(), *around]:
            self._classes.append((module, type(module)))
            self._attributes += [(module, name, value) for name, value in own.items()]
            module.__class__ = _sharded_class(kind, type(module))
        for owner, name, value in self._attributes:
            self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def remove(self) -> None:
        """Undo :meth:`install`. Parameter values are not restored."""
        for owner, name, value in reversed(self._undo):
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
        for module, kind in reversed(self._classes):
            module.__class__ = kind
            vars(module).pop("multiply", None)  # only sharded layers have it
        self._undo.clear()
        self._classes.clear()


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return the parts that this rank has of a model's sharded parameters, by name. A tied parameter appears under each
    of its names; parameters that are not in the result are replicated. The model is sharded, or a copy of a sharded
    one."""
    parts = {
        id(module._parameters[name]): part
        for module in model.modules()
        if isinstance(module, CutLayer)
        for name, part in module._parts.items()
    }
    named = model.named_parameters(remove_duplicate=False)
    return {name: parts[id(param)] for name, param in named if id(param) in parts}


_NOTHING: tuple[nn.Module, type[nn.Module], dict[str, Any]] = (nn.Module(), nn.Module, {})
_ABSENT: Any = object()


def _sharded_class(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    if not issubclass(kind, nn.Embedding):
        return mixed_class(own, kind, own)
    if own is nn.Embedding:
        return mixed_class(own, kind)
    return mixed_class(own, own, kind)  # a subclass of nn.Embedding calls super().forward()


@dataclass(frozen=True)
class ModuleRules:
    """The view of one module that rules are applied to.

    Attributes:
        tp_plan: collects what the rules declare.
        plan: the user's tensor-parallel settings.
        module: the module.
    """

    tp_plan: TPPlan
    plan: TensorPlan
    module: nn.Module

    @property
    def ranks(self) -> int:
        return self.tp_plan.axis.size

    @property
    def rank(self) -> int:
        return self.tp_plan.axis.rank

    def has(self, path: str) -> bool:
        """Return True if the module has a submodule with this path."""
        try:
            return bool(path) and isinstance(self.module.get_submodule(path), nn.Module)
        except AttributeError:
            return False

    def replicated(self, paths: Iterable[str]) -> None:
        """Declare the existing modules among ``paths`` as replicated; see :meth:`TPPlan.replicated`."""
        for path in filter(self.has, paths):
            self.tp_plan.replicated(self.child(path))

    def child(self, path: str) -> nn.Module:
        """Return the submodule with this path; ``""`` is the module itself.

        Raises:
            ValueError: there is no such submodule.
        """
        try:
            return self.module.get_submodule(path)
        except AttributeError:
            names = ", ".join(name for name, _ in self.module.named_children())
            raise ValueError(f"it has no {path!r}, only {names}: give a rule for this class") from None

    def size(self, path: str, out: bool) -> int:
        """Return the number of outputs or inputs of a linear layer."""
        module = self._base(path)
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        return weight.shape[out_dim(module) if out else 1 - out_dim(module)]

    def columns(
        self, path: str, ranges: Ranges, owner: nn.Module | None = None, *, padded: int = 0, gathers: bool = False
    ) -> None:
        """Shard the outputs of a linear layer, and ``padded`` additional outputs, into ``ranges``. The second layer of
        an adapter of this layer is sharded in the same way."""
        module = self._base(path)
        cut = ShardSpec(out_dim(module), self.size(path, True) + padded, ranges)
        self.tp_plan.columns(module, cut, gathers, owner)
        for first, second, dropout in self._adapters(path):
            self.tp_plan.replicated(first)
            self.tp_plan.columns(second, ShardSpec(0, cut.size, ranges), gathers)
            if isinstance(dropout, nn.Dropout):
                self.tp_plan.drops(dropout, own=False)

    def rows(self, path: str, ranges: Ranges) -> None:
        """Shard the inputs of a linear layer, and of the first layer of its adapter, into ``ranges``."""
        module = self._base(path)
        cut = ShardSpec(1 - out_dim(module), self.size(path, False), ranges)
        self.tp_plan.rows(module, cut)
        for first, second, dropout in self._adapters(path):
            self.tp_plan.replicated(second)
            self.tp_plan.rows(first, ShardSpec(1, cut.size, ranges))
            if isinstance(dropout, nn.Dropout):
                self.tp_plan.drops(dropout, own=True)

    def sharded_region(self, columns: Sequence[str], rows: Sequence[str]) -> None:
        """Declare the region between column-parallel and row-parallel layers: replicated modules in it whose gradients
        are partial must be declared, too."""
        holders = [self.child(path.rpartition(".")[0]) for path in (*columns, *rows)]
        widths = [*(self.size(path, False) for path in columns), *(self.size(path, True) for path in rows)]
        self.tp_plan.sharded_region(self.module, holders, widths)

    def grad_allreduce(self, path: str) -> None:
        """Declare a module between sharded layers whose parameters are single numbers for all elements (a slope).

        Raises:
            ValueError: the module has other parameters.
        """
        module = self.child(path)
        for name, param in module.named_parameters():
            if param.numel() != 1:
                raise ValueError(
                    f"{path}.{name} of {tuple(param.shape)} stands between layers that are cut, and only one number "
                    f"for all elements can be used for a part of them: give a {type(module).__name__} with one"
                )
        for each in module.modules():
            if each._parameters:
                self.tp_plan.grad_allreduce(each)

    def block(self, module: nn.Module, columns: Sequence[str], crossed: Sequence[str] = ()) -> None:
        """Under sequence parallelism, gather the tokens for these layers at the input of ``module``, once for all of
        them. If ``module`` contains more than them (it is a layer of the model), or there is only one, gather at each
        layer.

        Args:
            module: contains ``columns``; its first argument is their input.
            columns: paths of column-parallel layers, relative to the module of the rule.
            crossed: names of arguments of these layers that are replicated.
        """
        single = len(columns) == 1 and module is self.module and not crossed
        if single or self.tp_plan.is_layer(module):
            for path in columns:
                self.tp_plan.block(self.child(path))
        else:
            self.tp_plan.block(module, crossed)

    def layers(self, path: str) -> tuple[nn.Module, ...]:
        """Return a column-parallel linear layer and the column-parallel layers of its adapters."""
        return (self._base(path), *(second for _, second, _ in self._adapters(path)))

    def vocabulary(self, rows: int) -> ShardSpec:
        """Return the partition of ``rows`` over all ranks, padded if there are several."""
        unit = self.plan.vocabulary_multiple if self.ranks > 1 else 1
        return ShardSpec.even(0, rows + -rows % (unit * self.ranks), self.ranks, unit=unit)

    def _base(self, path: str) -> nn.Module:
        """Return the layer, or the base layer if an adapter wraps it."""
        module = self.child(path)
        base = getattr(module, "base_layer", None)
        return base if isinstance(base, nn.Module) else module

    def _adapters(self, path: str) -> list[tuple[nn.Module, nn.Module, nn.Module]]:
        """Return first layer, second layer and dropout of each low-rank adapter (peft's LoRA) around a layer."""
        module: Any = self.child(path)
        if self._base(path) is module:
            return []
        first, second = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        if not isinstance(first, nn.ModuleDict) or not isinstance(second, nn.ModuleDict) or not len(first):
            raise ValueError(
                f"{path} is a {type(module).__name__} around a layer: only LoRA is cut with its layer; leave "
                "this one out of the adapter's targets"
            )
        if getattr(module, "lora_variant", None) or any(getattr(module, "use_dora", {}).values()):
            raise ValueError(f"{path} has a variant of LoRA that needs whole layers: use plain LoRA (use_dora=False)")
        return [(first[name], second[name], module.lora_dropout[name]) for name in first]


class Rule(Protocol):
    """Declares how modules of a class are sharded: :class:`Attention`, :class:`Mlp`, or a rule of your own."""

    def collect(self, rules: ModuleRules) -> None:
        """Declare the sharding in ``rules.tp_plan``.

        Raises:
            TypeError: the module has layers of other classes than the rule supports.
            ValueError: the module has other layers or sizes than the rule supports.
        """
        ...
