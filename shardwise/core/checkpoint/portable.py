"""Models and optimizers alone, in files that other libraries read: what a Booster saves and loads.

Every save is a view of the same stream as a whole checkpoint: rank 0 writes a format from all ranks' tensors
(:mod:`shardwise.core.checkpoint.gathered`), and every rank loads the ranges it needs from any format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.find import opening
from shardwise.core.checkpoint.fitting import Fit
from shardwise.core.checkpoint.formats.detect import detect_format, open_checkpoint
from shardwise.core.checkpoint.formats.lazy import LazySource, entries_of
from shardwise.core.checkpoint.gathered import Portion, stream
from shardwise.core.checkpoint.match import Match
from shardwise.core.checkpoint.numbered import with_names
from shardwise.core.checkpoint.options import Options
from shardwise.core.checkpoint.pieces import PieceLayout
from shardwise.core.checkpoint.ranks import Ranks
from shardwise.core.checkpoint.restore import put_back, read_others
from shardwise.core.checkpoint.run import Holding, Run
from shardwise.core.checkpoint.snapshot import HostImage, Lane
from shardwise.core.checkpoint.source import CheckpointSource
from shardwise.core.checkpoint.write import agree
from shardwise.core.engine.fragments import Fragment

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
