"""Trains a tiny model on ranks under a plan, and compares with ``shardwise.testing.train_plain``."""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.plan import Plan, replicated
from shardwise.session import Session, build
from shardwise.testing import PlainRecipe, PlainRun, assert_close, train_plain
from tests.support.engine_setup import meshes
from tests.support.models import MODELS, ModelCase, make_batches


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: weights decay; vectors and scalars do not, and have another learning rate."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


EPS = 1e-2
"""Large, so that gradients which are zero except for rounding (the keys' bias of attention) do not become full
steps."""

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


def tokens_of(batch: Mapping[str, Any]) -> float:
    """Return a weight that differs between batches: the number of positive targets, plus one."""
    return 1.0 + float((batch["target"] > 0).sum())


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One cell of the matrix. ``dtype`` is the model's own; the plan may cast it."""

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
        """Return the same arithmetic, unsharded."""
        precision, grad = self.plan.precision, self.plan.grad
        scale = precision.scaler.initial_scale if precision.scaler else 1.0
        # Token weights count in units of 1024, so that their products with a loss scale stay small.
        scale /= 1024.0 if precision.scaler and grad.average == "tokens" else 1.0
        return PlainRecipe(
            max_norm=grad.max_norm,
            norm_type=grad.norm_type,
            param_dtype=precision.param_dtype,
            buffer_dtype=precision.buffer_dtype,
            reduce_dtype=precision.reduce_dtype,
            accumulate_dtype=precision.accumulate_dtype,
            masters=precision.master_weights,
            loss_scale=scale,
            mean_over_micro_batches=grad.average == "mean",
            tokens=tokens_of if grad.average == "tokens" else None,
        )

    def batches(self, case: ModelCase) -> list[Any]:
        """Return the batches, ``[step][micro-batch][rank]``."""
        return make_batches(case, self.world_size, self.steps, self.micro_batches, self.dtype)


