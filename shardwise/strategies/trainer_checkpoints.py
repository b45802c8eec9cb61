"""Checkpoints of a Trainer: the session's own format, with Lightning's entries in the same directory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.core.checkpoint.load import Restored
from shardwise.core.checkpoint.plain_values import check_scheduler, read_generators, restore_generators
from shardwise.core.checkpoint.save import agree
from shardwise.core.checkpoint.schedulers import SavedScheduler, inner_scheduler, regrouped, scheduler_class
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.session import Session
from shardwise.strategies.checkpoint_entries import left_out, pack, unpack

FABRIC = "fabric"
"""The entry with the state of a Fabric program; see :mod:`shardwise.strategies.fabric`."""

FABRIC_NAMES = "fabric_names"
"""The entry with the program's names of its model and its optimizers."""

ALONE = "checkpoint"  # the tag inside a directory whose name cannot be a tag


class _Outline(dict[str, Any]):
    """Names and shapes of a model's state; parameters are on the meta device, because the session writes the values."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self._first = {name: id(value) for name, value in state.items()}

    @property
    def changed(self) -> bool:
        return {name: id(value) for name, value in self.items()} != self._first


def outline(session: Session) -> dict[str, Any]:
    """Return names and shapes of the session's model; see :class:`_Outline`."""
    sharded = {id(param) for param in session.params}
    return _Outline(
        {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") if id(value) in sharded else value
            for name, value in session.module.state_layout().items()
        }
    )


class ModelOnly:
    """A session without its optimizers."""

    optimizers = ()

    def __init__(self, session: Session) -> None:
        self.values, self.mesh = session.values, session.mesh


