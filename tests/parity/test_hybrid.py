"""Architectures under every way to split a model; ``python -m tests.parity`` runs all of them.

Only architectures that no other test trains. Quick: two layouts that use every axis. Full: every layout once, with one
of two architectures. Campaign: every layout with both.
"""

import pytest

from shardwise.testing import run_ranks
from tests.parity.hybrid import LAYOUTS, measured
from tests.support.sets import campaign, full

FOUR = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 4]
EIGHT = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 8]


# Each axis once, with everything that is sent along it.
QUICK = ["tp2pp2x2 sequences", "dp2tp2 zero3"]
FULL = [(4, "falcon", FOUR[::2]), (4, "mixtral", FOUR[1::2]), (8, "llama", EIGHT)]


@pytest.mark.parametrize(
    ("ranks", "architecture", "layouts"),
    [(4, "mixtral", QUICK), *full(*FULL), *campaign((4, "falcon", FOUR), (4, "mixtral", FOUR))],
    ids=["over all axes", "falcon", "mixtral", "three axes of two", "falcon over all", "mixtral over all"],
)
def test_an_architecture_equals_one_process(ranks: int, architecture: str, layouts: list[str]) -> None:
    for found in run_ranks(ranks, measured, architecture, layouts, ["float64"], timeout=300.0):
        assert [each.layout for each in found] == layouts
        assert not [f"{each.layout}: {each.wrong}" for each in found if each.wrong]
