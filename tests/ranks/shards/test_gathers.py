"""Gathers of parameters: program order, prefetch, ``reshard_after_forward``, ``gathered()`` and concurrent threads.

[Note: Program order] describes the order that ranks share. Further tests: ranks that gather in another order, shards
aligned to 64 bytes for odd sizes and three ranks, and blocks that gather some of the parameters over shared memory,
messages, replicas and every tier.
"""

import contextlib
import dataclasses
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from saving_setup import ROWS, Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.comm import NativeGroup, PeerError
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.core.shards import prefetch
from shardwise.core.shards.chunk import Chunk
from shardwise.core.shards.gather_order import GatherLog
from shardwise.plan import ByNumel, ByTensor, ParamGroupPlan, Plan, on_device, zero
from shardwise.session import Session, Settings, build, shard
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import (
    adam,
    check,
    data,
    loss_of,
    one_mesh,
    plain_steps,
    run_plain,
    run_sharded,
    seeded,
    sgd,
    sharded,
)
from tests.support.exchange_setup import GLOO, counted
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full
from tests.support.steps import take_steps
from tests.support.stream_setup import LAYERS, Branching, groups_of
from tests.support.tier_setup import with_tiers

MEETINGS = ["which parameters had gradients", "the gradient norm"]
"""The host-side exchanges of a step, in addition to its gathers and reductions."""


def chain(layers: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])


def step_of(session: Session, loss: Tensor) -> None:
    session.backward(loss)
    session.optimizer.step()
    session.optimizer.zero_grad()


def meetings(plan: Plan, layers: int, steps: int) -> list[list[str]]:
    model, found = seeded(lambda: chain(layers)), []
    with counted() as purposes, sharded(model, adam(model), plan) as session:
        for step in range(steps):
            purposes.clear()
            step_of(session, session.module(data(session.mesh.rank, step)).square().mean())
            found.append(list(purposes))
    return found


@pytest.mark.parametrize(("size", "layers"), [(2, 24), *full((3, 24)), (2, 5)])
def test_number_of_host_all_gathers_does_not_grow_with_units(size: int, layers: int) -> None:
    for steps in run_ranks(size, meetings, GLOO, layers, 4):
        for purposes in steps[1:]:  # the first step agrees on the order of reductions
            assert purposes == MEETINGS


@pytest.mark.parametrize("changes", [{"same_order": False}, {"device_capacity_bytes": 1 << 30}])
def test_ranks_agree_before_gathers_where_needed(changes: dict[str, Any]) -> None:
    for steps in run_ranks(2, meetings, GLOO.but(**changes), 5, 2):
        assert steps[1].count("what to gather") > 5


# ---- gathers do not depend on what a single rank knows