class Saving:
    """Saving and loading for one strategy.

    Attributes:
        is_single_file: whether the last loaded checkpoint is one file, from which Lightning restores each entry.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.is_single_file = True
        self._dumping = False
        self._warned: set[str] = set()  # hyperparameters about which a warning was given

    # ---- entries of a checkpoint

    def outline_dumps(self, trainer: Any) -> None:
        """Make ``trainer`` put names and shapes into a checkpoint; the session writes the values."""
        connector = trainer._checkpoint_connector
        if "dump_checkpoint" in vars(connector):
            return
        dump: Callable[..., dict[str, Any]] = connector.dump_checkpoint

        def outlined(*args: Any, **kwargs: Any) -> dict[str, Any]:
            self._dumping = not self.one_file
            try:
                return dump(*args, **kwargs)
            finally:
                self._dumping = False

        connector.dump_checkpoint = outlined

    @property
    def _user_io(self) -> Any:
        """The user's ``checkpoint_io``; ``None`` for Lightning's default."""
        io = self._strategy._checkpoint_io
        return None if io is None or type(io) is self._strategy.ns.load("plugins.io.TorchCheckpointIO") else io

    @property
    def _asynchronous(self) -> bool:
        return isinstance(self._user_io, self._strategy.ns.load("plugins.io.async_plugin.AsyncCheckpointIO"))

    @property
    def one_file(self) -> bool:
        """Return True if the user's ``checkpoint_io`` writes each checkpoint as one file."""
        return self._user_io is not None and not self._asynchronous

    def module_state(self) -> dict[str, Any]:
        """Return the full state, or its outline while Lightning collects a checkpoint."""
        session: Session = self._strategy.session
        return outline(session) if self._dumping else session.module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's full state, or ``{}`` while Lightning collects a checkpoint."""
        state: dict[str, Any] = {} if self._dumping else optimizer.state_dict()
        return state

    # ---- saving

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any, one_file: Callable[..., None]) -> None:
        """See :meth:`shardwise.strategies.trainer.ShardedStrategy.save_checkpoint`.

        Raises:
            TypeError: ``storage_options`` without a ``checkpoint_io`` that would use them.
            CheckpointError: an entry cannot be saved or a file cannot be written (raised on every rank).
        """
        if storage_options is not None and not self.one_file:
            raise TypeError(
                f"storage_options={storage_options!r} have no effect on a directory of shards; give the strategy a "
                "checkpoint_io that uses them"
            )
        session: Session = self._strategy.session
        with saving_to(session, path) as path:
            if self.one_file:
                one_file(checkpoint, path, storage_options)
            else:
                self._save(session, checkpoint, path)

    def _save(self, session: Session, checkpoint: dict[str, Any], path: str) -> None:
        state = checkpoint.get("state_dict")
        if isinstance(state, _Outline) and state.changed:
            warn_user(
                f"on_save_checkpoint changed state_dict in the checkpoint ({len(state)} names), but the model is saved "
                "unchanged. Save additional values under another key"
            )
        packed = self._put_together(checkpoint, path)
        writer = self._writer(session, "optimizer_states" in checkpoint)
        root, tag = place(path)
        writer.latest = False  # ModelCheckpoint manages the directory
        writer.save(
            root,
            tag,
            step=int(checkpoint.get("global_step", 0)),
            user_state=packed,
            # asynchronous saves of other writers are not waited for
            use_async=self._asynchronous and writer is session.checkpoints,
        )

    def _put_together(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any] | None:
        """Return Lightning's entries as data on rank 0; warn once about hyperparameters that are not data."""
        world, rank = self._strategy.session.mesh.world, self._strategy.session.mesh.rank
        packed: list[dict[str, Any]] = []

        def put() -> list[str]:
            entries = dict(checkpoint)
            if "lr_schedulers" in entries:
                entries[CLASSES] = [scheduler_class(each.scheduler) for each in self._strategy.lr_scheduler_configs]
            packed.extend([pack(entries)] if rank == 0 else [])
            return left_out(packed[0]) if packed else []

        _, missing = agree(world.exchange_object, f"put together the entries of {path}", put)
        new = [name for name in missing[0] if name not in self._warned]
        if new:
            self._warned.update(new)
            warn_user(
                f"checkpoints are without {', '.join(new)}: nothing in them is pickled. Pass these hyperparameters to "
                "load_from_checkpoint, or use save_hyperparameters(ignore=...)"
            )
        return packed[0] if packed else None

    def _writer(self, session: Session, full: bool) -> Checkpointer:
        """Return the writer of a directory. With ``full`` it writes the optimizers, too."""
        return session.checkpoints if full else Checkpointer(ModelOnly(session))

    # ---- loading

    def load(self, path: Any, weights_only: bool | None, one_file: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """See :meth:`shardwise.strategies.trainer.ShardedStrategy.load_checkpoint`."""
        path = os.fspath(self._strategy.broadcast(path))
        session: Session = self._strategy.session
        self.is_single_file = bool(self._strategy.broadcast(not os.path.isdir(path)))
        if self.is_single_file:
            return _read_file(path, weights_only, one_file)
        module = self._strategy.lightning_module
        fitting = module.trainer.state.fn.value == "fit"
        without_optimizers = fitting and not self._strategy.broadcast(_has_optimizers(path))
        if fitting and not without_optimizers:
            strict, configs = module.strict_loading, self._strategy.lr_scheduler_configs
            restored = session.checkpoints.load(
                path, strict=strict, check=lambda state: check_schedulers(configs, unpack(state), strict)
            )
        else:
            restored = load_weights(session, path, module.strict_loading)
        if restored is None:
            raise FileNotFoundError(f"no checkpoint in {path}; give a directory or file that was saved")
        state = unpack(restored.user_state)
        if FABRIC in state:  # other state of a Fabric program
            state = {}
        if not state:  # saved by a Booster or another library: only weights and optimizer state
            state = {"lr_schedulers": [], "epoch": 0, "global_step": 0}
            if without_optimizers:
                warn_user(f"{path} holds weights only: optimizers and counters start from the beginning")
        elif without_optimizers and "lr_schedulers" not in state:  # saved with save_weights_only
            state["lr_schedulers"] = []
            warn_user(f"{path} holds weights only: optimizers and schedulers start from the beginning")
        state.setdefault("pytorch-lightning_version", self._strategy.ns.version)
        state["state_dict"] = outline(session)
        return state

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """See :meth:`shardwise.strategies.trainer.ShardedStrategy.load_model_state_dict`."""
        state = checkpoint["state_dict"]
        if self.is_single_file:
            self._strategy.session.module.load_state_dict(state, strict=strict)
        elif isinstance(state, _Outline) and state.changed:
            warn_user(
                f"on_load_checkpoint changed state_dict ({len(state)} names) after the weights were loaded. Load a "
                "single file to change the weights in the hook"
            )

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """See :meth:`shardwise.strategies.trainer.ShardedStrategy.load_optimizer_state_dict`."""
        if self.is_single_file:
            for optimizer, state in zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)


