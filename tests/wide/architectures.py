"""Trains an architecture of transformers under every plan, and plainly."""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise.plan import AutoPlan, ByNumel, BySearch, ByTensor, Plan, on_device, replicated, zero
from shardwise.testing import PlainRun, assert_close, train_plain
from tests.parity.sharded import OPTIMIZERS, Run, Setting, Tolerance, check_runs, train_case
from tests.parity.tiers import tier_plan
from tests.support.engine_setup import meshes
from tests.support.models import make_batches
from tests.wide.zoo import case_of

_SEARCHED = BySearch(search_range_numel=4096, interval_numel=256, min_chunk_numel=1024)
PLANS: dict[str, Plan] = {
    "ddp": replicated(),
    "zero1": zero(1),
    "zero2": zero(2).but(packing=ByNumel(chunk_numel=3000)),
    "zero3": zero(3),
    "zero3_gloo": zero(3).but(shared_memory=False),
    "budget0": zero(3).but(packing=ByNumel(chunk_numel=3000), prefetch=2),
    "by_tensor": zero(3).but(packing=ByTensor(persist_numel=0)),
    "gemini": zero(3).but(packing=_SEARCHED, gathered_fraction=0.5),
    "gemini_auto": zero(3).but(packing=_SEARCHED),
    "host": zero(3),
    "disk": zero(3),
    "disk_early": zero(3).but(update="backward"),
}
TIERS = {"host": "all_host", "disk": "all_disk", "disk_early": "thirds"}
CAPACITY = 256 * 2**20
STEPS = 2


def plan_of(name: str, directory: str) -> Plan:
    """Return one of :data:`PLANS`, with its tiers; a disk is in ``directory``."""
    plan = PLANS[name]
    if name in TIERS:
        return plan.but(tiers=tier_plan(TIERS[name], directory))
    if name == "gemini_auto":
        ratios = AutoPlan(warmup_non_model_ratio=0.8, steady_capacity_ratio=0.9, margin_ratio=0.0)
        return plan.but(tiers=replace(on_device(), device_capacity_bytes=CAPACITY, auto=ratios))
    return plan


def _setting(kind: str, plan: Plan) -> Setting:
    optimizer = "adamw" if sum(map(ord, kind)) % 2 else "sgd"
    return Setting(model=kind, plan=plan, world_size=2, optimizer=optimizer, steps=STEPS, dtype=torch.float64)


def train_kind(kind: str, plans: Sequence[str], directory: str) -> list[Run]:
    """Run each plan on this rank."""
    torch.set_num_threads(1)
    settings = [_setting(kind, plan_of(name, directory)) for name in plans]
    with warnings.catch_warnings(action="ignore"), meshes() as mesh_of:
        return [train_case(case_of(kind), setting, mesh_of(setting.plan)) for setting in settings]


@dataclass(frozen=True)
class Oracle:
    """Plain training, and the accuracy that a comparison with it can reach."""

    run: PlainRun
    tolerance: Tolerance
    error: float
    """The error of a training whose initial weights were rounded differently."""


EXACT = Tolerance(rtol=1e-9, share=1e-3)
ROUNDED = Tolerance(rtol=1e-5, share=0.25)
"""The tolerance for models that compute parts of themselves in fp32."""


@functools.lru_cache(maxsize=4)
def oracle(kind: str) -> Oracle:
    """Train plainly twice, the second time with a rounding error added to each weight.

    The effect shows whether the model computes in fp64 throughout.
    """
    case = case_of(kind)
    setting = _setting(kind, PLANS["zero3"])
    batches = make_batches(case, 2, STEPS, 1, torch.float64)

    def off() -> nn.Module:
        model = case.factory(torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=generator).to(p.dtype)
        return model

    make = OPTIMIZERS[setting.optimizer]
    plain, other = (train_plain(f, case.loss, make, batches) for f in (lambda: case.factory(torch.float64), off))
    error = 0.0
    for one, two in zip(plain.gradients, other.gradients, strict=True):
        error = max(error, _error(two, one, EXACT.share))
    error = max(error, _error(other.parameters[-1], plain.parameters[-1], 0.0))
    return Oracle(plain, EXACT if error < EXACT.rtol / 10 else ROUNDED, error)


def _error(actual: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> float:
    largest = max(float(value.abs().max()) for value in expected.values() if value.numel())
    return assert_close(actual, expected, float("inf"), "with other roundings", floor=share * largest)


def check_kind(kind: str, plans: Sequence[str], by_rank: Sequence[Sequence[Run]]) -> list[str]:
    """Return the differences from plain training, by plan."""
    expected = oracle(kind)
    wrong = []
    for index, name in enumerate(plans):
        try:
            check_runs([runs[index] for runs in by_rank], expected.run, _setting(kind, PLANS[name]), expected.tolerance)
        except AssertionError as error:
            wrong.append(f"{kind} under {name}: {error}")
    return wrong
