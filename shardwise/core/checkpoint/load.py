"""Restore a run: find the checkpoint, check that it fits, and load every value."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.core.base import tree
from shardwise.core.base.validate import names_text
from shardwise.core.checkpoint.directory import scan
from shardwise.core.checkpoint.formats.native import NativeSource
from shardwise.core.checkpoint.formats.registry import detect_format, located, open_checkpoint
from shardwise.core.checkpoint.formats.trainer import kind_of
from shardwise.core.checkpoint.input_checks import check_generators, reading
from shardwise.core.checkpoint.load_plan import Fit, LoadPlan
from shardwise.core.checkpoint.native_format import MANIFEST, digest_of, has_pieces
from shardwise.core.checkpoint.plain_values import Options, restore_generators, spread_generators
from shardwise.core.checkpoint.save import agree, check_seen
from shardwise.core.checkpoint.schedulers import SchedulerLoadPlan, saved_schedulers
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource, StateTensors
from shardwise.core.checkpoint.training_run import Run, as_run

Check = Callable[[Any], None] | None
"""Called on every rank with the user state before anything is changed. All ranks raise an error of one rank."""
LOAD_ANOTHER = "load another checkpoint before going on"
REPLACED = f"after values were replaced ({LOAD_ANOTHER})"
"""Part of the message of an error at that point, which no content of a file should cause."""


@dataclass(frozen=True)
class Restored:
    """The values of a checkpoint that are not tensors of the run.

    Attributes:
        path: the directory of the checkpoint that was loaded.
        tag: its name below the directory given to ``load``.
        step: the step that it was saved with.
        updates: number of optimizer steps.
        user_state: the value passed to ``save``.
        data_position: data position of this rank, or of rank 0 if the checkpoint has fewer ranks.
        data_positions: a position for each data-parallel rank that saved.
        missing: names of the model that the checkpoint does not have (``strict=False``).
        unexpected: names in the checkpoint that the model does not have.
        skipped: newer checkpoints that are damaged.
        resized: a sentence for each parameter that has another number of rows in the checkpoint.
    """

    path: str
    tag: str
    step: int
    updates: int
    user_state: Any
    data_position: Any
    data_positions: tuple[Any, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    resized: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Return the number of data-parallel ranks that saved."""
        return len(self.data_positions)


def restore(
    run: Run, root: str, tag: str | None, strict: bool, lr_schedulers: Sequence[Any], fit: Fit, check: Check = None
) -> Restored | None:
    """See :meth:`shardwise.core.checkpoint.checkpointer.Checkpointer.load`."""
    rank = run.rank
    paths = find_checkpoints(run, root, tag)
    skipped: list[str] = []
    begun: list[str] = []
    for path in paths:
        try:
            return _restore_one(run, path, strict, lr_schedulers, fit, check, skipped, begun)
        except CheckpointDamage as error:
            if tag != "auto":
                raise
            skipped.append(path)
            if rank == 0:
                print(f"checkpoint skipped: {error.problem}", flush=True)
        except (CheckpointError, FileNotFoundError, ValueError) as error:
            if not begun or path in begun:
                raise
            # "nothing was loaded" in its message is only about this checkpoint.
            raise CheckpointError(
                f"{error}\nsome values of {', '.join(begun)} were already loaded ({LOAD_ANOTHER})"
            ) from error
    if not paths and rank == 0:
        with contextlib.suppress(CheckpointError, OSError, ValueError):
            format = detect_format(root)
            print(f"not resumed: {root} holds a checkpoint of format {format}; leave 'auto' out to load it", flush=True)
    if skipped:
        listed = ", ".join(skipped)
        changed = f" (some values of {', '.join(begun)} were already loaded)" if begun else ""
        raise CheckpointDamage(f"every checkpoint in {root} is damaged ({listed}), see the notices above{changed}")
    return None