def held_by_one(plan: Plan, steps: int) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Rank 1 references a parameter of another layer in each step, so that it stays gathered; return gathers by
    step."""
    model, issued, gather = seeded(lambda: chain(LAYERS)), list[list[int]](), GatherLog.gather

    def noting(of: GatherLog, chunk: Chunk, *args: Any) -> Any:
        issued[-1].append(chunk.spec.index)
        return gather(of, chunk, *args)

    held: list[Tensor] = []
    with mock.patch.object(GatherLog, "gather", noting), sharded(model, adam(model), plan) as session:
        for step in range(steps):
            issued.append([])
            if session.mesh.rank:
                layer = model[step % LAYERS]
                hook = layer.register_forward_hook(lambda layer, *_: held.append(layer.weight.view(-1)))
            step_of(session, session.module(data(session.mesh.rank, step)).square().mean())
            held.clear()
            if session.mesh.rank:
                hook.remove()
        issued.append([])
        return issued[:-1], session.module.state_dict()


def chain_in_one_process(size: int, steps: int) -> dict[str, Tensor]:
    model = seeded(lambda: chain(LAYERS))
    return plain_steps(model, adam(model), steps, ranks=size)


@pytest.mark.parametrize("prefetch", [2, *full(0, 1)])
def test_ranks_prefetch_the_same_units_if_one_references_a_parameter(prefetch: int) -> None:
    with_small_reach = GLOO.but(prefetch=prefetch)
    found = run_ranks(2, held_by_one, with_small_reach, 4)
    (one, state), (other, _) = found
    assert one == other
    forward, backward = one[2][:LAYERS], one[2][LAYERS:]
    assert forward == sorted(forward) and backward == sorted(backward, reverse=True), "the order of the step before"
    assert_close(state, chain_in_one_process(2, 4), 1e-9, f"prefetch={prefetch}")


# ---- ranks that differ


@pytest.mark.parametrize("ranks", [2, *full(3)])
@on_ranks()
def test_different_gathers_raise_before_the_update(ranks: int) -> None:
    """In step 2 the last rank runs two layers of equal size in another order, which no other check would notice."""
    size = ranks
    with groups_of(NativeGroup):
        model, said = seeded(Branching), ""
        plan = zero(3).but(prefetch=0)
        with one_mesh(plan) as mesh, sharded(model, adam(model), plan, mesh) as session:
            before = session.module.state_dict()
            for step in range(4):
                usual = list(range(LAYERS))
                way = [*usual[:2], 3, 2, *usual[4:]] if step == 2 and mesh.rank == size - 1 and not said else usual
                try:
                    before = session.module.state_dict()
                    session.backward(session.module(data(mesh.rank, step), way).square().mean())
                except PeerError as error:
                    said = str(error)
                    session.optimizer.zero_grad()
                    after = session.module.state_dict()
                    assert all(torch.equal(before[name], after[name]) for name in before)
                    session.backward(session.module(data(mesh.rank, step), usual).square().mean())
                session.optimizer.step()
                session.optimizer.zero_grad()
            state = session.module.state_dict()
        assert_close(state, branching_in_one_process(size, 4), 1e-9, "after the error")
    others = "rank 0" if size == 2 else r"ranks [0, 1]"
    assert "have gathered different parameters since they last compared: gather 3 is" in said
    assert "(layers.2" in said and "(layers.3" in said
    assert f"on {others}" in said and f"on rank {size - 1}" in said and "same_order=False" in said


def branching_in_one_process(size: int, steps: int) -> dict[str, Tensor]:
    model = seeded(Branching)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(data(rank, step), range(LAYERS)).square().mean()  # type: ignore[no-any-return]

    return plain_steps(model, adam(model), steps, loss, size)


def waits_in_vain(plan: Plan) -> str:
    """In step 1, rank 1 runs two layers in another order."""
    model = seeded(Branching)
    with sharded(model, adam(model), plan) as session:
        rank = session.mesh.rank
        step_of(session, session.module(data(rank, 0), range(LAYERS)).square().mean())
        return raises(PeerError, None, session.module, data(rank, 1), [0, 2, 1] if rank else [0, 1, 2])


def test_timeout_of_a_gather_reports_all_ranks() -> None:
    first, second = run_ranks(2, waits_in_vain, GLOO.but(prefetch=0, wait_timeout_s=2.0))
    assert "rank 0 is in: step 1, forward, gather of unit 1 (layers.1" in first and "wait_timeout_s=2" in first
    assert "rank 1 is in: a gather or a reduction (where it gave up), at step 1, forward, gather of " in first
    assert "gather of unit 2 (layers.2" in second, second


def stops_apart(plan: Plan, training: bool, no_array: bool) -> tuple[list[int], dict[str, Tensor]]:
    """In step 1 each rank fails in forward after another layer, when one has prefetched more than the other.

    Or (``no_array``) rank 1 fails to allocate what it would prefetch, in the layer after which rank 0 fails.
    """
    model, counts = seeded(lambda: chain(LAYERS)), list[int]()

    def stop(*_: Any) -> None:
        raise ArithmeticError("broken on purpose")

    def take(numel: int, dtype: torch.dtype) -> Tensor:
        if len(pool.trace.current) > 2:
            stop()
        return torch.empty(numel, dtype=dtype)

    with mock.patch.object(prefetch, "AHEAD_BYTES", 1), sharded(model, adam(model), plan) as session:
        rank, pool = session.mesh.rank, session._engine.pool
        breaks = mock.patch.object(pool.arrays, "take", take) if no_array and rank else contextlib.nullcontext()
        for step in range(3):
            with torch.no_grad():
                session.module(data(rank, step))
            if step == 1:
                hook = model[2 + rank].register_forward_hook(stop)
                with pytest.raises(ArithmeticError), torch.set_grad_enabled(training), breaks:
                    session.module(data(rank, step))
                hook.remove()
                counts.append(pool.issued.count)
                with pytest.raises(RuntimeError, match="after a pass that failed"):
                    session.optimizer.step()
                if training:
                    session.optimizer.zero_grad()
                    counts.append(pool.issued.count)
            step_of(session, session.module(data(rank, step)).square().mean())
        counts.append(pool.issued.count)
        return counts, session.module.state_dict()


@pytest.mark.parametrize(("training", "no_array"), [(True, False), (False, False), (True, True)])
def test_ranks_that_fail_in_different_layers_of_forward_continue(training: bool, no_array: bool) -> None:
    (one, state), (other, _) = run_ranks(2, stops_apart, GLOO.but(prefetch=2), training, no_array)
    assert abs(one[0] - other[0]) == 1 and one[1:] == other[1:], "the one behind has caught up"
    assert_close(state, chain_in_one_process(2, 3), 1e-9, "after the failure")


MESSAGES = zero(3).but(shared_memory=False)
NAMES = ["linear", "layer_norm", "attention", "lstm", "mul", "conv2d"]
THREADS, TIMES = 3, 12


def table() -> Table:
    return Table(NAMES)


@pytest.mark.parametrize(
    "plan",
    [zero(3), *full(MESSAGES.but(same_order=False), zero(3).but(packing=ByTensor(persist_numel=0)), zero(2))],
    ids=["shared", "gloo", "alone", "zero2"],
)
@on_ranks(2)
def test_threads_evaluate_one_model_concurrently(plan: Plan) -> None:
    model, plain = seeded(table), seeded(table)
    wrong: list[str] = []

    def serve(thread: int) -> None:
        try:
            with torch.no_grad():
                for index in range(TIMES):
                    x = data(0, thread, index, rows=ROWS)
                    if not torch.allclose(model(x), plain(x), rtol=1e-12, atol=0):
                        wrong.append(f"thread {thread}, pass {index}")
        except Exception as error:
            wrong.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with sharded(model, sgd(model), plan) as session:
        threads = [threading.Thread(target=serve, args=(index,)) for index in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        assert not wrong
        loss = lambda model, _rank, _step: model(data(0, 0, rows=ROWS))  # noqa: E731
        take_steps(session, [0], loss)
        assert_close(session.module.state_dict(), plain_steps(plain, sgd(plain), 1, loss), 1e-11, "a step that follows")


def overlapping(plan: Plan) -> list[str]:
    """Let a second thread enter while the first is inside."""
    model = seeded(table)
    told: list[str] = []

    def evaluate() -> None:
        try:
            model(data(0, 0, rows=ROWS))
        except RuntimeError as error:
            told.append(str(error))

    def within(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=evaluate)
            other.start()
            other.join()

    with sharded(model, sgd(model), plan) as session:
        handle = model.ops["lstm"].register_forward_hook(within)
        loss = session.module(data(0, 0, rows=ROWS))
        handle.remove()
        session.backward(loss)
        session.optimizer.step()
    return told


def test_overlapping_threads_under_a_capacity_are_an_error() -> None:
    limited = dataclasses.replace(on_device(), device_capacity_bytes=1 << 24)
    for told in run_ranks(1, overlapping, zero(3).but(tiers=limited)):
        assert len(told) == 1
        assert "hold a lock" in told[0]
    assert run_ranks(2, overlapping, zero(3)) == [[], []]


BARE = MESSAGES.but(prefetch=0)
"""Without prefetch, since units as small as these would all be prefetched."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.recomputed = nn.Linear(24, 24), nn.Linear(24, 24), False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed:
            return x + self.out(checkpoint(self.inner, x, use_reentrant=False).tanh())
        return x + self.out(self.inner(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 24), nn.Linear(24, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def recomputing() -> nn.Module:
    model = Net()
    for block in model.blocks:
        block.recomputed = True
    return model


def two_passes(model: nn.Module, rank: int, step: int) -> Iterator[tuple[Tensor, bool]]:
    for index in range(2):
        yield model(data(rank, step, index)).square().mean(), False


def with_groups(plan: Plan, options: Mapping[str, bool]) -> Plan:
    each = [ParamGroupPlan(names=(name,), reshard_after_forward=option) for name, option in options.items()]
    return plan.but(groups=tuple(each))


NESTED = {"blocks": True, "blocks.1": False, "blocks.1.inner": True, "blocks.2.out.bias": False, "head": True}
PLANS = {
    "zero3": with_groups(zero(3), NESTED),
    "messages": with_groups(MESSAGES, NESTED),
    "agreed": with_groups(MESSAGES.but(same_order=False), NESTED),
    "ahead": with_groups(MESSAGES.but(prefetch=2, gathered_fraction=0.5), NESTED),
    "tensor": with_groups(MESSAGES.but(packing=ByTensor(persist_numel=30)), NESTED),
    "zero2": with_groups(zero(2).but(shared_memory=False, packing=ByNumel(chunk_numel=1000)), NESTED),
    "zero1": with_groups(zero(1).but(shared_memory=False), NESTED),
    "host": with_groups(MESSAGES.but(param_host_fraction=1.0, state_host_fraction=1.0), NESTED),
    "late": with_groups(zero(3).but(gather_on_use=True), NESTED),
}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("messages", Net),
        ("zero2", recomputing),
        ("zero1", Net),
        *full(("zero3", Net), ("zero3", recomputing), ("agreed", Net), ("ahead", recomputing)),
        *full(("tensor", Net), ("host", Net), ("late", Net)),
    ],
)
def test_results_equal_plain_torch(name: str, model: type[nn.Module]) -> None:
    states = run_ranks(2, run_sharded, model, two_passes, PLANS[name], 3)
    check(states, run_plain(model, two_passes, 2, 3), name)


