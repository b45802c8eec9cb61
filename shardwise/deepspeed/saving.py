"""Checkpoints of an engine: written in shardwise's format, read in that and in DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.base.checked import as_mapping, as_path
from shardwise.core.base.remarks import warn_user
from shardwise.core.checkpoint.bounds import reading
from shardwise.core.checkpoint.directory import LATEST
from shardwise.core.checkpoint.format import MANIFEST
from shardwise.core.checkpoint.formats.deepspeed import CLIENT_STATE, LATEST_UNIVERSAL
from shardwise.core.checkpoint.formats.detect import open_checkpoint
from shardwise.core.checkpoint.formats.optimizer_state import group_options
from shardwise.core.checkpoint.formats.output import output_file, write_torch
from shardwise.core.checkpoint.match import Match, Wanted
from shardwise.core.checkpoint.options import checked_options
from shardwise.core.checkpoint.read import NativeSource
from shardwise.core.checkpoint.restore import load_into, opening, read_buffers_and_extra_state
from shardwise.core.checkpoint.schedulers import SavedScheduler, SchedulerMatch, saved_schedulers
from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.source import StateTensors
from shardwise.core.checkpoint.write import agree
from shardwise.deepspeed.asserted import AssertedError
from shardwise.deepspeed.frozen import WithoutFrozen, frozen_ones_are_missing
from shardwise.deepspeed.parts import PartRun
from shardwise.deepspeed.zero_to_fp32 import FROZEN, write_program
from shardwise.session import Session

__all__ = ["Found", "Saving", "take_over"]


@dataclass(frozen=True)
class Found:
    """What a checkpoint says beside the values."""

    path: str
    client_state: dict[str, Any]
    counters: dict[str, int]


class Saving:
    """Of one session. Every method is collective, over all parts of the model: what fails in one is an error in all.

    Args:
        session: what is saved, and loaded into.
        universal: what is loaded without a tag is what ``latest_universal`` names, or without one the newest save.

    Attributes:
        doing: see :meth:`shardwise.core.checkpoint.run.Run.doing`.
    """

    def __init__(self, session: Session, universal: bool = False) -> None:
        self._session = session
        self._run = PartRun(session)
        self._latest = LATEST_UNIVERSAL if universal else LATEST
        self._native = Checkpointer(self._run)  # from the start: it counts the updates
        self._trained: Checkpointer | None = None
        self.doing = self._run.doing

    def agreed_tag(self, tag: str, mode: str) -> str:
        """That of the first rank, under which all save; ``mode`` is ``checkpoint.tag_validation``."""
        tags: list[str] = self._run.everybody(tag)
        if len(set(tags)) > 1 and mode != "IGNORE":
            message = f"tag={tag!r}, but the ranks' tags are {tags}: give the same on every rank"
            if mode == "FAIL":
                raise AssertedError(message)
            warn_user(message)
        return tags[0]

    def save(
        self,
        root: str,
        tag: str,
        schedules: Sequence[Any],
        client_state: dict[str, Any],
        counters: dict[str, int],
        save_latest: bool,
        exclude_frozen: bool,
    ) -> None:
        """See :meth:`shardwise.deepspeed.engine.DeepSpeedEngine.save_checkpoint`."""
        as_mapping("client_state", client_state, "a dict")
        named = self._session.module.unwrap().named_parameters()
        frozen = [name for name, param in named if not param.requires_grad]
        state = {"client_state": dict(client_state), "counters": counters, FROZEN: frozen}
        writer = self._without_frozen() if exclude_frozen else self._native
        writer.latest = save_latest
        directory, step = self._run.directory(as_path("save_dir", root, "a directory")), counters["global_steps"]
        writer.save(directory, tag, step=step, lr_schedulers=schedules, user_state=state)
        if directory == root:

            def beside() -> None:
                if self._run.rank == 0:
                    write_program(root)

            agree(self._run.gather, self._run.rank, f"write zero_to_fp32.py into {root}", beside)

    def _without_frozen(self) -> Checkpointer:
        if self._trained is None:
            self._trained = Checkpointer(WithoutFrozen(self._session))
        self._trained.steps = self._native.steps
        return self._trained

    def load(
        self, root: str, tag: str | None, strict: bool, optimizer_states: bool, schedules: Sequence[Any]
    ) -> Found | None:
        """See :meth:`shardwise.deepspeed.engine.DeepSpeedEngine.load_checkpoint`."""
        root, tag = as_path("load_dir", root, "a directory"), None if tag is None else str(tag)
        path = self._run.find(root, tag, self._latest)
        if path is None:
            if self._run.speaks:
                named = "" if tag is None else f" with tag {tag!r}"
                warn_user(f"no checkpoint{named} in {root}: nothing was loaded")
            return None
        lacking = bool(optimizer_states and strict and frozen_ones_are_missing(self._session, path))
        there = self._run.everybody([(Path(path) / MANIFEST).is_file(), lacking])
        if optimizer_states and any(native for native, _ in there):
            strict = strict and not any(lacks for _, lacks in there)
            restored = self._native.load(path, strict=strict, lr_schedulers=schedules)
            state = restored.user_state if restored is not None else None
            state = state if isinstance(state, Mapping) else {}
            return Found(path, dict(state.get("client_state") or {}), dict(state.get("counters") or {}))
        return take_over(self._session, path, strict, optimizer_states, schedules)

    def state_16bit(self, exclude_frozen: bool) -> dict[str, Any]:
        """The model's state in its compute dtype, on the host of rank 0; nothing on the others."""
        module = self._session.module
        frozen = {n for n, p in module.unwrap().named_parameters(remove_duplicate=False) if not p.requires_grad}
        kept: dict[str, Any] = {}
        for name, value in module.full_state(masters=False):
            if self._run.rank == 0 and not (exclude_frozen and name in frozen):
                kept[name] = value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        return {name: kept[name] for name in module.state_layout() if name in kept}

    def save_16bit(self, directory: str, filename: str, exclude_frozen: bool) -> None:
        """One torch file of the model's state, written by rank 0; it appears whole, and what was there goes then."""
        path = Path(self._run.directory(as_path("save_dir", directory, "a directory"))) / filename
        rank, kept = self._run.rank, self.state_16bit(exclude_frozen)

        def write() -> None:
            if rank != 0:
                return
            with output_file(path) as unfinished:
                write_torch(unfinished, kept)

        agree(self._run.gather, rank, f"write {path}", write)

    def close(self) -> None:
        """Give back what an unfinished save holds."""
        self._native.close()
        if self._trained is not None:
            self._trained.close()


