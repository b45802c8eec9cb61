"""What one rank cannot give is told on every rank, before the program's own group is waited in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardwise.core.comm import PeerError
from shardwise.pytorch.state_dict import set_model_state_dict, set_optimizer_state_dict
from shardwise.session import build
from shardwise.testing import run_ranks
from tests.support.engine_setup import PLANS, adam, one_mesh, seeded
from tests.support.engine_setup import two_layers as net

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def no_weights(rank: int) -> None:
    with one_mesh(PLANS["zero3"]) as mesh:
        session = build(seeded(net), None, PLANS["zero3"], mesh)
        set_model_state_dict(session.module, None if rank == 0 else {}, options=FROM_RANK_0)  # type: ignore[arg-type]


def no_moments(rank: int) -> None:
    with one_mesh(PLANS["zero3"]) as mesh:
        model = seeded(net)
        session = build(model, adam(model), PLANS["zero3"], mesh)
        given: Any = None if rank == 0 else {}
        set_optimizer_state_dict(session.module, session.optimizers[0], given, options=FROM_RANK_0)


def refused(call: Callable[[int], None]) -> tuple[str, str, bool]:
    """What kind of error this rank has, what it says, and whether the program's group still works."""
    kind = said = ""
    try:
        call(dist.get_rank())
    except (TypeError, PeerError) as error:
        kind, said = type(error).__name__, str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    return kind, said, total.item() == 2


CASES: dict[Callable[[int], None], tuple[str, str]] = {
    no_weights: ("the state on rank 0=None: give a dict", "loading the model failed:"),
    no_moments: ("the state on rank 0=None: give a dict", "loading the optimizers failed:"),
}


@pytest.mark.parametrize("call", CASES)
def test_a_rank_that_cannot_go_on_tells_the_others(call: Callable[[int], None]) -> None:
    own, theirs = CASES[call]
    (kind, said, works), (other_kind, told, goes_on) = run_ranks(2, refused, call)
    assert kind == "TypeError" and own in said, said
    assert other_kind == "PeerError" and theirs in told and f"rank 0: TypeError: {said}" in told, told
    assert works and goes_on
