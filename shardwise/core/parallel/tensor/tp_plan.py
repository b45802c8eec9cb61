"""Collects which parameters of a model are sharded by tensor parallelism, and installs the sharded layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shardwise.core.base.rng import Dropouts, RankRng, dropouts_of
from shardwise.core.base.torch_internals import point
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

__all__ = [
    "ModuleRules",
    "Rule",
    "TPPlan",
    "parts_of",
]


# [Note: What cutting a model changes]
# A module is cut where it stands: it stays the same object with the same parameter objects, so that ties, hooks,
# references of optimizers and names stay what they are. Its class becomes one that is both the user's and ours, for the
# forward pass; attributes that say sizes (a number of heads) become those of the part. Until install() nothing is
# changed but what this object remembers, so whatever does not fit is refused before. Values are cut by whoever holds
# them: cut_values() here, an engine from each whole value as it comes.
class TPPlan:
    """Of one model over one axis. Every rank of the axis collects the same.

    Args:
        axis: the ranks.
        sequences: those that go through the model's layers, if each rank has its own tokens there.
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

    # ---- what will be cut

    def columns(self, module: nn.Module, cut: ShardSpec, gathers: bool = False, owner: nn.Module | None = None) -> None:
        """Each rank makes a part of the layer's output, of an input that all have alike ("column-parallel").

        Args:
            module: an ``nn.Linear`` or transformers' ``Conv1D``, whole.
            cut: of the output; its dimension is that of the weight (``out_dim``).
            gathers: the parts are gathered, so that all ranks have all of the output.
            owner: a module with what comes behind it, up to the layer cut by rows: dropout in there is each rank's own.

        Raises:
            TypeError, ValueError: the module is no such layer, or the cut is of another dimension or size.
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
        """Each rank has a part of the layer's input, and all get the sum ("row-parallel"); the bias is added once.

        Args:
            module: as for :meth:`columns`.
            cut: of the input; its dimension is the weight's other one.

        Raises:
            TypeError, ValueError: as for :meth:`columns`.
        """
        self._check(module, cut, 1 - out_dim(module))
        sequences = self.sequences if self.divides(module) else None
        leaves = self.private if sequences is None else None
        self._take(module, {"weight": cut}, Rows, _leaves=leaves, _sequences=sequences)
        self._say_size(module, cut, ("in_features", "nx"))

    def vocabulary(self, module: nn.Embedding, cut: ShardSpec) -> None:
        """Each rank has the rows of a part of the vocabulary ("vocabulary-parallel").

        Args:
            module: whole.
            cut: of dimension 0, one range a rank. It may be larger than the vocabulary: the rest are rows of zeros that
                no input has.

        Raises:
            ValueError: the cut does not fit, or the embedding changes its weight in forward passes (``max_norm``).
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
        """Each rank has a part of every row (a bias of each head).

        Raises:
            ValueError: the cut is of another dimension or size.
        """
        if cut.dim != 1 or cut.size != module.embedding_dim:
            raise ValueError(
                f"rows of {module.embedding_dim} cut in dim {cut.dim} of {cut.size}: give dim 1 and "
                f"{module.embedding_dim}"
            )
        self._take(module, {"weight": cut}, Features)

    def per_head(self, module: nn.Module, cut: ShardSpec) -> None:
        """Each rank has the rows of ``module.weight`` for its heads (a norm of each)."""
        self._take(module, {"weight": cut}, PerHead)

    def experts(self, module: nn.Module, cuts: dict[str, ShardSpec]) -> None:
        """Each rank has a part of what lies between the layers of every expert.

        Args:
            module: takes tokens, experts' numbers and weights, and gives tokens.
            cuts: of its parameters (``[experts, outputs, inputs]``), by name.
        """
        self._take(module, cuts, Experts, _sequences=self.sequences if self.divides(module) else None)

    def enters(self, module: nn.Module, behind: nn.Module) -> None:
        """Each rank uses the output of ``module``, which is whole, for its part, also but not only in the layer
        ``behind``, which is cut by columns."""
        if self.divides(module):  # where all gradients are of parts
            return
        self._swap(module, Enters, {"_axis": self.axis})
        _, kind, own = self._layers[id(behind)]
        assert kind is Columns
        own["_copies"] = False

    def grad_allreduce(self, module: nn.Module) -> None:
        """Each rank uses the module, which is whole, for its part: its gradients are summed."""
        if self.divides(module):  # as those of all that is whole there
            return
        self._swap(module, GradAllReduce, {"_axis": self.axis})

    def sharded_region(self, module: nn.Module, holders: Sequence[nn.Module], widths: Sequence[int]) -> None:
        """Layers are cut in ``module``, so that of what is whole in there it has to be said how it is used, too.

        Args:
            module: with them.
            holders: the modules below it, or itself, that have them as their own.
            widths: of what goes into them and comes out, which all ranks have alike.
        """
        _, among, known = self._blocks.setdefault(id(module), (module, [], set()))
        among += holders
        known.update(widths)

    def replicated(self, module: nn.Module) -> None:
        """Each rank uses the module, which is whole, before or behind cut layers: its gradients are the whole ones."""
        self._replicated.update(id(each) for each in module.modules())

    def drops(self, module: nn.Module, own: bool) -> None:
        """A dropout of a part (``own``), or of what all ranks have alike, between two layers that are cut."""
        self._swap(module, Drops, {"_private": self.private, "_own": own})

    def of_heads(self, owner: nn.Module, name: str, heads: int, own: Range) -> None:
        """``owner`` is given something for all ``heads`` by this name, and takes what is for its ``own``."""
        names = list(inspect.signature(type(owner).forward).parameters)
        self._guard(owner)[name] = (names.index(name) - 1 if name in names else -1, heads, *own)

    def holds(self, module: nn.Module, name: str) -> None:
        """The module has a parameter that a cut layer has, too, and does not use it."""
        self._holders.add((id(module), name))

    def sets(self, owner: Any, **values: Any) -> None:
        """Attributes of ``owner`` that are others with the parts (a number of heads)."""
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
            if before != part:  # a tied one is cut once
                raise ValueError(
                    f"{name} of a {type(module).__name__} is cut as {before.cut} already, and now as {cut}"
                )
        own |= {"_axis": self.axis, "_parts": {name: self._parts[id(getattr(module, name))][1] for name in cuts}}
        if kind in (Columns, PerHead):
            held = {name: self._parts[id(getattr(module, name))][1].held() for name in cuts}
            own["_held"] = {name: each for name, each in held.items() if each is not None}
        self._swap(module, kind, own)

    def _swap(self, module: nn.Module, kind: type[nn.Module], own: dict[str, Any]) -> None:
        """The module's forward pass will be of ``kind``; one that stands in several places is met several times."""
        _, before, said = self._layers.setdefault(id(module), (module, kind, own))
        if before is not kind or said != own:
            raise ValueError(
                f"a {type(module).__name__} is cut as {before.__name__} already, and now as {kind.__name__}"
            )

    def _region(self, owner: nn.Module) -> tuple[RankRng, Dropouts] | None:
        dropouts = dropouts_of(owner.modules())
        if dropouts:
            self._guard(owner)
        return (self.private, dropouts) if dropouts else None

    def _guard(self, owner: nn.Module) -> dict[str, tuple[int, int, int, int]]:
        """The arguments for all heads of what will be a guard."""
        _, kind, own = self._layers.setdefault(id(owner), (owner, Guard, {"_leaves": self.private, "_of_heads": {}}))
        if kind is not Guard:
            raise ValueError(f"a {type(owner).__name__} is cut as {kind.__name__} already, and holds layers that are")
        found: dict[str, tuple[int, int, int, int]] = own["_of_heads"]
        return found

    def _say_size(self, module: nn.Module, cut: ShardSpec, names: tuple[str, str]) -> None:
        """What the module says of its own size is that of its part, which reshapes of its output rely on."""
        self.sets(module, **{name: cut.numel(self.axis.rank) for name in names if name in vars(module)})

    # ---- sequences of which each rank has its own tokens

    def divides(self, module: nn.Module) -> bool:
        """Whether it is in one of the layers between which sequences are divided."""
        return id(module) in self._inside

    def layers(self, body: nn.Module, layers: nn.ModuleList | nn.Sequential, name: str) -> None:
        """Between these layers each rank has its own tokens. Said before what is cut in them.

        Args:
            body: whose forward pass runs them.
            layers: all of them, one behind the other.
            name: of the list, for messages.

        Raises:
            ValueError: the body leaves out layers at random, or a layer takes a sequence in pieces.
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
        """Whether it is one of them."""
        return (id(module), Divided) in self._around

    def block(self, module: nn.Module, crossed: Sequence[str] = ()) -> None:
        """Cut layers begin where ``module`` does: its first argument is gathered, of a rank's own tokens.

        Args:
            module: with the first layers that are cut, or one of them.
            crossed: names of arguments that all ranks have whole (another sequence).
        """
        if not self.divides(module):
            return
        names = list(inspect.signature(module.forward).parameters)
        places = {name: names.index(name) if name in names else -1 for name in crossed}
        own = {"_hidden": hidden_name(module), "_crossed": places}
        self._wrap(module, Block, _sequences=self.sequences, **own)
        self._gathered.update(id(each) for each in module.modules())

    def router(self, module: nn.Module) -> None:
        """It gives scores of tokens, which the model may return."""
        if self.divides(module):
            self._wrap(module, Router, _sequences=self.sequences)

    def sum_whole(self) -> None:
        """Whatever is whole in the layers gets the sum of its gradients. Said behind all that is cut.

        Raises:
            ValueError: of a layer that is cut nobody has said where the tokens for it are gathered.
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
        """The module's forward pass will have that of ``kind`` around it, whatever else it is."""
        self._around.setdefault((id(module), kind), (module, own))

    # ---- what is

    def part_of(self, param: nn.Parameter) -> Part | None:
        """What this rank has of a parameter; ``None``: all of it."""
        found = self._parts.get(id(param))
        return None if found is None else found[1]

    def uncovered(self, model: nn.Module) -> list[str]:
        """Names of parameters that will be parts in modules which take them for whole."""
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name, param in module._parameters.items()
            if id(param) in self._parts
            and name not in self._layers.get(id(module), _NOTHING)[2].get("_parts", ())
            and (id(module), name) not in self._holders
        ]

    def unexplained(self, model: nn.Module) -> list[str]:
        """Names of trainable parameters that are whole, stand among cut layers, and of which nobody has said whether
        each rank uses them for its part: their gradients might be parts of a sum.

        A vector as wide as what all have alike does not fit between two cut layers.
        """
        within: dict[int, set[int]] = {}
        for module, holders, widths in self._blocks.values():
            others = [each for each in module.modules() if each is not module and id(each) in self._blocks]
            elsewhere = {id(each) for other in others for each in other.modules()}
            # One with others in it is a layer of the model, with residuals: most of it is beside.
            tops = [each for each in holders if each is not module] if others else [module]
            for each in (each for top in tops for each in top.modules() if id(each) not in elsewhere):
                within.setdefault(id(each), set()).update(widths)
        said = (GradAllReduce, Enters, Rows)
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            if id(module) in within and id(module) not in self._replicated and not self.divides(module)
            if self._layers.get(id(module), _NOTHING)[1] not in said
            for name, param in module._parameters.items()
            if param is not None
            and param.requires_grad
            and id(param) not in self._parts
            and not (param.dim() == 1 and param.numel() in within[id(module)])
        ]

    # ---- doing it

    def cut_values(self) -> None:
        """Each parameter shows this rank's part of what it shows now."""
        for param, part in self._parts.values():
            point(param, part.of(param.detach()))

    def install(self) -> None:
        """From here on the model's layers are those of parts."""
        for module, kind, own in self._layers.values():
            self._classes.append((module, type(module)))
            self._attributes += [(module, name, value) for name, value in own.items()]
            module.__class__ = _both(kind, type(module))
        for (_, kind), (module, own) in self._around.items():
            self._classes.append((module, type(module)))
            self._attributes += [(module, name, value) for name, value in own.items()]
            module.__class__ = _both(kind, type(module))
        for owner, name, value in self._attributes:
            self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def remove(self) -> None:
        """The model is what it was before :meth:`install`, values apart."""
        for owner, name, value in reversed(self._undo):
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
        for module, kind in reversed(self._classes):
            module.__class__ = kind
            vars(module).pop("multiply", None)  # a cut layer's alone
        self._undo.clear()
        self._classes.clear()


