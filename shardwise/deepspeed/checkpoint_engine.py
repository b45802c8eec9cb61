"""Checkpoints of an engine: written in shardwise's format, read from it and from DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.base.validate import as_mapping, as_path
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.directory import LATEST, scan
from shardwise.core.checkpoint.formats.atomic_files import output_file, write_torch
from shardwise.core.checkpoint.formats.deepspeed import CLIENT_STATE, LATEST_UNIVERSAL
from shardwise.core.checkpoint.formats.native import NativeSource
from shardwise.core.checkpoint.formats.optimizer_state import group_options
from shardwise.core.checkpoint.formats.registry import open_checkpoint
from shardwise.core.checkpoint.input_checks import read_name, reading
from shardwise.core.checkpoint.load import load_into, opening, read_buffers_and_extra_state
from shardwise.core.checkpoint.load_plan import LoadPart, LoadPlan
from shardwise.core.checkpoint.native_format import MANIFEST
from shardwise.core.checkpoint.plain_values import checked_options
from shardwise.core.checkpoint.save import agree
from shardwise.core.checkpoint.schedulers import SavedScheduler, SchedulerLoadPlan, saved_schedulers
from shardwise.core.checkpoint.source import CheckpointError, StateTensors
from shardwise.core.checkpoint.training_run import EngineRun, TrainedOnly
from shardwise.deepspeed.config import AssertedError
from shardwise.deepspeed.zero_to_fp32 import FROZEN, write_program
from shardwise.session import Session


@dataclass(frozen=True)
class LoadedState:
    """The path, client state and counters of a loaded checkpoint."""

    path: str
    client_state: dict[str, Any]
    counters: dict[str, int]


class Saving:
    """Saving and loading of one session. Every method is collective and all-or-none over all model-parallel ranks.

    Args:
        session: the session.
        universal: without a tag load what ``latest_universal`` names, or else the newest checkpoint.

    Attributes:
        doing: see :meth:`shardwise.core.checkpoint.training_run.Run.doing`.
    """

    def __init__(self, session: Session, universal: bool = False) -> None:
        self._session = session
        self._run = PartRun(session)
        self._latest = LATEST_UNIVERSAL if universal else LATEST
        self._native = Checkpointer(self._run)  # created early, because it counts the updates
        self._trained: Checkpointer | None = None
        self.doing = self._run.doing

    def agreed_tag(self, tag: str, mode: str) -> str:
        """Return rank 0's tag, under which all ranks save. ``mode`` is the value of ``checkpoint.tag_validation``."""
        tags: list[str] = self._run.everybody(tag)
        if len(set(tags)) > 1 and mode != "IGNORE":
            message = f"tag={tag!r}, but the ranks have different tags: {tags}; give the same on every rank"
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

            def write() -> None:
                if self._run.rank == 0:
                    write_program(root)

            agree(self._run.gather, f"write zero_to_fp32.py into {root}", write)

    def _without_frozen(self) -> Checkpointer:
        if self._trained is None:
            self._trained = Checkpointer(WithoutFrozen(self._session))
        self._trained.steps = self._native.steps
        return self._trained

    def load(
        self, root: str, tag: str | None, strict: bool, optimizer_states: bool, schedules: Sequence[Any]
    ) -> LoadedState | None:
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
            return LoadedState(path, dict(state.get("client_state") or {}), dict(state.get("counters") or {}))
        return take_over(self._session, path, strict, optimizer_states, schedules)

    def state_16bit(self, exclude_frozen: bool) -> dict[str, Any]:
        """Return the model's state in its compute dtype on rank 0, and ``{}`` on other ranks."""
        module = self._session.module
        frozen = {n for n, p in module.unwrap().named_parameters(remove_duplicate=False) if not p.requires_grad}
        state: dict[str, Any] = {}
        for name, value in module.full_state(masters=False):
            if self._run.rank == 0 and not (exclude_frozen and name in frozen):
                state[name] = value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        return {name: state[name] for name in module.state_layout() if name in state}

    def save_16bit(self, directory: str, filename: str, exclude_frozen: bool) -> None:
        """Write the model's state as one torch file, which replaces an existing one atomically."""
        path = Path(self._run.directory(as_path("save_dir", directory, "a directory"))) / filename
        rank, state = self._run.rank, self.state_16bit(exclude_frozen)

        def write() -> None:
            if rank != 0:
                return
            with output_file(path) as unfinished:
                write_torch(unfinished, state)

        agree(self._run.gather, f"write {path}", write)

    def close(self) -> None:
        """Free the resources of an unfinished save."""
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
) -> LoadedState:
    """Load a checkpoint of DeepSpeed, or only the model of a checkpoint of shardwise. Collective.

    ``check`` is called with the client state before the session changes; its error on one rank is raised on all.
    """
    run = PartRun(session)
    part: LoadPart = "all" if optimizer_states else "model"
    strict = strict and not any(run.everybody(frozen_ones_are_missing(session, path, part)))

    def look() -> tuple[LoadPlan, _SmallState]:
        match = LoadPlan(open_it(), run.local_state(), strict, part)
        small = _SmallState(run, session, match, schedules, path, strict)
        if check is not None:
            check(small.loaded.client_state)
        return match, small

    with opening(run, path, lambda: open_checkpoint(path)) as open_it:
        (match, small), _ = agree(run.gather, f"load {path}", look, share=False)
        load_into(run, match, path, small.put_back)
    return small.loaded


