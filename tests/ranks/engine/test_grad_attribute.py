"""``.grad`` of sharded parameters: read, clipped, edited and assigned as in plain PyTorch, also in half precision.

Unsupported uses raise on every rank and change nothing. ``step()`` clears gradients, so a loop without ``zero_grad()``
gets one warning.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.utils.dlpack
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from shardwise.core.grads.sharded_grad import ShardedGrad
from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, zero
from shardwise.session import Session
from shardwise.testing import assert_close, run_ranks
from tests.support.engine_setup import PLANS, SCALER, check, data, one_mesh, plain_steps, scaler, seeded, sgd, sharded
from tests.support.engine_setup import tanh_net as net
from tests.support.on_ranks import on_ranks, raises
from tests.support.sets import full


@contextmanager
def ready(plan: Plan, mesh: Mesh) -> Iterator[tuple[nn.Module, Session]]:
    """Yield a model after its first backward pass."""
    model = seeded(net)
    with sharded(model, sgd(model), plan, mesh) as session:
        session.backward(loss_of(session))
        yield model, session


def loss_of(session: Session, micro: int = 0) -> Tensor:
    return session.module(data(session.mesh.rank, 0, micro)).square().mean()


def grad(model: nn.Module, name: str = "0.weight") -> Tensor:
    found = dict(model.named_parameters())[name].grad
    assert isinstance(found, ShardedGrad)
    return found


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda params: torch.optim.Adam(params, foreach=False),
}


@pytest.mark.parametrize("name", ["zero3", *full("ddp", "zero2", "zero3_gloo")])
@on_ranks(2)
def test_optimizer_made_after_sharding_is_refused(name: str) -> None:
    """Such an optimizer, and an update without one, raise and change nothing; without gradients they have no effect."""
    with one_mesh(PLANS[name]) as mesh, ready(PLANS[name], mesh) as (model, session):
        before = session.module.state_dict()
        for what, make in OPTIMIZERS.items():
            words = rf"2\.weight\.grad by step\(\) of a {what}.*before sharding"
            raises(Exception, words, make(model[2].parameters()).step)
        with torch.no_grad():
            raises(Exception, "updates '0.bias'|0.bias.grad", model[0].bias.add_, grad(model, "0.bias"), alpha=-0.1)
        assert_close(session.module.state_dict(), before, 0.0, "after steps that were refused")
        session.optimizer.step()
        session.optimizer.zero_grad()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("name", ["zero2", *full("ddp", "zero3", "zero3_gloo")])
@on_ranks(2)
def test_unsupported_uses_of_grad_raise(name: str) -> None:
    plan = PLANS[name]
    gone = r"0\.weight\.grad.*after step\(\) has used it, or zero_grad\(\) dropped it"
    with one_mesh(plan) as mesh, ready(plan, mesh) as (model, session):
        weight, kept = model[0].weight, grad(model)
        raises(Exception, "averaged over the ranks already", dist.all_reduce, kept)
        assert f"{kept} {kept!r} {[kept]}".count("ShardedGrad(of '0.weight', shape=(8, 6)") == 3
        raises(Exception, r"clone\(\)", kept.data_ptr)
        values = kept.clone()
        assert torch.equal(torch.tensor(kept.tolist(), dtype=torch.float64), values)
        assert (kept.numpy() == values.numpy()).all()
        session.optimizer.step()
        raises(Exception, gone, clip_grad_norm_, model.parameters(), 1.0)
        raises(Exception, gone, kept.clone)
        session.optimizer.zero_grad()
        assert weight.grad is None
        raises(Exception, gone, kept.norm)
        session.backward(loss_of(session))
        assert weight.grad is kept
        expected = kept.clone()
        seen: list[str] = []
        handle = weight.register_hook(lambda _: seen.append(said(kept.norm)))
        session.backward(loss_of(session))
        assert "0.weight.grad while a backward pass runs" in seen[0]
        handle.remove()
        handle = weight.register_post_accumulate_grad_hook(lambda _: None)
        hook = r"0\.weight has a post-accumulate-grad hook.*register_hook"
        raises(Exception, hook, lambda: session.backward(loss_of(session)))
        handle.remove()
        session.optimizer.zero_grad()
        session.backward(loss_of(session))
        assert torch.allclose(grad(model), expected)
        session.optimizer.zero_grad()
        loss_of(session).backward(create_graph=True)
        raises(Exception, r"0\.weight\.grad of a pass with create_graph=True", lambda: kept.square().sum())
        with torch.no_grad():
            assert float(kept.square().sum()) > 0
    raises(RuntimeError, None, kept.clone)


@pytest.mark.parametrize("name", ["ddp", "zero1"])
@on_ranks(2)
def test_grad_after_no_sync_raises(name: str) -> None:
    with one_mesh(PLANS[name]) as mesh, ready(PLANS[name], mesh) as (model, session):
        with session.no_sync():
            session.backward(loss_of(session, 1))
        words = r"0\.weight\.grad after a pass under no_sync\(\)"
        raises(RuntimeError, words, clip_grad_norm_, model.parameters(), 1.0)
        session.backward(loss_of(session, 2))
        clip_grad_norm_(model.parameters(), 1.0)


def own_gradients(model: nn.Module, session: Session, rank: int) -> None:
    session.module.zero_grad()
    made = torch.autograd.grad(loss_of(session, 1 + rank), list(model.parameters()))
    for parameter, own in zip(model.parameters(), made, strict=True):
        parameter.grad = own


def by_rank(rank: int, step: float = 1.0) -> Tensor:
    return torch.full((8, 6), 1.0 + rank * step, dtype=torch.float64)


Change = Callable[[Any, Session, int], object]


def on_one(change: Callable[[Any], object]) -> Change:
    return lambda model, _session, rank: change(model) if rank == 1 else None


CHANGED = "2.bias.grad was assigned, cleared or changed in place differently on the ranks", "rank 1 1"
DIFFERENT: dict[str, tuple[Change, tuple[str, ...]]] = {
    "assigned on one": (on_one(lambda model: setattr(model[2].bias, "grad", torch.ones(3).double())), CHANGED),
    "cleared on one": (on_one(lambda model: setattr(model[2].bias, "grad", None)), CHANGED),
    "edited on one": (on_one(lambda model: grad(model, "2.bias").mul_(2.0)), CHANGED),
    "of their own": (own_gradients, ("0.weight.grad was given different values on the ranks (norms: rank 0",)),
    "copied": (
        lambda model, _, rank: grad(model).copy_(by_rank(rank)),
        ("was given different values on the ranks (norms: rank 0 ",),
    ),
    # Each shard has one owner, which alone scales it.
    "scaled": (lambda model, _, rank: grad(model).mul_(by_rank(rank)), ()),
    # As if a device summed in another order.
    "nearly the same": (lambda model, _, rank: setattr(model[0].weight, "grad", by_rank(rank, 1e-10)), ()),
}
"""Changes of gradients, and words of the error of the step; without words the step is applied."""


@pytest.mark.parametrize(
    ("name", "ranks"), [("zero3", 2), *full(("zero1", 2), ("zero2", 2), ("zero3_gloo", 2), ("hybrid", 4))]
)
@on_ranks()
def test_different_edits_on_ranks_raise(name: str, ranks: int) -> None:
    with one_mesh(PLANS[name]) as mesh:
        # With replicas (hybrid, 4 ranks), only the last cases apply, because replicas are not compared.
        for what in [*DIFFERENT][3 * (ranks == 4) :]:
            change, words = DIFFERENT[what]
            with ready(PLANS[name], mesh) as (model, session):
                before = session.module.state_dict()
                change(model, session, mesh.rank)
                told = said(session.optimizer.step)
                assert all(each in told for each in words or ("nothing",)), (what, told)
                after = session.module.state_dict()
                assert all(torch.equal(before[key], after[key]) for key in before) == bool(words), what


STEPS, MICRO = 2, 2
ROWS = {"zero2_host": zero(2).but(state_host_fraction=1.0)}
ROWS |= {name: PLANS[name] for name in ("ddp", "zero1", "zero3", "hybrid")}
ROWS["zero3_gloo"] = PLANS["zero3_gloo"].but(same_order=False)  # one module runs on rank 0 only
ROWS |= {"zero2_mean": zero(2).but(average="mean"), "zero3_tokens": zero(3).but(average="tokens")}
ROWS |= {"zero2_scaled": zero(2).but(scaler=SCALER), "zero1_scaled_mean": zero(1).but(scaler=SCALER, average="mean")}
QUICK = ("zero3", "zero2_mean", "zero2_scaled")


class Odd(nn.Module):
    """A tied weight, a frozen layer, an unused one, one that only rank 0 uses, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 6)
        self.sometimes = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embedding.weight
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        hidden = self.second(self.frozen(torch.tanh(self.first(x))))
        if rank == 0:
            hidden = hidden + self.sometimes(hidden)
        return self.head(hidden) * self.scalar + self.embedding(torch.tensor([1, 3])).sum()


