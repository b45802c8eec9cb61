"""The rows of the tier matrix: which plans, numbers, optimizers and models are trained with which mixes of tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardwise.build import Session
from shardwise.optim import CPUAdam, HybridAdam
from shardwise.plan import DiskPlan, TierPlan, on_device
from shardwise.testing import MODELS
from tests.parity import sharded
from tests.parity.covering import Row, cover
from tests.parity.matrix import allowed, make_setting
from tests.parity.sharded import Run, Setting

__all__ = ["MIXES", "TierRow", "TierRun", "default_rows", "own_optimizers", "setting_of", "tier_plan", "train_tiers"]

# Shares of parameters on host and disk, of state on host and disk.
MIXES: dict[str, tuple[float, float, float, float]] = {
    "s_host": (0, 0, 1, 0),
    "s_half_host": (0, 0, 0.5, 0),
    "p_host": (1, 0, 0, 0),
    "all_host": (1, 0, 1, 0),
    "s_disk": (0, 0, 0, 1),
    "p_host_s_disk": (1, 0, 0, 1),
    "p_disk": (0, 1, 0, 0),
    "p_disk_s_host": (0, 1, 1, 0),
    "all_disk": (0, 1, 0, 1),
    "thirds": (0.34, 0.33, 0.33, 0.34),
    "p_halves_s_disk": (0.5, 0.25, 0, 0.6),
}

# One of everything and nothing at once; the defaults in small; several threads and requests cut small.
KNOBS: dict[str, dict[str, Any]] = {
    "least": {"state_buffers": 1, "param_buffers": 1, "queue_depth": 1, "single_submit": True, "overlap_events": False},
    "usual": {},
    "threads": {"state_buffers": 5, "param_buffers": 5, "threads": 2, "queue_depth": 2},
}
STEPS, STEPS_OF_THREE = 10, 4
"""By default rows of three micro-batches make fewer steps."""

BASE: dict[str, tuple[str, ...]] = {
    "plan": ("ddp", "zero1", "zero2", "zero3", "by_tensor", "by_search", "hybrid3"),
    "ranks": ("1", "2", "4"),
    "numbers": ("fp32", "bf16", "fp16"),
    "micro": ("1x", "3x", "3x_no_sync"),
    "clip": ("unclipped", "p2"),
    "transport": ("shared", "gloo"),
    "knobs": tuple(KNOBS),
}
FILLED = {"average": "sum", "order": "overlap"}


class Peculiar(torch.optim.Optimizer):
    """State of every kind: per element (replaced, not changed in place; bool; from the third step on only), 0-dim
    tensors and plain numbers, which are part of the update."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"], self.state[param])

    def _update(self, param: torch.Tensor, grad: torch.Tensor, lr: float, state: dict[str, Any]) -> None:
        if not state:
            state.update(count=0, decay=torch.tensor(1.0), average=torch.zeros_like(param), history=[])
            state["rose"] = torch.zeros_like(param, dtype=torch.bool)
        state["count"] += 1
        state["decay"] *= 0.9
        state["history"].append(state["count"])
        state["average"] = 0.5 * state["average"] + grad
        pull = torch.where(state["rose"], 0.5, 1.0) * state["average"] / (1 + state["count"] + len(state["history"]))
        if "slow" in state:
            state["slow"].lerp_(param, 0.25)
            pull = pull + 0.01 * (param - state["slow"])
        elif state["count"] >= 3:
            state["slow"] = param.clone()
        state["rose"] = grad > 0
        param.sub_(lr * (1 + state["decay"]) * pull)


def _peculiar(model: nn.Module) -> torch.optim.Optimizer:
    return Peculiar([p for p in model.parameters() if p.requires_grad])


OWN: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "peculiar": _peculiar,
    "cpu_adam": lambda m: CPUAdam(sharded._two_groups(m), lr=1e-2, eps=sharded.EPS),
    "hybrid_adam": lambda m: HybridAdam(m.parameters(), lr=1e-2, eps=sharded.EPS, weight_decay=0.01),
}
OPTIMIZERS = (*sharded.OPTIMIZERS, *OWN)


def own_optimizers() -> Any:
    """Inside the context :func:`~tests.parity.sharded.train_case` and ``plain`` know these optimizers too."""
    return mock.patch.dict(sharded.OPTIMIZERS, OWN)


@dataclass(frozen=True)
class TierRow:
    """A training without offload, and the mixes of tiers under which it must give the same bits."""

    base: tuple[tuple[str, str], ...]
    mixes: tuple[str, ...]

    @property
    def row(self) -> Row:
        return dict(self.base)

    @property
    def label(self) -> str:
        return "-".join(self.row.values())


