"""Runs rows of a matrix in batches, so that ranks do not idle while the caller compares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pytest

from shardwise.testing import RankError, run_ranks
from tests.parity.sharded import Setting

R = TypeVar("R")


class Batches(Generic[R]):
    """Keeps results until they are asked for.

    Args:
        rows: each with ``label``.
        settings_of: what a row trains, one after the other.
        train: runs on every rank of a pool, with settings of one number of ranks.
        size: rows that ranks run in one task.
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
        """By setting, by rank. Raises what the ranks raised."""
        if label not in self._done:
            ranks = self._settings[label][0].world_size
            same = [each for each in self._waiting if self._settings[each][0].world_size == ranks and each != label]
            try:
                self._run([label, *same[: self._size - 1]])
            except RankError:  # one of the batch failed, so each of it runs alone
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
    """The rows of a file that this session selected: of tests that ask for the fixture."""
    here = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == request.path]
    return [i.callspec.params["row"] for i in here if request.fixturename in i.fixturenames]
