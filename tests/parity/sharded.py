"""Trains a tiny model on a rank as a plan says; the counterpart of ``shardwise.testing.train_plain``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.build import Session, build
from shardwise.plan import Plan
from shardwise.testing import MODELS, PlainRecipe, PlainRun, assert_close, make_batches, run_ranks, train_plain

__all__ = ["OPTIMIZERS", "Run", "Setting", "check_setting", "plain", "train_on_rank"]


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, vectors and scalars do not, and learn at another rate."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


EPS = 1e-4
"""Large, so that gradients which are zero but for rounding (the bias of attention's keys) are not blown up to steps."""

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(_two_groups(m), lr=1e-2, eps=EPS),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.05, amsgrad=True, eps=EPS),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, centered=True, eps=EPS),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2, eps=EPS),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2, eps=EPS),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=1e-2, eps=EPS),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5, eps=EPS),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-2),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One cell of the matrix. ``dtype`` is what the model is built in; the plan may cast it."""

    model: str
    plan: Plan
    world_size: int
    optimizer: str = "adamw"
    micro_batches: int = 1
    steps: int = 3
    dtype: torch.dtype = torch.float32
    use_no_sync: bool = False

    @property
    def recipe(self) -> PlainRecipe:
        """The same arithmetic, unsharded."""
        precision, grad = self.plan.precision, self.plan.grad
        return PlainRecipe(
            max_norm=grad.max_norm,
            norm_type=grad.norm_type,
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            accumulate_dtype=precision.accumulate_dtype,
            loss_scale=precision.scaler.initial_scale if precision.scaler else 1.0,
            mean_over_micro_batches=grad.average == "mean",
        )


@dataclass
class Run:
    """What one rank saw, by step."""

    losses: list[list[float]]
    gradients: list[dict[str, Tensor]]
    norms: list[float | None]
    skipped: list[bool]
    parameters: list[dict[str, Tensor]]
    traffic: list[dict[str, int]]
    peak_gathered_bytes: int


def train_on_rank(setting: Setting) -> Run:
    """Runs on every rank of a pool."""
    case = MODELS[setting.model]
    model = case.factory(setting.dtype)
    session = build(model, OPTIMIZERS[setting.optimizer](model), setting.plan)
    batches = make_batches(case, setting.world_size, setting.steps, setting.micro_batches, setting.dtype)
    run = Run([], [], [], [], [], [], 0)
    for step in batches:
        session.reset_traffic()
        run.losses.append(_passes(session, case.loss, step, setting.use_no_sync))
        run.traffic.append(session.traffic())
        run.gradients.append(session.full_gradients())
        assert session.optimizer is not None
        session.optimizer.step()
        run.norms.append(session.optimizer.get_grad_norm())
        run.skipped.append(session.optimizer.last_step_skipped)
        state = session.module.state_dict()
        run.parameters.append({name: state[name] for name, _ in model.named_parameters()})
    run.peak_gathered_bytes = session.memory().peak_gathered_bytes
    session.close()
    session.mesh.close()
    return run


def _passes(session: Session, loss: Callable[[nn.Module, Any], Tensor], step: Any, no_sync: bool) -> list[float]:
    losses = []
    for index, micro in enumerate(step):
        value = loss(session.module, micro[session.mesh.rank])
        losses.append(float(value.detach()))
        if no_sync and index + 1 < len(step):
            with session.no_sync():
                session.backward(value)
        else:
            session.backward(value)
    return losses


def plain(setting: Setting) -> PlainRun:
    """The oracle of a setting."""
    case = MODELS[setting.model]
    batches = make_batches(case, setting.world_size, setting.steps, setting.micro_batches, setting.dtype)
    return train_plain(
        lambda: case.factory(setting.dtype), case.loss, OPTIMIZERS[setting.optimizer], batches, setting.recipe
    )


def check_setting(setting: Setting, rtol: float) -> list[Run]:
    """Train sharded and plain and compare everything; the runs, for further checks."""
    expected = plain(setting)
    runs: list[Run] = run_ranks(setting.world_size, train_on_rank, setting)
    for rank, run in enumerate(runs):
        for step in range(setting.steps):
            where = f"{setting.model} rank {rank} step {step}"
            for micro, losses in enumerate(expected.losses[step]):
                _check_number(run.losses[step][micro], losses[rank], rtol, f"loss of {where} micro-batch {micro}")
            assert_close(run.gradients[step], expected.gradients[step], rtol, f"gradients of {where}")
            _check_number(run.norms[step], expected.norms[step], rtol, f"norm of {where}")
            assert run.skipped[step] == expected.skipped[step], where
            assert_close(run.parameters[step], _kept(expected, step), rtol, f"parameters of {where}")
    return runs


def _kept(expected: PlainRun, step: int) -> dict[str, Tensor]:
    """Parameters as a full state has them: in fp32 where there is a master, frozen ones in the compute dtype."""
    trained = {name for name, param in expected.model.named_parameters() if param.requires_grad}
    masters, computed = expected.masters[step], expected.parameters[step]
    return {name: masters[name] if name in trained else computed[name] for name in masters}


def _check_number(actual: float | None, expected: float, rtol: float, what: str) -> None:
    assert actual is not None and math.isfinite(actual), f"{what}: {actual}"
    # Written so that NaN fails.
    assert abs(actual - expected) <= rtol * max(abs(expected), 1e-30), f"{what}: {actual} instead of {expected}"
