"""Where a run of the demo is: what its checkpoints keep beside what :meth:`Booster.save_checkpoint` saves of any run.

It is read before the model is built as well, so that other sizes are refused before anything is allocated for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.directory import scan
from shardwise.checkpoint.format import read_manifest
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.write import agree
from shardwise.cli.errors import BadInput

__all__ = ["RunState", "newest_state", "told_as_bad_input"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run is.

    Attributes:
        step: steps done.
        goal: the step at which this run is complete.
        phase_start: the step at which the learning-rate schedule under way began.
        steps_option: ``--steps`` when ``goal`` was set.
        windows: windows of the text that were used, all ranks together: the position in the data.
        model: the model's sizes.
        data_digest: identifies the text.
        ranks: how many ranks wrote it.
        plugin: which plugin trained.
        seed: of the order of the text.
    """

    step: int
    goal: int
    phase_start: int
    steps_option: int
    windows: int
    model: dict[str, int]
    data_digest: str
    ranks: int
    plugin: str
    seed: int

    def user_state(self) -> dict[str, Any]:
        """What a checkpoint keeps as ``user_state``; ``windows`` is its ``data_position``."""
        return {name: value for name, value in asdict(self).items() if name != "windows"}

    @classmethod
    def of(cls, path: str, user_state: Any, windows: Any) -> RunState:
        """What a checkpoint at ``path`` says.

        Raises:
            BadInput: it is not one of the demo's.
        """
        try:
            return cls(**user_state, windows=windows)
        except TypeError as problem:
            raise BadInput(
                f"--out: {path} is not a checkpoint of the demo ({problem}); remove it, or give another"
            ) from problem


@contextmanager
def told_as_bad_input(out: str) -> Iterator[None]:
    """What goes wrong inside with the checkpoints in ``out``, on every rank, is a :class:`BadInput` in one line."""
    try:
        yield
    except (CheckpointError, FileNotFoundError, ValueError) as problem:
        text = " ".join(str(problem).split())
        raise BadInput(f"--out {out}: {text}; put that right, or give another folder") from problem


def newest_state(out: str) -> RunState | None:
    """What the newest checkpoint in ``out`` says, as far as manifests can be read; ``None`` where there is none.

    Collective. Loading may find that checkpoint damaged and take an older one, so what it says is only a first check.

    Raises:
        CheckpointError: on every rank, when rank 0 cannot read the folder.
        BadInput: it is not one of the demo's.
    """
    ranks = Ranks(own=False)

    def look() -> tuple[Any, ...] | None:
        readable = [found.path for found in scan(out) if found.head is not None] if ranks.rank == 0 else []
        if not readable:
            return None
        state = read_manifest(readable[0]).state  # without tensors, so as it was given
        return readable[0], state.get("user_state"), (state.get("data_position") or [None])[0]

    try:
        found = agree(ranks.gather, ranks.rank, f"read the checkpoints in {out}", look)[1][0]
    finally:
        ranks.close()
    return None if found is None else RunState.of(*found)
