"""Programs written for other libraries, ported and run: one of each library here, all of them in the campaign."""

from __future__ import annotations

import pytest

from tests.foreign.cases import CASES, Case
from tests.foreign.running import outcome

ALWAYS = {
    "colossalai_booster.py --plugin gemini",
    "deepspeed_zero3.py",
    "fairscale_fsdp.py",
    "transformers_deepspeed.py 3",
}


def _marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.name in ALWAYS else (pytest.mark.campaign,))


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_a_program_runs_as_it_did(case: Case) -> None:
    found = outcome(case)
    assert not found.wrong, f"{found.wrong}\n{found.output[-4000:]}"


def test_those_of_every_run_are_there() -> None:
    assert {case.name for case in CASES} >= ALWAYS
