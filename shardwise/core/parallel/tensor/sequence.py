"""Megatron-style sequence parallelism: between sharded layers, each rank of an axis has a part of the tokens."""

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

KEY = "shardwise_tokens"
"""Name of the keyword argument that is added to the arguments of each layer."""


# [Note: Tokens of a rank]
# Source: Megatron-LM's sequence parallelism (arXiv 2205.05198). All ranks of the axis get full batches, and everything
# that a model computes before and after its layers (positions, masks, embeddings, the loss) is replicated: models
# derive it from full embeddings. The input of the first layer is split by tokens, as evenly as possible, and the output
# of the last is gathered. In between, a rank has its own tokens. At the beginning of a block of sharded layers
# (attention, an MLP, experts), tokens are gathered, and at its end partial results are reduce-scattered; each is the
# other's backward. Every gradient between the first layer and the last is therefore partial: outside of blocks it
# belongs to the rank's own tokens, inside it is the contribution of its shards. The gradients of all replicated
# parameters in there are all-reduced: those of a norm, of a bias after a reduce-scatter, of a router, or of a layer
# before a sharded one. Before the first layer and after the last, all ranks compute the same, and nothing is
# all-reduced. Dropout in a layer uses each rank's own random numbers ([Note: Random numbers of a cut model]), except on
# full tokens (in an adapter). The partition of the tokens must be known again when a layer is recomputed in the
# backward pass, possibly after passes of other lengths. It is therefore an argument of each layer, which activation
# checkpointing saves with the others.
@dataclass(frozen=True)
class Tokens:
    """The partition of tokens over the ranks, for the sequences in the layers.

    Attributes:
        rows: number of sequences.
        sizes: the number of tokens of each sequence on a rank, by rank.
    """

    rows: int
    sizes: tuple[int, ...]

    def of(self, x: Tensor) -> tuple[int, tuple[int, ...]]:
        """Return the token dimension of ``x``, and its sizes by rank. ``x`` is ``[rows, tokens, ...]``, or, flattened,
        ``[rows * tokens, width]``; flattened tokens of the ranks are not in the order of full sequences."""
        if x.dim() > 2:
            return 1, self.sizes
        return 0, tuple(self.rows * size for size in self.sizes)