def parameters(*modules: str) -> set[str]:
    names = [name for name, _ in Net().named_parameters()]
    return {name for name in names if any(name.startswith(module + ".") for module in modules)}


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_reshard_after_forward_keeps_or_frees_units(stage: Any) -> None:
    """Check what can be read after forward, and after backward."""
    plan = Settings(stage=stage, reshard_after_forward={"head": True, "blocks": True, "blocks.1": False}).plan()
    stays = parameters("blocks.1") | (parameters("embed") if stage == 2 else set())
    model = seeded(Net)
    there = lambda: {name for name, param in model.named_parameters() if not param.isnan().any()}  # noqa: E731
    with sharded(model, adam(model), plan.but(shared_memory=False, prefetch=0)) as session:
        loss = loss_of(session)
        assert there() == stays
        session.backward(loss)
        assert stays <= there() and not parameters("head", "blocks.2") & there()


@pytest.mark.parametrize(
    ("name", "near"), [("haed", "head"), *full(("blocks.3", "blocks.2"), ("head.wieght", "head.weight"))]
)
@on_ranks(2)
def test_unknown_names_are_refused_before_anything_changes(name: str, near: str) -> None:
    model, options = seeded(Net), {"embed": True, name: False}
    message = f"'{name}' in the plan's groups .* did you mean .*'{near}'"
    before, optimizer = {name: param.clone() for name, param in model.named_parameters()}, adam(model)
    step = optimizer.step
    raises(ValueError, message, lambda: shard(model, optimizer, reshard_after_forward=options))
    assert optimizer.step == step
    for name, param in model.named_parameters():
        assert param.equal(before[name])
    with sharded(model, optimizer, BARE) as session:
        step_of(session, loss_of(session))


