"""The factors of the parity matrix, their allowed combinations, and the rows that run."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from shardwise.plan import ByNumel, BySearch, ByTensor, Plan, ScalerPlan, replicated, zero
from tests.parity.covering import Row, cover, each_once
from tests.parity.sharded import OPTIMIZERS, Setting, Tolerance
from tests.support.engine_setup import scaler
from tests.support.models import MODELS

SMALL = ByNumel(chunk_numel=48)
"""About the size of one tiny layer, so that every model has several chunks."""

PLANS: dict[str, Plan] = {
    "ddp": replicated(),
    "zero1": zero(1).but(packing=SMALL),
    "zero2": zero(2).but(packing=SMALL),
    "zero3": zero(3),
    "budget0": zero(3).but(packing=SMALL, prefetch=2),
    "budget0.3": zero(3).but(packing=SMALL, gathered_fraction=0.3),
    "budget1": zero(3).but(packing=SMALL, gathered_fraction=1.0),
    # Everything could be evicted and nothing ever is.
    "roomy": zero(3).but(packing=SMALL, gathered_budget_bytes=1 << 30),
    "by_tensor": zero(3).but(packing=ByTensor(persist_numel=10)),
    "by_search": zero(3).but(
        packing=BySearch(search_range_numel=64, interval_numel=8, min_chunk_numel=16), gathered_fraction=0.5, prefetch=0
    ),
    # Parameters as in ZeRO-3, gradients as in ZeRO-1.
    "zero3_last": zero(3).but(reduce="last"),
    "hybrid1": zero(1, dp_replicate=2).but(packing=SMALL),
    "hybrid2": zero(2, dp_replicate=2).but(packing=SMALL),
    "hybrid3": zero(3, dp_replicate=2),
}
MAIN_PLANS = ("zero1", "zero2", "zero3", "budget0")
"""Plans under which every model is trained by default."""

MICRO = {"1x": (1, False), "3x": (3, False), "3x_no_sync": (3, True)}
CLIP = {"unclipped": 0.0, "p1": 1.0, "p2": 2.0, "p3": 3.0, "pinf": math.inf}
MAX_NORM = 0.02
"""Below the norm of every gradient here, so that clipping always acts."""

FACTORS: dict[str, tuple[str, ...]] = {
    "model": tuple(MODELS),
    "plan": tuple(PLANS),
    "ranks": ("1", "2", "3", "4"),
    "numbers": ("fp64", "fp32", "bf16", "fp16", "bf16_reduce32", "bf16_no_master"),
    "optimizer": tuple(OPTIMIZERS),
    "micro": tuple(MICRO),
    "clip": tuple(CLIP),
    "transport": ("shared", "gloo"),
    "average": ("sum", "mean", "tokens"),
    "order": ("overlap", "sequence", "agreed", "on_use"),
}
COSTS = {"gloo": 4.0, "3": 3.0, "4": 4.0}
"""A message of gloo takes two thread switches on either side; more than two ranks share two cores."""
QUICK_COSTS = {**COSTS, "1": 2.0}
"""For the quick set: a single rank shards nothing."""

RTOL = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3, "bf16_reduce32": 2e-2, "bf16_no_master": 2e-2}
"""16 bits: five units in the last place of bf16 (2^-8), two of fp16 (2^-10)."""
SHARE = 0.25
"""See :class:`~tests.parity.sharded.Tolerance`; not in fp64."""
NO_MASTERS_ROUNDED = 0.05
"""Share of the elements; with unexpected masters it is about a third."""
CUT_SHOWS = ("sgd", "rmsprop")
CUT_ROUNDED = 0.15
"""The same where torch's loops round the ends of a tensor differently from its middle.

Splitting a plain tensor into four changes 3 % (SGD) and 5 % (RMSprop) of its elements in two steps.
"""


KEY_BIASES = ("attention", "gpt", "gpt_checkpointed")
"""Models with attention: the gradient of the keys' bias is zero except for rounding, and Rprop uses only signs."""


def allowed(row: Row) -> bool:
    """Return whether values can be combined; ``row`` may lack factors."""
    plan = PLANS.get(row.get("plan", ""))
    if plan is not None:
        if row.get("micro") == "3x_no_sync" and plan.shard.reduce == "every":
            return False
        if plan.mesh.dp_replicate == 2 and row.get("ranks", "4") != "4":
            return False
    return not (row.get("optimizer") == "rprop" and row.get("model") in KEY_BIASES)


def _constant_scale(average: str) -> ScalerPlan:
    """Return a constant scale: gradients of these models times it are normal numbers of fp16; tokens count in units of
    1024."""
    scale = 64.0 * 1024.0 if average == "tokens" else 64.0
    return scaler(initial_scale=scale, hysteresis=1000)


