"""All ranks' tensors as one source on rank 0, so that every writer of a format can save a model that no rank holds.

The other ranks answer reads until rank 0 is done. What it holds beyond its own shards is what a writer asks for at a
time: a block of a tensor, or one output shard where a format needs it whole.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.checkpoint import tree
from shardwise.core.checkpoint.contents import describe_optimizers, merge_optimizers, own_state, pieces_of
from shardwise.core.checkpoint.files import CheckpointError, describe
from shardwise.core.checkpoint.formats.lazy import BLOCK_BYTES
from shardwise.core.checkpoint.ranks import Ranks
from shardwise.core.checkpoint.run import Reader, Run
from shardwise.core.checkpoint.source import CheckpointSource, TensorFact
from shardwise.core.checkpoint.write import agree
from shardwise.core.engine.fragments import Fragment
from shardwise.core.parallel.tensor.order import StoredCut, read_logical

__all__ = ["Portion", "stream"]

DONE = -1


@dataclass
class Portion:
    """What one rank gives to a save, and how it is read.

    Attributes:
        fragments: of this rank.
        reader: their values.
        post: JSON for rank 0.
        state: on rank 0 makes the JSON state from all ranks' ``post``.
    """

    fragments: list[Fragment]
    reader: Reader
    post: dict[str, Any]
    state: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

    @classmethod
    def of_model(cls, run: Run) -> Portion:
        """The weights of a run; buffers and extra state are of the first rank that has them.

        Raises:
            TypeError: extra state that is neither numbers, strings, None, tensors nor containers of them.
        """
        held = run.held()
        plan = held.plan(BLOCK_BYTES, shared=False)
        tensors: dict[str, torch.Tensor] = {}
        given = {name: value for name, value in held.extra().items() if held.gives(name)}
        extra = {name: tree.encode(value, tensors, f"extra/{name}") for name, value in given.items()}
        own = {f"model/{name}": value for name, value in held.buffers().items() if held.gives(name)}
        own |= {f"state/{name}": value for name, value in tensors.items()}
        shapes = {f"model/{name}": [list(s.shape), _text(s.dtype)] for name, s in held.model_shapes().items()}
        shapes |= {name: [list(value.shape), _text(value.dtype)] for name, value in own.items()}
        aliases = held.aliases()

        def state(posts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            found = {name: value for each in posts for name, value in each["extra"].items()}
            return {"aliases": aliases} | ({"extra": found} if found else {})

        reader = _Chosen(plan.fragments, plan.reader(), "model/", pieces_of(own, BLOCK_BYTES))
        post = {"shapes": shapes if run.rank == 0 else {}, "extra": extra}
        return cls(reader.fragments, reader, post, state)

    @classmethod
    def of_optimizer(cls, run: Run, index: int) -> Portion:
        """The state, groups and loss scale of one optimizer, which becomes number 0.

        Raises:
            TypeError, ValueError: state that a checkpoint cannot hold.
        """
        held, trainer = run.held(), run.optimizers[index]
        plan = held.plan(BLOCK_BYTES, shared=False)
        reader = _Chosen(plan.fragments, plan.reader(), f"optimizer/{trainer.index}/", [], "optimizer/0/")
        described, scaler = describe_optimizers(held, [trainer]), trainer.scaler
        shapes = {name: list(shape.shape) for name, shape in held.model_shapes().items()}
        for group in described[0]["groups"]:
            group["shapes"] = [shapes[name] for name in group["params"]]  # a parameter without state has no other

        def state(posts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            saved = {"optimizers": merge_optimizers(described, posts), "aliases": held.aliases()}
            return saved | ({} if scale is None else {"scaler": scale})

        scale = None if scaler is None else scaler.state_dict()
        return cls(reader.fragments, reader, own_state(held, [trainer]), state)

    def snapshot(self, copy: Callable[[Sequence[Fragment], Any], Sequence[torch.Tensor]]) -> None:
        """Read everything now, into the tensors that ``copy(fragments, values)`` returns."""
        try:
            values = (self.reader.read(index) for index in range(len(self.fragments)))
            copied = copy(self.fragments, values)
        finally:
            self.reader.close()
        self.reader = _InMemory(copied)


class _Chosen:
    """The fragments of a reader whose names begin in one way (perhaps renamed), and further tensors."""

    def __init__(
        self,
        fragments: Sequence[Fragment],
        reader: Reader,
        start: str,
        more: Sequence[tuple[Fragment, torch.Tensor]],
        renamed: str | None = None,
    ) -> None:
        chosen = [index for index, fragment in enumerate(fragments) if fragment.name.startswith(start)]
        begin = start if renamed is None else renamed
        self._reader, self._chosen, self._more = reader, chosen, more
        named = [(begin + fragments[index].name.removeprefix(start), fragments[index]) for index in chosen]
        self.fragments = [replace(fragment, name=name) for name, fragment in named]
        self.fragments += [fragment for fragment, _ in more]

    def read(self, index: int, start: int = 0, numel: int | None = None) -> torch.Tensor:
        if index < len(self._chosen):
            return self._reader.read(self._chosen[index], start, numel)
        value = self._more[index - len(self._chosen)][1]
        return value[start:] if numel is None else value[start : start + numel]

    def close(self) -> None:
        self._reader.close()


class _InMemory:
    """Values that were copied."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = values

    def read(self, index: int, start: int = 0, numel: int | None = None) -> torch.Tensor:
        value = self._values[index]
        return value[start:] if numel is None else value[start : start + numel]

    def close(self) -> None:
        self._values = ()


