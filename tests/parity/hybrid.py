"""Every architecture under every way to split a model, compared with one process: loss, gradients, norm, parameters."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise.core.mesh import Mesh
from shardwise.core.parallel.pipeline.batch import split_batch
from shardwise.plan import MeshPlan, PipelinePlan, Plan, SequencePlan, TensorPlan, replicated, zero
from shardwise.session import Session, build
from tests.support.engine_setup import adam
from tests.support.tensor_cases import CASES
from tests.support.tensor_setup import PAD, Case, Exact, loss_of

CPU = torch.device("cpu")
STEPS, LR, LAYERS, MICROBATCHES, SHARE = 3, 0.01, 4, 2, 0.5
EXACT, SINGLE = 1e-11, 1e-6
"""Tolerances of losses and gradients: of each tensor in fp64, of all gradients' norm in fp32.

In fp32 twice the error of one process against fp64 is allowed, if that is more, since two equally exact results may
differ by it.
"""

Training = tuple[float, dict[str, Tensor], float, dict[str, Tensor]]
"""The first step's loss and gradients, the last step's norm before clipping, and the final parameters."""


def _plan(plan: Plan, tp: int = 1, pp: int = 1, sequence: Any = None, chunks: int = 1) -> Plan:
    schedule: Any = "1f1b" if chunks == 1 else "interleaved"
    pipeline = PipelinePlan(schedule=schedule, chunks=chunks, microbatches=MICROBATCHES) if pp > 1 else PipelinePlan()
    return plan.but(tp=tp, pp=pp, tensor=TensorPlan(vocabulary_multiple=4, sequence=sequence), pipeline=pipeline)


LAYOUTS: dict[str, tuple[int, Plan]] = {
    "tp2": (4, _plan(replicated(), tp=2)),
    "tp4": (4, _plan(replicated(), tp=4)),
    "pp2": (4, _plan(replicated(), pp=2)),
    "pp4": (4, _plan(replicated(), pp=4)),
    "tp2pp2": (4, _plan(replicated(), tp=2, pp=2)),
    "dp2tp2 zero1": (4, _plan(zero(1), tp=2)),
    "dp2tp2 zero2": (4, _plan(zero(2), tp=2)),
    "dp2tp2 zero3": (4, _plan(zero(3), tp=2)),
    "pp2dp2 zero1": (4, _plan(zero(1), pp=2)),
    "split_gather": (4, _plan(zero(1), tp=2, sequence="split_gather")),
    "sequences": (4, _plan(zero(1), tp=2, sequence="split_gather")),
    "tp2pp2x2 sequences": (4, _plan(replicated(), tp=2, pp=2, sequence="split_gather", chunks=2)),
    "tp2pp2dp2 zero1": (8, _plan(zero(1), tp=2, pp=2)),
}
"""Number of ranks and plan, by name."""
SHARED: dict[str, tuple[int, Plan]] = {
    "sp2 all_to_all": (2, zero(1).but(sp=2)),
    "sp2 ring": (2, zero(3).but(sp=2, sequence=SequencePlan(mode="ring_attn"))),
    "sp4 ring": (4, zero(1).but(sp=4, sequence=SequencePlan(mode="ring_attn"))),
    "sp4 rings of 2": (4, zero(1).but(sp=4, sequence=SequencePlan(mode="ring_attn", inner_ring=2))),
    "hybrid shard": (4, zero(3, dp_replicate=2)),
}
"""Further layouts, for ``tests/gpu``."""


@dataclass(frozen=True)
class Found:
    """The outcome of one layout with one architecture.

    Attributes:
        layout, dtype: which layout, and in which dtype.
        padded: whether some tokens were padding.
        error: the largest error of a gradient, relative to its tensor (fp64) or to the norm of all (fp32); NaN if
            refused.
        wrong: what is too far off, or the refusal; empty if nothing is.
        refused: the model cannot be split in this way, which raised before anything changed.
    """

    layout: str
    dtype: str
    padded: bool
    error: float
    wrong: str = ""
    refused: bool = False


def with_layers(case: Case, layers: int) -> Case:
    """Return the same model with so many layers."""
    config = copy.deepcopy(case.config)
    names = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
    for name in names:
        if name in vars(config):
            setattr(config, name, layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = (config.layer_types * layers)[:layers]
    return replace(case, config=config)


def _case(architecture: str, padded: bool, staged: bool) -> Case:
    """Return the architecture's first case, with four layers."""
    case = with_layers(CASES[architecture]()[0], LAYERS)
    if staged and getattr(case.config, "output_router_logits", False):
        case.config.output_router_logits = False
    return replace(case, padded=padded)


def _batch(case: Case, step: int, rank: int, device: torch.device = CPU) -> dict[str, Tensor]:
    """Return a batch of the case's kind, another one for each step and data-parallel rank."""
    batch = case.batch()
    generator = torch.Generator().manual_seed(100 * step + rank)
    for name in ("input_ids", "decoder_input_ids"):
        if name in batch:
            ids = torch.randint(0, PAD, batch[name].shape, generator=generator)
            batch[name] = torch.where(batch[name] == PAD, PAD, ids) if case.padded else ids
    for name in ("pixel_values", "input_features"):
        if name in batch:
            batch[name] = torch.randn(batch[name].shape, generator=generator, dtype=torch.float64)
    return {name: value.to(device) for name, value in batch.items()}


