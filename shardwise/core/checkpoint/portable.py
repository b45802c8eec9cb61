"""Models and optimizers alone, in files that other libraries read: what a Booster saves and loads.

Every save is a view of the same stream as a whole checkpoint: rank 0 writes a format from all ranks' tensors
(:mod:`shardwise.core.checkpoint.portable`), and every rank loads the ranges it needs from any format.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from shardwise.core.base import tree
from shardwise.core.checkpoint.fitting import Fit
from shardwise.core.checkpoint.format import PieceLayout
from shardwise.core.checkpoint.formats.detect import detect_format, open_checkpoint
from shardwise.core.checkpoint.formats.lazy import BLOCK_BYTES, LazySource, entries_of, with_names
from shardwise.core.checkpoint.match import Match
from shardwise.core.checkpoint.options import Options
from shardwise.core.checkpoint.restore import opening, put_back, read_others
from shardwise.core.checkpoint.run import Holding, Ranks, Run
from shardwise.core.checkpoint.snapshot import HostImage, Lane
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource, TensorFact, describe
from shardwise.core.checkpoint.write import agree, describe_optimizers, merge_optimizers, own_state, pieces_of
from shardwise.core.engine.fragments import Fragment
from shardwise.core.parallel.tensor.order import StoredCut, read_logical

__all__ = ["PortableFiles"]

Write = Callable[[CheckpointSource], object]
Part = Literal["model", "optimizer"]
AS_IT_IS = Fit()


class PortableFiles:
    """Saves and loads of one process; every method is collective."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._ranks: Ranks | None = None

    @property
    def _world(self) -> Ranks:
        if self._ranks is None or self._ranks.outdated:
            self._ranks = Ranks(own=False)
        return self._ranks

    def save_model(self, run: Run, write: Write, what: str, use_async: bool = False) -> None:
        """Rank 0 calls ``write`` with the model of ``run``.

        Args:
            run: whose.
            write: writes a source; it leaves nothing half-done where it raises.
            what: completes "rank 0 could not ...", such as "save the model to x".
            use_async: copy to host memory and return; a thread writes. A save of a model that still runs is waited for
                first.

        Raises:
            CheckpointError, ValueError: on every rank, when any could not; or an asynchronous save before it failed.
        """
        self._save("model", run, lambda: Portion.of_model(run), write, what, use_async)

    def save_optimizer(self, run: Run, index: int, write: Write, what: str, use_async: bool = False) -> None:
        """The same with optimizer ``index`` of ``run``, which is number 0 of the source."""
        self._save("optimizer", run, lambda: Portion.of_optimizer(run, index), write, what, use_async)

    def _save(
        self, kind: Part, run: Run, prepare: Callable[[], Portion], write: Write, what: str, use_async: bool
    ) -> None:
        lane = self._lanes.setdefault(kind, Lane())

        def copy(image: HostImage) -> Portion:
            portion = prepare()
            portion.snapshot(lambda fragments, values: _copy(image, fragments, values))
            return portion

        with run.doing(_doing(what)):
            lane.wait_for_saves()
            run.settle()
            # The run's ranks meet in a group of its own, before anything is sent over the program's, or one is made.
            run.gather(None)
            if use_async:
                pin = run.device.type == "cuda"
                lane.start(pin, copy, lambda ranks, copied: stream(ranks, copied, write, what))
            else:
                stream(self._world, prepare, write, what)

    def load_model(self, run: Run, path: str, strict: bool, fit: Fit = AS_IT_IS) -> Match:
        """Weights, buffers and extra state from any format. Collective.

        Raises:
            ValueError: names (``strict``) or shapes do not fit; all are listed and nothing was changed.
            FileNotFoundError: nothing is there.
            CheckpointError: it cannot be read, on every rank.
        """
        return self._load(run, path, "model", strict, fit)

    def load_optimizer(self, run: Run, path: str, strict: bool = True, fit: Fit = AS_IT_IS) -> Match:
        """State, groups and loss scale of the run's optimizer from any format. Collective. Raises as load_model."""
        return self._load(run, path, "optimizer", strict, fit)

    def _load(self, run: Run, path: str, part: Part, strict: bool, fit: Fit) -> Match:
        def look() -> tuple[Match, dict[str, Any], Options | None]:
            held = run.held()
            source = _of_part(fit.apply(open_it(), held), held, part, path, strict)
            match = Match(source, held, strict, part)
            if part == "model":
                return match, read_others(run, match), None
            return match, {}, Options(run, match)

        what = f"load the {part} from {path}"
        with run.doing(_doing(what)):
            self.wait_for_saves()
            run.settle()
            with opening(run, path, lambda: open_checkpoint(path, detect_format(path, part))) as open_it:
                (match, others, options), _ = agree(run.gather, run.rank, what, look, share=False)

                def rest() -> None:
                    if options is None:
                        match.held.put_others(others)
                    else:
                        options.put_back()

                put_back(run, match, f"the {part} from {path}", rest)
        return match

    def on_rank_zero(self, run: Run, action: Callable[[], object], what: str) -> None:
        """Rank 0 acts, and every rank of ``run`` raises where that failed. Collective.

        Raises:
            CheckpointError, ValueError: as ``action``.
        """
        self.everywhere(run, action if run.rank == 0 else _nothing, what)

    def everywhere(self, run: Run, action: Callable[[], Any], what: str) -> Any:
        """Every rank of ``run`` acts, and every rank raises where one failed. Collective."""
        with run.doing(_doing(what)):
            return agree(run.gather, run.rank, what, action, share=False)[0]

    @property
    def saving(self) -> bool:
        """Whether an asynchronous save is still being written."""
        return any(lane.running for lane in self._lanes.values())

    def wait_for_saves(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointError: an asynchronous save failed.
        """
        self._each(Lane.wait_for_saves)

    def close(self) -> None:
        """Wait, and give back memory and communicators. Raises as :meth:`wait_for_saves` does."""
        self._each(Lane.close)

    def _each(self, action: Callable[[Lane], None]) -> None:
        failures = []
        for kind in sorted(self._lanes):
            try:
                action(self._lanes[kind])
            except CheckpointError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _nothing() -> None:
    pass


def _doing(what: str) -> str:
    """What completes "could not ..." ("save the model to x") as :meth:`Run.doing` has it ("saving ...")."""
    verb, _, rest = what.partition(" ")
    return f"{verb.removesuffix('e')}ing {rest}"


def _copy(image: HostImage, fragments: Sequence[Fragment], values: Any) -> list[torch.Tensor]:
    copied = image.take(PieceLayout(fragments), values)()
    return [torch.from_numpy(data).view(each.dtype) for data, each in zip(copied, fragments, strict=True)]


def _of_part(source: CheckpointSource, held: Holding, part: Part, path: str, strict: bool) -> CheckpointSource:
    """``source``, if it has that part; an optimizer's numbers made names.

    Raises:
        CheckpointError: it has not.
        ValueError: an optimizer with other groups, which is always an error where there are no names.
    """
    if part == "model":
        if not any(name.startswith("model/") for name in source.tensors()):
            raise CheckpointError(f"{path} holds no model; give what save_model wrote, or another library's model")
        return source
    saved = source.state().get("optimizers", [])
    if not saved:
        raise CheckpointError(f"{path} holds no optimizer; give what save_optimizer wrote")
    if len(saved) > 1:
        raise CheckpointError(f"{path} holds {len(saved)} optimizers; load it with load_checkpoint")
    theirs = [list(group["params"]) for group in saved[0]["groups"]]
    ours = held.group_names(held.optimizers[0])
    numbered = any(name.startswith("#") for names in (*theirs, *ours) for name in names)
    if not strict and not numbered:
        return source
    if len(theirs) != len(ours):
        raise ValueError(
            f"the checkpoint has {len(theirs)} parameter groups and the optimizer {len(ours)}; "
            "build the optimizer with the same groups as when saving"
        )
    wrong = [
        f"group {index}: {len(their)} parameters in the checkpoint, {len(our)} in the optimizer"
        for index, (their, our) in enumerate(zip(theirs, ours, strict=True))
        if len(their) != len(our)
    ]
    if not wrong:
        wrong = _other_shapes(saved[0]["groups"], ours if numbered else theirs, held)
    if wrong:
        listed = "\n  ".join(wrong)
        raise ValueError(f"the checkpoint does not fit the optimizer, nothing was loaded:\n  {listed}")
    if not numbered:
        return source
    # Numbers, in the order of the groups, as torch has it.
    pairs = (zip(their, our, strict=True) for their, our in zip(theirs, ours, strict=True))
    return _optimizer_alone(with_names(source, {0: {name: own for group in pairs for name, own in group}}))


def _other_shapes(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], held: Holding) -> list[str]:
    """Parameters whose shape was another one when the optimizer was saved, where the checkpoint says so."""
    own = {name: tuple(shape.shape) for name, shape in held.model_shapes().items()}
    return [
        f"group {index}, parameter {place}: shape {tuple(shape)} in the checkpoint, {own[name]} in the optimizer"
        for index, (group, named) in enumerate(zip(groups, names, strict=True))
        for place, (shape, name) in enumerate(zip(group.get("shapes", ()), named, strict=False))
        if name in own and tuple(shape) != own[name]
    ]


def _optimizer_alone(source: CheckpointSource) -> CheckpointSource:
    """Without the model, whose other names of tied parameters are not the optimizer's here."""
    entries = {name: entry for name, entry in entries_of(source).items() if name.startswith("optimizer/0/")}
    return LazySource("renamed", entries, {**source.state(), "aliases": {}})


DONE = -1


class Reader(Protocol):
    """See :class:`shardwise.core.engine.fragments.FragmentReader`."""

    def read(self, index: int, start: int = 0, numel: int | None = None) -> torch.Tensor: ...
    def close(self) -> None: ...


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