def _restore_one(
    run: Run,
    path: str,
    strict: bool,
    lr_schedulers: Sequence[Any],
    fit: Fit,
    check: Check,
    skipped: Sequence[str],
    begun: list[str],
) -> Restored:
    """Restore a checkpoint, and append its path to ``begun`` before the first value is replaced."""
    opened: list[CheckpointSource] = []

    def look() -> tuple[LoadPlan, _OtherState]:
        opened.append(open_it())
        local_state = run.local_state()
        match = LoadPlan(fit.apply(opened[0], local_state), local_state, strict)
        # The damaged checkpoint may have left any value in them, because pieces are checked while they are loaded.
        if begun and match.staying:
            raise CheckpointError(
                f"{path} does not replace {names_text(match.staying)}, which a damaged checkpoint changed; load one "
                "by its tag"
            )
        state = _OtherState(run, match, lr_schedulers, strict)
        if check is not None:
            check(state.user_state)
        return match, state

    with opening(run, path, lambda: _open(path)) as open_it:
        (match, state), _ = agree(run.gather, f"load {path}", look, share=False)
        begun.append(path)
        load_into(run, match, path, state.apply)
    head = opened[0].manifest.head if isinstance(opened[0], NativeSource) else None
    return Restored(
        path,
        head.tag if head is not None else os.path.basename(path),
        head.step if head is not None else int(match.state.get("step", 0) or 0),
        int(match.state.get("updates", 0)),
        state.user_state,
        state.positions[run.data_rank if run.data_rank < len(state.positions) else 0],
        tuple(state.positions),
        tuple(match.missing),
        tuple(match.unexpected),
        tuple(skipped),
        tuple(getattr(match.source, "resized", ())),
    )


def _open(path: str) -> CheckpointSource:
    """Open a native checkpoint if there is a manifest, otherwise a checkpoint of another format."""
    return NativeSource(path) if os.path.exists(os.path.join(path, MANIFEST)) else open_checkpoint(path)


def load_into(session: Any, match: LoadPlan, what: str, finish: Callable[[], None]) -> None:
    """Load parameters, masters and optimizer state into a run or a session, then call ``finish``. Collective.

    ``finish`` loads the values that belong to them: rates and counts.

    Raises:
        CheckpointDamage, CheckpointError: some values were already replaced (raised on every rank).
    """
    run, optimizers = as_run(session), match.optimizers
    with (
        run.replaced(match.replaces_parameters, not match.staying_parameters, optimizers),
        run.adopting(optimizers),
    ):
        agree(
            run.gather,
            f"load {what}, of which some values were already loaded ({LOAD_ANOTHER})",
            lambda: match.local_state.load_into(match.fill, match.tensor_of, match.state_of, optimizers),
            share=False,
        )
    # All values have arrived: if a scheduler or a hook raises now, the run can go on.
    if run.rank == 0:
        match.warn(what)
    agree(run.gather, f"load the rest of {what}, {REPLACED}", finish, share=False)
    if match.part != "optimizer":
        hooks = partial(match.local_state.loaded, match.missing, match.unexpected)
        agree(run.gather, f"call hooks for loads of {what}, {REPLACED}", hooks, share=False)


def same_place(run: Run, state: Mapping[str, Any]) -> bool:
    """Return True if the saving rank of this number held the same part of the model and saw the same data."""
    saved, own, places = state.get("world", {}), run.world(), state.get("data_rank", [])
    same_parts = all(saved.get(name, 1) == own.get(name, 1) for name in ("tensor", "pipeline"))
    return same_parts and (places[run.rank : run.rank + 1] or [run.rank]) == [run.data_rank]


def read_buffers_and_extra_state(run: Run, match: LoadPlan) -> dict[str, Any]:
    """Return the buffers and the extra state of this rank by name."""
    state, local_state = match.state, match.local_state
    with reading("extra state of the checkpoint"):
        extra = tree.decode(state["extra"], StateTensors(match.source)) if "extra" in state else {}
    values = {name: value for name, value in extra.items() if name in local_state.buffers_and_extra}
    buffers = state.get("buffers", [])
    own = buffers[run.rank] if len(buffers) == run.size and same_place(run, state) else {}
    for name, value in local_state.buffers().items():
        full = f"state/{own[name]}" if name in own else f"model/{name}"
        if full in match.infos:
            if match.infos[full].numel != value.numel():  # values of a single rank are stored flat
                raise ValueError(
                    f"the buffer {name} has shape {match.infos[full].shape} in the checkpoint and {tuple(value.shape)} "
                    "in the model; nothing was loaded"
                )
            values[name] = match.source.read(full, 0, value.numel()).reshape(value.shape)
    local_state.check_buffers_and_extra(values)
    return values


