"""Checkpoints that fit a session in part: a model without optimizers, and optimizers that changed after the save.

A model alone is saved with its full-precision masters. Optimizer state is loaded by the parameters' names, and a
warning names parameters that start without state. The reference is plain torch with state copied by name.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.core.checkpoint.formats import open_checkpoint, write_dcp
from shardwise.core.mesh import Mesh
from shardwise.deepspeed.checkpoint_engine import WithoutFrozen
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.strategies.trainer_checkpoints import ModelOnly
from shardwise.testing import assert_close, run_ranks
from tests.support.checkpoint_setup import SCALER, plans
from tests.support.engine_setup import adam, one_mesh, sharded
from tests.support.on_ranks import on_ranks
from tests.support.sets import full

NAMES = ("zero1", "zero3", "host", "bf16", "bf16 disk", "fp16", "straddling", "mixed")
State = dict[str, Tensor]


def model() -> nn.Module:
    """Return an fp32 model with a frozen first layer."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    net[0].requires_grad_(False)
    return net


QUICK = [(name, 1 + number % 2) for number, name in enumerate(NAMES)]


@on_ranks()
@pytest.mark.parametrize(("name", "ranks"), [*QUICK, *full(*((name, 3 - ranks) for name, ranks in QUICK))])
def test_model_only_checkpoint_has_full_precision_masters(name: str, ranks: int, tmp_path: Path) -> None:
    """After two steps the masters have values that 16 bits cannot represent; both saves omit the optimizer."""
    net, plan = model(), plans(f"{tmp_path}/disk")[name]
    with sharded(net, adam(net), plan) as session:
        for _ in range(2):
            session.backward(session.module(torch.ones(3, 6)).float().square().mean())
            session.optimizer.step()
        saver = Checkpointer(ModelOnly(session))
        saver.save(tmp_path, "all", use_async=name == "fp16")
        saver.wait_for_saves()
        Checkpointer(WithoutFrozen(ModelOnly(session))).save(tmp_path, "trained")  # type: ignore[arg-type]
        masters = session.module.state_dict()
    kept = masters["2.weight"]
    assert kept.dtype == torch.float32
    assert name not in ("bf16", "bf16 disk", "fp16") or not torch.equal(kept, kept.bfloat16().float())
    for tag in ("all", "trained"):
        saved = {n: value for n, value in masters.items() if tag == "all" or not n.startswith("0.")}
        with open_checkpoint(tmp_path / tag) as source:
            facts = {n.removeprefix("model/"): fact for n, fact in source.tensors().items() if n.startswith("model/")}
            read = {n: source.read(f"model/{n}", 0, saved[n].numel()).view(saved[n].shape) for n in facts}
        assert_close(read, saved, 0.0, tag)
        assert all(fact.dtype == saved[n].dtype for n, fact in facts.items())
        net = model()
        with torch.no_grad():
            for param in net.parameters():
                param.zero_()
        with sharded(net, adam(net), plan) as session:
            Checkpointer(ModelOnly(session)).load(tmp_path, tag, strict=tag == "all")
            state = session.module.state_dict()
            assert_close({n: state[n] for n in saved}, saved, 0.0, tag)


def test_load_without_optimizer_state_warns(tmp_path: Path) -> None:
    net = model()
    with sharded(net, adam(net), zero(1)) as session:
        Checkpointer(ModelOnly(session)).save(tmp_path, "one")
        with pytest.raises(ValueError, match=r"missing from the checkpoint: optimizer 0 \(Adam\)"):
            session.checkpoints.load(tmp_path, "one")
        with pytest.warns(UserWarning, match=r"optimizer 0 \(Adam\): the checkpoint has no optimizers, so its"):
            session.checkpoints.load(tmp_path, "one", strict=False)


def test_static_loss_scale_is_not_loaded(tmp_path: Path) -> None:
    """A load must not replace a static scale with the dynamic scale of another run."""
    moving = plans(str(tmp_path))["fp16"]
    fixed = moving.but(scaler=dataclasses.replace(SCALER, initial_scale=64.0, min_scale=64.0, max_scale=64.0))
    for plan, before, after in ((moving, 256.0, 128.0), (fixed, 64.0, 64.0), (moving, 256.0, 128.0)):
        net = model()
        with sharded(net, adam(net), plan) as session:
            scaler = session.optimizers[0].scaler
            assert scaler is not None and scaler.scale == before
            if not (tmp_path / "one").exists():
                scaler.update(overflow=True)
                session.checkpoints.save(tmp_path, "one")
                state = session.optimizers[0].state_dict()
            session.checkpoints.load(tmp_path, "one")
            assert scaler.scale == after
            session.optimizers[0].load_state_dict(state)
            assert scaler.scale == after


