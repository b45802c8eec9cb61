"""Which layers of a model are cut over an axis, and how: collected first, done when everything is known to fit."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.tensor.axis import Axis
from shardwise.tensor.cut import Cut, Part
from shardwise.tensor.layers import Columns, CutLayer, Rows, Vocabulary, out_dim
from shardwise.torch_internals import point

__all__ = ["Cutting", "parts_of"]


# [Note: What cutting a model changes]
# A module is cut where it stands: it stays the same object with the same parameter objects, so that ties, hooks,
# references of optimizers and names stay what they are. Its class becomes one that is both the user's and ours, for the
# forward pass; attributes that say sizes (a number of heads) become those of the part. Until install() nothing is
# changed but what this object remembers, so whatever does not fit is refused before. Values are cut by whoever holds
# them: cut_values() here, an engine from each whole value as it comes.
class Cutting:
    """Of one model over one axis. Every rank of the axis collects the same.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._parts: dict[int, tuple[nn.Parameter, Part]] = {}
        self._layers: list[tuple[nn.Module, type[CutLayer], dict[str, Any]]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []

    # ---- what will be cut

    def columns(self, module: nn.Module, cut: Cut, gathers: bool = False) -> None:
        """Each rank makes a part of the layer's output, of an input that all have alike ("column-parallel").

        Args:
            module: an ``nn.Linear`` or transformers' ``Conv1D``, whole.
            cut: of the output; its dimension is that of the weight (:func:`~shardwise.tensor.layers.out_dim`).
            gathers: the parts are gathered, so that all ranks have all of the output.

        Raises:
            TypeError, ValueError: the module is no such layer, or the cut is of another dimension or size.
        """
        dim = out_dim(module)
        self._check(module, cut, dim)
        parts = {"weight": cut}
        if getattr(module, "bias", None) is not None:
            parts["bias"] = Cut(0, cut.size, cut.ranges)
        self._take(module, parts, Columns, _gathers=gathers)
        self._say_size(module, cut, ("out_features", "nf"))

    def rows(self, module: nn.Module, cut: Cut) -> None:
        """Each rank has a part of the layer's input, and all get the sum ("row-parallel"); the bias is added once.

        Args:
            module: as for :meth:`columns`.
            cut: of the input; its dimension is the weight's other one.

        Raises:
            TypeError, ValueError: as for :meth:`columns`.
        """
        self._check(module, cut, 1 - out_dim(module))
        self._take(module, {"weight": cut}, Rows)
        self._say_size(module, cut, ("in_features", "nx"))

    def vocabulary(self, module: nn.Embedding, cut: Cut) -> None:
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
        self._take(module, {"weight": cut}, Vocabulary)

    def sets(self, owner: Any, **values: Any) -> None:
        """Attributes of ``owner`` that are others with the parts (a number of heads)."""
        self._attributes += [(owner, name, value) for name, value in values.items()]

    def _check(self, module: nn.Module, cut: Cut, dim: int) -> None:
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        if cut.dim != dim or cut.size < weight.shape[dim]:
            raise ValueError(
                f"a {type(module).__name__} with a weight of {tuple(weight.shape)} cut in dim {cut.dim} of {cut.size}: "
                f"give dim {dim} and {weight.shape[dim]}"
            )

    def _take(self, module: nn.Module, cuts: dict[str, Cut], kind: type[CutLayer], **own: Any) -> None:
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
        self._layers.append((module, kind, own))

    def _say_size(self, module: nn.Module, cut: Cut, names: tuple[str, str]) -> None:
        """What the module says of its own size is that of its part, which reshapes of its output rely on."""
        self.sets(module, **{name: cut.numel(self.axis.rank) for name in names if name in vars(module)})

    # ---- what is

    def part_of(self, param: nn.Parameter) -> Part | None:
        """What this rank has of a parameter; ``None``: all of it."""
        found = self._parts.get(id(param))
        return None if found is None else found[1]

    # ---- doing it

    def cut_values(self) -> None:
        """Each parameter shows this rank's part of what it shows now."""
        for param, part in self._parts.values():
            point(param, part.of(param.detach()))

    def install(self) -> None:
        """From here on the model's layers are those of parts."""
        for module, kind, own in self._layers:
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
        for module, kind in self._classes:
            module.__class__ = kind
        self._undo.clear()
        self._classes.clear()


def parts_of(model: nn.Module) -> dict[str, Part]:
    """What this rank has of a model's parameters, by name, of a tied one by each of its names; of all others it has
    all. The model is cut, or a copy of such a one."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, CutLayer):
            found.update({f"{prefix}.{name}" if prefix else name: part for name, part in module._parts.items()})
    return found


_ABSENT: Any = object()
_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _both(kind: type[CutLayer], own: type[nn.Module]) -> type[nn.Module]:
    """A class that is still the user's module's: ``isinstance``, names and attributes go on."""
    if (kind, own) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _CLASSES[kind, own] = type(own.__name__, (kind, own), names)
    return _CLASSES[kind, own]