def _saved_schedules(match: LoadPlan, count: int) -> list[SavedScheduler]:
    """Return the saved states of ``count`` schedules; DeepSpeed's checkpoints have at most one."""
    if not count:
        return []
    if isinstance(match.source, NativeSource):
        saved = saved_schedulers(match)
        if len(saved) != count:
            raise ValueError(
                f"the checkpoint has {len(saved)} learning-rate schedulers and the engine {count}; "
                "leave the schedule out with load_lr_scheduler_states=False"
            )
        return saved
    other = match.state.get("other") or {}
    saved_schedule = tree.decode(other["lr_scheduler"], None) if other.get("lr_scheduler") is not None else None
    return [SavedScheduler(saved_schedule)] * count if saved_schedule else []


class _SmallState:
    """Buffers, schedules, options of param groups and the loss scale, checked before the session changes."""

    def __init__(
        self, run: PartRun, session: Session, match: LoadPlan, schedules: Sequence[Any], path: str, strict: bool
    ) -> None:
        self._run, self._match, self._session = run, match, session
        with reading(f"what {path} holds besides tensors"):
            saved = _saved_schedules(match, len(schedules))
            self.loaded = _loaded_state(path, match)
            records = [[group_options(group) for group in each["groups"]] for each in match.state.get("optimizers", [])]
        self._schedules = SchedulerLoadPlan(match, saved, schedules[: len(saved)], strict)
        self._groups: list[tuple[int, int, dict[str, Any]]] = []
        self._scale: dict[str, float] | None = None
        native = isinstance(match.source, NativeSource)  # only the model of a native checkpoint is loaded here
        self._module_state = read_buffers_and_extra_state(run, match) if native else _buffers(match)
        if not native:
            for index, adopted in match.adopted.items():
                self._match_groups(index, adopted.options, lambda key, own: key in own and key != "params")
            with reading(f"the loss scale of {path}"):
                self._scale = _scale(session, match)
        if self._schedules and match.part == "model":  # rates that a schedule has set are kept with the optimizers
            for index in range(min(len(session.optimizers), len(records))):
                if len(session.optimizers[index].param_groups) == len(records[index]):
                    self._match_groups(index, records[index], lambda key, own: key == "lr")

    def _match_groups(self, index: int, groups: Sequence[Mapping[str, Any]], loads: Callable[..., bool]) -> None:
        own_groups = self._session.optimizers[index].param_groups
        for number, (own, saved) in enumerate(zip(own_groups, groups, strict=True)):
            options = {key: value for key, value in saved.items() if loads(key, own)}
            self._groups.append((index, number, checked_options(own, options, f"optimizer {index}, group {number}")))

    def put_back(self) -> None:
        """Change the session."""
        self._match.local_state.load_buffers_and_extra(self._module_state)
        for index, number, options in self._groups:
            self._session.optimizers[index].param_groups[number].update(options)
        scaler = self._session.optimizers[0].scaler if self._session.optimizers else None
        if scaler is not None and self._scale is not None:
            scaler.load_state_dict(self._scale)
        self._schedules.apply(self._run)


def _buffers(match: LoadPlan) -> dict[str, torch.Tensor]:
    buffers = {}
    for name, value in match.local_state.buffers().items():
        if f"model/{name}" in match.infos and name in match.local_state.buffers_and_extra:
            buffers[name] = match.source.read(f"model/{name}", 0, value.numel()).reshape(value.shape)
    return buffers


def _scale(session: Session, match: LoadPlan) -> dict[str, float] | None:
    """Return DeepSpeed's loss scale as a state of our scaler, or ``None``."""
    other = match.state.get("other") or {}
    scale = {key: tree.decode(value, None) for key, value in (other.get("loss_scaler") or {}).items()}
    scaler = session.optimizers[0].scaler if session.optimizers and match.optimizers else None
    if scaler is None or "cur_scale" not in scale or not scaler.dynamic:
        return None
    used = int(scale.get("delayed_shift", 1)) - int(scale.get("cur_hysteresis", 1))
    since = int(scale.get("cur_iter", 0)) - int(scale.get("last_overflow_iter", -1)) - 1
    good = good_steps(since, scaler.plan.growth_interval)
    state = {"scale": float(scale["cur_scale"]), "overflows": used, "good_steps": good}
    type(scaler)(scaler.plan).load_state_dict(state)
    return state


def good_steps(since: int, window: int) -> int:
    """Return our count of good steps for DeepSpeed's count ``since``, whose window starts one step later."""
    return (since - 1) % window if since > 0 else -1