Optimizer = torch.optim.Optimizer
ByName = dict[str, Any]
ROWS = 6


class Net(nn.Module):
    """A network with an optional ``head``."""

    def __init__(self, head: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.head = nn.Linear(3, 3) if head else nn.Identity()
        self.body.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(torch.tanh(self.body(x))))


def net(seed: int = 0, **how: bool) -> Net:
    torch.manual_seed(seed)
    return Net(**how).double()


def adamw(*modules: nn.Module, **how: Any) -> Optimizer:
    return torch.optim.AdamW([p for m in modules for p in m.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, **how)


def halves(m: Net, first: ByName | None = None, second: ByName | None = None) -> Optimizer:
    groups = [
        {"params": list(m.body.parameters()), **(first or {})},
        {"params": list(m.last.parameters()), **(second or {})},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def two(m: Net) -> list[Optimizer]:
    return [adamw(m.body), torch.optim.SGD(m.last.parameters(), lr=0.05, momentum=0.9)]


@dataclasses.dataclass(frozen=True)
class Case:
    """Optimizers of the saving and the loading run, expected options after the load, and words of the warning."""

    before: Callable[[Net], Any]
    after: Callable[[Net], Any]
    options: tuple[ByName, ...]
    words: tuple[str, ...]
    net_before: ByName = dataclasses.field(default_factory=dict)
    net_after: ByName = dataclasses.field(default_factory=dict)


LATER = {"lr": 2e-3}  # the learning rate that a schedule set before the save
CASES = {
    "new layer": Case(adamw, adamw, (LATER,), ("start without state: head.weight, head.bias",), {}, {"head": True}),
    "newly frozen": Case(
        adamw, adamw, (LATER,), ("no optimizer has here: body.weight, body.bias",), {}, {"frozen": True}
    ),
    "newly trained": Case(
        adamw, adamw, (LATER,), ("start without state: body.weight, body.bias",), {"frozen": True}, {}
    ),
    "split": Case(
        adamw,
        lambda m: halves(m, {"weight_decay": 0.0}, {"weight_decay": 0.5}),
        (LATER | {"weight_decay": 0.0}, LATER | {"weight_decay": 0.5}),
        ("weight_decay of group 0 stays 0.0, the checkpoint has 0.01",),
    ),
    "turned": Case(
        lambda m: halves(m, {"weight_decay": 0.0}, {"weight_decay": 0.5}),
        lambda m: torch.optim.AdamW(
            [{"params": list(m.last.parameters())}, {"params": list(m.body.parameters())}], eps=1.0
        ),
        (LATER | {"weight_decay": 0.5, "eps": 1e-3}, LATER | {"weight_decay": 0.0, "eps": 1e-3}),
        (),
    ),
    "one becomes two": Case(
        adamw,
        two,
        (LATER,),
        (
            "optimizer 1 is SGD, but the checkpoint has the state of AdamW",
            "these parameters start without state: last.weight, last.bias",
        ),
    ),
}
ANEW = {"newly frozen": {"body.weight", "body.bias"}, "one becomes two": {"last.weight", "last.bias"}}
"""Parameters whose saved state is not loaded."""


def several(made: Any) -> list[Optimizer]:
    return made if isinstance(made, list) else [made]


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain_steps(model: Net, optimizers: list[Optimizer], first: int, last: int) -> None:
    for step in range(first, last):
        model(rows(step)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def named_state(model: nn.Module, optimizers: list[Optimizer]) -> ByName:
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: {k: torch.as_tensor(v) for k, v in s.items()}
        for each in optimizers
        for p, s in each.state.items()
        if s
    }


def expected(name: str, steps: int) -> tuple[ByName, ByName]:
    """Return values and state by name of plain torch, right after the load (``steps=0``) or ``steps`` later."""
    case = CASES[name]
    model = net(**case.net_before)
    optimizers = several(case.before(model))
    plain_steps(model, optimizers, 0, 2)
    old, values = named_state(model, optimizers), model.state_dict()
    model = net(seed=5, **case.net_after)
    model.load_state_dict(values, strict=False)
    optimizers = several(case.after(model))
    for group, options in zip(optimizers[0].param_groups, case.options, strict=True):
        group.update(options)
    for found, parameter in model.named_parameters():
        if found in old and found not in ANEW.get(name, ()):
            holder = next(o for o in optimizers for g in o.param_groups if any(parameter is p for p in g["params"]))
            holder.state[parameter] = copy.deepcopy(old[found])
    plain_steps(model, optimizers, 2, 2 + steps)
    return copy.deepcopy(dict(model.state_dict())), named_state(model, optimizers)


def steps_of(session: Session, first: int, last: int) -> None:
    for step in range(first, last):
        mine = rows(step).chunk(session.mesh.size)[session.mesh.rank]
        session.backward(session.module(mine).square().mean())
        for each in session.optimizers:
            each.step()


def sharded_state(session: Session, names: list[list[str]]) -> ByName:
    found = {}
    for each, own in zip(session.optimizers, names, strict=True):
        for number, entry in each.state_dict()["state"].items():
            found[own[number]] = {key: torch.as_tensor(value) for key, value in entry.items()}
    return found


def numbered(model: nn.Module, optimizers: list[Optimizer]) -> list[list[str]]:
    names = {p: name for name, p in model.named_parameters()}
    return [[names[p] for group in each.param_groups for p in group["params"]] for each in optimizers]


def save(root: str, names: list[str]) -> None:
    with one_mesh(zero(1)) as mesh:
        for name in names:
            model = net(**CASES[name].net_before)
            session = build(model, CASES[name].before(model), zero(1), mesh)
            steps_of(session, 0, 2)
            for group in session.optimizers[0].param_groups:
                group.update(LATER)
            session.checkpoints.save(root, name)
            session.close()


def as_one(state: ByName) -> dict[str, Tensor]:
    return {f"{name}/{key}": value.double() for name, entry in state.items() for key, value in entry.items()}


def go_on(root: Path, name: str, plan: Plan, mesh: Mesh, form: str, rtol: float) -> None:
    """Load, compare with plain torch and train on; only rank 0 warns."""
    model = net(seed=5, **CASES[name].net_after)
    made = CASES[name].after(model)
    listed = numbered(model, several(made))
    session = build(model, made, plan, mesh)
    if name != "new layer":
        steps_of(session, 50, 51)  # the load replaces this state
    path = root / f"{form}{name}"
    with pytest.raises(ValueError, match="does not fit"):
        session.checkpoints.load(path)
    with warnings.catch_warnings(record=True, action="always") as caught:
        session.checkpoints.load(path, strict=False)
    told = [str(each.message) for each in caught if "loaded partially" in str(each.message)]
    assert len(told) == (mesh.rank == 0 and bool(CASES[name].words)), (name, told)
    assert all(words in text for text in told for words in CASES[name].words), (name, told)
    _, state = expected(name, 0)
    assert_close(as_one(sharded_state(session, listed)), as_one(state), rtol, name)
    steps_of(session, 2, 4)
    if rtol < 1e-9:
        values, later = expected(name, 2)
        assert_close(session.module.state_dict(), values, rtol, name)
        assert_close(as_one(sharded_state(session, listed)), as_one(later), rtol, name)
    session.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save each case with two ranks, natively and as DCP, which does not store classes of optimizers."""
    root = tmp_path_factory.mktemp("saved")
    run_ranks(2, save, str(root), list(CASES))
    for name in CASES:
        source = open_checkpoint(root / name)
        write_dcp(source, root / f"dcp {name}")
        source.close()
    return root


PLANS = [("zero3", 2, 1e-11), ("zero1", 3, 1e-11), ("mixed", 2, 1e-11), ("backward", 2, 1e-11), ("bf16", 2, 1e-6)]


@on_ranks()
@pytest.mark.parametrize(("plan", "ranks", "rtol"), [PLANS[0], *full(*PLANS[1:])], ids=[plan for plan, *_ in PLANS])
def test_optimizer_state_is_loaded_by_name(saved: Path, plan: str, ranks: int, rtol: float) -> None:
    own = {**plans(f"{saved}-disk"), "backward": zero(2).but(update="backward")}[plan]
    with one_mesh(own) as mesh:
        for name in CASES:
            go_on(saved, name, own, mesh, "", rtol)


@on_ranks(2)
def test_dcp_optimizer_state_is_loaded_by_name_and_shape(saved: Path) -> None:
    with one_mesh(zero(3)) as mesh:
        for name in CASES:
            if "two" not in name:  # several optimizers become one in DCP
                go_on(saved, name, zero(3), mesh, "dcp ", 1e-11)