def stream(
    ranks: Ranks, prepare: Callable[[], Portion], write: Callable[[CheckpointSource], object], what: str
) -> None:
    """Rank 0 calls ``write`` with a source of all ranks' tensors. Collective.

    Args:
        ranks: all of them.
        prepare: what this rank gives.
        write: must leave nothing half-done where it raises.
        what: completes "rank 0 could not ...".

    Raises:
        CheckpointError, ValueError: on every rank, when any failed; nothing was written.
    """
    portions: list[Portion] = []

    def offer() -> dict[str, Any]:
        portions.append(prepare())
        return {"map": _listed(portions[0].fragments), **portions[0].post}

    try:
        _, posts = agree(ranks.gather, ranks.rank, what, offer)
        portion = portions[0]
        if ranks.rank == 0:
            agree(ranks.gather, 0, what, lambda: _serve_writer(ranks, portion, posts, write), share=False)
        else:
            agree(ranks.gather, ranks.rank, what, lambda: _answer(ranks, portion), share=False)
    finally:
        for each in portions:
            each.reader.close()


def _listed(fragments: Sequence[Fragment]) -> dict[str, Any]:
    """By tensor: shape, dtype, ``[number, start, numel]`` of each fragment, and how it is cut."""
    found: dict[str, Any] = {}
    for number, each in enumerate(fragments):
        cut = None if each.cut is None else each.cut.fields()
        entry = found.setdefault(each.name, [list(each.shape), _text(each.dtype), [], cut])
        entry[2].append([number, each.start, each.numel])
    return found


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_WRITING = threading.Lock()
"""Two saves, of a model and of its optimizer, may replace one directory; only rank 0 takes it."""


def _serve_writer(
    ranks: Ranks,
    portion: Portion,
    posts: Sequence[Mapping[str, Any]],
    write: Callable[[CheckpointSource], object],
) -> None:
    try:
        with _WRITING:
            write(_Gathered(ranks, portion, posts))
    finally:
        for rank in range(1, ranks.size):
            ranks.send(torch.tensor([DONE, 0, 0], device="cpu"), rank)