def take_over(
    session: Session,
    path: str,
    strict: bool,
    optimizer_states: bool,
    schedules: Sequence[Any],
    check: Callable[[Any], None] | None = None,
) -> Found:
    """Values from a checkpoint of DeepSpeed, or those of the model alone from our own. Collective. ``check`` is called
    with the client state before anything is changed, and what it raises on one rank is raised on all."""
    run = PartRun(session)
    wanted: Wanted = "all" if optimizer_states else "model"
    strict = strict and not any(run.everybody(frozen_ones_are_missing(session, path, wanted)))

    def look() -> tuple[Match, _Rest]:
        match = Match(open_it(), run.local_state(), strict, wanted)
        rest = _Rest(run, session, match, schedules, path, strict)
        if check is not None:
            check(rest.found.client_state)
        return match, rest

    with opening(run, path, lambda: open_checkpoint(path)) as open_it:
        (match, rest), _ = agree(run.gather, run.rank, f"load {path}", look, share=False)
        load_into(run, match, path, rest.put_back)
    return rest.found


def _saved_schedules(match: Match, wanted: int) -> list[SavedScheduler]:
    """What the checkpoint says of ``wanted`` schedules; of DeepSpeed's one, which need not be there."""
    if not wanted:
        return []
    if isinstance(match.source, NativeSource):
        saved = saved_schedulers(match)
        if len(saved) != wanted:
            raise ValueError(
                f"the checkpoint has {len(saved)} learning-rate schedulers and the engine {wanted}; "
                "leave the schedule out with load_lr_scheduler_states=False"
            )
        return saved
    other = match.state.get("other") or {}
    saved_schedule = tree.decode(other["lr_scheduler"], None) if other.get("lr_scheduler") is not None else None
    return [SavedScheduler(saved_schedule)] * wanted if saved_schedule else []


