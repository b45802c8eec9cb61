"""``zero_hpz_partition_size`` and ``mics_shard_size``: plain PyTorch's numbers, and who holds and sends what."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.testing import assert_close
from tests.support.engine_setup import adam, data, run_plain, seeded
from tests.support.on_ranks import on_ranks

RANKS, PASSES, STEPS, WIDTH, DEPTH = 4, 2, 2, 6, 4
# Nothing stays gathered for its own sake, and nothing is fetched ahead.
STAGE_3: dict[str, Any] = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hpz": {"zero_hpz_partition_size": 2},
    "hpz of all": {"zero_hpz_partition_size": 99},
    "mics": {"mics_shard_size": 2},
    "mics of one": {"mics_shard_size": 1},
}


def chain() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def trained(keys: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, int], dict[str, int]]:
    """The last state, bytes of gathers of the first pass by group, and elements that this rank holds."""
    model = seeded(chain)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": 0.0,
        "zero_optimization": STAGE_3 | keys,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    session, mesh = engine.session, engine.session.mesh
    mesh.reset_traffic()
    gathers: dict[str, int] = {}
    for step in range(STEPS):
        for index in range(PASSES):
            engine.backward(engine(data(mesh.world.rank, step, index)).square().mean())
            engine.step()
            if not gathers:
                gathers = {group.name: group.traffic.bytes["all_gather"] for group in mesh.groups}
    memory = session.memory()
    held = {"shards": memory.parameters_bytes // 8, "secondary": memory.secondary_bytes // 8}
    state = session.module.state_dict()
    engine.destroy()
    return state, gathers, held


@on_ranks(RANKS)
def test_the_same_numbers_over_whichever_ranks() -> None:
    def program(model: nn.Module, rank: int, step: int) -> Any:
        for index in range(PASSES):
            yield model(data(rank, step, index)).square().mean() / PASSES, False

    expected = run_plain(chain, program, RANKS, STEPS)
    unit, elements = WIDTH * WIDTH * 8, DEPTH * WIDTH * WIDTH
    # Backward gathers all but the unit that is there, and the first, whose input needs no gradient.
    again = DEPTH - 2
    # What each case sends, by group, and holds: elements in shards and in second copies. Under mics gathers are inside
    # groups of two, which hold half of all each; gradients are summed over both groups.
    traffic: dict[str, tuple[dict[str, int], int, int]] = {
        "plain": ({"dp_shard": (DEPTH + again) * unit * 3 // 4}, elements // 4, 0),
        "hpz": ({"dp_shard": DEPTH * unit * 3 // 4, "secondary": again * unit // 2}, elements // 4, elements // 2),
        "hpz of all": ({"dp_shard": (DEPTH + again) * unit * 3 // 4}, elements // 4, 0),
        "mics": ({"dp_shard": (DEPTH + again) * unit // 2}, elements // 2, 0),
        "mics of one": ({}, elements, 0),
    }
    for name, keys in CASES.items():
        state, gathers, held = trained(keys)
        assert_close(state, expected, 1e-11, name)
        sent = {group: count for group, count in gathers.items() if count}
        assert (sent, held["shards"], held["secondary"]) == traffic[name], name
