"""Save and load models and optimizers separately, in files that other libraries read. A Booster uses this module.

To save, rank 0 writes a format from all ranks' tensors: it requests one block at a time from the other ranks, which
answer until it is done. To load, every rank reads the ranges that it needs from any format.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from shardwise.core.base import tree
from shardwise.core.checkpoint.async_save import AsyncSaver, HostSnapshot
from shardwise.core.checkpoint.formats.lazy_tensors import BLOCK_BYTES, LazySource, entries_of, with_names
from shardwise.core.checkpoint.formats.registry import detect_format, open_checkpoint
from shardwise.core.checkpoint.load import load_into, opening, read_buffers_and_extra_state
from shardwise.core.checkpoint.load_plan import Fit, LoadPlan
from shardwise.core.checkpoint.native_format import PieceLayout
from shardwise.core.checkpoint.plain_values import Options
from shardwise.core.checkpoint.save import agree, describe_optimizers, merge_optimizers, own_state, pieces_of
from shardwise.core.checkpoint.source import CheckpointError, CheckpointSource, TensorInfo, describe, dtype_name
from shardwise.core.checkpoint.training_run import LocalState, Ranks, Run
from shardwise.core.engine.checkpoint_state import Fragment, FragmentPlan
from shardwise.core.parallel.tensor.stored_order import StoredCut, read_logical

Write = Callable[[CheckpointSource], object]
Part = Literal["model", "optimizer"]
AS_IT_IS = Fit()


class PortableFiles:
    """Save and load models and optimizers. Every method is collective."""

    def __init__(self) -> None:
        self._savers: dict[str, AsyncSaver] = {}
        self._ranks: Ranks | None = None

    @property
    def _world(self) -> Ranks:
        if self._ranks is None or self._ranks.outdated:
            self._ranks = Ranks(own=False)
        return self._ranks

    def save_model(self, run: Run, write: Write, what: str, use_async: bool = False) -> None:
        """Call ``write`` on rank 0 with the model of ``run``.

        Args:
            run: the run to save.
            write: writes a source completely, or raises and leaves nothing.
            what: completes "rank 0 could not ...", such as "save the model to x".
            use_async: copy to host memory and return; a thread writes. An unfinished save of a model is waited for
                first.

        Raises:
            CheckpointError, ValueError: a rank or an earlier asynchronous save failed (raised on every rank).
        """
        self._save("model", run, lambda: LocalTensors.of_model(run), write, what, use_async)

    def save_optimizer(self, run: Run, index: int, write: Write, what: str, use_async: bool = False) -> None:
        """Save optimizer ``index`` of ``run``, which is number 0 of the source."""
        self._save("optimizer", run, lambda: LocalTensors.of_optimizer(run, index), write, what, use_async)

    def _save(
        self, kind: Part, run: Run, prepare: Callable[[], LocalTensors], write: Write, what: str, use_async: bool
    ) -> None:
        saver = self._savers.setdefault(kind, AsyncSaver())

        def copy(image: HostSnapshot) -> LocalTensors:
            portion = prepare()
            portion.snapshot(lambda fragments, values: _copy(image, fragments, values))
            return portion

        with run.doing(_doing(what)):
            saver.wait_for_saves()
            run.settle()
            # The run's own group synchronizes the ranks before the program's group is used, or a new one is created.
            run.gather(None)
            if use_async:
                pin = run.device.type == "cuda"
                saver.start(pin, copy, lambda ranks, copied: stream(ranks, copied, write, what))
            else:
                stream(self._world, prepare, write, what)

    def load_model(self, run: Run, path: str, strict: bool, fit: Fit = AS_IT_IS) -> LoadPlan:
        """Load weights, buffers and extra state from any format. Collective.

        Raises:
            ValueError: names (``strict``) or shapes do not fit; all are listed and nothing was changed.
            FileNotFoundError: there is no checkpoint.
            CheckpointError: the file cannot be read (raised on every rank).
        """
        return self._load(run, path, "model", strict, fit)

    def load_optimizer(self, run: Run, path: str, strict: bool = True, fit: Fit = AS_IT_IS) -> LoadPlan:
        """Load state, groups and loss scale of the run's optimizer. Collective. Raises as :meth:`load_model`."""
        return self._load(run, path, "optimizer", strict, fit)

    def _load(self, run: Run, path: str, part: Part, strict: bool, fit: Fit) -> LoadPlan:
        def look() -> tuple[LoadPlan, dict[str, Any], Options | None]:
            local_state = run.local_state()
            source = _of_part(fit.apply(open_it(), local_state), local_state, part, path, strict)
            match = LoadPlan(source, local_state, strict, part)
            if part == "model":
                return match, read_buffers_and_extra_state(run, match), None
            return match, {}, Options(run, match)

        what = f"load the {part} from {path}"
        with run.doing(_doing(what)):
            self.wait_for_saves()
            run.settle()
            with opening(run, path, lambda: open_checkpoint(path, detect_format(path, part))) as open_it:
                (match, values, options), _ = agree(run.gather, what, look, share=False)

                def apply() -> None:
                    if options is None:
                        match.local_state.load_buffers_and_extra(values)
                    else:
                        options.apply()

                load_into(run, match, f"the {part} from {path}", apply)
        return match

    def on_rank_zero(self, run: Run, action: Callable[[], object], what: str) -> None:
        """Call ``action`` on rank 0. Every rank raises its error. Collective.

        Raises:
            CheckpointError, ValueError: errors of ``action``.
        """
        self.everywhere(run, action if run.rank == 0 else lambda: None, what)

    def everywhere(self, run: Run, action: Callable[[], Any], what: str) -> Any:
        """Call ``action`` on every rank. Every rank raises if a rank fails. Collective."""
        with run.doing(_doing(what)):
            return agree(run.gather, what, action, share=False)[0]

    @property
    def saving(self) -> bool:
        """Return True if an asynchronous save is still being written."""
        return any(saver.running for saver in self._savers.values())

    def wait_for_saves(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: an asynchronous save failed.
        """
        self._each(AsyncSaver.wait_for_saves)

    def close(self) -> None:
        """Wait for saves, and release memory and communicators. Raises as :meth:`wait_for_saves` does."""
        self._each(AsyncSaver.close)

    def _each(self, action: Callable[[AsyncSaver], None]) -> None:
        failures = []
        for kind in sorted(self._savers):
            try:
                action(self._savers[kind])
            except CheckpointError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _doing(what: str) -> str:
    """Turn "save the model to x" into "saving the model to x", for :meth:`Run.doing`."""
    verb, _, object_ = what.partition(" ")
    return f"{verb.removesuffix('e')}ing {object_}"


def _copy(image: HostSnapshot, fragments: Sequence[Fragment], values: Any) -> list[torch.Tensor]:
    copied = image.take(PieceLayout(fragments), values)
    return [torch.from_numpy(data).view(each.dtype) for data, each in zip(copied, fragments, strict=True)]


def _of_part(
    source: CheckpointSource, local_state: LocalState, part: Part, path: str, strict: bool
) -> CheckpointSource:
    """Return ``source`` if it has that part, with names in place of an optimizer's numbers.

    Raises:
        CheckpointError: the checkpoint does not have that part.
        ValueError: the optimizer has other groups, which is always an error without names.
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
    ours = local_state.group_names(local_state.optimizers[0])
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
        wrong = _other_shapes(saved[0]["groups"], ours if numbered else theirs, local_state)
    if wrong:
        listed = "\n  ".join(wrong)
        raise ValueError(f"the checkpoint does not fit the optimizer, nothing was loaded:\n  {listed}")
    if not numbered:
        return source
    # Numbers follow the order of the groups, as in torch.
    pairs = (zip(their, our, strict=True) for their, our in zip(theirs, ours, strict=True))
    return _optimizer_alone(with_names(source, {0: {name: own for group in pairs for name, own in group}}))


def _other_shapes(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], local_state: LocalState
) -> list[str]:
    """Return parameters that had another shape when the optimizer was saved, if the checkpoint has shapes."""
    own = {name: tuple(shape.shape) for name, shape in local_state.model_shapes().items()}
    return [
        f"group {index}, parameter {place}: shape {tuple(shape)} in the checkpoint, {own[name]} in the optimizer"
        for index, (group, named) in enumerate(zip(groups, names, strict=True))
        for place, (shape, name) in enumerate(zip(group.get("shapes", ()), named, strict=False))
        if name in own and tuple(shape) != own[name]
    ]


