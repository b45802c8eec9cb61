"""Sequences of which each rank of an axis has a part of the tokens, between layers that are cut."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.base.rng import Dropouts, RankRng
from shardwise.core.parallel.tensor.axis import Axis
from shardwise.core.parallel.tensor.shard_spec import shares

__all__ = [
    "Block",
    "Body",
    "Divided",
    "Layer",
    "Place",
    "Router",
    "Sequences",
    "Tokens",
    "hidden_name",
    "inside",
    "lists_of_layers",
]

KEY = "shardwise_tokens"
"""The name of what each layer is given beside its own arguments."""


# [Note: Tokens of a rank]
# Source: Megatron-LM's sequence parallelism (arXiv 2205.05198). All ranks of the axis get whole batches, and whatever a
# model makes before and behind its layers (positions, masks, embeddings, the loss) is whole: models derive it from
# whole embeddings. What enters the first layer is divided by tokens, as even as can be, and what leaves the last is
# gathered. Between, a rank has its own tokens. Where a block of cut layers begins (attention, an MLP, experts) tokens
# are gathered, and where it ends parts are summed and divided in one exchange; each is the other's backward.
# So every gradient between the first layer and the last is a part of a sum: of the rank's own tokens outside of blocks,
# of what its cut layers contribute inside. Whatever parameter all ranks have whole in there gets the sum over them of
# its gradients, whether it is a norm, a bias behind a sum, a router, or a layer before one that is cut; before the
# first layer and behind the last all ranks compute the same, and nothing is summed. Dropout is each rank's own in all
# of a layer ([Note: Random numbers of a cut model]), but where whole tokens are dropped (an adapter's).
# Which tokens are whose has to be known again where a layer is recomputed in the backward pass, maybe with passes of
# other lengths behind it: so it is an argument of each layer, which whoever recomputes it has kept with the others.
@dataclass(frozen=True)
class Tokens:
    """Which tokens each rank has, of the sequences that go through the layers.

    Attributes:
        rows: sequences.
        sizes: by rank, tokens of each of them.
    """

    rows: int
    sizes: tuple[int, ...]

    def of(self, x: Tensor) -> tuple[int, tuple[int, ...]]:
        """The dimension of tokens in ``[rows, tokens, ...]`` or, flattened, ``[rows * tokens, width]``, and its sizes
        by rank. The ranks' flattened tokens are in another order than those of whole sequences."""
        if x.dim() > 2:
            return 1, self.sizes
        return 0, tuple(self.rows * size for size in self.sizes)


class Sequences:
    """Those that go through the layers of one model, in each thread.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._local = threading.local()

    def __deepcopy__(self, _memo: object) -> Sequences:
        return self

    @property
    def current(self) -> Tokens:
        """Of the pass under way.

        Raises:
            RuntimeError: a layer or what is in it was called by something else than the model's own forward pass.
        """
        found: Tokens | None = getattr(self._local, "tokens", None)
        if found is None:
            raise RuntimeError(
                f"a layer between which {self.axis.size} ranks divide sequences was called outside of the model's "
                "forward pass, where it is not known which tokens are whose: call the whole model, and checkpoint "
                "activations by gradient_checkpointing_enable() or torch's checkpoint_wrapper"
            )
        return found

    @property
    def divided(self) -> bool:
        """Whether the pass under way is between the first layer and the last."""
        return getattr(self._local, "tokens", None) is not None

    def divide(self, x: Tensor) -> Tensor:
        """This rank's tokens of what all have alike: ``[rows, tokens, ...]``."""
        sizes = tuple(shares(x.shape[1], self.axis.size))
        self._local.tokens = Tokens(x.shape[0], sizes)
        return self.axis.own_part(x, 1, sizes)

    def gather(self, x: Tensor) -> Tensor:
        """All tokens; the layers are over."""
        sizes = self.current.sizes
        self._local.tokens = None
        return self.axis.gathered(x, 1, sizes)

    @contextmanager
    def with_tokens(self, tokens: Tokens | None) -> Iterator[None]:
        before = getattr(self._local, "tokens", None)
        self._local.tokens = tokens
        try:
            yield
        finally:
            self._local.tokens = before

    def into_parts(self, x: Tensor) -> Tensor:
        """The tokens of all ranks, for layers of which each has a part."""
        dim, sizes = self.current.of(x)
        return self.axis.gathered_for_parts(x, dim, sizes)

    def from_parts(self, x: Tensor) -> Tensor:
        """This rank's tokens of the sum over the ranks of ``x``."""
        dim, sizes = self.current.of(x)
        return self.axis.summed_part(x, dim, sizes)

    def numbers(self, x: Tensor) -> Tensor:
        """Whole numbers of the tokens of all ranks, in the order of :meth:`into_parts`."""
        dim, sizes = self.current.of(x)
        return self.axis.gathered(x.to(torch.float32), dim, sizes).to(x.dtype)


@dataclass(frozen=True)
class Place:
    """Where a layer is.

    Attributes:
        layers: the list that it is in.
        index: there.
    """

    layers: nn.ModuleList | nn.Sequential
    index: int

    @property
    def first(self) -> bool:
        """Whether no layer of the same stage comes before it."""
        return self.index == 0 or not _runs(self.layers[self.index - 1])

    @property
    def last(self) -> bool:
        return self.index + 1 == len(self.layers) or not _runs(self.layers[self.index + 1])