def parts_of(model: nn.Module) -> dict[str, Part]:
    """What this rank has of a model's parameters, by name, of a tied one by each of its names; of all others it has
    all. The model is cut, or a copy of such a one."""
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
_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _both(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """A class that is still the user's module's: ``isinstance``, names and attributes go on."""
    if (kind, own) not in _CLASSES:
        bases = (kind, own)
        if issubclass(kind, nn.Embedding):  # a subclass of an embedding calls what it is derived from
            bases = (kind,) if own is nn.Embedding else (own, kind)  # type: ignore[assignment]
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _CLASSES[kind, own] = type(own.__name__, bases, names)
    return _CLASSES[kind, own]


@dataclass(frozen=True)
class ModuleRules:
    """A module that rules are applied to.

    Attributes:
        cutting: collects what they say.
        plan: what was asked for.
        module: this one.
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
        """Whether there is such a module below this one."""
        try:
            return bool(path) and isinstance(self.module.get_submodule(path), nn.Module)
        except AttributeError:
            return False

    def replicated(self, paths: Iterable[str]) -> None:
        """Those of the modules that are there compute beside the layers that are cut; see :meth:`Cutting.beside`."""
        for path in filter(self.has, paths):
            self.tp_plan.replicated(self.child(path))

    def child(self, path: str) -> nn.Module:
        """A module below this one, itself for ``""``.

        Raises:
            ValueError: there is none.
        """
        try:
            return self.module.get_submodule(path)
        except AttributeError:
            names = ", ".join(name for name, _ in self.module.named_children())
            raise ValueError(f"it has no {path!r}, only {names}: give a rule for this class") from None

    def size(self, path: str, out: bool) -> int:
        """Outputs or inputs of a linear layer."""
        module = self._base(path)
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        return weight.shape[out_dim(module) if out else 1 - out_dim(module)]

    def columns(
        self, path: str, ranges: Ranges, owner: nn.Module | None = None, *, padded: int = 0, gathers: bool = False
    ) -> None:
        """The outputs of a linear layer, with ``padded`` behind them, are cut into ``ranges``; of an adapter beside it,
        those of its second layer."""
        module = self._base(path)
        cut = ShardSpec(out_dim(module), self.size(path, True) + padded, ranges)
        self.tp_plan.columns(module, cut, gathers, owner)
        for first, second, dropout in self._adapters(path):
            self.tp_plan.replicated(first)
            self.tp_plan.columns(second, ShardSpec(0, cut.size, ranges), gathers)
            if isinstance(dropout, nn.Dropout):
                self.tp_plan.drops(dropout, own=False)

    def rows(self, path: str, ranges: Ranges) -> None:
        """The inputs of a linear layer are; of an adapter beside it, those of its first layer."""
        module = self._base(path)
        cut = ShardSpec(1 - out_dim(module), self.size(path, False), ranges)
        self.tp_plan.rows(module, cut)
        for first, second, dropout in self._adapters(path):
            self.tp_plan.replicated(second)
            self.tp_plan.rows(first, ShardSpec(1, cut.size, ranges))
            if isinstance(dropout, nn.Dropout):
                self.tp_plan.drops(dropout, own=True)

    def sharded_region(self, columns: Sequence[str], rows: Sequence[str]) -> None:
        """Between layers cut by columns and by rows stands nothing whose gradients would be parts, or it is named."""
        holders = [self.child(path.rpartition(".")[0]) for path in (*columns, *rows)]
        widths = [*(self.size(path, False) for path in columns), *(self.size(path, True) for path in rows)]
        self.tp_plan.sharded_region(self.module, holders, widths)

    def grad_allreduce(self, path: str) -> None:
        """What stands between layers that are cut and has numbers that count for every element alike (a slope).

        Raises:
            ValueError: it has others.
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
        """Where sequences are divided, the tokens for these layers are gathered where ``module`` begins: once for all
        of them, unless it holds more than them (it is a layer of the model), or there is but one.

        Args:
            module: with ``columns``; its first argument is what they get.
            columns: paths below this site's module of what is cut by columns.
            crossed: names of arguments for them that are whole.
        """
        single = len(columns) == 1 and module is self.module and not crossed
        if single or self.tp_plan.is_layer(module):
            for path in columns:
                self.tp_plan.block(self.child(path))
        else:
            self.tp_plan.block(module, crossed)

    def layers(self, path: str) -> tuple[nn.Module, ...]:
        """A linear layer that is cut by columns, and what of its adapters is."""
        return (self._base(path), *(second for _, second, _ in self._adapters(path)))

    def vocabulary(self, rows: int) -> ShardSpec:
        """Over all ranks, padded where there are several."""
        unit = self.plan.vocabulary_multiple if self.ranks > 1 else 1
        return ShardSpec.even(0, rows + -rows % (unit * self.ranks), self.ranks, unit=unit)

    def _base(self, path: str) -> nn.Module:
        """The layer itself, where an adapter stands around it."""
        module = self.child(path)
        base = getattr(module, "base_layer", None)
        return base if isinstance(base, nn.Module) else module

    def _adapters(self, path: str) -> list[tuple[nn.Module, nn.Module, nn.Module]]:
        """First layer, second layer and dropout of each low-rank adapter (peft's LoRA) around a layer."""
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
    """What is cut in modules of a class."""

    def collect(self, rules: ModuleRules) -> None:
        """Tell ``site.cutting``.

        Raises:
            TypeError, ValueError: the module has other layers or sizes than the rule is for.
        """
        ...
