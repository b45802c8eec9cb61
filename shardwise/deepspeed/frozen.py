"""Checkpoints without the parameters that nobody trains."""

from __future__ import annotations

from shardwise.core.checkpoint.formats.detect import open_checkpoint
from shardwise.core.checkpoint.match import Match, Wanted
from shardwise.core.checkpoint.run import TrainedOnly
from shardwise.core.checkpoint.source import CheckpointError
from shardwise.deepspeed.parts import PartRun
from shardwise.session import Session

__all__ = ["WithoutFrozen", "frozen_ones_are_missing"]


class WithoutFrozen(PartRun):
    """A session to be saved without parameters that do not require gradients (those that an optimizer has stay)."""

    def local_state(self) -> TrainedOnly:
        """What is saved."""
        return TrainedOnly(self._session.engine, self._session.optimizers)


def frozen_ones_are_missing(session: Session, path: str, wanted: Wanted = "all") -> bool:
    """Whether what is wanted fits but for frozen parameters that the checkpoint lacks: they stay as they are."""
    held = WithoutFrozen(session).local_state()
    if not held.left_out:
        return False
    try:
        source = open_checkpoint(path)
    except (CheckpointError, OSError, ValueError):
        return False  # whoever loads it says what is wrong, on every rank
    try:
        match = Match(source, PartRun(session).local_state(), False, wanted)
    except ValueError:
        return False
    finally:
        source.close()
    return bool(match.missing) and held.left_out.issuperset(match.missing) and not match.unexpected
