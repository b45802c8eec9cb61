"""Programs written for other libraries, ported and run: two in the full set, all in the campaign.

The quick set runs one of them in forks of a process that has imported torch.
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
    """Run a program that writes no file, with ``shardwise run`` instead of torchrun."""
    (place,) = (index for index, word in enumerate(command) if word.endswith(".py"))
    program = [str(folder / command[place]), *command[place + 1 :]]
    return launching.finished("shardwise", "run", "--nproc", "2", *program, log=folder / "log")


def test_ported_program_gives_the_same_loss_in_forks() -> None:
    (case,) = (case for case in CASES if case.name == QUICK)
    found = outcome(case, in_forks)
    assert not found.wrong, f"{found.wrong}\n{found.output[-4000:]}"


def in_sets() -> list[object]:
    rows = [(case.name in FULL, pytest.param(case, id=case.name)) for case in CASES]
    return [each for now, row in rows for each in (full(row) if now else campaign(row))]


@pytest.mark.parametrize("case", in_sets())
def test_ported_program_gives_the_same_loss(case: Case) -> None:
    found = outcome(case)
    assert not found.wrong, f"{found.wrong}\n{found.output[-4000:]}"


def test_names_of_the_full_set_exist() -> None:
    assert {case.name for case in CASES} >= FULL