def _optimizer_alone(source: CheckpointSource) -> CheckpointSource:
    """Return the source without the model, whose aliases do not apply to the optimizer's names."""
    entries = {name: entry for name, entry in entries_of(source).items() if name.startswith("optimizer/0/")}
    return LazySource("renamed", entries, {**source.state(), "aliases": {}})


DONE = -1


Read = Callable[[int, int | None], torch.Tensor]
"""Returns ``numel`` elements of a fragment from ``start`` on, or all elements for ``None``."""


@dataclass
class LocalTensors:
    """The tensors that one rank contributes to a save.

    Attributes:
        fragments: fragments of this rank.
        reads: functions that read their values, in the same order.
        close: releases what ``reads`` use.
        post: JSON for rank 0.
        state: returns on rank 0 the JSON state from all ranks' ``post``.
    """

    fragments: list[Fragment]
    reads: list[Read]
    close: Callable[[], None]
    post: dict[str, Any]
    state: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

    @classmethod
    def of_model(cls, run: Run) -> LocalTensors:
        """Return the weights of a run, and the buffers and extra state that this rank owns.

        Raises:
            TypeError: extra state of other types than numbers, strings, None, tensors and containers of them.
        """
        local_state = run.local_state()
        plan = local_state.plan(BLOCK_BYTES, shared=False)
        tensors: dict[str, torch.Tensor] = {}
        values = {name: value for name, value in local_state.extra().items() if local_state.owns(name)}
        extra = {name: tree.encode(value, tensors, f"extra/{name}") for name, value in values.items()}
        own = {f"model/{name}": value for name, value in local_state.buffers().items() if local_state.owns(name)}
        own |= {f"state/{name}": value for name, value in tensors.items()}
        shapes = {
            f"model/{name}": [list(s.shape), dtype_name(s.dtype)] for name, s in local_state.model_shapes().items()
        }
        shapes |= {name: [list(value.shape), dtype_name(value.dtype)] for name, value in own.items()}
        aliases = local_state.aliases()

        def state(posts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            merged = {name: value for each in posts for name, value in each["extra"].items()}
            return {"aliases": aliases} | ({"extra": merged} if merged else {})

        post = {"shapes": shapes if run.rank == 0 else {}, "extra": extra}
        local = cls(*_renamed(plan, "model/", "model/"), post, state)
        for fragment, value in pieces_of(own, BLOCK_BYTES):
            local.fragments.append(fragment)
            local.reads.append(partial(_slice, value))
        return local

    @classmethod
    def of_optimizer(cls, run: Run, index: int) -> LocalTensors:
        """Return the state, groups and loss scale of one optimizer, which becomes number 0.

        Raises:
            TypeError, ValueError: state that a checkpoint cannot hold.
        """
        local_state, trainer = run.local_state(), run.optimizers[index]
        plan = local_state.plan(BLOCK_BYTES, shared=False)
        described, scaler = describe_optimizers(local_state, [trainer]), trainer.scaler
        shapes = {name: list(shape.shape) for name, shape in local_state.model_shapes().items()}
        for group in described[0]["groups"]:
            group["shapes"] = [shapes[name] for name in group["params"]]  # parameters without state have no other shape

        def state(posts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            saved = {"optimizers": merge_optimizers(described, posts), "aliases": local_state.aliases()}
            return saved | ({} if scale is None else {"scaler": scale})

        scale = None if scaler is None else scaler.state_dict()
        local = _renamed(plan, f"optimizer/{trainer.index}/", "optimizer/0/")
        return cls(*local, own_state(local_state, [trainer]), state)

    def snapshot(self, copy: Callable[[Sequence[Fragment], Any], Sequence[torch.Tensor]]) -> None:
        """Read all values now into the tensors that ``copy(fragments, values)`` returns."""
        try:
            copied = copy(self.fragments, (read(0, None) for read in self.reads))
        finally:
            self.close()
        self.reads, self.close = [partial(_slice, value) for value in copied], lambda: None


def _renamed(plan: FragmentPlan, prefix: str, new: str) -> tuple[list[Fragment], list[Read], Callable[[], None]]:
    """Return the fragments whose names begin with ``prefix``, which ``new`` replaces, functions that read them, and one
    that ends the reading."""
    chosen = [(index, each) for index, each in enumerate(plan.fragments) if each.name.startswith(prefix)]
    fragments = [replace(each, name=new + each.name.removeprefix(prefix)) for _, each in chosen]
    return fragments, [partial(plan.read, index) for index, _ in chosen], plan.close


def _slice(value: torch.Tensor, start: int, numel: int | None) -> torch.Tensor:
    return value[start:] if numel is None else value[start : start + numel]


def stream(ranks: Ranks, prepare: Callable[[], LocalTensors], write: Write, what: str) -> None:
    """Call ``write`` on rank 0 with a source of all ranks' tensors. Collective.

    Args:
        ranks: all ranks.
        prepare: returns this rank's tensors.
        write: writes a source completely, or raises and leaves nothing.
        what: completes "rank 0 could not ...".

    Raises:
        CheckpointError, ValueError: a rank failed (raised on every rank); nothing was written.
    """
    portions: list[LocalTensors] = []

    def offer() -> dict[str, Any]:
        portions.append(prepare())
        return {"map": _listed(portions[0].fragments), **portions[0].post}

    try:
        _, posts = agree(ranks.gather, what, offer)
        portion = portions[0]
        if ranks.rank == 0:
            agree(ranks.gather, what, lambda: _serve_writer(ranks, portion, posts, write), share=False)
        else:
            agree(ranks.gather, what, lambda: _answer(ranks, portion), share=False)
    finally:
        for each in portions:
            each.close()


def _listed(fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Return by tensor: shape, dtype, ``[number, start, numel]`` of each fragment, and its cut."""
    listed: dict[str, Any] = {}
    for number, each in enumerate(fragments):
        cut = None if each.cut is None else each.cut.fields()
        entry = listed.setdefault(each.name, [list(each.shape), dtype_name(each.dtype), [], cut])
        entry[2].append([number, each.start, each.numel])
    return listed


_WRITING = threading.Lock()
"""Saves of a model and of its optimizer may replace the same directory; only rank 0 acquires it."""


def _serve_writer(ranks: Ranks, portion: LocalTensors, posts: Sequence[Mapping[str, Any]], write: Write) -> None:
    try:
        with _WRITING:
            write(_Gathered(ranks, portion, posts))
    finally:
        for rank in range(1, ranks.size):
            ranks.send(torch.tensor([DONE, 0, 0], device="cpu"), rank)


def _answer(ranks: Ranks, portion: LocalTensors) -> None:
    """Send rank 0 the ranges that it asks for until it is done; report an error to it, and raise it at the end."""
    failure: Exception | None = None
    while True:
        index, start, numel = ranks.receive(torch.empty(3, dtype=torch.int64, device="cpu"), 0).tolist()
        if index == DONE:
            break
        good = 1
        try:
            value = portion.reads[index](start, numel).view(torch.uint8)
        except Exception as error:
            good, failure = 0, error
            value = torch.frombuffer(bytearray(describe(error).encode()), dtype=torch.uint8)
        ranks.send(torch.tensor([good, value.numel()], device="cpu"), 0)
        ranks.send(value, 0)
    if failure is not None:
        raise failure


class _Gathered:
    """A :class:`CheckpointSource` on rank 0."""

    def __init__(self, ranks: Ranks, portion: LocalTensors, posts: Sequence[Mapping[str, Any]]) -> None:
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
        self._infos = {n: TensorInfo(tuple(shape), getattr(torch, dtype)) for n, (shape, dtype) in shapes.items()}
        for pieces in self._pieces.values():
            pieces.sort()

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def state(self) -> dict[str, Any]:
        return self._state

    def close(self) -> None:
        """Do nothing, because no file is open."""

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        info = self._infos[name]
        if start < 0 or numel < 0 or start + numel > info.numel:
            raise ValueError(
                f"elements {start} to {start + numel} of {name}, which has {info.numel}; read a range inside it"
            )
        if name not in self._cuts:
            return self._read_stored(name, start, numel)
        out = torch.empty(numel, dtype=info.dtype, device="cpu")

        def read(start: int, out: torch.Tensor) -> None:
            out.copy_(self._read_stored(name, start, out.numel()))

        read_logical(read, info.shape, self._cuts[name], start, out)
        return out

    def _read_stored(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Return elements in stored order."""
        info = self._infos[name]
        pieces = self._pieces.get(name, [])
        at, index = start, max(bisect.bisect_right(pieces, start, key=lambda piece: piece[0]) - 1, 0)
        out = torch.empty(0, dtype=info.dtype, device="cpu")
        while at < start + numel:
            if index == len(pieces) or not pieces[index][0] <= at < pieces[index][0] + pieces[index][1]:
                raise CheckpointError(f"no rank holds element {at} of {name} {info.shape}; report this")
            first, count, rank, number = pieces[index]
            stop = min(first + count, start + numel)
            if rank != 0 and stop - at == numel:
                return self._part(rank, number, at - first, numel, info.dtype)
            if at == start:
                out = torch.empty(numel, dtype=info.dtype, device="cpu")
            out[at - start : stop - start] = self._part(rank, number, at - first, stop - at, info.dtype)
            at, index = stop, index + 1
        return out

    def _part(self, rank: int, number: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if rank == 0:
            return self._portion.reads[number](start, numel)
        self._ranks.send(torch.tensor([number, start, numel], device="cpu"), rank)
        good, nbytes = self._ranks.receive(torch.empty(2, dtype=torch.int64, device="cpu"), rank).tolist()
        data = self._ranks.receive(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), rank)
        if not good:
            raise CheckpointError(f"rank {rank} could not read its part: {data.numpy().tobytes().decode()}")
        return data.view(dtype)
