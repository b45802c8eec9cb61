"""Two hosts of two ranks each, in network namespaces joined by a wire, each with a /dev/shm of its own."""

from pathlib import Path

import pytest

from tests.support.hosts import TwoHosts, check_program

RANKS = Path(__file__).parents[1]


@pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not()))
@pytest.mark.parametrize(
    "program",
    [
        pytest.param("engine/two_hosts_program.py", marks=pytest.mark.full),
        pytest.param("booster/hosts_program.py", marks=pytest.mark.campaign),
    ],
)
def test_ranks_on_two_hosts_are_plain_pytorch(program: str) -> None:
    """ZeRO, and layers that are cut inside a host while the rest is across."""
    check_program(RANKS / program, 29578)