def _runs(module: nn.Module) -> bool:
    """Whether it is one of this rank's layers, of the stage that is running."""
    return isinstance(module, Layer) and not getattr(module, "stands_aside", False)


class Layer(nn.Module):
    """One of the layers between which each rank has its own tokens; activation checkpointing may be around them.

    Attributes:
        _sequences: that go through.
        _place: where it is.
        _hidden: the name of its first argument.
    """

    _sequences: Sequences
    _place: Place
    _hidden: str

    # Around whatever the call consists of, hooks and activation checkpointing: what is kept for backward is divided.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequences, last = self._sequences, self._place.last
        if self._place.first:
            args, kwargs = _changed(sequences.divide, self._hidden, args, kwargs)
        outputs = super().__call__(*args, **kwargs, **{KEY: sequences.current})
        if not last:
            return outputs
        if isinstance(outputs, tuple):
            return (sequences.gather(outputs[0]), *outputs[1:])
        return sequences.gather(outputs)


class Divided(nn.Module):
    """A layer that is given a rank's own tokens, and computed once more where activation checkpointing says so.

    Attributes:
        _sequences: that go through.
        _hidden: the name of its first argument.
        _private: the rank's own random numbers.
        _dropouts: that draw.
    """

    _sequences: Sequences
    _hidden: str
    _private: RankRng
    _dropouts: Dropouts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._sequences.with_tokens(kwargs.pop(KEY)):
            if not self.training:
                return super().forward(*args, **kwargs)
            device = (args[0] if args else kwargs[self._hidden]).device
            with self._private.drawing(True, device, self._dropouts):
                return super().forward(*args, **kwargs)


class Body(nn.Module):
    """The module whose forward pass runs the layers.

    Attributes:
        _sequences: that go through.
    """

    _sequences: Sequences

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("output_hidden_states")
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), "output_hidden_states", False)
        if wanted:
            raise ValueError(
                f"output_hidden_states={wanted} for a {type(self).__name__} whose sequences are divided between its "
                "layers: each rank has a part of those states; leave it False, or sequence=None"
            )
        with self._sequences.with_tokens(None):
            outputs = super().forward(*args, **kwargs)
            if self._sequences.divided:
                raise RuntimeError(
                    f"the {type(self).__name__} did not call the last of its layers, where the tokens of all ranks "
                    "are gathered: call all of them in each pass, or sequence=None"
                )
            return outputs


class Block(nn.Module):
    """Where a block of cut layers begins.

    Attributes:
        _sequences: whose tokens are gathered.
        _hidden: the name of the first argument, these.
        _crossed: others by name, with their places (``-1``: by name only), that all ranks have alike and whole.
    """

    _sequences: Sequences
    _hidden: str
    _crossed: dict[str, int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sequences = self._sequences
        for name, place in self._crossed.items():
            if isinstance(kwargs.get(name), Tensor) or (0 <= place < len(args) and isinstance(args[place], Tensor)):
                args, kwargs = _changed(sequences.axis.copied, name, args, kwargs, place)
        args, kwargs = _changed(sequences.into_parts, self._hidden, args, kwargs)
        return super().forward(*args, **kwargs)


class Router(nn.Module):
    """Gives scores of tokens first, which the model may return and compute a loss of: of all tokens, in their order."""

    _sequences: Sequences

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, *others = super().forward(*args, **kwargs)
        tokens, axis = self._sequences.current, self._sequences.axis
        by_row = logits.view(tokens.rows, tokens.sizes[axis.rank], logits.shape[-1])
        return (axis.gathered(by_row, 1, tokens.sizes).flatten(0, 1), *others)


def _changed(
    change: Callable[[Tensor], Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of which one, by name or place, is another."""
    if name in kwargs:
        return args, kwargs | {name: change(kwargs[name])}
    return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs


def hidden_name(module: nn.Module) -> str:
    """The name of a module's first argument."""
    return next(iter(inspect.signature(module.forward).parameters))


def inside(layer: nn.Module) -> nn.Module:
    """The layer itself, where torch's ``checkpoint_wrapper`` stands around it."""
    own = getattr(layer, "_checkpoint_wrapped_module", None)
    return inside(own) if isinstance(own, nn.Module) else layer


def lists_of_layers(
    model: nn.Module, attends: Callable[[nn.Module], bool]
) -> list[tuple[nn.Module, nn.ModuleList | nn.Sequential]]:
    """The lists of which each module holds attention that is cut, innermost, each with the module that it is in.

    Args:
        model: any.
        attends: whether a module's rules say so of it.
    """
    holding = {id(parent) for parent in model.modules() if any(attends(module) for module in parent.modules())}

    def fits(module: nn.Module) -> bool:
        return (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len(module) > 0
            and all(id(each) in holding for each in module)
        )

    found = []
    for parent in model.modules():
        for module in parent.children():
            inner = (each for each in module.modules() if each is not module)
            if fits(module) and not any(fits(each) for each in inner):
                found.append((parent, module))
    return found  # type: ignore[return-value]
