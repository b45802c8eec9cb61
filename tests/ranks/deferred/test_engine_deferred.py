"""build() of deferred and meta models: values equal the plain ones, memory stays within a shard and one chunk."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.comm import Buffer
from shardwise.core.comm.shared_memory import MappedBuffer
from shardwise.core.deferred import deferred_init
from shardwise.core.engine.param_writer import ParamWriter
from shardwise.plan import Plan, zero
from shardwise.testing import run_ranks
from tests.support.counters import live_tensor_bytes
from tests.support.engine_setup import PLANS, adam, check, seeded, sharded
from tests.support.modules import TinyGpt
from tests.support.on_ranks import on_ranks
from tests.support.sets import campaign, full


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(20, 7), nn.Linear(7, 2))


BUILDERS: dict[str, Callable[[], nn.Module]] = {"gpt": TinyGpt, "convolutions": convolutions}


IN_FULL = [("ddp", "deferred"), ("zero2", "deferred"), ("zero3", "meta"), ("half", "meta"), ("zero3_gloo", "deferred")]


@pytest.mark.parametrize(("name", "how"), [("zero1", "meta"), ("zero3", "deferred"), *full(*IN_FULL)])
@on_ranks(2)
def test_values_equal_the_unsharded_initialization(name: str, how: str) -> None:
    for kind, builder in BUILDERS.items():
        if kind == "gpt" and how == "meta":
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
        with sharded(model, optimizer, PLANS[name]) as session:
            assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
            x = torch.zeros(2, 4, dtype=torch.long) if kind == "gpt" else torch.ones(2, 3, 6)
            session.backward(session.module(x).square().mean())
            state = session.module.state_dict()
            session.optimizer.step()
            assert not torch.equal(session.module.state_dict()[next(iter(state))], state[next(iter(state))])
        torch.manual_seed(3)
        plain = builder().state_dict()
        expected = {k: v for k, v in plain.items() if "running" not in k and "num_batches" not in k}
        check([{k: state[k] for k in expected}], expected, f"{name} {how} {kind}", rtol=0.0)


WIDTH, HALF = 256, torch.bfloat16
UNIT = WIDTH * WIDTH + WIDTH


def mapped_bytes() -> int:
    """Return the bytes of peers' memory that this process maps; the peers count them."""
    peers: dict[int, int] = {}
    for buffer in [each for each in gc.get_objects() if issubclass(type(each), Buffer)]:
        if isinstance(buffer, MappedBuffer):  # one array; a part of it is this rank's
            storage = buffer.local.untyped_storage()
            peers[storage._cdata] = storage.nbytes() - buffer.local.nbytes
            continue
        local, whole = buffer._full
        for storage in (peer.untyped_storage() for peer in whole if peer.data_ptr() != local.data_ptr()):
            peers[storage._cdata] = storage.nbytes()
    return sum(peers.values())


def own_bytes() -> int:
    return live_tensor_bytes("cpu") - mapped_bytes()


@dataclass(frozen=True)
class Building:
    """Live tensor bytes of this rank: the peak while values are made, after build, and after the first step."""

    making: int
    built: int
    trained: int


def watch_building(plan: Plan, how: str, depth: int, train: bool) -> Building:
    """Build (and train); measure whenever a full value is about to be sharded."""
    making: list[int] = []
    store, trained = ParamWriter.store, 0

    def watched(self: ParamWriter, index: int, value: Tensor) -> None:
        making.append(own_bytes())
        store(self, index, value)

    before = own_bytes()
    with mock.patch.object(ParamWriter, "store", watched):
        torch.manual_seed(0)
        context: Any = deferred_init() if how == "deferred" else torch.device("meta")
        with context:
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        with sharded(model, torch.optim.AdamW(model.parameters()) if train else None, plan) as session:
            built = own_bytes()
            if train:
                session.backward(session.module(torch.ones(2, WIDTH)).float().square().mean())
                session.optimizer.step()
                trained = own_bytes()
    return Building(max(making) - before, built - before, trained - before)


@pytest.mark.parametrize(
    ("dtype", "how"), [(None, "deferred"), *full((HALF, "meta")), *campaign((None, "meta"), (HALF, "deferred"))]
)
def test_peak_memory_of_build_and_step(dtype: torch.dtype | None, how: str) -> None:
    """Compare with the formulas for shared memory and Adam, for N ranks and chunks of C elements.

    With w bytes (4 or 2) for each of the Psi parameters, and m bytes (0 or 4) for its master:

    * while values are made: (w + m) Psi / N, and the values of one module, here 4 C;
    * after build: (w + m) Psi / N, and two buffers for unsharded gradients, 2 w C;
    * after a step: (w + 8) Psi / N more, for gradient shards and Adam's two moments. Scratch is at most all gradient
    shards in fp32, because one tile has more elements than all of them; Adam has a step count per shard.
    """
    depth = 8
    w, m = (4, 0) if dtype is None else (2, 4)
    for world_size in (2, 3):
        aligned = 64 // w * world_size  # each shard starts at a multiple of 64 bytes
        unit = -(-UNIT // aligned) * aligned
        share = depth * unit // world_size
        small = 8192 + 2 * depth * world_size * 4
        for found in run_ranks(world_size, watch_building, zero(3, dtype), how, depth, True):
            kept = (w + m) * share
            # A recorded tensor keeps the state of a generator until it has values.
            making = kept + 4 * unit + (2 * depth * torch.get_rng_state().nbytes if how == "deferred" else 0)
            assert kept + 4 * WIDTH * WIDTH <= found.making <= making + small, (found, making)
            built = kept + 2 * w * unit
            assert built <= found.built <= built + small, (found, built)
            trained = built + (w + 8) * share
            scratch = 4 * share + 2 * 4 * unit // world_size  # one call of the optimizer steps all of it
            padding = 8 * depth * (unit - UNIT)  # padding has no moments
            assert trained - padding <= found.trained <= trained + scratch + small, (found, trained)


def different_seeds(plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    with deferred_init():
        model = TinyGpt()
    with sharded(model, adam(model), plan) as session:
        return session.module.state_dict()


def test_sync_init_broadcasts_rank_0() -> None:
    torch.manual_seed(0)
    check(run_ranks(2, different_seeds, PLANS["zero3"]), dict(TinyGpt().state_dict()), "sync_init", rtol=0.0)
    first, second = run_ranks(2, different_seeds, PLANS["ddp"].but(sync_init=False))
    assert not torch.equal(first["tokens.weight"], second["tokens.weight"])


@on_ranks(2)
def test_unsharded_parameters_are_freed() -> None:
    before = live_tensor_bytes()
    model = seeded(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])).requires_grad_(False)
    with sharded(model, None, PLANS["zero3_gloo"]):
        left = live_tensor_bytes() - before
        end = time.monotonic() + HANGS_S
        # The thread of the transport frees the last messages a moment after their arrival.
        while left > CUT_UP and time.monotonic() < end:
            time.sleep(0.01)
            left = live_tensor_bytes() - before
        assert left <= CUT_UP


HANGS_S = 60.0
CUT_UP = 8 * 8 * (64 * 64 + 64) // 2 + 2048