Reads = list[float]
Edit = Callable[[Odd, int], Reads]
"""A function of the model and the number of the pass, called after each backward pass."""


def last(edit: Callable[[Odd], Reads]) -> Edit:
    return lambda model, micro: edit(model) if micro == MICRO - 1 else []


def clip_values(model: Odd) -> Reads:
    clip_grad_value_(model.parameters(), 0.02)
    return [float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))]


def norm_of(p: float, foreach: bool | None) -> Edit:
    def edit(model: Odd) -> Reads:
        return [float(clip_grad_norm_(model.parameters(), 0.05, p, error_if_nonfinite=True, foreach=foreach))]

    return last(edit)


def in_two(model: Odd) -> Reads:
    """Clip a part of the parameters, by a norm that is not theirs."""
    norm = get_total_norm([p.grad for p in model.first.parameters() if p.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.01, norm * 2)
    return [float(norm), float(clip_grad_norm_([model.scalar], 1e-3)), float(clip_grad_norm_(model.scalar, 1e9))]


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def read(model: Odd) -> Reads:
    found: Reads = []
    for name, p in model.named_parameters():
        if p.grad is None:
            found.append(-1.0)
            continue
        assert p.grad.shape == p.shape and p.grad.dtype == p.dtype and p.grad.device == p.device, name
        for each in (p.grad.norm(), p.grad.data.norm(1), p.grad.detach().flatten().norm(math.inf), p.grad.norm(3)):
            found.append(float(each))
        found += [float(p.grad.abs().max()), float(p.grad.mean()), float(p.grad.norm(0)), float(p.grad.float().sum())]
        found += [float(p.grad.clone().flatten()[-1]), float((p.grad * 2 + 1).sum())]
        found += [float(torch.zeros_like(p.grad).sum()), float(torch.ones_like(p).copy_(p.grad).sum())]
    found += [float(torch.stack([grad_of(p).abs().amax() for p in model.first.parameters()]).sum())]
    weight = grad_of(model.first.weight)
    found += [*weight.norm(dim=1).tolist(), *weight[1].tolist(), float(weight.t()[2, 3]), weight[0, 0].item()]
    found += [float(torch.cat([grad_of(p).reshape(-1) for p in model.second.parameters()]).norm())]
    return found


def edit_in_place(model: Odd) -> Reads:
    weight = grad_of(model.first.weight)
    weight.mul_(0.5).div_(torch.tensor(3.0)).neg_()
    weight *= (torch.arange(48.0).view(8, 6) % 3 > 0).double()
    weight[2:4] = 0.0
    weight.view(-1)[5] = 7.0
    weight.data[6, torch.tensor([True, False, True, False, False, True])] = 0.25
    grad_of(model.first.bias).add_(0.1).add_(torch.arange(8.0) / 50, alpha=2).clamp_(min=-0.2).clamp_max_(0.3)
    grad_of(model.second.bias).sub_(torch.ones(6), alpha=0.5).sign_()
    grad_of(model.second.weight).t()[1].fill_(-0.5)
    grad_of(model.second.weight).nan_to_num_(0.0).add_(grad_of(model.sometimes.weight).abs()[:, :1])
    grad_of(model.embedding.weight)[torch.tensor([1, 3])] += 0.75
    grad_of(model.scalar).copy_(torch.tensor(0.375, dtype=torch.float64))
    first, *_ = grad_of(model.head.bias).split(3)
    first.zero_()
    torch._foreach_mul_([grad_of(p) for p in model.sometimes.parameters()], [0.5, 3.0])
    return read(model)


def assign(model: Odd) -> Reads:
    model.first.bias.grad = torch.arange(8.0, dtype=torch.float64) / 8
    model.first.weight.grad = grad_of(model.first.weight) * 3
    model.second.weight.grad = grad_of(model.second.weight).detach()  # the same gradient
    model.second.bias.grad = None
    model.unused.bias.grad = torch.full((3,), 0.5, dtype=torch.float64)
    norm = clip_grad_norm_(model.parameters(), 0.5)
    return [float(norm), *(float(grad_of(p).norm()) for p in (model.first.bias, model.unused.bias))]


def clear_all(model: Odd, micro: int) -> Reads:
    """Drop the gradients of the first pass with ``grad = None``, and of one module with zero_grad() in the second."""
    if micro:
        model.second.zero_grad(set_to_none=False)
        model.sometimes.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None
    return []


def every_pass(model: Odd, micro: int) -> Reads:
    """Edit between passes; the next pass adds to the edited gradients."""
    norm = clip_grad_norm_(model.parameters(), 0.1)
    if not micro:
        model.first.bias.grad = torch.ones(8, dtype=torch.float64)
        model.second.bias.grad = None
    return [float(norm)]


EDITS: dict[str, Edit] = {
    **{f"norm {p} {foreach}": norm_of(p, foreach) for p, foreach in ((2.0, None), (math.inf, True))},
    "value": last(clip_values),
    "in two": last(in_two),
    "read": last(read),
    "edit": last(edit_in_place),
    "assign": last(assign),
    "clear": clear_all,
    "every pass": every_pass,
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05, eps=1e-2)


def losses(model: Any, rank: int, step: int) -> Iterator[Tensor]:
    for micro in range(MICRO):
        yield model(data(rank, step, micro), rank).square().mean() * 10


def edits_under(plan: Plan) -> dict[str, Edit]:
    """Return the edits; plain torch has no equivalent for edits of earlier passes if passes are averaged."""
    left_out = () if plan.grad.average == "sum" else ("clear", "every pass")
    return {name: edit for name, edit in EDITS.items() if name not in left_out}


def plain(edit: Edit, ranks: int, divisor: float = 1.0) -> tuple[dict[str, Tensor], Reads]:
    model = seeded(Odd)
    optimizer, reads = optimizer_of(model), []
    for step in range(STEPS):
        for micro, several in enumerate(zip(*(losses(model, rank, step) for rank in range(ranks)), strict=True)):
            for loss in several:
                (loss / (ranks * divisor)).backward()
            reads += edit(model, micro)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), reads


