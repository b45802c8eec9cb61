"""The rows of the tier matrix: plans, number formats, optimizers and models, with their mixes of tiers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardwise.core.optim import CPUAdam, HybridAdam
from shardwise.plan import TierPlan
from shardwise.session import Session
from tests.parity import sharded
from tests.parity.covering import Row, cover, each_once
from tests.parity.matrix import COSTS, FACTORS, QUICK_COSTS, allowed, make_setting
from tests.parity.sharded import Run, Setting
from tests.support.engine_setup import OwnOptimizer
from tests.support.models import MODELS
from tests.support.tier_setup import SHARES, tiers

MIXES = {name: shares for name, shares in SHARES.items() if name != "device"} | {
    "s_half_host": (0, 0, 0.5, 0),
    "p_host": (1, 0, 0, 0),
    "p_halves_s_disk": (0.5, 0.25, 0, 0.6),
}
"""Shares of parameters on host and disk, and of state on host and disk."""

# One of everything, and nothing in parallel; small defaults; several threads with small requests.
KNOBS: dict[str, dict[str, Any]] = {
    "least": {"state_buffers": 1, "param_buffers": 1, "queue_depth": 1, "single_submit": True, "overlap_events": False},
    "usual": {},
    "threads": {"state_buffers": 5, "param_buffers": 5, "threads": 2, "queue_depth": 2},
}
STEPS, STEPS_OF_ONE, STEPS_OF_THREE = 10, 6, 4
"""Rows of one and of three micro-batches make fewer steps by default, but one row for each number format at 1, 2 and 4
ranks makes all."""

PREFETCH = {"own": None, "none": 0, "three": 3}

BASE: dict[str, tuple[str, ...]] = {
    "plan": ("ddp", "zero1", "zero2", "zero3", "by_tensor", "by_search", "hybrid3"),
    "ranks": ("1", "2", "4"),
    "numbers": ("fp32", "bf16", "fp16"),
    "micro": ("1x", "3x", "3x_no_sync"),
    "clip": ("unclipped", "p2"),
    "transport": ("shared", "gloo"),
    "knobs": tuple(KNOBS),
    "order": FACTORS["order"],
    "prefetch": tuple(PREFETCH),
    "update": ("step", "backward"),
}
FILLED = {"average": "sum", "order": "overlap", "prefetch": "own", "update": "step"}


class Peculiar(OwnOptimizer):
    """An optimizer with state of every kind, which is part of the update.

    Per element (replaced instead of changed in place; bool; from the third step on only), 0-dim tensors and plain
    numbers.
    """

    def update(self, param: Any, group: dict[str, Any]) -> None:
        grad, state = param.grad, self.state[param]
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
        param.sub_(group["lr"] * (1 + state["decay"]) * pull)


OWN: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "peculiar": lambda m: Peculiar([p for p in m.parameters() if p.requires_grad], lr=1e-2),
    "cpu_adam": lambda m: CPUAdam(sharded._two_groups(m), lr=1e-2, eps=sharded.EPS),
    "hybrid_adam": lambda m: HybridAdam(m.parameters(), lr=1e-2, eps=sharded.EPS, weight_decay=0.01),
}
OPTIMIZERS = (*sharded.OPTIMIZERS, *OWN)


def own_optimizers() -> Any:
    """Let :func:`~tests.parity.sharded.train_case` and ``plain`` know these optimizers too, inside this context."""
    return mock.patch.dict(sharded.OPTIMIZERS, OWN)


@dataclass(frozen=True)
class TierRow:
    """A training without offload, and the mixes of tiers under which it must have the same bits."""

    base: tuple[tuple[str, str], ...]
    mixes: tuple[str, ...]
    steps: int = STEPS

    @property
    def row(self) -> Row:
        return dict(self.base)

    @property
    def label(self) -> str:
        return "-".join(self.row.values())

    @property
    def norm_rtol(self) -> float:
        """The relative tolerance of norms.

        If gradients are streamed, norms are computed from chunks' norms in the order of their arrival. Only the
        reported norm depends on them.
        """
        return 1e-12 if setting_of(self.row, None, "").plan.grad.update == "backward" else 0.0


def tier_plan(mix: str, directory: str, knobs: str = "usual") -> TierPlan:
    """The plan of one mix, with its disk in ``directory``."""
    with mock.patch.dict(SHARES, MIXES):
        return tiers(mix, directory, **({"block_bytes": 8192, "queue_depth": 8} | KNOBS[knobs]))


def setting_of(row: Row, mix: str | None, directory: str, steps: int = STEPS) -> Setting:
    """Return the setting that a row trains under ``mix``; ``None``: without offload."""
    row = {**FILLED, **row}
    setting = replace(make_setting(row), steps=steps)
    plan = setting.plan.but(update=row["update"])
    prefetch = PREFETCH[row["prefetch"]]
    plan = plan if prefetch is None else plan.but(prefetch=prefetch)
    plan = plan if mix is None else plan.but(tiers=tier_plan(mix, directory, row.get("knobs", "usual")))
    return replace(setting, plan=plan)


# ---- which rows

_LEFT = {factor: FILLED[factor] for factor in ("order", "prefetch", "update")}
# 3 ranks divide little evenly.
_THREE = {"ranks": "3", "clip": "p2", "transport": "shared", "knobs": "threads"}
THREE_RANKS: list[Row] = [
    {"plan": "zero1", "numbers": "fp32", "micro": "3x_no_sync", **_THREE, **_LEFT},
    {"plan": "zero3", "numbers": "bf16", "micro": "1x", **_THREE, **_LEFT},
]
# The others of four ranks are for hybrid sharding, which needs them.
_FOUR = {"ranks": "4", "micro": "3x", "clip": "p2", "transport": "shared", "knobs": "threads"}
FOUR_RANKS: list[Row] = [
    {"plan": "zero2", "numbers": "fp16", **_FOUR, **_LEFT, "order": "on_use"},
    {"plan": "zero3", "numbers": "bf16", **_FOUR, **_LEFT, "prefetch": "three"},
]
_SEEDS: list[Row] = [
    {"ranks": ranks, "numbers": numbers, "micro": "3x"}
    for ranks in BASE["ranks"]
    for numbers in BASE["numbers"]
    if not any(row["ranks"] == ranks and row["numbers"] == numbers for row in FOUR_RANKS)
]


def goes(row: Row) -> bool:
    """Whether values go together, and none of them is idle; ``row`` may lack factors."""
    if not allowed(row):
        return False
    if row.get("prefetch", "own") != "own":
        # Nothing is fetched ahead in sequence, nor where nothing is fetched.
        if row.get("order") == "sequence" or row.get("plan") in ("ddp", "zero1", "zero2"):
            return False
        if row["prefetch"] == "none" and row.get("plan") == "by_search":
            return False  # its own
    if row.get("update") == "backward":
        once = row.get("micro", "1x") == "1x" and row.get("clip", "unclipped") == "unclipped"
        return once and row.get("numbers") != "fp16"
    return True


def _goes(row: Row) -> bool:
    without_sync = row.get("micro") == "3x_no_sync"
    of_four = row.get("plan", "hybrid3") == "hybrid3" and not without_sync
    fetches = row.get("prefetch", "own") != "own"  # and so its plan reduces at every pass
    return goes(row) and (row.get("ranks") != "4" or of_four) and not (fetches and without_sync)


def _kind(mix: str) -> str:
    """Return whether any state of a mix is on the disk."""
    return "disk" if MIXES[mix][3] else "memory"


def _pairs(row: Row, mix: str) -> set[tuple[str, str, str]]:
    """Return the pairs that a run of ``row`` under ``mix`` covers."""
    pairs = {(factor, row[factor], mix) for factor in BASE if row[factor] in BASE[factor]}
    return pairs | {(factor, row[factor], _kind(mix)) for factor in ("optimizer", "model")}


def _complete(bases: Sequence[Row]) -> list[Row]:
    """Add a model and an optimizer to each row, in turn."""
    models, optimizers = list(MODELS), list(OPTIMIZERS)
    waiting = [models[(7 * index) % len(models)] for index in range(len(models))]
    rows = []
    for index, base in enumerate(bases):
        model = next(model for model in waiting if allowed({**base, "model": model}))
        waiting.remove(model)
        waiting.append(model)
        optimizer = optimizers[index % len(optimizers)]
        if not allowed({"model": model, "optimizer": optimizer}):
            optimizer = "adamw"
        rows.append({**base, "model": model, "optimizer": optimizer})
    return rows


def _steps(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of steps.

    The first row with three micro-batches of each number format at each rank count has all steps, other rows fewer.
    """
    seen: set[tuple[str, str]] = set()
    steps = []
    for row in rows:
        key = row["ranks"], row["numbers"]
        first = row["micro"] == "3x" and key not in seen
        steps.append(STEPS if first else STEPS_OF_ONE if row["micro"] == "1x" else STEPS_OF_THREE)
        seen |= {key} if first else set()
    return steps