class _Rest:
    """Everything beside parameters and element-wise state, read and checked before anything is changed: buffers, what
    schedules say, and where optimizers are wanted the options of their param groups and the loss scale."""

    def __init__(
        self, run: PartRun, session: Session, match: Match, schedules: Sequence[Any], path: str, strict: bool
    ) -> None:
        self._run, self._match, self._session = run, match, session
        with reading(f"what {path} holds beside tensors"):
            saved = _saved_schedules(match, len(schedules))
            self.found = _found(path, match)
            records = [[group_options(group) for group in each["groups"]] for each in match.state.get("optimizers", [])]
        self._schedules = SchedulerMatch(match, saved, schedules[: len(saved)], strict)
        self._groups: list[tuple[int, int, dict[str, Any]]] = []
        self._scale: dict[str, float] | None = None
        native = isinstance(match.source, NativeSource)  # of which the model alone is taken over
        self._others = read_buffers_and_extra_state(run, match) if native else _buffers(match)
        if not native:
            for index, taken in match.taken.items():
                self._match_groups(index, taken.options, lambda key, own: key in own and key != "params")
            with reading(f"the loss scale of {path}"):
                self._scale = _scale(session, match)
        if self._schedules and match.wanted == "model":  # rates that a schedule had set are kept with the optimizers
            for index in range(min(len(session.optimizers), len(records))):
                if len(session.optimizers[index].param_groups) == len(records[index]):
                    self._match_groups(index, records[index], lambda key, own: key == "lr")

    def _match_groups(self, index: int, found: Sequence[Mapping[str, Any]], wanted: Callable[..., bool]) -> None:
        groups = zip(self._session.optimizers[index].param_groups, found, strict=True)
        for number, (own, saved) in enumerate(groups):
            options = {key: value for key, value in saved.items() if wanted(key, own)}
            self._groups.append((index, number, checked_options(own, options, f"optimizer {index}, group {number}")))

    def put_back(self) -> None:
        """Change the session."""
        self._match.local_state.put_others(self._others)
        for index, number, options in self._groups:
            self._session.optimizers[index].param_groups[number].update(options)
        scaler = self._session.optimizers[0].scaler if self._session.optimizers else None
        if scaler is not None and self._scale is not None:
            scaler.load_state_dict(self._scale)
        self._schedules.apply(self._run)


def _buffers(match: Match) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in match.local_state.buffers().items():
        if f"model/{name}" in match.facts and name in match.local_state.others:
            found[name] = match.source.read(f"model/{name}", 0, value.numel()).reshape(value.shape)
    return found


def _scale(session: Session, match: Match) -> dict[str, float] | None:
    """DeepSpeed's loss scale in our words; ``None`` where there is none to take over."""
    other = match.state.get("other") or {}
    scale = {key: tree.decode(value, None) for key, value in (other.get("loss_scaler") or {}).items()}
    scaler = session.optimizers[0].scaler if session.optimizers and match.optimizers else None
    if scaler is None or "cur_scale" not in scale or not scaler.dynamic:
        return None
    used = int(scale.get("delayed_shift", 1)) - int(scale.get("cur_hysteresis", 1))
    since = int(scale.get("cur_iter", 0)) - int(scale.get("last_overflow_iter", -1)) - 1
    good = good_steps(since, scaler.plan.growth_interval)
    found = {"scale": float(scale["cur_scale"]), "overflows": used, "good_steps": good}
    type(scaler)(scaler.plan).load_state_dict(found)
    return found


def good_steps(since: int, window: int) -> int:
    """Our count of good steps where DeepSpeed counts ``since``, of which the first is before the window."""
    return (since - 1) % window if since > 0 else -1


def _found(path: str, match: Match) -> Found:
    state = match.state
    ours = tree.decode(state["user_state"], StateTensors(match.source)) if "user_state" in state else None
    if isinstance(ours, Mapping):
        return Found(path, dict(ours.get("client_state") or {}), dict(ours.get("counters") or {}))
    other = state.get("other") or {}
    client = {
        k.removeprefix(CLIENT_STATE): tree.decode(v, None) for k, v in other.items() if k.startswith(CLIENT_STATE)
    }
    counters = {"global_steps": int(state.get("step", 0) or 0)}
    counters |= {key: int(tree.decode(other.get(key), None) or 0) for key in ("global_samples", "skipped_steps")}
    return Found(path, client, counters)