def test_invalid_options_name_the_remedy() -> None:
    a_dict = r"reshard_after_forward=False: give a dict .*stage=3 \(True\) or stage=2"
    raises(TypeError, a_dict, Settings, reshard_after_forward=False)
    neither = "reshard_after_forward=4 of head is neither.*set secondary"
    raises(ValueError, neither, Settings, reshard_after_forward={"head": 4})
    for names in ((), "head"):
        words = f"names={re.escape(repr(names))} of a parameter group: give a tuple of names"
        raises(ValueError, words, ParamGroupPlan, names=names, reshard_after_forward=True)
    one = ParamGroupPlan(names=("head",), reshard_after_forward=True)
    raises(ValueError, "groups=.* have a name twice", zero(3).but, groups=(one, one))
    for groups in (["head"], one, None):
        raises(ValueError, "groups=.*: give a tuple of ParamGroupPlan objects", zero(3).but, groups=groups)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].out = self.blocks[2].out


@on_ranks(2)
def test_shared_parameter_has_one_option_under_all_names() -> None:
    model = seeded(Tied)
    mixed = with_groups(zero(3), {"blocks.0": True, "blocks.2": False})
    with pytest.raises(ValueError, match=r"blocks.2.out.weight is one parameter, and its names \['blocks.0', 'blo"):
        build(model, adam(model), mixed)
    with sharded(model, adam(model), with_groups(zero(3), {"blocks.2": False})) as session:
        loss_of(session)
        assert not model.blocks[0].out.weight.isnan().any() and model.blocks[0].inner.weight.isnan().any()


RANKS = 3


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 77), nn.Tanh(), nn.Linear(77, 31), nn.Tanh(), nn.Linear(31, 3))


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(RANKS)
def test_shards_are_at_multiples_of_64_bytes(stage: Any) -> None:
    model = seeded(odd).float()
    with sharded(model, adam(model), zero(stage, torch.bfloat16).but(shared_memory=False)) as session:
        large = [each for each in session._engine.shards.chunks if each.spec.padded_numel >= 16 * 32 * RANKS]
        assert large and not any(each.shard.data_ptr() % 64 for each in large)


