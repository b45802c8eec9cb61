"""Checkpoints of Fabric programs: the session's own format, with what else the program saves in the same directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.core.checkpoint.session import Checkpointer
from shardwise.core.checkpoint.write import agree
from shardwise.late import LateOptimizer
from shardwise.session import Session
from shardwise.strategies.entries import pack, unpack
from shardwise.strategies.saving import FABRIC, FABRIC_NAMES, ModelOnly, load_weights, place, saving_to

__all__ = ["Check", "FabricSaving", "restored", "writer_of"]

Check = Callable[[Mapping[str, Any]], None] | None


class FabricSaving:
    """Of one strategy."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def one_file(self) -> bool:
        """Whether checkpoints go, whole, through a ``checkpoint_io`` that somebody chose."""
        given = self._strategy._checkpoint_io
        return given is not None and type(given) is not self._strategy.ns.load("plugins.io.torch_io.TorchCheckpointIO")

    # ---- what is what

    def _sessions(self, state: Mapping[str, Any]) -> dict[str, Session]:
        found = {}
        for name, value in state.items():
            if isinstance(value, nn.Module):
                try:
                    found[name] = self._strategy.late(value).session
                except ValueError:
                    continue  # a module that Fabric did not set up
        return found

    def _one(self, state: Mapping[str, Any], call: str) -> tuple[str, Session]:
        sessions = self._sessions(state)
        if len(sessions) != 1:
            raise ValueError(
                f"{call} with {len(sessions)} models that were set up ({', '.join(sessions) or 'none'}) in "
                f"state={{{', '.join(state)}}}: a checkpoint directory holds one; give state={{'model': model, ...}}"
            )
        return next(iter(sessions.items()))

    @staticmethod
    def _optimizers(state: Mapping[str, Any], session: Session, call: str) -> list[str]:
        """Names of the session's optimizers in ``state``, in the session's order: all of them, or none."""
        found = {}
        for name, value in state.items():
            own = value.target if isinstance(value, LateOptimizer) else value
            if any(own is each for each in session.optimizers):
                found[name] = own
            elif isinstance(own, Optimizer) and hasattr(own, "engine"):
                raise ValueError(
                    f"{call}: state[{name!r}] is an optimizer of another model than state has; save each model with "
                    "its own, in a directory of its own"
                )
        if found and len(found) != len(session.optimizers):
            raise ValueError(
                f"{call} with {len(found)} of the model's {len(session.optimizers)} optimizers ({', '.join(found)}): "
                "give all, or none to leave them out"
            )
        return [name for each in session.optimizers for name, own in found.items() if own is each]

    # ---- saving

    def save(
        self, path: Any, state: dict[str, Any], storage_options: Any, filter: Any, whole: Callable[..., None]
    ) -> None:
        """See :meth:`shardwise.strategies.fabric.FabricStrategy.save_checkpoint`.

        Raises:
            TypeError: ``storage_options`` or ``filter`` for a directory.
            ValueError: not exactly one model, or some of its optimizers.
            CheckpointError: on every rank, where an entry cannot be saved, or a file not be written.
        """
        if self.one_file or not self._sessions(state):
            whole(os.fspath(self._strategy.broadcast(path)), state, storage_options, filter)
            return
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value is not None:
                raise TypeError(
                    f"save({name}={value!r:.80}): ranks write files of their own, whole tensors of the model; give the "
                    "strategy a checkpoint_io for single files, which take it"
                )
        call = f"save({os.fspath(path)!r})"
        name, session = self._one(state, call)
        optimizers = self._optimizers(state, session, call)
        rest = {key: value for key, value in state.items() if key != name and key not in optimizers}
        with saving_to(session, path) as path:
            packed = self._packed(rest, [name, *optimizers], session, path)
            writer = self._strategy.writer(session, bool(optimizers))
            root, tag = place(path)
            writer.latest = False
            writer.save(root, tag, step=session.checkpoints.steps, user_state=packed)

    def _packed(self, rest: dict[str, Any], names: list[str], session: Session, path: str) -> dict[str, Any] | None:
        packed: list[dict[str, Any]] = []

        def put() -> None:
            converted = self._strategy._convert_stateful_objects_in_state(rest, filter={})
            packed.extend([pack({FABRIC: converted, FABRIC_NAMES: names})] if session.mesh.rank == 0 else [])

        agree(session.mesh.world.exchange_object, session.mesh.rank, f"put together the entries of {path}", put)
        return packed[0] if packed else None

    # ---- loading

    def load(
        self, path: Any, state: Any, strict: bool, weights_only: bool | None, whole: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """See :meth:`shardwise.strategies.fabric.FabricStrategy.load_checkpoint`.

        Raises:
            ValueError: a directory without exactly one model to restore, or with some of its optimizers; entries of
                the state that the checkpoint lacks, where nothing is changed.
        """
        path = os.fspath(self._strategy.broadcast(path))
        if not self._strategy.broadcast(os.path.isdir(path)):
            more = {} if weights_only is None else {"weights_only": weights_only}
            return whole(path, state, strict, **more)
        call = f"load({path!r})"
        if isinstance(state, nn.Module):
            self._strategy.restore(self._one({"obj": state}, call)[1], path, strict, False)
            return {}
        if isinstance(state, Optimizer):
            raise ValueError(
                f"load_raw({path!r}, {type(state).__name__}): a directory has optimizers with their model; use "
                "fabric.load(path, {'model': model, 'optimizer': optimizer})"
            )
        state = {} if state is None else state
        name, session = self._one(state, call)
        optimizers = self._optimizers(state, session, call)
        wanted = [key for key in state if key != name and key not in optimizers]

        def check(entries: Mapping[str, Any]) -> None:
            missing = [key for key in wanted if key not in entries]
            if strict and missing:
                raise ValueError(
                    f"the state asks for {', '.join(missing)}, which {path} does not have (it has "
                    f"{', '.join(entries) or 'nothing beside the model'}); give strict=False to keep them as they are"
                )

        entries = dict(self._strategy.restore(session, path, strict, bool(optimizers), check))
        check(entries)
        for key in wanted:
            if key in entries:
                value = entries.pop(key)
                if hasattr(state[key], "load_state_dict"):
                    state[key].load_state_dict(value)
                else:
                    state[key] = value
        return entries


def entries_of(user_state: Any) -> dict[str, Any]:
    """What a program had beside the model, of a checkpoint that Fabric or a Trainer wrote."""
    found = unpack(user_state)
    inner = found.get(FABRIC)
    return dict(inner) if isinstance(inner, Mapping) else found


def writer_of(session: Session, whole: bool) -> Checkpointer:
    """What writes a directory; ``whole``: with the optimizers."""
    return session.checkpoints if whole else Checkpointer(ModelOnly(session))


def restored(session: Session, path: str, strict: bool, whole: bool, check: Check) -> dict[str, Any]:
    """Restore a session; ``whole``: with its optimizers, loss scale and random numbers. What else there is."""
    if whole:
        given = (lambda state: check(entries_of(state))) if check is not None else None
        found = session.checkpoints.load(path, strict=strict, check=given)
    else:
        found = load_weights(session, path, strict)
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {path}")
    return entries_of(found.user_state)