def _answer(ranks: Ranks, portion: Portion) -> None:
    """Give rank 0 what it asks for until it is done; a failure is told to it, and raised at the end."""
    failure: Exception | None = None
    while True:
        index, start, numel = ranks.receive(torch.empty(3, dtype=torch.int64, device="cpu"), 0).tolist()
        if index == DONE:
            break
        good = 1
        try:
            value = portion.reader.read(index, start, numel).view(torch.uint8)
        except Exception as error:
            good, failure = 0, error
            value = torch.frombuffer(bytearray(describe(error).encode()), dtype=torch.uint8)
        ranks.send(torch.tensor([good, value.numel()], device="cpu"), 0)
        ranks.send(value, 0)
    if failure is not None:
        raise failure


class _Gathered:
    """A :class:`CheckpointSource` on rank 0."""

    def __init__(self, ranks: Ranks, portion: Portion, posts: Sequence[Mapping[str, Any]]) -> None:
        self._ranks, self._portion = ranks, portion
        self._state = portion.state(posts)
        shapes = dict(posts[0].get("shapes", {}))
        self._pieces: dict[str, list[tuple[int, int, int, int]]] = {}
        self._cuts: dict[str, StoredCut] = {}
        for rank, post in enumerate(posts):
            for name, (shape, dtype, pieces, cut) in post["map"].items():
                shapes.setdefault(name, [shape, dtype])
                if cut is not None:
                    self._cuts[name] = StoredCut.read(cut)
                self._pieces.setdefault(name, []).extend((start, n, rank, number) for number, start, n in pieces)
        self._facts = {n: TensorFact(tuple(shape), getattr(torch, dtype)) for n, (shape, dtype) in shapes.items()}
        for pieces in self._pieces.values():
            pieces.sort()

    def tensors(self) -> Mapping[str, TensorFact]:
        return self._facts

    def state(self) -> dict[str, Any]:
        return self._state

    def close(self) -> None:
        """Nothing is open."""

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        fact = self._facts[name]
        if start < 0 or numel < 0 or start + numel > fact.numel:
            raise ValueError(f"elements {start} to {start + numel} of {name}, which has {fact.numel}: ask for less")
        if name not in self._cuts:
            return self._read_stored(name, start, numel)
        out = torch.empty(numel, dtype=fact.dtype, device="cpu")

        def read(start: int, out: torch.Tensor) -> None:
            out.copy_(self._read_stored(name, start, out.numel()))

        read_logical(read, fact.shape, self._cuts[name], start, out)
        return out

    def _read_stored(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements in the order in which the ranks give them."""
        fact = self._facts[name]
        pieces = self._pieces.get(name, [])
        at, index = start, max(bisect.bisect_right(pieces, start, key=lambda piece: piece[0]) - 1, 0)
        out = torch.empty(0, dtype=fact.dtype, device="cpu")
        while at < start + numel:
            if index == len(pieces) or not pieces[index][0] <= at < pieces[index][0] + pieces[index][1]:
                raise CheckpointError(f"no rank holds element {at} of {name} {fact.shape}; report this")
            first, count, rank, number = pieces[index]
            stop = min(first + count, start + numel)
            if rank != 0 and stop - at == numel:
                return self._part(rank, number, at - first, numel, fact.dtype)
            if at == start:
                out = torch.empty(numel, dtype=fact.dtype, device="cpu")
            out[at - start : stop - start] = self._part(rank, number, at - first, stop - at, fact.dtype)
            at, index = stop, index + 1
        return out

    def _part(self, rank: int, number: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if rank == 0:
            return self._portion.reader.read(number, start, numel)
        self._ranks.send(torch.tensor([number, start, numel], device="cpu"), rank)
        good, nbytes = self._ranks.receive(torch.empty(2, dtype=torch.int64, device="cpu"), rank).tolist()
        data = self._ranks.receive(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), rank)
        if not good:
            raise CheckpointError(f"rank {rank} could not give its part: {data.numpy().tobytes().decode()}")
        return data.view(dtype)