def ours(edit: Edit, plan: Plan, mesh: Mesh, zeroed: bool) -> tuple[dict[str, Tensor], Reads]:
    model, reads = seeded(Odd), []
    with sharded(model, optimizer_of(model), plan, mesh) as session:
        for step in range(STEPS):
            for micro, loss in enumerate(losses(session.module, mesh.rank, step)):
                if plan.grad.average == "tokens":
                    session.backward(loss, tokens=7)
                elif step % 2 or plan.precision.scaler is not None:
                    session.backward(loss)
                else:
                    loss.backward()
                reads += edit(model, micro)
            session.optimizer.step()
            if zeroed:
                session.optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
        return session.module.state_dict(), reads


def all_edits(plan: Plan) -> list[tuple[dict[str, Tensor], Reads]]:
    with one_mesh(plan) as mesh:
        return [ours(edit, plan, mesh, at % 2 == 0) for at, edit in enumerate(edits_under(plan).values())]


@pytest.mark.parametrize("name", [*QUICK, *full(*[name for name in ROWS if name not in QUICK])])
def test_edits_of_grad_equal_plain_torch(name: str) -> None:
    plan, ranks = ROWS[name], 4 if name == "hybrid" else 2
    results = run_ranks(ranks, all_edits, plan)
    for at, (what, edit) in enumerate(edits_under(plan).items()):
        state, reads = plain(edit, ranks, 1.0 if plan.grad.average == "sum" else MICRO)
        for rank, (_, found) in enumerate(each[at] for each in results):
            assert found == pytest.approx(reads, rel=1e-6, abs=1e-12), f"{what}, {name}, rank {rank}"
        check([each[at][0] for each in results], state, f"{what}, {name}", rtol=1e-9)


