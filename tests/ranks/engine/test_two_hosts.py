"""Two hosts of two ranks each, as network namespaces joined by a virtual link, each with a /dev/shm of its own."""

from pathlib import Path

import pytest

from tests.support.hosts import TwoHosts, check_program
from tests.support.sets import campaign, full

RANKS = Path(__file__).parents[1]


@pytest.mark.skipif(TwoHosts.why_not() is not None, reason=str(TwoHosts.why_not()))
@pytest.mark.parametrize("program", [*full("engine/two_hosts_program.py"), *campaign("booster/hosts_program.py")])
def test_training_on_two_hosts_equals_plain_torch(program: str) -> None:
    """ZeRO over both hosts, and tensor parallelism inside a host with the other axes across hosts."""
    check_program(RANKS / program, 29578)
