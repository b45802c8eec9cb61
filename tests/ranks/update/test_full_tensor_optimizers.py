"""Optimizers that need a parameter's norm, rows and columns, or singular vectors.

Each parameter is unsharded on one rank for its update, so every plan gives plain PyTorch's values.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.comm import PeerError
from shardwise.core.engine import optimizer_state
from shardwise.core.optim.muon import MuonWithAuxAdam
from shardwise.deepspeed.optimizers import FusedLamb
from shardwise.nn import optimizer as own
from shardwise.plan import ByModule, Plan, on_device, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, OwnOptimizer, away_from_zero, one_mesh, plain_steps, seeded, sharded
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import campaign, full
from tests.support.tier_setup import with_tiers

RANKS, STEPS = 3, 4


class Normed(OwnOptimizer):
    """An optimizer of unknown name: momentum in the direction of the gradient."""

    def update(self, param: Any, group: dict[str, Any]) -> None:
        average = self.state[param].setdefault("average", torch.zeros_like(param))
        average.mul_(0.5).add_(param.grad / param.grad.norm())
        param.sub_(group["lr"] * average)


class Centred(OwnOptimizer):
    """Subtracts each row's mean. It sets ``whole_tensors``, and it uses random numbers, so that a trial run could not
    show it."""

    whole_tensors = True

    def update(self, param: Any, group: dict[str, Any]) -> None:
        torch.rand(())
        param.sub_(group["lr"] * (param.grad - param.grad.mean(-1, keepdim=True)))


class Listed(OwnOptimizer):
    """State as in SOAP and Shampoo: lists of matrices, one per dimension, some of them empty, tuples, dicts,
    strings."""

    def update(self, param: Any, group: dict[str, Any]) -> None:
        # shards have no 0-dim parameters
        state, grad = self.state[param], param.grad.reshape(param.shape or (1,))
        if not state:
            sizes = [size if size < 10 else 0 for size in grad.shape]
            state["matrices"] = [param.new_zeros(n, n) if n else [] for n in sizes]
            state["of"] = {
                "steps": (0, torch.zeros((), dtype=torch.float64)),
                3: {"norms": param.new_zeros(2)},
                "kind": "x",
            }
        for dim, matrix in enumerate(state["matrices"]):
            if isinstance(matrix, Tensor):
                moved = grad.movedim(dim, 0)
                rows = moved.reshape(len(matrix), -1)
                matrix.mul_(0.5).add_(rows @ rows.T)
                grad = (matrix @ rows / (1 + matrix.norm())).view(moved.shape).movedim(0, dim).contiguous()
        steps, told = state["of"]["steps"]
        state["of"]["steps"] = (steps + 1, told + 1)
        state["of"][3]["norms"].add_(grad.norm())
        grad = grad.view(param.shape) / (1 + state["of"][3]["norms"][0])
        param.sub_(group["lr"] * grad * (1 + 0.1 * steps + 0.1 * told))


class Net(nn.Module):
    """Parameters of odd shapes: matrices, one with a single column, vectors, a kernel, a scalar, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 7)
        self.kernel = nn.Conv1d(1, 2, 3)
        self.column = nn.Linear(1, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.last = nn.Linear(7, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.table(tokens)))
        seen = (
            self.kernel(hidden.flatten(0, 1).unsqueeze(1)).square().mean() + self.column(hidden[..., :1]).sin().mean()
        )
        return self.last(hidden * self.scale).square().mean() + seen + self.frozen.sum() * 0