def make_setting(row: Row) -> Setting:
    """Return the setting of a full row."""
    plan = PLANS[row["plan"]].but(
        max_norm=MAX_NORM if row["clip"] != "unclipped" else 0.0,
        norm_type=CLIP[row["clip"]] or 2.0,
        shared_memory=row["transport"] == "shared" and None,
        average=row["average"],
        overlap=row["order"] != "sequence",
        # Ranks use different branches of the mixture.
        same_order=False if row["order"] == "agreed" or row["model"] == "mixture" else None,
        gather_on_use=row["order"] == "on_use",
    )
    numbers = row["numbers"]
    if numbers not in ("fp64", "fp32"):
        half = torch.float16 if numbers == "fp16" else torch.bfloat16
        plan = plan.but(param_dtype=half, buffer_dtype=half, cast_inputs=True)
        plan = plan.but(scaler=_constant_scale(row["average"])) if numbers == "fp16" else plan
        plan = plan.but(reduce_dtype=torch.float32) if numbers == "bf16_reduce32" else plan
        plan = plan.but(master_weights=numbers != "bf16_no_master")
    micro_batches, use_no_sync = MICRO[row["micro"]]
    return Setting(
        model=row["model"],
        plan=plan,
        world_size=int(row["ranks"]),
        optimizer=row["optimizer"],
        micro_batches=micro_batches,
        steps=2,
        dtype=torch.float64 if numbers == "fp64" else torch.float32,
        use_no_sync=use_no_sync,
    )


def tolerance(row: Row) -> Tolerance:
    """Return the accuracy that a row must reach.

    In 16 bits, the first step equals plain training bit for bit, unless sums are rounded in another order: unsharded
    gradients added up before the reduction (``no_sync``), the sum over a shard group rounded before the sum over the
    replicas (hybrid sharding), or gradients that a chunk gets after its reduction, which are rounded separately (a rank
    that used less of the mixture in the pass before reduces it too early). Another exception are parameters with 16
    bits from the start: optimizers that create state when they are built (Adagrad) round it to 16 bits.

    Without masters the optimizer sees the same 16-bit gradients and parameters as in plain training, bit for bit, and
    so computes the same ones, with two exceptions: torch's loops sometimes round the last elements of a tensor, which
    do not fill a vector register, differently, and shards end elsewhere; and a factor (clipping, an average) may differ
    in the last bit of fp32. Either moves rare elements by one unit in the last place, and the next step spreads that a
    little.
    """
    numbers = row["numbers"]
    if row["model"] == "mixed_bf16":
        return Tolerance(rtol=RTOL["bf16"], share=SHARE)
    too_early = row["model"] == "mixture" and row["micro"] != "1x" and row["order"] != "sequence"
    rounded_twice = row["micro"] == "3x_no_sync" or row["plan"].startswith("hybrid") or too_early
    exact = numbers not in ("fp64", "fp32") and not rounded_twice
    rounded = CUT_ROUNDED if row["optimizer"] in CUT_SHOWS else NO_MASTERS_ROUNDED
    rounded = rounded if exact and numbers == "bf16_no_master" else None
    share = 0.0 if numbers == "fp64" else SHARE
    return Tolerance(rtol=RTOL[numbers], share=share, first_is_exact=exact, rounded=rounded)


def label(row: Mapping[str, str]) -> str:
    """Return a row's name in test ids."""
    return "-".join(row.values())


def plan_product(plans: tuple[str, ...], ranks: str, numbers: str) -> list[Row]:
    """Return parts of rows: every model under each of ``plans``."""
    rows = [{"model": m, "plan": p, "ranks": ranks, "numbers": numbers} for m, p in product(MODELS, plans)]
    return [row for row in rows if allowed(row)]


def dangerous_product() -> list[Row]:
    """Return parts of rows: every model under every main plan at 2 ranks in fp64."""
    return plan_product(MAIN_PLANS, "2", "fp64")


def default_rows() -> list[Row]:
    """Return every model under every main plan at 2 ranks in fp64, and every allowed pair of values of two factors."""
    return cover(FACTORS, allowed, dangerous_product(), COSTS)


def quick_rows(rows: Sequence[Row]) -> list[Row]:
    """Return few of ``rows``, in which every model and every value of every other factor occurs."""
    return each_once(rows, dict.items, lambda row: math.prod(QUICK_COSTS.get(value, 1.0) for value in row.values()))


def complete(
    part: Row,
    choice: random.Random,
    factors: Mapping[str, Sequence[str]] = FACTORS,
    goes: Callable[[Row], bool] = allowed,
) -> Row:
    """Return a row with any other values that can be combined with ``part``."""
    row = dict(part)
    for factor, values in factors.items():
        if factor not in row:
            row[factor] = choice.choice([v for v in values if goes({**row, factor: v})])
    return {factor: row[factor] for factor in factors}
