"""Programs written for other libraries, ported and run: two in the full set, all in the campaign.

In the quick set one of them runs in forks of a process that has imported torch.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.foreign.cases import CASES, Case
from tests.foreign.running import outcome
from tests.support import launching
from tests.support.sets import campaign, full

QUICK = "colossalai_zero.py 2"
FULL = {"colossalai_booster.py --plugin gemini", "deepspeed_zero3.py"}


def in_forks(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """A program that writes no file, with ``shardwise run`` in torchrun's place."""
    (place,) = (index for index, word in enumerate(command) if word.endswith(".py"))
    program = [str(folder / command[place]), *command[place + 1 :]]
    return launching.finished("shardwise", "run", "--nproc", "2", *program, log=folder / "log")


def test_a_program_runs_in_forks_as_it_did() -> None:
    (case,) = (case for case in CASES if case.name == QUICK)
    found = outcome(case, in_forks)
    assert not found.wrong, f"{found.wrong}\n{found.output[-4000:]}"


def in_sets() -> list[object]:
    rows = [(case.name in FULL, pytest.param(case, id=case.name)) for case in CASES]
    return [each for now, row in rows for each in (full(row) if now else campaign(row))]


@pytest.mark.parametrize("case", in_sets())
def test_a_program_runs_as_it_did(case: Case) -> None:
    found = outcome(case)
    assert not found.wrong, f"{found.wrong}\n{found.output[-4000:]}"


def test_those_of_every_run_are_there() -> None:
    assert {case.name for case in CASES} >= FULL
