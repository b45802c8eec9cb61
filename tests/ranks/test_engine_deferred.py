"""build() of models that were only described: equal values, and never more than a shard and one chunk in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_setup import PLANS, adam, check, seeded, sharded
from torch import Tensor, nn

from shardwise.engine.deferred import deferred_init
from shardwise.engine.writer import ValueWriter
from shardwise.plan import Plan, zero
from shardwise.testing import live_tensor_bytes, run_ranks
from shardwise.testing.modules import TinyGpt


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(20, 7), nn.Linear(7, 2))


BUILDERS: dict[str, Callable[[], nn.Module]] = {"gpt": TinyGpt, "convolutions": convolutions}


def initial(plan: Plan, how: str) -> dict[str, tuple[dict[str, Tensor], list[bool]]]:
    results = {}
    for name, builder in BUILDERS.items():
        if name == "gpt" and how == "meta":
            continue  # TinyGpt's own parameter has no reset_parameters
        torch.manual_seed(3)
        if how == "deferred":
            with deferred_init():
                model = builder()
        else:
            with torch.device("meta"):
                model = builder()
        assert all(p.is_meta or type(p) is not nn.Parameter for p in model.parameters())
        if how == "meta":
            torch.manual_seed(3)
        optimizer = adam(model)
        with sharded(model, optimizer, plan) as session:
            kinds = [type(p) is nn.Parameter and not p.is_meta for p in model.parameters()]
            x = torch.zeros(2, 4, dtype=torch.long) if name == "gpt" else torch.ones(2, 3, 6)
            session.backward(session.module(x).square().mean())
            state = session.module.state_dict()
            session.optimizer.step()
            assert not torch.equal(session.module.state_dict()[next(iter(state))], state[next(iter(state))])
            results[name] = (state, kinds)
    return results


@pytest.mark.parametrize("how", ["deferred", "meta"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "half", "zero3", "zero3_gloo"])
def test_values_equal_the_unsharded_initialisation(name: str, how: str) -> None:
    results = run_ranks(2, initial, PLANS[name], how)
    for builder in results[0]:
        torch.manual_seed(3)
        plain = BUILDERS[builder]()
        expected = {k: v for k, v in plain.state_dict().items() if "running" not in k and "num_batches" not in k}
        for result in results:
            state, kinds = result[builder]
            assert all(kinds)
            check([{k: state[k] for k in expected}], expected, f"{name} {how} {builder}", rtol=0.0)


def bf16_masters(plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with deferred_init():
        model = TinyGpt()
    with sharded(model, adam(model), plan) as session:
        return session.module.state_dict()


def test_masters_hold_the_unrounded_values() -> None:
    torch.manual_seed(3)
    expected = TinyGpt().state_dict()
    for stage in (1, 3):
        check(run_ranks(2, bf16_masters, zero(stage, torch.bfloat16)), dict(expected), f"stage {stage}", rtol=0.0)


WIDTH, DEPTH = 256, 40
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def peak_while_building(plan: Plan, how: str) -> int:
    """Peak of live tensor bytes over the start, looked at whenever a whole value is cut up."""
    peaks: list[int] = []
    store = ValueWriter.store

    def watched(self: ValueWriter, index: int, value: Tensor) -> None:
        peaks.append(live_tensor_bytes("cpu"))
        store(self, index, value)

    ValueWriter.store = watched  # type: ignore[method-assign]
    before = live_tensor_bytes("cpu")
    try:
        torch.manual_seed(0)
        context: Any = deferred_init() if how == "deferred" else torch.device("meta")
        with context:
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        with sharded(model, None, plan):
            peaks.append(live_tensor_bytes("cpu"))
            return max(peaks) - before
    finally:
        ValueWriter.store = store  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_peak_while_building(how: str) -> None:
    """model / N + the largest chunk. A recorded tensor also keeps the generator's state, 5 KB, until it has values."""
    model = DEPTH * UNIT_BYTES
    for world_size in (2, 4):
        # On gloo no peer's memory is mapped, so what lives here is this rank's. Frozen: no gradient buffers either.
        plan = zero(3).but(shared_memory=False)
        for live in run_ranks(world_size, frozen_peak, plan, how):
            bound = model // world_size + UNIT_BYTES
            states = 2 * DEPTH * torch.get_rng_state().nbytes if how == "deferred" else 0
            assert model // world_size <= live <= bound + states + 8192, (live / bound, how)


def frozen_peak(plan: Plan, how: str) -> int:
    linear = nn.Linear.__init__

    def frozen(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        linear(self, *args, **kwargs)
        self.requires_grad_(False)

    nn.Linear.__init__ = frozen  # type: ignore[method-assign]
    try:
        return peak_while_building(plan, how)
    finally:
        nn.Linear.__init__ = linear  # type: ignore[method-assign]


def different_seeds(plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    with deferred_init():
        model = TinyGpt()
    with sharded(model, adam(model), plan) as session:
        return session.module.state_dict()


def test_sync_init_takes_rank_zeros_values() -> None:
    torch.manual_seed(0)
    check(run_ranks(2, different_seeds, PLANS["zero3"]), dict(TinyGpt().state_dict()), "sync_init", rtol=0.0)
    first, second = run_ranks(2, different_seeds, PLANS["ddp"].but(sync_init=False))
    assert not torch.equal(first["tokens.weight"], second["tokens.weight"])


def eager_is_cut_up(plan: Plan) -> int:
    """A real model's own memory is gone after build, on every rank."""
    before = live_tensor_bytes()
    model = seeded(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])).requires_grad_(False)
    with sharded(model, None, plan):
        return live_tensor_bytes() - before


def test_a_real_model_is_freed() -> None:
    whole = 8 * 8 * (64 * 64 + 64)
    for left in run_ranks(2, eager_is_cut_up, PLANS["zero3_gloo"]):
        assert left <= whole // 2 + 2048