def _cast(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def _numbers(dtype: torch.dtype) -> Any:
    return Exact() if dtype == torch.float64 else nullcontext()


def _plain(case: Case, dtype: torch.dtype, replicas: int, staged: bool, limit: float, device: torch.device) -> Training:
    model = case.made().to(device, dtype)
    optimizer = adam(model, LR)
    first: tuple[float, dict[str, Tensor]] = (0.0, {})
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(replicas):
            batch = _cast(_batch(case, step, rank, device), dtype)
            parts = [(each.kwargs, each.share) for each in split_batch(batch, MICROBATCHES, None)]
            for kwargs, share in parts if staged else [(batch, 1.0)]:
                with _numbers(dtype):
                    loss = loss_of(model(**kwargs)) * share / replicas
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        if not step:
            first = total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
        optimizer.step()
    return *first, norm, {name: param.detach() for name, param in model.named_parameters()}


def _limit(case: Case) -> float:
    """Return a fraction of the first gradients' norm, so that gradients are clipped."""
    model = case.made()
    with Exact():
        loss_of(model(**_batch(case, 0, 0))).backward()
    return SHARE * float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def _divided(session: Session, case: Case, dtype: torch.dtype) -> Training:
    mesh, optimizer = session.mesh, session.optimizer
    first: tuple[float, dict[str, Tensor]] = (0.0, {})
    for step in range(STEPS):
        batch = _cast(_batch(case, step, mesh.rank // mesh.sequence.size, mesh.device), dtype)
        if session.pipeline is not None:
            with _numbers(dtype):
                outcome = session.pipeline.step(batch, lambda out, _: loss_of(out), train=True)
            loss = session.pipeline.everywhere(outcome.loss)
        else:
            with _numbers(dtype):
                loss = loss_of(session.module(**batch))
            session.backward(loss)
        if not step:
            mean = sum(post[0] for post in mesh.world.exchange([loss.item()])) / mesh.size
            first = mean, session.full_gradients()
        optimizer.step()
    norm = optimizer.get_grad_norm()
    assert norm is not None
    return *first, norm, session.module.state_dict()


def _rounded(single: Training, double: Training) -> float:
    """Return the largest error of a gradient in fp32, relative to the norm of all."""
    total = float(torch.nn.utils.get_total_norm(list(double[1].values())))
    return max(float((single[1][name].double() - grad).norm()) for name, grad in double[1].items()) / total


def _judged(found: Training, expected: Training, tolerance: float) -> tuple[float, str]:
    """Return the largest error of a gradient, and what is too far off."""
    exact = tolerance == EXACT
    (loss, grads, norm, values), (plain_loss, plain_grads, plain_norm, plain_values) = found, expected
    wrong = [f"gradients of {sorted(grads.keys() ^ plain_grads.keys())}"] if grads.keys() != plain_grads.keys() else []
    total = max(float(torch.nn.utils.get_total_norm(list(plain_grads.values()))), 1e-30)
    error = 0.0
    for name in grads.keys() & plain_grads.keys():
        gap, own = (grads[name].double() - plain_grads[name].double()).abs(), plain_grads[name].double().abs()
        each = float(gap.max() / own.max().clamp(min=1e-2)) if exact else float(gap.norm()) / total
        error = max(error, each) if each == each else each
        if not each <= tolerance:
            wrong.append(f"gradient of {name}: {each:.1e}")
    for what, one, other in (("loss", loss, plain_loss), ("norm", norm, plain_norm)):
        if not abs(one - other) <= (tolerance if what == "loss" else 10 * tolerance) * abs(other):
            wrong.append(f"{what} {one!r}, not {other!r}")
    for name, value in plain_values.items():
        off = float((values[name].double() - value.double()).abs().max()) if name in values else float("nan")
        if exact and not off <= 1e-9 * max(float(value.abs().max()), 1e-2):
            wrong.append(f"{name} after {STEPS} steps: {off:.1e}")
    return error, "; ".join(wrong[:4])


def measured(architecture: str, layouts: list[str], dtypes: list[str], device: torch.device = CPU) -> list[Found]:
    """Return the outcome of each of ``layouts``, which have the same number of ranks, with the architecture.

    Runs on all of these ranks; the first one compares.
    """
    order, known = sorted(CASES), LAYOUTS | SHARED
    plain: dict[Any, Training] = {}
    made: dict[MeshPlan, Mesh] = {}
    every = []
    for layout, kind in product(layouts, dtypes):
        plan, dtype = known[layout][1], getattr(torch, kind)
        padded = (list(known).index(layout) + order.index(architecture)) % 2 == 0
        padded = padded and architecture not in ("vit", "whisper")  # whose inputs have one size
        staged = plan.mesh.pp > 1
        case = _case(architecture, padded, staged)
        limit = _limit(case)
        if plan.mesh not in made:
            made[plan.mesh] = Mesh.create(plan.mesh, device, plan.comm)
        mesh = made[plan.mesh]
        model = case.made().to(dtype)
        try:
            session = build(model, adam(model, LR), plan.but(max_norm=limit), mesh)
        except (ValueError, NotImplementedError) as error:
            every.append(Found(layout, kind, padded, float("nan"), str(error), refused=True))
            continue
        found = _divided(session, case, dtype)
        session.close()
        error_, wrong = 0.0, ""
        if mesh.is_rank0:
            wanted = {"float64": EXACT} if kind == "float64" else {"float64": EXACT, kind: SINGLE}
            key = (padded, staged, mesh.size // mesh.sequence.size)
            for each in wanted:
                if (each, *key) not in plain:
                    plain[each, *key] = _plain(case, getattr(torch, each), key[-1], staged, limit, device)
            expected, tolerance = plain[kind, *key], wanted[kind]
            if kind != "float64":
                tolerance = max(tolerance, 2 * _rounded(expected, plain["float64", *key]))
            error_, wrong = _judged(found, expected, tolerance)
        every.append(Found(layout, kind, padded, error_, wrong))
    for mesh in made.values():
        mesh.close()
    return every