class _OtherState:
    """Values other than parameters and element-wise state. They are read and checked before anything is changed."""

    def __init__(self, run: Run, match: LoadPlan, lr_schedulers: Sequence[Any], strict: bool) -> None:
        self._run, self._match = run, match
        state, tensors = match.state, StateTensors(match.source)
        with reading("the state of the checkpoint"):
            saved = saved_schedulers(match) if lr_schedulers else []
            self._read(state, tensors)
        self._module_state = read_buffers_and_extra_state(run, match)
        self._options = Options(run, match)
        self._schedulers = SchedulerLoadPlan(match, saved, lr_schedulers, strict)

    def _read(self, state: Mapping[str, Any], tensors: StateTensors) -> None:
        # Other formats have none of these values; values that a checkpoint lacks stay unchanged.
        run = self._run
        self.user_state = tree.decode(state["user_state"], tensors) if "user_state" in state else None
        saved = state.get("data_position", [])
        first: dict[int, Any] = {}
        for place, each in zip(state.get("data_rank", range(len(saved))), saved, strict=False):
            first.setdefault(place, each)
        self.positions = [tree.decode(first[place], tensors) for place in sorted(first)] or [None]
        generators = state.get("rng", [])
        self._exact = run.rank < len(generators) and same_place(run, state)
        own_generators = generators[run.rank if self._exact else 0] if generators else None
        self._generators = tree.decode(own_generators, tensors) if generators else None
        if self._generators is not None:
            check_generators(self._generators)

    def apply(self) -> None:
        """Change the run."""
        self._match.local_state.load_buffers_and_extra(self._module_state)
        self._options.apply()
        self._schedulers.apply(self._run)
        if self._generators is None:
            return
        if self._exact:
            restore_generators(self._generators, self._run.device)
        else:
            spread_generators(self._generators, self._run.data_rank)


Opens = Callable[[], CheckpointSource]
"""Opens a checkpoint on this rank. Not collective."""


def _candidates(root: str, tag: str | None) -> list[str]:
    """Return the directories to try, in order. Raises FileNotFoundError, CheckpointDamage (unreadable heads without
    "auto").
    """
    if os.path.exists(os.path.join(root, MANIFEST)) or has_pieces(root):
        if tag not in (None, "auto"):
            raise ValueError(f"tag={tag!r}: {root} is a checkpoint itself; leave the tag out")
        return [root]
    entries = scan(root)
    if tag == "auto":
        return [each.path for each in entries]
    if tag is not None:
        chosen = [each.path for each in entries if each.tag == tag]
        place = Path(root, tag)
        if not chosen and place.is_dir() and kind_of(place) is not None:
            return [str(place)]  # checkpoint-N of a Trainer
        if not chosen:
            tags = ", ".join(each.tag for each in entries)
            raise FileNotFoundError(f"no checkpoint {tag!r} in {root}; it has {tags or 'none'}")
        return chosen
    if not entries:
        try:
            if tag is None and detect_format(root):
                return [str(located(Path(root)))]  # a checkpoint of another library
        except FileNotFoundError as error:
            problem = str(error).removeprefix(f"{root}: ").partition(";")[0]
            raise FileNotFoundError(f"no checkpoint in it; give the directory of the save ({problem})") from error
    broken = [each for each in entries if each.head is None]
    if broken:
        raise CheckpointDamage(broken[0].damage, "load another checkpoint ('auto' skips it)")
    return [entries[0].path]


def find_checkpoints(run: Run, root: str, tag: str | None) -> list[str]:
    """Return the checkpoints to try, in order, as rank 0 finds them. Collective.

    Args:
        run: the ranks.
        root: a directory of checkpoints, or one.
        tag: as for :meth:`shardwise.core.checkpoint.checkpointer.Checkpointer.load`.

    Raises:
        FileNotFoundError, CheckpointDamage, CheckpointError, ValueError: on every rank.
    """
    what = f"load {root}"
    paths: list[str] = agree(run.gather, what, lambda: _candidates(root, tag) if run.rank == 0 else [])[1][0]
    if not paths:  # "auto" then starts from scratch, which is wrong if other ranks see checkpoints

        def none_here() -> None:
            if scan(root):
                raise CheckpointError("it sees checkpoints, and rank 0 sees none; use a directory that all ranks share")

        agree(run.gather, what, none_here)
    return paths


@contextmanager
def opening(run: Run, path: str, open_here: Opens) -> Iterator[Opens]:
    """Yield a function that opens the checkpoint at ``path`` on this rank with ``open_here``. Collective.

    The opened checkpoint is closed at the end of the block. The function raises CheckpointError if ranks see different
    checkpoints.
    """
    seen = agree(run.gather, f"look at {path}", lambda: _seen(path))[1]
    opened: list[CheckpointSource] = []

    def open_it() -> CheckpointSource:
        there = next((each for each in seen if each is not None), None)
        if there is not None:
            check_seen([each == there for each in seen], path)
        opened.append(open_here())
        return opened[0]

    try:
        yield open_it
    finally:
        for source in opened:
            source.close()


def _seen(path: str) -> str | None:
    """Return an identifier of the native checkpoint at a path; ``None`` if there is nothing."""
    return digest_of(os.path.join(path, MANIFEST)) if os.path.exists(path) else None
