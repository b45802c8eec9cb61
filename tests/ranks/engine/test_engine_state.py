"""Full state dicts of model and optimizer: equal to plain torch's, loaded at other stages and world sizes.

Hooks of state_dict and load_state_dict, and overridden methods, work as in plain torch, or an error names the value.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.core.checkpoint import Checkpointer, TorchRun
from shardwise.core.mesh import init_distributed
from shardwise.plan import Plan
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, check, seeded, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full

ROWS = 12  # a multiple of 1, 2, 3 and 4 ranks
State = dict[str, Any]


class Net(nn.Module):
    """Tied, frozen, unused and scalar parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.unused = nn.Linear(2, 3)
        self.register_buffer("offset", torch.arange(7.0))
        self.register_buffer("seen", torch.tensor(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + 0.01 * self.offset.to(x.dtype)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.frozen
        return x * self.scale


def two_groups(model: nn.Module) -> list[State]:
    params = list(model.named_parameters())
    return [
        {"params": [p for n, p in params if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in params if "weight" not in n], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(two_groups(m), lr=0.05, eps=1e-4),
    "sgd": lambda m: torch.optim.SGD(two_groups(m), lr=0.05, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(two_groups(m), lr=0.05, initial_accumulator_value=0.2),
    "nadam": lambda m: torch.optim.NAdam(two_groups(m), lr=0.05, eps=1e-4),
}


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain_states(kind: str, first: int, last: int, state: tuple[State, State] | None = None) -> tuple[State, State]:
    """Return model and optimizer state after the plain steps ``first .. last - 1``."""
    model = seeded(Net, seed=first)
    if state is None:
        model = seeded(Net)
    optimizer = OPTIMIZERS[kind](model)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in range(first, last):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def sharded_steps(
    plan: Plan, kind: str, first: int, last: int, state: tuple[State, State] | None
) -> tuple[State, State]:
    model = seeded(Net, seed=17 * first)  # differs from the weights of the state
    with sharded(model, OPTIMIZERS[kind](model), plan) as session:
        if state is not None:
            found = session.module.load_state_dict(state[0])
            assert not found.missing_keys and not found.unexpected_keys
            session.optimizer.load_state_dict(state[1])
        for step in range(first, last):
            one_step(session, step)
        return session.module.state_dict(), session.optimizer.state_dict()


def one_step(session: shardwise.Session, step: int) -> None:
    mine = batch(step).chunk(session.mesh.size)[session.mesh.rank]
    session.backward(session.module(mine).square().mean())
    session.optimizer.step()


def flat(state: State) -> dict[str, Tensor]:
    """Return optimizer state with one name per entry, and numbers as tensors."""
    entries = {f"{i}.{k}": torch.as_tensor(v) for i, entry in state["state"].items() for k, v in entry.items()}
    return {name: value.double() for name, value in entries.items()}


FROZEN = 4
"""Number of the frozen parameter in the optimizer: torch's Adagrad has unused state for it, a session has none."""


def without_frozen(state: State) -> State:
    return state | {"state": {number: entry for number, entry in state["state"].items() if number != FROZEN}}


def same_state(actual: tuple[State, State], expected: tuple[State, State], what: str) -> None:
    actual, expected = (actual[0], without_frozen(actual[1])), (expected[0], without_frozen(expected[1]))
    assert list(actual[0]) == list(expected[0])
    assert_close(actual[0], expected[0], 1e-11, what)
    assert list(actual[1]["state"]) == list(expected[1]["state"])
    assert_close(flat(actual[1]), flat(expected[1]), 1e-11, what)
    for ours, theirs in zip(actual[1]["param_groups"], expected[1]["param_groups"], strict=True):
        assert ours == theirs
    for entry, other in zip(actual[1]["state"].values(), expected[1]["state"].values(), strict=True):
        for key in other:
            assert type(entry[key]) is type(other[key])
            assert getattr(entry[key], "shape", None) == getattr(other[key], "shape", None)


COUNTS = {"adam": 7, "adagrad": 4, "sgd": 3, "nadam": 3}
assert COUNTS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *[(kind, count) for kind, count in COUNTS.items() if kind == "nadam"],
        *full(*[(kind, count) for kind, count in COUNTS.items() if kind != "nadam"]),
        *campaign(*[(kind, 7) for kind in COUNTS if COUNTS[kind] < 7]),
    ],
)
def test_states_between_plain_torch_stages_and_world_sizes(kind: str, count: int) -> None:
    """Hand a run from plan to plan and through plain torch: it equals one plain run.

    The slower optimizers use only the first ``count`` stations.
    """
    expected: tuple[State, State] | None = None
    state: tuple[State, State] | None = None
    stations = [("zero3", 2), ("plain", 1), ("zero1", 3), ("hybrid", 4), ("ddp", 2), ("zero3_gloo", 3), ("half", 2)]
    for index, (name, world_size) in enumerate(stations[:count]):
        expected = plain_states(kind, 2 * index, 2 * index + 2, expected)
        if name == "plain":
            state = plain_states(kind, 2 * index, 2 * index + 2, state)
        else:
            states = run_ranks(world_size, sharded_steps, PLANS[name], kind, 2 * index, 2 * index + 2, state)
            for other in states[1:]:
                check([other[0]], states[0][0], "every rank has it", rtol=0.0)
            state = states[0]
        same_state(state, expected, f"{kind} after {name} on {world_size}")


@pytest.mark.parametrize("name", ["zero3", *full("zero1")])
@on_ranks(2)
def test_states_that_do_not_fit_change_nothing(name: str) -> None:
    model = seeded(Net)
    with sharded(model, OPTIMIZERS["adam"](model), PLANS[name]) as session:
        before = session.module.state_dict()
        state = {name: value + 1 if value.is_floating_point() else value for name, value in before.items()}
        bad = {n: v for n, v in state.items() if not n.startswith("unused")} | {"new": torch.ones(1)}
        bad["first.weight"] = torch.ones(7, 4)
        for strict in (True, False):
            shapes = r"first.weight: \(7, 4\) instead of \(7, 5\)"
            message = raises(RuntimeError, shapes, session.module.load_state_dict, bad, strict=strict)
            assert not strict or all(each in message for each in ("unused.weight", "unused.bias", ": new;"))
        optimizer_state = session.optimizer.state_dict()
        groups = optimizer_state["param_groups"]
        for change in (groups[:1], groups[::-1]):
            other = optimizer_state | {"param_groups": change}
            raises(ValueError, "param groups of", session.optimizer.load_state_dict, other)
        assert_close(session.module.state_dict(), before, 0.0, "after loads that were refused")
        del state["scale"], state["blocks.1.weight"]
        found = session.module.load_state_dict(state | {"new": torch.ones(1)}, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["scale"], ["new"])
        partly = session.module.state_dict()
        assert all(torch.equal(partly[n], state[n]) for n in state)
        assert torch.equal(partly["scale"], before["scale"])


HooksState = dict[str, Tensor]
LR = 0.5


class Scaled(nn.Module):
    """Bound its weight in a load hook, and keep its row sums in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(5, 5)), list[str]()
        self.register_buffer("bound", torch.tensor(9.0))
        self.register_buffer("sums", torch.zeros(5), persistent=False)
        self.register_load_state_dict_post_hook(Scaled.renew)

    def renew(self, _keys: Any) -> None:
        self.calls.append("scaled")
        with torch.no_grad():
            self.weight.clamp_(max=self.bound.item())
            self.sums.copy_(self.weight.float().sum(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.sums.to(x.dtype)


def forgive(model: nn.Module, keys: Any) -> None:
    """Hook of the full model, which runs after the hooks of its layers."""
    model[1].calls.append("whole")
    for names in keys:
        names[:] = [name for name in names if "forgiven" not in name]


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 5), Scaled())
    model[1].sums.copy_(model[1].weight.detach().sum(1))
    model.register_load_state_dict_post_hook(forgive)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def given(dtype: torch.dtype) -> HooksState:
    """Return the state to load; its bound is below some of its weights."""
    model = net(7).to(dtype)
    model[1].bound.fill_(0.5)
    return dict(model.state_dict())


def plain(state: HooksState) -> tuple[HooksState, Tensor, HooksState]:
    """Return weights and sums after the load, the outputs, and the weights one step later."""
    model = net(1)
    model.load_state_dict(state)
    assert model[1].calls == ["scaled", "whole"] and float(model[1].weight.detach().max()) == 0.5
    return told(model, model, lambda loss: loss.backward(), sgd(model))


def told(model: nn.Module, wrapped: nn.Module, backward: Callable[..., Any], optimizer: Any) -> Any:
    x = torch.ones(2, 5, dtype=torch.float32)
    out = wrapped(x).float()
    first = {name: value.float().clone() for name, value in wrapped.state_dict().items()}
    first["sums"] = model[1].sums.float().clone()
    backward(out.square().mean())
    optimizer.step()
    return first, out.detach(), {n: v.float().clone() for n, v in wrapped.state_dict().items()}


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), *full(("fp32", 0.0))])
@on_ranks(2)
def test_load_state_dict_post_hooks_are_called(tmp_path: Path, precision: str, tolerance: float) -> None:
    """Each load calls the hooks once on all ranks, children first, with gathered parameters, and keeps their writes."""
    state = given(torch.float32)
    before, out, after = plain(state)
    for stage in (1, 2, 3):
        for way in ("state", "own", "checkpoint"):
            model = net(1)
            session = shardwise.shard(model, sgd(model), stage=stage, precision=precision)
            if way == "checkpoint":
                other = net(7)
                other.load_state_dict(state)
                other[1].weight.data.copy_(state["1.weight"])  # above the bound, as in the state
                source = shardwise.shard(other, sgd(other), stage=stage)
                source.checkpoints.save(f"{tmp_path}/{stage}", "a")
                source.close()
                session.checkpoints.load(f"{tmp_path}/{stage}", "a")
            else:
                (session.module if way == "state" else model).load_state_dict(state)
            assert model[1].calls == ["scaled", "whole"], (stage, way, model[1].calls)
            first, outputs, last = told(model, session.module, session.backward, session.optimizer)
            what = f"stage {stage}, {way}"
            assert_close(first, before, tolerance, what)
            assert_close({"out": outputs}, {"out": out}, max(tolerance, 1e-6), what)
            assert_close(last, after, max(tolerance, 1e-6), what)
            wrong(session, state)
            session.close()


def wrong(session: shardwise.Session, state: HooksState) -> None:
    """A refused load calls no hooks; hooks may edit the lists of keys, and their exceptions are raised."""
    model = session.model
    model[1].calls.clear()
    fewer = {name: value for name, value in state.items() if name != "0.bias"} | {"forgiven": torch.ones(1)}
    raises(RuntimeError, "missing: 0.bias; unexpected: forgiven\n", session.module.load_state_dict, fewer)
    wrapped = {f"module.{name}": value for name, value in state.items()}
    raises(RuntimeError, "remove 'module.' from the names", session.module.load_state_dict, wrapped)
    assert not model[1].calls
    keys = session.module.load_state_dict(fewer, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["0.bias"], []) and len(model[1].calls) == 2
    handle = model[0].register_load_state_dict_post_hook(lambda *_: 1)
    with pytest.raises(AssertionError, match="a load_state_dict post-hook of Linear returned a value"):
        session.module.load_state_dict(state)
    handle.remove()
    if session.mesh.rank == 0:  # the other rank gets a PeerError, and both can go on
        model[0].register_load_state_dict_post_hook(lambda *_: {}["lost"])
    with pytest.raises(KeyError if session.mesh.rank == 0 else shardwise.core.comm.PeerError, match="lost"):
        session.module.load_state_dict(state)


def hooked_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


class Adapted(nn.Module):
    """Save only the adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.register_state_dict_post_hook(Adapted.drop)

    @staticmethod
    def drop(_: nn.Module, state: HooksState, prefix: str, _metadata: Any) -> None:
        for name in ("base.weight", "base.bias"):
            state.pop(prefix + name)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.base(x))


def adapted(seed: int) -> Adapted:
    torch.manual_seed(seed)
    return Adapted()


def values(model: nn.Module) -> HooksState:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stage", [3, *full(1)])
@on_ranks(2)
def test_parameters_removed_by_a_state_dict_hook_can_be_loaded(stage: int) -> None:
    """Parameters load by their names in the model; a strict load reports missing ones."""
    init_distributed()
    plain, pretrained = adapted(1), values(adapted(7))
    plain.load_state_dict(pretrained)
    for strict in (True, False):
        model = adapted(1)
        with pytest.raises(RuntimeError, match=r"base.weight"):  # plain torch raises, too
            model.load_state_dict(model.state_dict())
        session = shardwise.shard(model, hooked_sgd(model), stage=stage)
        state = session.module.state_dict()
        assert sorted(state) == ["adapter.bias", "adapter.weight"]
        raises(RuntimeError, "missing: base.weight, base.bias", session.module.load_state_dict, state)
        assert session.module.load_state_dict(state, strict=False).missing_keys == ["base.weight", "base.bias"]
        keys = session.module.load_state_dict(pretrained, strict=strict)
        assert not keys.missing_keys and not keys.unexpected_keys
        with pytest.raises(RuntimeError, match=r"base.weight: \(3, 4\) instead of \(4, 4\)"):
            session.module.load_state_dict(pretrained | {"base.weight": torch.ones(3, 4)})
        with session.module.gathered():
            assert_close(values(model), values(plain), 0.0, f"strict={strict}")
        session.close()


class Counts(nn.Linear):
    """Add a number and a tensor to each state dict, and take them back in a load."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.count, self.pair = 0, torch.zeros(2)
        self.register_buffer("bank", torch.zeros(3))

    def state_dict(self, *args: Any, **kwargs: Any) -> HooksState:
        found: HooksState = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        found |= {prefix + "count": torch.tensor(self.count), prefix + "pair": self.pair.clone()}
        return found

    def _load_from_state_dict(self, state: HooksState, prefix: str, *rest: Any) -> None:
        if prefix + "count" in state:
            self.count, self.pair = int(state.pop(prefix + "count")), state.pop(prefix + "pair").clone()
            assert prefix + "bank" in state
        super()._load_from_state_dict(state, prefix, *rest)


def counting(taken: bool, count: int) -> nn.Sequential:
    """Return a model with such values; without ``taken`` its state has a value that no load takes back."""
    torch.manual_seed(count)
    layer = Counts() if taken else nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    model.total = layer.count = count  # type: ignore[assignment]
    if taken:
        layer.pair, layer.bank = layer.pair + count, layer.bank + count

    def save(_: nn.Module, state: HooksState, prefix: str, _metadata: Any) -> None:
        state[prefix + "1.total"] = torch.tensor([float(model.total)])

    def take(_: nn.Module, state: HooksState, prefix: str, *_rest: Any) -> None:
        if prefix + "1.total" in state:
            model.total = int(state.pop(prefix + "1.total"))  # type: ignore[assignment]

    model.register_state_dict_post_hook(save)
    if taken:
        model.register_load_state_dict_pre_hook(take)
    return model


@on_ranks(2)
@pytest.mark.parametrize("stage", [3, *full(1)])
def test_values_that_modules_add_to_a_state_are_loaded(tmp_path: Path, stage: int) -> None:
    init_distributed()
    for taken in (True, False):
        model = counting(taken, 5)
        path = f"{tmp_path}/{stage}/{taken}"
        session = shardwise.shard(model, hooked_sgd(model), stage=stage)
        state = {name: value.clone() for name, value in session.module.state_dict().items()}
        session.checkpoints.save(path, "a")
        session.close()
        for way in ("state", "checkpoint", "torch"):
            model = counting(taken, 1)
            if way == "torch":
                saver = Checkpointer(TorchRun(model, hooked_sgd(model)))
                load: Any = saver.load
            else:
                session = shardwise.shard(model, hooked_sgd(model), stage=stage)
                load = session.checkpoints.load
            before = session.module.state_dict() if way != "torch" else {}
            if taken:
                session.module.load_state_dict(state) if way == "state" else load(path, "a")
                layer = model[1]
                assert (layer.count, layer.pair.tolist(), layer.bank.tolist()) == (5, [5.0] * 2, [5.0] * 3), way
                assert model.total == 5, way
            else:
                with pytest.raises(ValueError, match=r"1.total.*(is recomputed|a hook of the model saves this)"):
                    session.module.load_state_dict(state) if way == "state" else load(path, "a")
            after = session.module.state_dict() if way != "torch" else {}
            for name, value in after.items():  # a refused load changes nothing
                assert torch.equal(value, state[name] if taken else before[name]), (way, name)
            if way != "torch":
                session.close()