def net() -> nn.Module:
    return away_from_zero(Net())


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(100 * rank + step))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Lamb": lambda m: own.Lamb(trained(m), lr=0.05, weight_decay=0.01),
    "FusedLAMB": lambda m: own.FusedLAMB(trained(m), lr=0.05, max_grad_norm=0),
    "DeepSpeed's": lambda m: FusedLamb(trained(m), lr=0.05, weight_decay=0.01, min_coeff=0.3, max_coeff=1.5),
    "torch's Adafactor": lambda m: torch.optim.Adafactor(trained(m), lr=0.05),
    "Muon": lambda m: torch.optim.Muon([p for p in trained(m) if p.dim() == 2], lr=0.05),
    "MuonWithAuxAdam": lambda m: MuonWithAuxAdam(
        [{"params": [p for p in trained(m) if (p.dim() > 1) is on], "use_muon": on, "lr": 0.1} for on in (True, False)]
    ),
    "of no known name": lambda m: Normed(trained(m)),
    "that says so": lambda m: Centred(trained(m)),
    "of lists": lambda m: Listed(trained(m)),
}
WHOLE_PLANS = {name: PLANS[name] for name in ("ddp", "zero2", "zero3_tensor", "zero3_gloo")} | {
    "modules": zero(3).but(packing=ByModule(unit_classes=("Linear",))),
    "host": zero(3).but(tiers=replace(on_device(), param_host_fraction=0.5, state_host_fraction=0.7)),
    "backward": zero(3).but(update="backward"),
}


SOME = ["Lamb", "torch's Adafactor", "MuonWithAuxAdam", "of no known name", "of lists"]
EVERY = [
    *[("zero2", list(MAKE)), ("zero3_tensor", SOME[:1]), ("host", SOME[1:2]), ("backward", SOME[3:4])],
    *full(*((plan, SOME) for plan in WHOLE_PLANS if plan != "zero2")),
    *campaign(("modules", list(MAKE))),
]
"""Plans, with the optimizers that run under each."""


def tolerance(name: str) -> float:
    """Return the tolerance: Muon multiplies in bfloat16, shardwise's Muon in fp32."""
    return 5e-2 if name == "Muon" else 1e-5 if "Muon" in name else 1e-11


def plain(name: str, ranks: int = RANKS) -> tuple[nn.Module, Any]:
    model = seeded(net)
    optimizer = MAKE[name](model)
    plain_steps(model, optimizer, STEPS, lambda model, rank, step: model(tokens(rank, step)), ranks)
    return model, optimizer


def steps_of(session: Session, steps: range) -> None:
    for step in steps:
        session.optimizer.backward(session.module(tokens(session.mesh.rank, step)))
        session.optimizer.step()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return the numbers and tensors inside, and the structure of their containers."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key!r}")
    elif isinstance(value, list | tuple):
        yield f"{path} of {type(value).__name__}", len(value)
        for place, each in enumerate(value):
            yield from leaves(each, f"{path}.{place}")
    elif value is not None and not isinstance(value, str):
        yield path, value