class Sequences:
    """The sequences in the layers of one model, per thread.

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
        """The partition of the current pass.

        Raises:
            RuntimeError: a layer or a module in it was called outside of the model's own forward pass.
        """
        tokens: Tokens | None = getattr(self._local, "tokens", None)
        if tokens is None:
            raise RuntimeError(
                f"a layer between which {self.axis.size} ranks divide sequences was called outside of the model's "
                "forward pass, where it is not known which tokens are whose: call the whole model, and checkpoint "
                "activations by gradient_checkpointing_enable() or torch's checkpoint_wrapper"
            )
        return tokens

    @property
    def divided(self) -> bool:
        """Whether the current pass is between the first layer and the last."""
        return getattr(self._local, "tokens", None) is not None

    def divide(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of a replicated tensor ``[rows, tokens, ...]``."""
        sizes = tuple(shares(x.shape[1], self.axis.size))
        self._local.tokens = Tokens(x.shape[0], sizes)
        return self.axis.own_part(x, 1, sizes)

    def gather(self, x: Tensor) -> Tensor:
        """Gather all tokens at the end of the layers."""
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
        """Gather the tokens of all ranks as the input of sharded layers."""
        dim, sizes = self.current.of(x)
        return self.axis.gathered_for_parts(x, dim, sizes)

    def from_parts(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of ``x`` over the ranks (reduce-scatter)."""
        dim, sizes = self.current.of(x)
        return self.axis.summed_part(x, dim, sizes)

    def numbers(self, x: Tensor) -> Tensor:
        """Gather integers of the tokens of all ranks, in the order of :meth:`into_parts`."""
        dim, sizes = self.current.of(x)
        return self.axis.gathered(x.to(torch.float32), dim, sizes).to(x.dtype)


@dataclass(frozen=True)
class Place:
    """The position of a layer.

    Attributes:
        layers: the list that contains it.
        index: index of the layer in the list.
    """

    layers: nn.ModuleList | nn.Sequential
    index: int

    @property
    def first(self) -> bool:
        """Whether no layer of the same stage comes before this one."""
        return self.index == 0 or not _runs(self.layers[self.index - 1])

    @property
    def last(self) -> bool:
        return self.index + 1 == len(self.layers) or not _runs(self.layers[self.index + 1])


def _runs(module: nn.Module) -> bool:
    """Return True if the module is a layer of this rank in the current stage."""
    return isinstance(module, Layer) and not getattr(module, "is_skipped", False)


class Layer(nn.Module):
    """A layer of a list. Between the layers each rank has its own tokens. Activation checkpointing may wrap the layer.

    Attributes:
        _sequences: the sequences in the layers.
        _place: position of the layer.
        _hidden: name of the first argument of the layer.
    """

    _sequences: Sequences
    _place: Place
    _hidden: str

    # Wraps the full call with hooks and activation checkpointing, so that the saved activations are sharded.
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
    """A layer whose input is a rank's own tokens; activation checkpointing may run it again.

    Attributes:
        _sequences: the sequences in the layers.
        _hidden: name of the first argument of the layer.
        _private: the random number stream of the rank.
        _dropouts: the dropouts that use this stream.
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
        _sequences: the sequences in the layers.
    """

    _sequences: Sequences

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = kwargs.get("output_hidden_states")
        if hidden_states is None:
            hidden_states = getattr(getattr(self, "config", None), "output_hidden_states", False)
        if hidden_states:
            raise ValueError(
                f"output_hidden_states={hidden_states} for a {type(self).__name__} whose sequences are divided between "
                "its layers: each rank has a part of those states; leave it False, or sequence=None"
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
    """The module at the beginning of a block of sharded layers.

    Attributes:
        _sequences: the sequences whose tokens are gathered.
        _hidden: the name of the first argument, which is gathered.
        _crossed: replicated arguments by name, with their positions (``-1``: keyword only).
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
    """Returns scores of tokens as its first output, which are gathered in order, since the model may return them."""

    _sequences: Sequences

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, *extra = super().forward(*args, **kwargs)
        tokens, axis = self._sequences.current, self._sequences.axis
        by_row = logits.view(tokens.rows, tokens.sizes[axis.rank], logits.shape[-1])
        return (axis.gathered(by_row, 1, tokens.sizes).flatten(0, 1), *extra)


def _changed(
    change: Callable[[Tensor], Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with one of them, by name or position, replaced."""
    if name in kwargs:
        return args, kwargs | {name: change(kwargs[name])}
    return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs


def hidden_name(module: nn.Module) -> str:
    """Return the name of a module's first argument."""
    return next(iter(inspect.signature(module.forward).parameters))


def inside(layer: nn.Module) -> nn.Module:
    """Return the layer inside of torch's ``checkpoint_wrapper``, or the layer itself if it is not wrapped."""
    own = getattr(layer, "_checkpoint_wrapped_module", None)
    return inside(own) if isinstance(own, nn.Module) else layer


def lists_of_layers(
    model: nn.Module, attends: Callable[[nn.Module], bool]
) -> list[tuple[nn.Module, nn.ModuleList | nn.Sequential]]:
    """Return the innermost lists in which each module contains sharded attention, each with its parent module.

    Args:
        model: any model.
        attends: returns True if a module's rules shard attention.
    """
    holding = {id(parent) for parent in model.modules() if any(attends(module) for module in parent.modules())}

    def fits(module: nn.Module) -> bool:
        return (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len(module) > 0
            and all(id(each) in holding for each in module)
        )

    lists = []
    for parent in model.modules():
        for module in parent.children():
            inner = (each for each in module.modules() if each is not module)
            if fits(module) and not any(fits(each) for each in inner):
                lists.append((parent, module))
    return lists  # type: ignore[return-value]