@contextmanager
def saving_to(session: Session, path: Any) -> Iterator[str]:
    """Run a save inside, in which every rank uses rank 0's ``path``.

    The ranks synchronize in the session's own group, which detects a rank that does something else, and not in the
    program's default group.
    """
    path = os.fspath(path)
    with session.mesh.doing(f"saving checkpoint {path}"):
        yield str(session.mesh.mesh_group.exchange_object(path, "what saving needs")[0])


def _read_file(path: str, weights_only: bool | None, one_file: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    try:
        return one_file(path) if weights_only is None else one_file(path, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        # In Lightning 2.6, Trainer.fit(weights_only=False) does not reach a strategy that restores after its setup.
        error.add_note(
            f"{path} was read with weights_only={weights_only}, which is all that Lightning says to strategies that "
            "restore after setup: allow the classes by torch.serialization.add_safe_globals, or save the file again "
            "without them"
        )
        raise


def _has_optimizers(path: str) -> bool:
    """Return whether there is optimizer state; also True if the file cannot be read, which loading will report."""
    try:
        with open_checkpoint(path) as source:
            return bool(source.state().get("optimizers"))
    except (OSError, ValueError, CheckpointError):
        return True


def load_weights(session: Session, path: str, strict: bool) -> Restored | None:
    """Load the model without changing the random number generators."""
    device = session.mesh.device
    generators = read_generators(device)
    try:
        return Checkpointer(ModelOnly(session)).load(path, strict=strict)
    finally:
        restore_generators(generators, device)


def place(path: str) -> tuple[str, str]:
    """Return the directory of checkpoints and the tag in it. A name that cannot be a tag becomes the directory.

    Raises:
        ValueError: the path is a URL.
    """
    if "://" in path:
        raise ValueError(f"filepath={path!r} is a URL; give a directory that all ranks mount, into which each writes")
    root, tag = os.path.split(os.path.abspath(path))
    if tag.startswith(".") or tag in ("latest", "auto"):
        return os.path.join(root, tag), ALONE
    return root, tag


# ---- States of learning-rate schedulers, which Lightning loads into any scheduler.


CLASSES = "lr_scheduler_classes"
"""The entry next to Lightning's ``lr_schedulers`` with the classes of the schedulers."""


def _saved(configs: Sequence[Any], checkpoint: Mapping[str, Any]) -> Iterator[tuple[int, Any, SavedScheduler]]:
    """Iterate over number, scheduler, and the state that ``checkpoint`` has for it."""
    states = checkpoint.get("lr_schedulers") or ()
    kinds = [*(checkpoint.get(CLASSES) or ()), *[""] * len(states)]
    for number, (config, state, kind) in enumerate(zip(configs, states, kinds, strict=False)):
        yield number, config.scheduler, SavedScheduler(state, kind)


def check_schedulers(configs: Sequence[Any], checkpoint: Mapping[str, Any], strict: bool) -> None:
    """Check that the states in ``checkpoint["lr_schedulers"]`` are those of the schedulers.

    Args:
        configs: Lightning's ``LRSchedulerConfig``.
        checkpoint: Lightning's dictionary.
        strict: a state of another class, or for another number of param groups, is an error.

    Raises:
        ValueError: a state belongs to another scheduler, or has values that its class never has.
    """
    for number, scheduler, saved in _saved(configs, checkpoint):
        reason = saved.misfit(scheduler)
        if reason is not None and strict:
            raise ValueError(
                f"learning-rate scheduler {number}: {reason}; return from configure_optimizers what was saved, or set "
                "strict_loading=False to keep its own state"
            )
        if reason is None or saved.misfit(scheduler, same_groups=False) is None:
            check_scheduler(scheduler, saved.state, f"learning-rate scheduler {number}")


def fit_schedulers(configs: Sequence[Any], checkpoint: dict[str, Any]) -> None:
    """Adapt states that were checked without ``strict`` to the schedulers.

    A scheduler keeps its own state, with a warning, if the saved state is of another class. If the optimizer has other
    param groups, the state gets the learning rates of these groups.
    """
    states = list(checkpoint.get("lr_schedulers") or ())
    for number, scheduler, saved in _saved(configs, checkpoint):
        reason = saved.misfit(scheduler)
        if reason is None:
            continue
        if saved.misfit(scheduler, same_groups=False) is None:
            groups = inner_scheduler(scheduler).optimizer.param_groups
            states[number] = regrouped(saved.state, scheduler.state_dict(), groups, [None] * len(groups))
        else:
            warn_user(f"learning-rate scheduler {number}: {reason}; it stays as it is")
            states[number] = scheduler.state_dict()
    if states:
        checkpoint["lr_schedulers"] = states
