"""A module that rules are applied to, and what a rule is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shardwise.core.parallel.tensor.cut import Cut
from shardwise.core.parallel.tensor.cutting import Cutting
from shardwise.core.parallel.tensor.heads import Ranges
from shardwise.core.parallel.tensor.layers import out_dim
from shardwise.plan import TensorPlan

__all__ = ["Rule", "Site"]


@dataclass(frozen=True)
class Site:
    """A module that rules are applied to.

    Attributes:
        cutting: collects what they say.
        plan: what was asked for.
        module: this one.
    """

    cutting: Cutting
    plan: TensorPlan
    module: nn.Module

    @property
    def ranks(self) -> int:
        return self.cutting.axis.size

    @property
    def rank(self) -> int:
        return self.cutting.axis.rank

    def has(self, path: str) -> bool:
        """Whether there is such a module below this one."""
        try:
            return bool(path) and isinstance(self.module.get_submodule(path), nn.Module)
        except AttributeError:
            return False

    def beside(self, paths: Iterable[str]) -> None:
        """Those of the modules that are there compute beside the layers that are cut; see :meth:`Cutting.beside`."""
        for path in filter(self.has, paths):
            self.cutting.beside(self.child(path))

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
        cut = Cut(out_dim(module), self.size(path, True) + padded, ranges)
        self.cutting.columns(module, cut, gathers, owner)
        for first, second, dropout in self._adapters(path):
            self.cutting.beside(first)
            self.cutting.columns(second, Cut(0, cut.size, ranges), gathers)
            if isinstance(dropout, nn.Dropout):
                self.cutting.drops(dropout, own=False)

    def rows(self, path: str, ranges: Ranges) -> None:
        """The inputs of a linear layer are; of an adapter beside it, those of its first layer."""
        module = self._base(path)
        cut = Cut(1 - out_dim(module), self.size(path, False), ranges)
        self.cutting.rows(module, cut)
        for first, second, dropout in self._adapters(path):
            self.cutting.beside(second)
            self.cutting.rows(first, Cut(1, cut.size, ranges))
            if isinstance(dropout, nn.Dropout):
                self.cutting.drops(dropout, own=True)

    def encloses(self, columns: Sequence[str], rows: Sequence[str]) -> None:
        """Between layers cut by columns and by rows stands nothing whose gradients would be parts, or it is named."""
        holders = [self.child(path.rpartition(".")[0]) for path in (*columns, *rows)]
        widths = [*(self.size(path, False) for path in columns), *(self.size(path, True) for path in rows)]
        self.cutting.encloses(self.module, holders, widths)

    def alike(self, path: str) -> None:
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
                self.cutting.alike(each)

    def block(self, module: nn.Module, columns: Sequence[str], crossed: Sequence[str] = ()) -> None:
        """Where sequences are divided, the tokens for these layers are gathered where ``module`` begins: once for all
        of them, unless it holds more than them (it is a layer of the model), or there is but one.

        Args:
            module: with ``columns``; its first argument is what they get.
            columns: paths below this site's module of what is cut by columns.
            crossed: names of arguments for them that are whole.
        """
        single = len(columns) == 1 and module is self.module and not crossed
        if single or self.cutting.is_layer(module):
            for path in columns:
                self.cutting.block(self.child(path))
        else:
            self.cutting.block(module, crossed)

    def layers(self, path: str) -> tuple[nn.Module, ...]:
        """A linear layer that is cut by columns, and what of its adapters is."""
        return (self._base(path), *(second for _, second, _ in self._adapters(path)))

    def vocabulary(self, rows: int) -> Cut:
        """Over all ranks, padded where there are several."""
        unit = self.plan.vocabulary_multiple if self.ranks > 1 else 1
        return Cut.even(0, rows + -rows % (unit * self.ranks), self.ranks, unit=unit)

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

    def collect(self, site: Site) -> None:
        """Tell ``site.cutting``.

        Raises:
            TypeError, ValueError: the module has other layers or sizes than the rule is for.
        """
        ...
