"""What is noted of rounds, when it is played, and how far; see [Note: Scripts instead of rounds]."""

from __future__ import annotations

from shardwise.gather.script import CROWDED, MOST_PATIENCE, STRAYED, Entry, Scripts

FORWARD = [((0,), 0, False), ((1, 2), 0, False), ((), 0, True)]
STEP = [*FORWARD, ((2,), 0, False), ((), 1, False), ((1, 0), 2, False), ((), 3, True)]


def noted(scripts: Scripts, step: list[tuple[tuple[int, ...], int, bool]] = STEP, alike: bool = True) -> None:
    for units, reductions, ends in step:
        scripts.note(units, reductions, ends, alike)
    scripts.end_span(0.0)
    scripts.updated(None)


def playing(times: int = 2) -> Scripts:
    scripts = Scripts()
    for _ in range(times):
        assert not scripts.playing
        noted(scripts)
    assert scripts.playing
    return scripts


def played(scripts: Scripts, wanted: list[int] | None, ready: int = 0) -> list[tuple[int, ...]] | None:
    found = scripts.until(wanted, ready)
    scripts.at += len(found or ())
    return None if found is None else [entry.units for entry in found]


def test_what_was_the_same_twice_is_played() -> None:
    scripts = playing()
    assert played(scripts, [0]) == [(0,)]
    assert played(scripts, [1, 2]) == [(1, 2)]
    assert played(scripts, None) == [()]
    assert played(scripts, [2]) == [(2,)]
    assert played(scripts, [], 1) == [()]
    assert played(scripts, [0, 1], 2) == [(1, 0)]
    assert played(scripts, None, 3) == [()]
    assert scripts.rest == [] and scripts.owed == 0
    scripts.end_span(0.0)
    scripts.updated(None)
    assert scripts.playing


def test_another_step_is_noted_anew() -> None:
    scripts = Scripts()
    noted(scripts)
    noted(scripts, STEP[:-1])
    noted(scripts)
    assert not scripts.playing
    noted(scripts)
    assert scripts.playing


def test_ranks_that_differed_have_no_script() -> None:
    scripts = Scripts()
    noted(scripts)
    noted(scripts, alike=False)
    noted(scripts)
    assert not scripts.playing


def test_a_rank_that_needs_less_takes_part_in_what_lies_between() -> None:
    scripts = playing()
    assert played(scripts, [2]) == [(0,), (1, 2)]
    assert played(scripts, None) == [()]
    assert played(scripts, [0], 2) == [(2,), (), (1, 0)]


def test_no_search_goes_beyond_the_pass() -> None:
    scripts = playing()
    assert played(scripts, [1]) == [(0,), (1, 2)]
    assert played(scripts, [2, 0]) is None  # unit 2 is in the script of backward


def test_a_reduction_that_cannot_begin_ends_it() -> None:
    scripts = playing()
    assert played(scripts, None) == [(0,), (1, 2), ()]
    assert played(scripts, [2]) == [(2,)]
    assert played(scripts, [], 0) == []  # it may come later
    assert played(scripts, [0], 1) is None
    scripts.strayed = True
    assert scripts.owed == 3


def test_who_strays_makes_all_wait_longer() -> None:
    scripts = playing()
    patience = 2
    while patience < MOST_PATIENCE:
        scripts.end_span(STRAYED)
        scripts.updated(None)
        patience *= 2
        for _ in range(patience):
            assert not scripts.playing
            noted(scripts)
        assert scripts.playing
    scripts.end_span(STRAYED)
    for _ in range(MOST_PATIENCE):
        scripts.updated(None)
        assert not scripts.playing
        noted(scripts)
    assert scripts.playing
    for _ in range(5 * MOST_PATIENCE):  # and less, when nobody does
        scripts.end_span(0.0)
        scripts.updated(None)
    scripts.end_span(STRAYED)
    scripts.updated(None)
    for _ in range(MOST_PATIENCE):
        noted(scripts)
    assert scripts.playing


def test_spans_of_a_step_have_scripts_of_their_own() -> None:
    scripts = Scripts()
    for _ in range(2):
        for step in (STEP, STEP[:4] + STEP[-1:]):
            for units, reductions, ends in step:
                scripts.note(units, reductions, ends, True)
            scripts.end_span(0.0)
        scripts.updated(None)
    assert scripts.playing and scripts.rest == [Entry(*each) for each in STEP]
    scripts.at = len(STEP)
    scripts.end_span(0.0)
    assert scripts.playing and len(scripts.rest) == 5
    scripts.end_span(0.0)
    assert not scripts.playing  # no step had a third one
    scripts.updated(1)
    assert not scripts.playing  # nor came any behind an update of another optimizer


def test_a_failed_pass_is_followed_by_rounds_until_the_update() -> None:
    scripts = playing()
    scripts.failed()
    assert not scripts.playing
    noted(scripts, STEP[:2])
    assert not scripts.playing
    noted(scripts)
    noted(scripts)
    assert scripts.playing


def test_a_span_is_played_where_no_rank_knows_of_another_model() -> None:
    scripts = playing()
    scripts.end_span(CROWDED)
    scripts.updated(None)
    assert not scripts.playing
    noted(scripts)  # is at its end the only one again
    assert scripts.playing


def test_another_model_that_comes_ends_what_is_played() -> None:
    scripts = playing()
    played(scripts, None)
    scripts.stop()
    assert not scripts.playing and scripts.rest == [] and scripts.at == 0
    scripts.updated(None)
    assert not scripts.playing


def test_what_a_rank_says_of_a_span() -> None:
    scripts = playing()
    assert scripts.word == 0.0
    scripts.crowded = lambda: True
    assert scripts.word == CROWDED
    scripts.strayed = True
    assert scripts.word == STRAYED
