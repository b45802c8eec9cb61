"""Two hosts of two ranks each, in network namespaces joined by a wire, each with a /dev/shm of its own."""

from pathlib import Path

import pytest

from tests.support.hosts import TwoHosts, check_program
from tests.support.sets import campaign, full

RANKS = Path(__file__).parents[1]


@pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not()))
@pytest.mark.parametrize("program", [*full("engine/two_hosts_program.py"), *campaign("booster/hosts_program.py")])
def test_ranks_on_two_hosts_are_plain_pytorch(program: str) -> None:
    """ZeRO, and layers that are cut inside a host while the rest is across."""
    check_program(RANKS / program, 29578)
