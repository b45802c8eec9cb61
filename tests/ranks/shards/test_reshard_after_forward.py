"""``reshard_after_forward`` by module: what stays gathered and what is freed, how often it is gathered, bad names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.plan import ByModule, ByNumel, ByTensor, ParamGroupPlan, Plan, zero
from shardwise.session import Session, Settings, build, shard
from shardwise.testing import run_ranks
from tests.support.engine_setup import adam, check, data, loss_of, run_plain, run_sharded, seeded, sharded
from tests.support.sets import full

MESSAGES = zero(3).but(shared_memory=False)
BARE = MESSAGES.but(prefetch=0)
"""Otherwise units as small as these are all fetched ahead, and none is gathered twice."""


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
def test_results_are_those_of_plain_torch(name: str, model: type[nn.Module]) -> None:
    states = run_ranks(2, run_sharded, model, two_passes, PLANS[name], 3)
    check(states, run_plain(model, two_passes, 2, 3), name)


def gathers(session: Session) -> int:
    """Run two steps, and return the gathers of the second."""
    assert session.optimizer is not None
    for _ in range(2):
        session.reset_traffic()
        session.backward(loss_of(session))
        session.optimizer.step()
        session.optimizer.zero_grad()
    return session.mesh.shard.traffic.calls["all_gather"]


def counted(options: list[dict[str, bool]]) -> list[int]:
    counts = []
    for each in options:
        model = seeded(Net)
        with sharded(model, adam(model), with_groups(BARE, each)) as session:
            counts.append(gathers(session))
    return counts


def test_a_module_that_stays_gathered_is_gathered_once_a_step() -> None:
    """Without options five units are gathered, and the blocks again; the head is used at once, and backward of the
    embedding reads no weight."""
    options = [{}, {"blocks.0": False}, {"blocks.0": False, "blocks.1": False}, {"head": True}, {"blocks.1": True}]
    for counts in run_ranks(2, counted, options):
        assert counts == [8, 7, 6, 9, 8]


def shown(plan: Plan) -> list[set[str]]:
    """Names of the parameters that can be read after forward, and after backward."""
    model, found = seeded(Net), []
    with sharded(model, adam(model), plan) as session:
        loss = loss_of(session)
        found.append({name for name, param in model.named_parameters() if not param.isnan().any()})
        session.backward(loss)
        found.append({name for name, param in model.named_parameters() if not param.isnan().any()})
    return found


def parameters(*modules: str) -> set[str]:
    names = [name for name, _ in Net().named_parameters()]
    return {name for name in names if any(name.startswith(module + ".") for module in modules)}


@pytest.mark.parametrize("stage", [2, 3])
def test_what_stays_and_what_is_freed(stage: int) -> None:
    plan = Settings(stage=stage, reshard_after_forward={"head": True, "blocks": True, "blocks.1": False}).plan()
    free = plan.but(shared_memory=False, prefetch=0)
    stays = parameters("blocks.1") | (parameters("embed") if stage == 2 else set())
    for after_forward, after_backward in run_ranks(2, shown, free):
        assert after_forward == stays
        assert stays <= after_backward and not parameters("head", "blocks.2") & after_backward


def refused(options: dict[str, bool], message: str) -> None:
    model = seeded(Net)
    before, optimizer = {name: param.clone() for name, param in model.named_parameters()}, adam(model)
    step = optimizer.step
    with pytest.raises(ValueError, match=message):
        shard(model, optimizer, reshard_after_forward=options)
    assert optimizer.step == step
    for name, param in model.named_parameters():
        assert param.equal(before[name])
    with sharded(model, optimizer, BARE) as session:
        assert gathers(session) == 8


@pytest.mark.parametrize("name", ["haed", *full("blocks.3", "head.wieght")])
def test_unknown_names_are_refused_before_anything_changes(name: str) -> None:
    near = {"haed": "head", "blocks.3": "blocks.2", "head.wieght": "head.weight"}[name]
    run_ranks(2, refused, {"embed": True, name: False}, f"'{name}' in the plan's groups .* did you mean .*'{near}'")


def test_bad_options_say_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"reshard_after_forward=False: give a dict .*stage=3 \(True\) or stage=2"):
        Settings(reshard_after_forward=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reshard_after_forward=4 of head is neither.*set secondary"):
        Settings(reshard_after_forward={"head": 4})
    with pytest.raises(ValueError, match=r"names=\(\) of a parameter group: give a tuple of names"):
        ParamGroupPlan(names=(), reshard_after_forward=True)
    with pytest.raises(ValueError, match=r"names='head' of a parameter group: give a tuple of names"):
        ParamGroupPlan(names="head", reshard_after_forward=True)  # type: ignore[arg-type]
    one = ParamGroupPlan(names=("head",), reshard_after_forward=True)
    with pytest.raises(ValueError, match=r"groups=.* have a name twice"):
        zero(3).but(groups=(one, one))
    for groups in (["head"], one, None):
        with pytest.raises(ValueError, match=r"groups=.*: give a tuple of ParamGroupPlan objects"):
            zero(3).but(groups=groups)


def units_of_groups() -> None:
    """Parameters named one by one share a unit; a unit of a module has its name, whatever the packing."""
    for packing in (ByNumel(chunk_numel=10**6), ByModule(unit_classes=("Block",))):
        model = seeded(Net)
        biases = {f"blocks.{i}.inner.bias": False for i in range(3)}
        with sharded(
            model, adam(model), with_groups(zero(3).but(packing=packing), {**biases, "head": True})
        ) as session:
            units = session.optimizer._shards.layout.units
            assert "head" in {unit.module for unit in units}
            assert len(units) == (3 if packing.__class__ is ByNumel else 8)


def test_units_of_parameter_groups() -> None:
    run_ranks(2, units_of_groups)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].out = self.blocks[2].out


def tied() -> None:
    model = seeded(Tied)
    mixed = with_groups(zero(3), {"blocks.0": True, "blocks.2": False})
    with pytest.raises(ValueError, match=r"blocks.2.out.weight is one parameter, and its names \['blocks.0', 'blo"):
        build(model, adam(model), mixed)
    with sharded(model, adam(model), with_groups(zero(3), {"blocks.2": False})) as session:
        loss_of(session)
        assert not model.blocks[0].out.weight.isnan().any() and model.blocks[0].inner.weight.isnan().any()


def test_names_of_a_shared_parameter_have_one_option() -> None:
    run_ranks(2, tied)