def test_edits_of_grad_change_the_training() -> None:
    """Check that the comparison above can fail."""
    untouched, _ = plain(lambda model, micro: [], 2)
    for what, edit in EDITS.items():
        state, reads = plain(edit, 2)
        assert what == "read" or any(not torch.equal(state[key], untouched[key]) for key in state), what
        assert reads or what == "clear"
    assert not isinstance(seeded(Odd).scalar.grad, ShardedGrad)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, eps=1e-3)


# ---- half precision

USES_SCALER = scaler(initial_scale=256.0, max_scale=1024.0)
HALVES = {
    f"{name} {dtype}": plan.but(param_dtype=kind, cast_inputs=True, output_dtype=torch.float32, scaler=scaler)
    for name, plan in (("zero1", zero(1)), ("zero3", zero(3)))
    for dtype, kind, scaler in (("bf16", torch.bfloat16, None), ("fp16", torch.float16, USES_SCALER))
}


def clipped(plan: Plan) -> tuple[list[float], list[float], list[Any]]:
    """Return norms before clipping, norms that steps apply, and the results of an overflow."""
    torch.manual_seed(0)
    model, norms, applied = net(), list[float](), list[float]()
    with sharded(model, adam(model.parameters()), plan) as session:
        rank = session.mesh.rank
        for step in range(3):
            for micro in range(2):
                session.backward(session.module(data(rank, step, micro).float()).square().mean() * 4)
            parts = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(each.dtype == p.dtype for each, p in zip(parts, model.parameters(), strict=True))
            norms.append(math.sqrt(sum(float(each.float().norm()) ** 2 for each in parts)))
            assert session.optimizer.clip_grad_by_norm(1e9) == pytest.approx(norms[-1], rel=1e-5)
            assert float(clip_grad_norm_(model.parameters(), 0.2)) == pytest.approx(norms[-1], rel=1e-5)
            session.optimizer.step()
            session.optimizer.zero_grad()
            applied.append(session.optimizer.get_grad_norm() or 0.0)
        before = session.module.state_dict()
        factor = math.inf if rank == 0 else 1.0
        session.backward(session.module(data(rank, 0).float()).square().mean() * factor)
        overflown: list[Any] = [float(clip_grad_norm_(model.parameters(), 1.0))]
        if plan.precision.scaler is not None:
            session.optimizer.step()
            after = session.module.state_dict()
            overflown += [session.optimizer.last_step_skipped, session.optimizer.scaler.scale]
            overflown.append(all(torch.equal(before[key], after[key]) for key in before))
    return norms, applied, overflown


