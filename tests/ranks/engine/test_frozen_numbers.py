"""Frozen parameters of any dtype, and of classes of their own, are sharded as floating-point ones are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from shardwise.core.base.torch_internals import give_subclass
from shardwise.plan import ByTensor, DiskPlan, Plan, replicated, zero
from shardwise.session import Session, build
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import data, one_mesh, seeded, sgd, sharded, told

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)
NUMEL = 24


class Codes(nn.Parameter):
    """As packed weights have it: a class that makes something else of what is done to it."""

    def to(self, *args: object, **kwargs: object) -> Tensor:
        raise AssertionError(f"packs itself on its way to {args}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return super().__torch_function__(func, types, args, kwargs or {})


class Lookup(nn.Module):
    """Its table is read by rows; a second tensor is the same memory, and is read in the table's place."""

    def __init__(self, dtype: torch.dtype, follows: bool) -> None:
        super().__init__()
        numbers = torch.randint(2, 100, (NUMEL,)).to(dtype).view(6, 4)
        self.codes = give_subclass(Codes, numbers) if follows else nn.Parameter(numbers, requires_grad=False)
        if follows:
            self.codes.same = self.codes.data.as_subclass(Tensor)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        beside = getattr(self.codes, "same", None)
        codes = self.codes if beside is None else beside
        out = _Scaled.apply(x, codes) if beside is not None else x @ _real(codes)
        if beside is not None:
            self.codes.data = beside  # as layers of 8-bit weights do
        return (out * self.scale) @ _real(codes).t()


class _Scaled(torch.autograd.Function):
    """Keeps what it was given where no hook sees it."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.codes = codes
        return x @ _real(codes)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return grad @ _real(ctx.codes).t(), None


def _real(codes: Tensor) -> Tensor:
    return (codes.real if codes.is_complex() else codes).double() / 100


def net() -> nn.Module:
    own = [Lookup(dtype, follows=False) for dtype in DTYPES] + [Lookup(torch.int8, follows=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), *own).double()


def steps(model: nn.Module, run: object, rank: int) -> None:
    run(model(data(rank, 0)[:, :6].double()).square().mean())  # type: ignore[operator]


def expected() -> dict[str, Tensor]:
    model = seeded(net)
    optimizer = sgd(model)
    for _ in range(2):
        for rank in range(2):
            steps(model, lambda loss: (loss / 2).backward(), rank)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def plans(folder: str) -> list[Plan]:
    on_disk = {"param_disk_fraction": 1.0, "state_disk_fraction": 1.0, "disk": DiskPlan(directory=folder)}
    return [
        zero(3),
        zero(3).but(shared_memory=False),
        zero(3).but(packing=ByTensor(persist_numel=0), param_host_fraction=1.0, state_host_fraction=1.0),
        zero(3).but(**on_disk),
        zero(2),
        replicated(),
    ]


class Found(NamedTuple):
    trained: dict[str, Tensor]
    loaded: dict[str, Tensor]
    errors: list[str]
    parameter_bytes: int
    formula_bytes: int


def wrong_uses(session: Session, model: nn.Module) -> list[str]:
    """A write to what is not gathered, and numbers of another kind."""
    state = session.module.state_dict()
    with torch.no_grad():
        model[1].codes.zero_()
    errors = [told(lambda: session.module(data(0, 0)))]
    given = {name: value.float() if "codes" in name else value for name, value in state.items()}
    return [*errors, told(lambda: session.module.load_state_dict(given))]


def on_rank(folder: str) -> list[Found]:
    found = []
    for number, plan in enumerate(plans(folder)):
        with one_mesh(plan) as mesh:
            model, errors = seeded(net), []
            with sharded(model, sgd(model), plan, mesh) as session:
                for _ in range(2):
                    steps(session.module, session.backward, mesh.rank)
                    session.optimizer.step()
                    session.optimizer.zero_grad()
                trained = session.module.state_dict()
                held = sum(tier.get("parameters", 0) for tier in session.memory().by_tier.values())
                chunks = session.engine.shards.layout.chunks
                whole = sum(chunk.padded_bytes for chunk in chunks)
                session.checkpoints.save(folder, f"plan-{number}")
                if number == 0:
                    errors = wrong_uses(session, model)
                if number < 2:
                    session.unshard()
                    steps(model, lambda loss: loss.backward(), 0)  # what followed parameters is theirs again
                    assert_close(dict(model.state_dict()), trained, 0.0, "unsharded")
            other = seeded(net, 7)
            with sharded(other, sgd(other), plan, mesh) as session:
                session.checkpoints.load(folder, f"plan-{max(number - 1, 0)}")
                loaded = session.module.state_dict()
            stays = plan.shard.always_gathered
            found.append(Found(trained, loaded, errors, held, whole if stays else whole // mesh.shard.size))
    return found


def test_frozen_numbers_of_every_dtype_are_sharded(tmp_path: Path) -> None:
    wanted = expected()
    assert any(not value.is_floating_point() for value in wanted.values())
    for rank, results in enumerate(run_ranks(2, on_rank, str(tmp_path))):
        for plan, found in enumerate(results):
            assert_close(found.trained, wanted, 1e-11, f"plan {plan}, rank {rank}")
            assert all(found.trained[name].dtype is wanted[name].dtype for name in wanted)
            assert_close(found.loaded, found.trained, 1e-11, f"loaded, plan {plan}, rank {rank}")
            assert found.parameter_bytes == found.formula_bytes, plan
        assert "1.codes (6, 4) was written to" in results[0].errors[0]
        assert "1.codes: torch.float32 instead of torch.uint8" in results[0].errors[1]


def test_what_cannot_be_sharded_is_refused() -> None:
    model = seeded(net)
    model[1].codes = give_subclass(Codes, torch.zeros(6, 4))
    model[1].codes.bnb_quantized = False
    assert "1.codes (Codes, (6, 4)) is still torch.float32, and is packed when it moves" in told(
        lambda: build(model, None, zero(3)), ValueError
    )
    quantized = nn.Sequential(nn.Linear(2, 2))
    quantized[0].weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)), requires_grad=False)
    assert "0.weight (TwoTensor, (2, 2)) has its values in other tensors" in told(
        lambda: build(quantized, None, zero(3)), ValueError
    )