def _given(rows: Sequence[Row], steps: Sequence[int]) -> list[list[str]]:
    """Return two mixes for the longest rows, with state in memory and on the disk; other rows get theirs later."""
    turns = {kind: cycle([mix for mix in MIXES if _kind(mix) == kind]) for kind in ("memory", "disk")}
    longest = [row["micro"] != "1x" and count == STEPS for row, count in zip(rows, steps, strict=True)]
    return [[next(turn) for turn in turns.values()] if long else [] for long in longest]


def default_rows() -> list[TierRow]:
    """Return rows with every pair of values of two base factors, and every mix with every such value.

    Every optimizer and every model has state in memory and on disk.
    """
    bases = [*cover(BASE, _goes, _SEEDS, COSTS), *FOUR_RANKS, *THREE_RANKS]
    of_two = cycle(base for base in list(bases) if base["ranks"] == "2")
    bases += islice(of_two, max(0, len(MODELS) - len(bases)))
    rows = _complete(bases)
    steps = _steps(rows)
    chosen = _given(rows, steps)
    fixed = [bool(mixes) for mixes in chosen]
    wanted = {pair for row in rows for mix in MIXES for pair in _pairs(row, mix)}
    wanted -= {pair for row, mixes in zip(rows, chosen, strict=True) for mix in mixes for pair in _pairs(row, mix)}
    while wanted:
        left = len(wanted)
        for row, mixes, done in zip(rows, chosen, fixed, strict=True):
            gain, mix = max((len(_pairs(row, mix) & wanted), mix) for mix in MIXES if mix not in mixes)
            if gain and not done:
                mixes.append(mix)
                wanted -= _pairs(row, mix)
        if len(wanted) == left:
            raise ValueError(f"no row is left to run {sorted(wanted)}")
    found = zip(rows, chosen, steps, strict=True)
    return [TierRow(tuple(row.items()), tuple(mixes), count) for row, mixes, count in found if mixes]


def quick_rows(rows: Sequence[TierRow]) -> list[TierRow]:
    """Return few of ``rows``, in which every mix and every value of a base factor occurs."""

    def values(row: TierRow) -> list[tuple[str, str]]:
        return [("mix", mix) for mix in row.mixes] + [item for item in row.base if item[0] in BASE]

    def cost(row: TierRow) -> float:
        return row.steps * (1 + len(row.mixes)) * math.prod(QUICK_COSTS.get(value, 1.0) for _, value in row.base)

    return each_once(rows, values, cost)


# ---- on the ranks


@dataclass
class TierRun:
    """A run, and the tiers of model data at its end (``MemoryReport.by_tier``)."""

    run: Run
    by_tier: dict[str, dict[str, int]]


def train_tiers(settings: Sequence[Setting]) -> list[TierRun]:
    """Train several settings of one world size in one task; return digests instead of tensors."""
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
