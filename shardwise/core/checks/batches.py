"""Checks that the ranks of a tensor-parallel or sequence-parallel group have the same batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.core.base.device import Later, runs_ahead
from shardwise.core.base.fingerprint import WORD, word_of
from shardwise.core.comm import Group, ranks_text

TEXT_LENGTH = 400


def outline(batch: Any) -> str:
    """Describe a batch: names, shapes and dtypes of its tensors, and its numbers."""
    return ", ".join(f"{name}: {_outlined(value)}" for name, value in _leaves(batch))


def _outlined(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _leaves(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _leaves(batch[key], f"{name}.{key}" if name else str(key))
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{name}[{index}]")
    else:
        yield name, batch


def fingerprint(batch: Any) -> Tensor:
    """Return a fingerprint of the integers in a batch, on their device. On a GPU nothing is waited for.

    Returns:
        A 0-D int64 tensor; ranks exchange its value modulo :data:`WORD`, which is exact in float64.
    """
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for index, (_, value) in enumerate(_leaves(batch)):
        if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex() and value.numel():
            word = word_of(value, start=index + 1)
            total = total.to(word.device) * 3 + word
    return total


class SameBatches:
    """Fingerprints the batches of the forward passes with gradients between two steps."""

    def __init__(self) -> None:
        self._outlines = 0
        self._values: Tensor | None = None
        self._sent: Later | None = None
        """A copy on its way to the host. Reading it on the device would wait for later passes."""
        self._last = ""

    def note(self, batch: Any, use: str = "") -> None:
        """Add the batch of a forward pass, with a text on its use."""
        self._last = outline(batch) + use
        self._outlines = zlib.crc32(self._last.encode(), self._outlines)
        word = fingerprint(batch)
        self._values = word if self._values is None else self._values.to(word.device) * 3 + word
        self._sent = Later(self._values) if runs_ahead(word.device) else None

    def forget(self) -> None:
        """Start again, because gradients were used or dropped."""
        self._outlines, self._values, self._sent = 0, None, None

    def words(self, waits: bool = True) -> tuple[float, float]:
        """Return the fingerprints. On a GPU this waits for work that was queued before the last forward pass; without
        ``waits`` the second one is 0 there."""
        if self._values is None or (self._sent is not None and not waits):
            return float(self._outlines), 0.0
        value = self._values.item() if self._sent is None else self._sent.value()
        return float(self._outlines), float(int(value) % WORD)

    def explain(self, group: Group) -> None:
        """Compare the batches in ``group``. Collective.

        Raises:
            ValueError: On every rank, if they differ; shows the last batch of each.
        """
        posts = group.exchange_object([list(self.words()), self._last[:TEXT_LENGTH]], "batches that differ")
        if any(words != posts[0][0] for words, _ in posts):
            self.forget()
            raise ValueError(differing([tuple(words) for words, _ in posts], [text for _, text in posts]))


def differing(words: list[tuple[float, ...]], outlines: list[str]) -> str:
    """Return the message of the error about batches that differ."""
    same: dict[tuple[float, ...], list[int]] = {}
    for rank, each in enumerate(words):
        same.setdefault(each, []).append(rank)
    text = "; ".join(f"{ranks_text(ranks)}: {outlines[ranks[0]]}" for ranks in same.values())
    values = " (of the same shapes, with other values)" if len({*outlines}) == 1 else ""
    return (
        f"the {len(words)} ranks that hold one model were given {len(same)} different batches{values}: {text}. Give "
        "all of them the same, as the plugin's prepare_dataloader does, and call zero_grad() before going on"
    )