def _loaded_state(path: str, match: LoadPlan) -> LoadedState:
    state = match.state
    ours = tree.decode(state["user_state"], StateTensors(match.source)) if "user_state" in state else None
    if isinstance(ours, Mapping):
        return LoadedState(path, dict(ours.get("client_state") or {}), dict(ours.get("counters") or {}))
    other = state.get("other") or {}
    client = {
        k.removeprefix(CLIENT_STATE): tree.decode(v, None) for k, v in other.items() if k.startswith(CLIENT_STATE)
    }
    counters = {"global_steps": int(state.get("step", 0) or 0)}
    counters |= {key: int(tree.decode(other.get(key), None) or 0) for key in ("global_samples", "skipped_steps")}
    return LoadedState(path, client, counters)


# ---- Checkpoints under tensor parallelism: each model-parallel rank has its own directory, and all ranks agree.


class PartRun(EngineRun):
    """A session and the sessions of other model-parallel ranks of an ``mpu``: a failure in one is a failure in all."""

    @property
    def speaks(self) -> bool:
        """Return True if this rank warns: rank 0 of the first part."""
        model_axis = self._session.mesh.joined
        return self.rank == 0 and (model_axis is None or model_axis.rank == 0)

    def directory(self, root: str) -> str:
        """Return the directory of this part; ``root`` itself if the model has one part."""
        model_axis = self._session.mesh.joined
        return root if model_axis is None else str(Path(root) / _name(model_axis.rank))

    def gather(self, value: object, /) -> list[Any]:
        """Return the ``value`` of every rank of this part, for :func:`agree`. Collective over all parts.

        A failure of the same rank of another part replaces a success.
        """
        rows = super().gather(value)
        model_axis = self._session.mesh.joined
        if model_axis is None:
            return rows
        failed: dict[int, Any] = {}
        own = [[rank, row] for rank, row in enumerate(rows) if isinstance(row, dict) and "error" in row]
        parts: list[Any] = model_axis.exchange_object(own)
        for number, part in enumerate(parts):
            for rank, row in part:
                failed.setdefault(rank, {**row, "error": f"in {_name(number)}: {row['error']}"})
        return [failed.get(rank, row) for rank, row in enumerate(rows)]

    def everybody(self, value: object) -> list[Any]:
        """Return the ``value`` of every rank of every part. Collective over all parts."""
        rows = super().gather(value)
        model_axis = self._session.mesh.joined
        parts: list[Any] = [rows] if model_axis is None else model_axis.exchange_object(rows)
        return [row for part in parts for row in part]

    def find(self, root: str, tag: str | None, latest: str = LATEST) -> str | None:
        """Return the directory of ``tag`` or of ``latest``, or ``None`` if no part has it. Collective over all parts.

        Raises:
            CheckpointError: the parts have different checkpoints (raised on every rank).
            NotImplementedError: the checkpoint is a universal one, and the model has several parts.
        """
        own, model_axis = Path(self.directory(root)), self._session.mesh.joined
        _, places = agree(self.gather, f"find a checkpoint in {own}", lambda: [tag_directory(own, tag, latest)])
        path: str | None = next((place for (place,) in places if place is not None), None)
        if model_axis is None:
            return path
        if latest != LATEST and (Path(root) / latest).exists():
            raise NotImplementedError(
                f"{root}: a universal checkpoint cannot be loaded with a model-parallel mpu. Use "
                "tensor_parallel.autotp_size in the configuration, or leave checkpoint.load_universal out"
            )
        checkpoints: list[Any] = model_axis.exchange_object(None if path is None else _tag_and_step(Path(path)))
        if any(each != checkpoints[0] for each in checkpoints):
            raise CheckpointError(
                f"{root}: the parts of the model have different checkpoints, by part [tag, step] {checkpoints}. Give a "
                "tag= that all parts have, or restore the missing directories"
            )
        return path


def _name(number: int) -> str:
    return f"mp_rank_{number:02d}"


def _tag_and_step(path: Path) -> list[Any]:
    head = {each.tag: each.head for each in scan(str(path.parent))}.get(path.name)
    return [path.name, None if head is None else head.step]


def tag_directory(root: Path, tag: str | None, latest: str) -> str | None:
    """Return the directory of ``tag``, of ``latest``, or the newest one; or ``None``."""
    tag = tag or read_name(root / latest) or read_name(root / LATEST)
    if tag:
        return str(root / tag) if (root / tag).is_dir() else None
    result = scan(str(root)) if root.is_dir() else []
    return str(result[0].path) if result else None  # if the newest is damaged, loading reports it


# ---- Checkpoints without frozen parameters.


class WithoutFrozen(PartRun):
    """A session saved without frozen parameters, except those that an optimizer has."""

    def local_state(self) -> TrainedOnly:
        """Return the state to save."""
        return TrainedOnly(self._session.values, self._session.optimizers)


def frozen_ones_are_missing(session: Session, path: str, part: LoadPart = "all") -> bool:
    """Return whether the checkpoint fits except for missing frozen parameters, which then keep their values."""
    local = WithoutFrozen(session).local_state()
    if not local.left_out:
        return False
    try:
        with open_checkpoint(path) as source:
            match = LoadPlan(source, PartRun(session).local_state(), False, part)
    except (CheckpointError, OSError, ValueError):
        return False  # loading reports the error on every rank
    return bool(match.missing) and local.left_out.issuperset(match.missing) and not match.unexpected
