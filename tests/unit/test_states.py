"""A table of states refuses what is not in it, and has to be whole."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from shardwise.core.base.states import Table


class Door(Enum):
    CLOSED = auto()
    OPEN = auto()
    LOCKED = auto()


DOOR = Table("door", {Door.CLOSED: {Door.OPEN: "pushed", Door.LOCKED: "the key"}, Door.OPEN: {}, Door.LOCKED: {}})


class Keeper:
    def open(self, old: Door) -> None:
        self._set(old, Door.OPEN)

    def _set(self, old: Door, new: Door) -> None:
        DOOR.check(7, old, new)


def test_an_illegal_change_names_the_thing_the_states_and_the_caller() -> None:
    Keeper().open(Door.CLOSED)
    message = r"door 7 is LOCKED and cannot become OPEN \(only nothing\), which Keeper.open wants"
    with pytest.raises(RuntimeError, match=message):
        Keeper().open(Door.LOCKED)
    with pytest.raises(RuntimeError, match=r"door 7 is CLOSED and cannot become CLOSED \(only OPEN, LOCKED\)"):
        DOOR.check(7, Door.CLOSED, Door.CLOSED)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({Door.CLOSED: {Door.OPEN: "pushed"}, Door.OPEN: {}}, "LOCKED"),
        ({Door.CLOSED: {Door.OPEN: "pushed", Door.LOCKED: "the key"}, Door.OPEN: {}}, "LOCKED"),
        ({Door.CLOSED: {}, Door.OPEN: {Door.CLOSED: "pulled"}, Door.LOCKED: {}}, "OPEN, LOCKED"),
    ],
)
def test_a_table_with_a_state_too_few_is_refused(changes: dict[Door, dict[Door, str]], lost: str) -> None:
    with pytest.raises(ValueError, match=f"the state table of a door has no transition to or from {lost}; add it"):
        Table("door", changes)