@dataclass
class Run:
    """Results of one rank, by step. ``digest`` is of all gradients and parameters; only rank 0 returns these."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    traffic: list[dict[str, int]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    peak_gathered_bytes: int = 0
    digest: str = ""


def train_on_rank(setting: Setting) -> Run:
    """Train one setting on a rank of a pool."""
    return train_case(MODELS[setting.model], setting)


def train_all(settings: Sequence[Setting]) -> list[Run]:
    """Train several settings of one world size in one task; those with equal axes and transport reuse a mesh."""
    with meshes() as mesh_of:
        return [train_case(MODELS[each.model], each, mesh_of(each.plan)) for each in settings]


def train_case(case: ModelCase, setting: Setting, mesh: Mesh | None = None) -> Run:
    """Train ``case`` under ``setting`` (whose ``model`` is not looked up), on ``mesh`` or on a new one."""
    model = case.factory(setting.dtype)
    session = build(model, OPTIMIZERS[setting.optimizer](model), setting.plan, mesh)
    run = Run()
    optimizer = session.optimizer
    for step in setting.batches(case):
        session.reset_traffic()
        run.losses.append(_passes(session, case.loss, step, setting))
        run.traffic.append(session.traffic())
        run.gradients.append({} if setting.plan.grad.update == "backward" else session.full_gradients())
        optimizer.step()
        run.norms.append(optimizer.get_grad_norm())
        run.skipped.append(optimizer.last_step_skipped)
    # Collective, and one for all steps: a wrong update shows in the losses and gradients of the next step as well.
    state = session.module.state_dict()
    run.parameters = {name: state[name] for name, _ in model.named_parameters()}
    run.peak_gathered_bytes = session.memory().peak_gathered_bytes
    rank = session.mesh.rank
    session.close()
    if mesh is None:
        session.mesh.close()
    run.digest = _digest([*run.gradients, run.parameters])
    if rank:
        run.gradients, run.parameters = [], {}
    return run


def _digest(dicts: Sequence[Mapping[str, Tensor]]) -> str:
    total = hashlib.sha256()
    for tensors in dicts:
        for name, tensor in tensors.items():
            total.update(name.encode())
            total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _passes(session: Session, loss: Callable[[nn.Module, Any], Tensor], step: Any, setting: Setting) -> list[float]:
    losses = []
    weighted = setting.plan.grad.average == "tokens"
    for index, micro in enumerate(step):
        batch = micro[session.mesh.rank]
        value = loss(session.module, batch)
        losses.append(float(value.detach()))
        skips = setting.use_no_sync and index + 1 < len(step)
        with session.no_sync() if skips else nullcontext():
            session.backward(value, tokens_of(batch) if weighted else None)
    return losses


def plain(setting: Setting) -> PlainRun:
    """Return the plain run of a setting."""
    return _plain(replace(setting, plan=replicated(), use_no_sync=False), setting.recipe)


@functools.lru_cache(maxsize=512)
def _plain(setting: Setting, recipe: PlainRecipe) -> PlainRun:
    """Train a setting without its plan, from which only the recipe is used."""
    case = MODELS[setting.model]
    make = OPTIMIZERS[setting.optimizer] if recipe.masters else fused(OPTIMIZERS[setting.optimizer])
    return train_plain(lambda: case.factory(setting.dtype), case.loss, make, setting.batches(case), recipe)


def fused(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return ``make`` with the kernel that the engine chooses where the user left the choice to torch.

    In 16 bits the choice matters: torch's fused kernels round each result once, its loops after every operation. The
    fused SGD is not used, since it is wrong in 16 bits on a CPU (torch 2.13).
    """

    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.Adagrad):
            for group in optimizer.param_groups:
                group["fused"] = True
        return optimizer

    return build


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The allowed error of a run.

    Attributes:
        rtol: of every number, and of every tensor relative to its largest expected element.
        share: gradients whose largest element is below this share of the largest of all gradients are compared as if it
            were that large: nearly complete cancellation leaves no relative accuracy.
        floor: the same as an absolute magnitude, for parameters as well.
        first_is_exact: losses and gradients of the first step are equal bit for bit: the same sums in the same order.
            Parameters are then within :data:`SAME_GRADIENTS_RTOL`, as long as the gradients of later steps are equal.
        rounded: parameters are updated in 16 bits: the share of all their elements that may differ, each by one unit in
            the last place of the tensor's largest element. ``None``: as above.
    """

    rtol: float
    share: float = 0.0
    floor: float = 0.0
    first_is_exact: bool = False
    rounded: float | None = None


SAME_GRADIENTS_RTOL = 1e-6
"""If 16-bit gradients are equal bit for bit in every step, updates are equal except for fp32 rounding."""
BF16_ULP = 2.0**-7
"""Spacing of the numbers in [1, 2) with a mantissa of 8 bits."""


def check_runs(runs: Sequence[Run], expected: PlainRun, setting: Setting, tolerance: Tolerance) -> None:
    """Compare every rank's losses, and gradients, norms and parameters, which must be equal bit for bit on all
    ranks."""
    for rank, run in enumerate(runs):
        assert run.digest == runs[0].digest, f"{setting.model}: gradients or parameters of rank {rank} are not rank 0's"
        assert run.norms == runs[0].norms, (
            f"{setting.model}: norms of rank {rank} {run.norms}, of rank 0 {runs[0].norms}"
        )
        assert run.skipped == expected.skipped, f"{setting.model} rank {rank}: {run.skipped} not {expected.skipped}"
        _check_losses(run, rank, expected, setting, tolerance)
    first = runs[0]
    same = True
    for step in range(setting.steps):
        where = f"{setting.model} step {step}"
        gradients = {} if setting.plan.grad.update == "backward" else expected.gradients[step]
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        floor = max(tolerance.floor, tolerance.share * largest)
        rtol = 0.0 if tolerance.first_is_exact and step == 0 else tolerance.rtol
        same &= assert_close(first.gradients[step], gradients, rtol, f"gradients of {where}", floor=floor) == 0.0
        _check_number(first.norms[step], expected.norms[step], tolerance.rtol, f"norm of {where}")
    rtol = min(tolerance.rtol, SAME_GRADIENTS_RTOL) if same and tolerance.first_is_exact else tolerance.rtol
    where = f"parameters of {setting.model} after step {setting.steps - 1}"
    rtol = BF16_ULP if tolerance.rounded is not None else rtol
    assert_close(first.parameters, _kept(expected), rtol, where, floor=tolerance.floor)
    if tolerance.rounded is not None:
        _check_rounded(first.parameters, _kept(expected), tolerance.rounded, where)


def check_beside_rounding(runs: Sequence[Run], expected: PlainRun, setting: Setting, tolerance: Tolerance) -> None:
    """Check as :func:`check_runs`, with a larger tolerance for fp32 if it fails.

    That is twice the error of plain training in fp32 against fp64, which depends on the kernels for the processor.
    """
    try:
        check_runs(runs, expected, setting, tolerance)
    except AssertionError:
        if setting.dtype != torch.float32 or setting.plan.precision.param_dtype not in (None, torch.float32):
            raise
        rtol = 2 * rounding(setting, tolerance.share)
        if not rtol > tolerance.rtol:
            raise
        check_runs(runs, expected, setting, replace(tolerance, rtol=rtol))


def rounding(setting: Setting, share: float) -> float:
    """Return the largest error of a gradient of plain training in fp32, measured as in :func:`check_runs`."""
    single, double = plain(setting), plain(replace(setting, dtype=torch.float64))
    worst = 0.0
    for rounded, exact in zip(single.gradients, double.gradients, strict=True):
        floor = share * max((float(g.abs().max()) for g in exact.values() if g.numel()), default=0.0)
        worst = max(worst, assert_close(rounded, exact, math.inf, "plain", floor=floor, check_dtype=False))
    return worst


def _check_rounded(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], share: float, what: str) -> None:
    total = sum(tensor.numel() for tensor in expected.values())
    other = sum(int((actual[name] != tensor).sum()) for name, tensor in expected.items())  # NaN counts as different
    assert other <= share * total, f"{what}: {other} of {total} elements are rounded otherwise"


def _check_losses(run: Run, rank: int, expected: PlainRun, setting: Setting, tolerance: Tolerance) -> None:
    for step in range(setting.steps):
        rtol = 0.0 if tolerance.first_is_exact and step == 0 else tolerance.rtol
        for micro, losses in enumerate(expected.losses[step]):
            where = f"loss of {setting.model} rank {rank} step {step} micro-batch {micro}"
            _check_number(run.losses[step][micro], losses[rank], rtol, where)


def _kept(expected: PlainRun) -> dict[str, Tensor]:
    """Return parameters as a full state has them: in fp32 if there is a master, frozen ones in the compute dtype."""
    trained = {name for name, param in expected.model.named_parameters() if param.requires_grad}
    masters, computed = expected.masters[-1], expected.parameters[-1]
    return {name: masters[name] if name in trained else computed[name] for name in masters}


def _check_number(actual: float | None, expected: float, rtol: float, what: str) -> None:
    assert actual is not None and math.isfinite(actual), f"{what}: {actual}"
    # NaN has to fail.
    assert abs(actual - expected) <= rtol * max(abs(expected), 1e-30), f"{what}: {actual} instead of {expected}"