BASE = zero(3, torch.bfloat16)
GATHERED_PLANS = {
    "memory": zero(3),
    "masters": BASE,
    "messages": BASE.but(shared_memory=False),
    "replicas": zero(3, torch.bfloat16, dp_replicate=2),
    "secondary": zero(3).but(secondary=2),
    "later": zero(3).but(gather_on_use=True),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 6))


def one_step(session: Session, step: int) -> None:
    x = data(session.mesh.rank, step).to(session.params[0].dtype)
    session.backward(session.module(x).float().square().mean())
    session.optimizers[0].step()


def edited(plan: Plan) -> None:
    model = seeded(net)
    with sharded(model, adam(model), plan) as session:
        one_step(session, 0)
        before, first = session.module.state_dict(), [model[0].weight, model[0].bias]
        with session.gathered([model[2].weight]):
            shown = {name: param.detach().clone() for name, param in model[2].named_parameters()}
            assert all(bool(param.isnan().all()) for param in model[0].parameters())
            model[2].bias.data.zero_()  # not written back
        for name, value in shown.items():
            assert torch.equal(value, before[f"2.{name}"].to(value.dtype)), name
        session.reset_traffic()
        with session.gathered(first, write_back=True), torch.no_grad():
            first[0].data = first[0].data.clone()
            first[1][2:30] = 0.5
            inside = session.module.state_dict()
            first[1][30:] = -0.5
        moved = session.traffic()
        before["0.bias"][2:30] = 0.5
        assert_close(inside, before, 0.0, "a state inside of the block")
        before["0.bias"][30:] = -0.5
        assert_close(session.module.state_dict(), before, 0.0, "some were written")
        assert plan.tiers.disk is None or moved["disk_write"] > 0
        with session.gathered(session.params):
            assert session._engine.pool.blocks.all_gathered
            assert model.state_dict().keys() == before.keys()
        other = seeded(net)
        with sharded(other, adam(other), plan) as second:
            one_step(second, 0)
            second.module.load_state_dict(before)
            for each in (session, second):
                one_step(each, 1)
            assert_close(session.module.state_dict(), second.module.state_dict(), 0.0, "training goes on with it")


IN_FULL = ["memory", "masters", "replicas", "secondary", "later", "all_disk", "p_disk_s_host"]


@pytest.mark.parametrize("name", ["messages", "thirds", *full(*IN_FULL)])
def test_changes_of_some_parameters_are_written_back(name: str, tmp_path: Path) -> None:
    plan = GATHERED_PLANS[name] if name in GATHERED_PLANS else with_tiers(BASE, name, str(tmp_path))
    run_ranks(4 if name in ("replicas", "secondary") else 2, edited, plan)


@pytest.mark.parametrize("name", ["memory", "messages"])
@on_ranks(2)
def test_overlapping_blocks_keep_their_units_gathered(name: str) -> None:
    """Blocks over common units end in another order than they began."""
    model = seeded(net)
    with sharded(model, adam(model), GATHERED_PLANS[name]) as session:
        one, two = session.gathered(model[0].parameters()), session.gathered([model[0].bias, model[2].bias])
        shown = lambda: [not bool(each.weight.isnan().any()) for each in (model[0], model[2], model[3])]  # noqa: E731
        found = []
        for call in (one.__enter__, two.__enter__):
            call()
            found.append(shown())
        for block in (one, two):
            block.__exit__(None, None, None)
            found.append(shown())
        assert found == [[True, False, False], [True, True, False], [True, True, False], [False] * 3]
        one_step(session, 0)


def in_capacity(capacity: int) -> tuple[int, int]:
    """Return the bytes on the device after the build, and those of the largest unit."""
    model = seeded(net)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    with sharded(model, adam(model), zero(3).but(device_capacity_bytes=capacity)) as session:
        sizes = session._engine.pool.sizes
        if capacity < 1 << 30:
            with pytest.raises(DeviceMemoryError), session.module.gathered():
                pass
            for name, param in model.named_parameters():
                with session.gathered([param]):
                    assert torch.equal(param.data, expected[name])
        return sum(session.ledger.bytes_by_kind().values()), max(sizes.values())


def test_single_parameters_fit_where_the_model_does_not() -> None:
    held, largest = run_ranks(2, in_capacity, 1 << 40)[0]
    run_ranks(2, in_capacity, held + largest + largest // 8)