def result(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the weights, and the full state in plain torch's format."""
    packed = optimizer.state_dict()["state"]
    state = {f"{n}.{k}": torch.as_tensor(v) for n, entry in packed.items() for k, v in leaves(entry)}
    return {**model.state_dict(), **{key: value.double() for key, value in state.items()}}


@pytest.mark.parametrize(("name_of_plan", "names"), EVERY)
@on_ranks(RANKS)
def test_every_plan_equals_plain_torch(name_of_plan: str, names: list[str]) -> None:
    plan = WHOLE_PLANS[name_of_plan]
    with one_mesh(plan) as mesh:
        for name in names:
            model = seeded(net)
            with sharded(model, MAKE[name](model), plan, mesh) as session:
                steps_of(session, range(2))
                state = session.optimizer.state_dict()
                session.optimizer.load_state_dict(copy.deepcopy(state))  # the gathered tensors were scattered again
                steps_of(session, range(2, STEPS))
                found, expected = result(session.module, session.optimizer), result(*plain(name))
                assert_close(found, expected, tolerance(name), f"{name}, {name_of_plan}")
                whole = {param.numel() for param in model.parameters()}
                pieces = [piece for group in session.optimizer.param_groups for piece in group["params"]]
                assert {piece.numel() for piece in pieces} <= whole


def halves(directory: str, plan: Plan, load: bool, names: list[str], small: int) -> dict[str, dict[str, Any]]:
    """Run two of four steps on all the batches of :func:`plain`; save a checkpoint after them, or load it before.

    Rows and columns of more than ``small`` elements are separate tensors in the checkpoint.
    """
    found = {}
    before, optimizer_state.MOST_SMALL = optimizer_state.MOST_SMALL, small
    with one_mesh(plan) as mesh:
        for name in names:
            model = seeded(net)
            with sharded(model, MAKE[name](model), plan, mesh) as session:
                path = f"{directory}/{name.replace(' ', '-')}"
                if load:
                    session.checkpoints.load(path, "auto")
                for step in range(2, STEPS) if load else range(2):
                    for rank in range(mesh.rank, RANKS * 2, mesh.size):
                        share = mesh.size / (RANKS * 2)
                        session.optimizer.backward(session.module(tokens(rank, step)) * share)
                    session.optimizer.step()
                if not load:
                    session.checkpoints.save(path)
                found[name] = result(session.module, session.optimizer)
    optimizer_state.MOST_SMALL = before
    return found


SAVED = [name for name in MAKE if name not in ("that says so", "FusedLAMB", "Muon")]
ROWS = ["torch's Adafactor", "of lists"]


@pytest.mark.parametrize(
    ("first", "then", "small", "names"),
    [*[(3, 2, 5, ["Lamb", *ROWS]), *full((1, 3, 4096, ROWS))], *campaign((3, 2, 5, SAVED), (1, 3, 4096, SAVED))],
)
def test_checkpoints_resume_on_other_numbers_of_ranks(
    first: int, then: int, small: int, names: list[str], tmp_path: Path
) -> None:
    run_ranks(first, halves, str(tmp_path), zero(3), False, names, small)  # type: ignore[arg-type]
    every = run_ranks(then, halves, str(tmp_path), zero(2), True, names, small)  # type: ignore[arg-type]
    for name in names:
        expected = result(*plain(name, RANKS * 2))
        for found in every:
            assert_close(found[name], expected, tolerance(name), name)


class Failing(Normed):
    """Raises within a step once it is told to."""

    whole_tensors = True
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails and any(param.dim() == 2 for group in self.param_groups for param in group["params"]):
            raise ValueError("no root of this matrix")


@on_ranks(RANKS)
def test_failed_update_on_one_rank_raises_on_all() -> None:
    """So does the next step, until both states are loaded."""
    expected = result(*plain("of no known name"))
    for plan in (zero(2), zero(3).but(shared_memory=False), zero(3).but(update="backward")):
        model = seeded(net)
        with sharded(model, Failing(trained(model)), plan) as session:
            steps_of(session, range(2))
            kept = copy.deepcopy(session.module.state_dict()), session.optimizer.state_dict()
            rank = session.mesh.rank
            session.optimizer.optimizer.fails = rank == 1
            session.optimizer.backward(session.module(tokens(rank, 2)))
            with pytest.raises(ValueError if rank == 1 else PeerError) as raised:
                session.optimizer.step()
            text = f"{raised.value} {getattr(raised.value, '__notes__', '')}"
            assert text.startswith("no root" if rank == 1 else "step() of Failing failed")
            assert "no root of this matrix" in text and "half-changed on all ranks: load a checkpoint" in text
            assert rank == 1 or "rank 1: ValueError" in text
            session.optimizer.optimizer.fails = False
            raises((RuntimeError, ValueError), "half-changed", session.optimizer.step)
            session.module.load_state_dict(kept[0])
            session.optimizer.load_state_dict(kept[1])
            session.optimizer.zero_grad()
            steps_of(session, range(2, STEPS))
            assert_close(result(session.module, session.optimizer), expected, 1e-11, f"rank {rank}")


@on_ranks(2)
def test_plans_without_full_tensors_are_refused(tmp_path: Path) -> None:
    plan = zero(2)
    on_disk = with_tiers(plan, "s_disk", str(tmp_path)).but(state_disk_fraction=0.5)
    with one_mesh(plan) as mesh:
        for make, own_plan, words in (
            (MAKE["Lamb"], on_disk, "state_disk_fraction=0.5.*Lamb needs whole tensors"),
            (lambda m: own.FusedLAMB(trained(m)), plan, r"max_grad_norm=1\.0 needs all gradients"),
        ):
            model = seeded(net)
            raises(ValueError, words, build, model, make(model), own_plan, mesh)