def tier_plan(mix: str, directory: str, knobs: str = "usual") -> TierPlan:
    """The plan of one mix, with its disk in ``directory``."""
    fields: dict[str, Any] = {
        "directory": directory,
        "block_bytes": 8192,
        "queue_depth": 8,
        "threads": 1,
        "single_submit": False,
        "overlap_events": True,
        "state_buffers": 3,
        "param_buffers": 3,
    }
    shares = dict(
        zip(
            ("param_host_fraction", "param_disk_fraction", "state_host_fraction", "state_disk_fraction"),
            map(float, MIXES[mix]),
            strict=True,
        )
    )
    return replace(on_device(), disk=DiskPlan(**(fields | KNOBS[knobs])), **shares)


def setting_of(row: Row, mix: str | None, directory: str, steps: int | None = None) -> Setting:
    """What a row trains under ``mix``; ``None``: without offload."""
    steps = steps or (STEPS if row["micro"] == "1x" else STEPS_OF_THREE)
    setting = replace(make_setting({**FILLED, **row}), steps=steps)
    if mix is None:
        return setting
    return replace(setting, plan=setting.plan.but(tiers=tier_plan(mix, directory, row["knobs"])))


# ---- which rows

# 3 ranks divide little evenly.
_THREE = {"ranks": "3", "clip": "p2", "transport": "shared", "knobs": "threads"}
THREE_RANKS: list[Row] = [
    {"plan": "zero1", "numbers": "fp32", "micro": "3x_no_sync", **_THREE},
    {"plan": "zero3", "numbers": "bf16", "micro": "1x", **_THREE},
]
_JUDGED = ("plan", "ranks", "numbers", "micro", "clip", "transport", "knobs")


def _goes(row: Row) -> bool:
    """Like :func:`~tests.parity.matrix.allowed`; by default four ranks are for hybrid sharding, which needs them."""
    of_four = row.get("plan", "hybrid3") == "hybrid3" and row.get("micro") != "3x_no_sync"
    return allowed(row) and (row.get("ranks") != "4" or of_four)


def _kind(mix: str) -> str:
    """Whether the state of a mix is on the disk at all."""
    return "disk" if MIXES[mix][3] else "memory"


def _pairs(row: Row, mix: str) -> set[tuple[str, str, str]]:
    """What a run of ``row`` under ``mix`` covers."""
    pairs = {(factor, row[factor], mix) for factor in _JUDGED if row[factor] in BASE[factor]}
    return pairs | {(factor, row[factor], _kind(mix)) for factor in ("optimizer", "model")}


def default_rows() -> list[TierRow]:
    """Every pair of values of two base factors; every mix with every such value; every optimizer and every model with
    state in memory and on disk."""
    models, optimizers = list(MODELS), list(OPTIMIZERS)
    bases = [*cover(BASE, _goes), *THREE_RANKS]
    of_two = cycle(base for base in list(bases) if base["ranks"] == "2")
    bases += islice(of_two, max(0, len(models) - len(bases)))
    rows = []
    for index, base in enumerate(bases):
        optimizer = optimizers[index % len(optimizers)]
        model = models[(7 * index) % len(models)]
        if not allowed({"model": model, "optimizer": optimizer}):
            optimizer = "adamw"
        rows.append({**base, "model": model, "optimizer": optimizer})
    wanted = {pair for row in rows for mix in MIXES for pair in _pairs(row, mix)}
    chosen: list[list[str]] = [[] for _ in rows]
    while wanted:
        for row, mixes in zip(rows, chosen, strict=True):
            gain, mix = max((len(_pairs(row, mix) & wanted), mix) for mix in MIXES if mix not in mixes)
            if gain:
                mixes.append(mix)
                wanted -= _pairs(row, mix)
    return [TierRow(tuple(row.items()), tuple(mixes)) for row, mixes in zip(rows, chosen, strict=True) if mixes]


# ---- on the ranks


@dataclass
class TierRun:
    """A run, and where model data was at its end (``MemoryReport.by_tier``)."""

    run: Run
    by_tier: dict[str, dict[str, int]]


def train_tiers(settings: Sequence[Setting]) -> list[TierRun]:
    """Several settings of one world size in one task; digests instead of tensors."""
    found: list[dict[str, dict[str, int]]] = []
    close = Session.close

    def note(session: Session) -> None:
        found.append(session.memory().by_tier)
        close(session)

    with mock.patch.object(Session, "close", note), own_optimizers():
        runs = sharded.train_all(settings)
    for run in runs:
        run.gradients, run.parameters = [], {}
    return [TierRun(run, by_tier) for run, by_tier in zip(runs, found, strict=True)]