@pytest.mark.parametrize("name", ["zero1 bf16", "zero3 fp16", *full("zero1 fp16", "zero3 bf16")])
def test_clipping_in_half_precision(name: str) -> None:
    """torch's clipping equals clip_grad_by_norm() up to the rounding of stored gradients."""
    for norms, applied, overflown in run_ranks(2, clipped, HALVES[name]):
        assert min(norms) > 0.2 and norms[0] > 1.0
        assert applied == pytest.approx([0.2] * 3, rel=1e-2)
        assert not math.isfinite(overflown[0])
        assert overflown[1:] in ([], [True, 128.0, True])


GRADS_STEPS = 3
GRADS_ROWS = {name: PLANS[name] for name in ("ddp", "zero1", "zero2", "zero3")}
GRADS_ROWS |= {"zero3_streams": zero(3).but(update="backward")}
GRADS_SCALER = scaler(initial_scale=8.0, growth_interval=9, max_scale=64.0)
GRADS_ROWS |= {"zero2_scaled": zero(2).but(scaler=GRADS_SCALER), "zero2_mean": zero(2).but(average="mean")}


WORDS = "without zero_grad() since the step before"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def _told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [each.filename for each in caught if WORDS in str(each.message)]


def _before_pass(session: Session, at: str) -> None:
    if at in ("optimizer", "twice"):
        session.optimizers[0].zero_grad()
    elif at == "zeros":
        session.optimizers[0].zero_grad(set_to_none=False)
    elif at == "groups":
        for group in session.optimizers[0].param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
    elif at in ("inherited", "inherited foreach"):
        # A wrapper that shares the groups and inherits torch's zero_grad().
        wrapper = torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {"foreach": "foreach" in at})
        wrapper.param_groups = session.optimizers[0].param_groups
        wrapper.zero_grad(set_to_none=False)
    elif at == "module":
        session.module.zero_grad()
    elif at == "own model":
        session.model.zero_grad()
    elif at == "by hand":
        for parameter in session.module.parameters():
            parameter.grad = None


