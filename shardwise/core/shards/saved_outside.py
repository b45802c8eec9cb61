"""What a loss that was made outside of the model's forward pass keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

__all__ = ["end_graph_at", "saved_outside"]

KEY = "shardwise: a model's forward pass ended here"
MOST_NODES = 1 << 14
"""A graph that is larger is looked at in part."""


def end_graph_at(output: torch.Tensor) -> None:
    """``output`` is of a forward pass that was measured: :func:`saved_outside` looks no further."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[KEY] = True


def saved_outside(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that the graph of ``loss`` keeps, up to the outputs of measured forward passes.

    Nothing is unpacked: what hooks on saved tensors have made something else of is left out.
    """
    first: Any = loss.grad_fn
    due, seen = [first], {first}
    while due and len(seen) < MOST_NODES:
        node = due.pop()
        if node is None or KEY in node.metadata:
            continue
        kind: Any = type(node)
        for name in _saved_names(kind):
            yield from _tensors(node, name)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                due.append(following)


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    """Attributes of a kind of node through which torch shows what it has saved, as it was packed."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _tensors(node: Any, name: str) -> Iterator[torch.Tensor]:
    try:
        saved = getattr(node, name)
        found = [each.data for each in (saved if isinstance(saved, list | tuple) else (saved,)) if each is not None]
    except (RuntimeError, AttributeError):  # the graph was freed, which its pass will say
        return
    yield from (each for each in found if isinstance(each, torch.Tensor))
