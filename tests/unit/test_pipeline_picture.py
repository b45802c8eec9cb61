"""Schedules drawn: what the pictures say is what the schedules are."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.core.parallel.pipeline import draw_schedule, make_schedule, schedule_text

SMALL = """\
zbv: 2 ranks with 2 stages each, 3 micro-batches
bubble: 5.3% of all ranks' time (its formula: 5.3%)
micro-batches whose activations a rank holds, at most (stage by stage, rank by rank): 4 4
and of which it holds what gradients of weights are made of: 1 3
F forward, B backward, W gradients of weights; small letters: the rank's other stages; . waits
rank 0 F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2 .
rank 1 .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2
"""


def test_a_picture_in_text() -> None:
    assert schedule_text(make_schedule("zbv", 2, 2, 3)) + "\n" == SMALL
    plain = schedule_text(make_schedule("1f1b", 2, 1, 2), (1.0, 1.0, 1.0)).splitlines()
    assert plain[-2:] == ["rank 0 F0 F1 .  .  B0 -- .  B1 --", "rank 1 .  F0 B0 -- F1 B1 -- .  ."]
    assert plain[1] == "bubble: 33.3% of all ranks' time (its formula: 33.3%)"
    uneven = schedule_text(make_schedule("zbv", 4, 2, 8), (1.0, 2.0, 0.5))
    assert "its formula" not in uneven
    narrow = schedule_text(make_schedule("zbv", 4, 2, 40)).splitlines()
    assert narrow[-1].startswith("rank 3 ...FfFfFfFfbwFBWfbw") and len(narrow[-1]) == len("rank 3 ") + 243


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["schedule", "--pp", "2", "--microbatches", "3", "--style", "zbv"]
    assert main([*arguments, "--svg", str(tmp_path / "zbv.svg")]) == 0
    assert capsys.readouterr().out == f"{SMALL}picture: {tmp_path / 'zbv.svg'}\n"
    assert (tmp_path / "zbv.svg").read_text() == draw_schedule(make_schedule("zbv", 2, 2, 3))
    for times in ("1e308", "1e-320"):
        assert main([*arguments, "--times", times, times, times]) == 0
        assert capsys.readouterr().out == SMALL
    for more, told in (
        (["--pp", "0"], "--pp 0: give a number of at least 1"),
        (["--chunks", "3"], "--style zbv --chunks 3: schedule='zbv' with 3 stages a rank: give 2"),
        (["--microbatches", "4000"], "at most 4096 passes"),
        (["--times", "1", "0", "1"], "--times 1.0 0.0 1.0: give three numbers above 0"),
        (["--times", "1e-320", "1", "1"], "1.0 1.0: give numbers of which none is more than 1000 times another"),
        (["--times", "1", "1e-9", "1"], "--times 1.0 1e-09 1.0: give numbers of which none is more than 1000 times"),
        (["--svg", str(tmp_path)], "cannot be written: give a file"),
        (["--svg", "/proc/x.svg"], "error: /proc/x.svg: cannot be written: No such file"),
        (["--svg", "/dev/full"], "error: /dev/full: cannot be written: No space left"),
        (["--svg", "x" * 300], f"error: {'x' * 300}: cannot be written: File name too long"),
    ):
        assert main([*arguments, *more]) == 2
        captured = capsys.readouterr()
        assert told in captured.err and not captured.out