def _loop(plan: Plan, at: str) -> tuple[list[str], dict[str, Tensor]]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        model = seeded(_model)
        with sharded(model, sgd(model), plan) as session:
            for step in range(GRADS_STEPS):
                _before_pass(session, at)
                loss = session.module(data(session.mesh.rank, step)).square().mean()
                if at == "after forward":
                    session.optimizer.zero_grad()
                session.backward(loss)
                session.optimizer.step()
                if at == "after step":
                    session.optimizer.zero_grad()
            state = session.module.state_dict()
            if at == "twice":
                session.optimizer.step()  # plain PyTorch would apply the same gradients twice
            return _told(caught), state


TOLD = ("never", "twice")
"""Loops that get the warning once: without ``zero_grad()``, or with a step without a pass."""


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *[("zero2", "never"), ("zero3_streams", "never"), ("zero2_scaled", "never"), ("zero3", "twice")],
        *[("zero1", "after step"), ("zero3", "optimizer"), ("zero3_streams", "groups"), ("zero1", "inherited")],
        *full(*((name, "never") for name in ("ddp", "zero1", "zero3", "zero2_mean")), ("zero1", "twice")),
        *full(("zero3", "zeros"), ("zero1", "own model"), ("zero3", "module"), ("zero1", "by hand")),
        *full(("zero3", "after forward"), ("zero1", "inherited foreach")),
    ],
)
def test_missing_zero_grad_warns_once(name: str, at: str) -> None:
    results = run_ranks(2, _loop, GRADS_ROWS[name], at)
    for told, _ in results:
        assert told == ([__file__] if at in TOLD else [])  # the warning is at the line of step()
    model = seeded(_model)
    expected = plain_steps(model, sgd(model), GRADS_STEPS)
    check([state for _, state in results], expected, f"{name}, {at}", 1e-6 if "scaled" in name else 1e-11)
