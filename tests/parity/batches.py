"""Runs the rows of a matrix in batches, so that ranks do not idle while the caller compares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pytest

from shardwise.testing import RankError, run_ranks
from tests.parity.sharded import Setting

R = TypeVar("R")


class Batches(Generic[R]):
    """Runs rows in batches, and stores results until they are requested.

    Args:
        rows: each with ``label``.
        settings_of: returns the settings that a row trains, one after the other.
        train: runs on every rank of a pool, with settings of one number of ranks.
        size: number of rows that ranks run in one task.
    """

    def __init__(
        self,
        rows: Mapping[str, R],
        settings_of: Callable[[R], list[Setting]],
        train: Callable[[Sequence[Setting]], list[Any]],
        size: int,
    ) -> None:
        self._settings = {label: settings_of(row) for label, row in rows.items()}
        self._waiting = dict.fromkeys(rows)
        self._train, self._size = train, size
        self._done: dict[str, list[list[Any]]] = {}

    def runs(self, label: str) -> list[list[Any]]:
        """Return the results by setting and rank; raise what the ranks raised."""
        if label not in self._done:
            ranks = self._settings[label][0].world_size
            same = [each for each in self._waiting if self._settings[each][0].world_size == ranks and each != label]
            try:
                self._run([label, *same[: self._size - 1]])
            except RankError:  # a row of the batch failed, so this row runs alone
                self._run([label])
        return self._done.pop(label)

    def _run(self, batch: Sequence[str]) -> None:
        settings = [setting for label in batch for setting in self._settings[label]]
        for label in batch:
            self._waiting.pop(label, None)
        by_rank = run_ranks(settings[0].world_size, self._train, settings, timeout=180.0)
        by_setting = iter(zip(*by_rank, strict=True))
        for label in batch:
            self._done[label] = [list(next(by_setting)) for _ in self._settings[label]]


def selected(request: pytest.FixtureRequest) -> list[Any]:
    """Return the rows of a file that this session selected, from tests that use the fixture."""
    here = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == request.path]
    return [i.callspec.params["row"] for i in here if request.fixturename in i.fixturenames]
