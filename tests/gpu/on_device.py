"""Functions that the ranks of the GPU tests run. Each takes the device type, so that it also runs on the CPU."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.optim import HybridAdam
from shardwise.core.optim.lamb import Lamb
from shardwise.core.optim.muon import MuonWithAuxAdam
from shardwise.core.parallel.float8 import convert_to_float8_training
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.testing import PlainRecipe, PlainRun, train_plain
from tests.support.early_setup import counting
from tests.support.models import MODELS, adamw, make_batches, to_device

STEPS = 3


def device_of_rank(device_type: str) -> torch.device:
    """Return this rank's device and make it current, with TF32 off; ranks share GPUs if there are too few."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    _make_work_spaces(device)
    return device


@functools.cache
def _make_work_spaces(device: torch.device) -> None:
    """Allocate cuBLAS's workspaces, for this thread and autograd's, since tests read the allocator: up to 32 MiB
    each.
    """
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(8, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()
    torch.cuda.synchronize(device)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Return Muon for matrices and Adam for other parameters."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == flag] for flag in (True, False))
    groups = ({"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False, "lr": 1e-2, "eps": 1e-2})
    return MuonWithAuxAdam(groups)


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks; on a CPU without code generation, which needs a compiler."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="inductor" if next(model.parameters()).is_cuda else "aot_eager")


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "hybrid": lambda model: HybridAdam(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1),
    "lamb": lambda model: Lamb(model.parameters(), lr=1e-2, eps=1e-2),
    "muon": muon,
}
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "": lambda model: None,
    "fp8": convert_to_float8_training,
    "compile": compile_blocks,
    "graphs": lambda model: [block.compile(mode="reduce-overhead") for block in model.blocks],  # type: ignore[union-attr]
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training run on the ranks of a pool."""

    model: str
    plan: Plan
    device_type: str
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    side_stream: bool = False
    optimizer: str = "adamw"
    change: str = ""
    """The change of the model before it is sharded: a key of :data:`CHANGES`."""


@dataclass
class Run:
    """Results of a rank by step; tensors are on the CPU."""

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    updates: int = 0
    """Number of chunks updated during backward."""


def _on_cpu(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def _train(session: Session, setting: Setting, device: torch.device) -> Run:
    case, run = MODELS[setting.model], Run()
    batches = make_batches(case, dist.get_world_size(), STEPS, setting.micro_batches, setting.dtype)
    for step in batches:
        losses = []
        for micro in step:
            loss = case.loss(session.module, to_device(micro[dist.get_rank()], device))
            losses.append(float(loss.detach()))
            session.backward(loss)
        run.losses.append(losses)
        if setting.plan.grad.update == "step":
            run.gradients.append(_on_cpu(session.full_gradients()))
        session.optimizer.step()
        session.optimizer.zero_grad()
        run.norms.append(session.optimizer.get_grad_norm())
        run.skipped.append(session.optimizer.last_step_skipped)
        state = session.module.state_dict()
        run.parameters.append(_on_cpu({name: state[name] for name, _ in session.module.unwrap().named_parameters()}))
    run.devices = {p.device.type for p in session.module.unwrap().parameters()}
    return run


@contextmanager
def session_of(
    plan: Plan, device: torch.device, model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> Iterator[Session]:
    """Yield a session; it is not closed if the test fails, since peers may be gone."""
    session = build(model, optimizer(model), plan, device=device)
    yield session
    session.close()
    session.mesh.close()


def train(setting: Setting) -> Run:
    """Train with the plan, optionally on a side stream."""
    device = device_of_rank(setting.device_type)
    model = MODELS[setting.model].factory(setting.dtype)
    CHANGES[setting.change](model)
    aside = device.type == "cuda" and setting.side_stream
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if aside else nullcontext()
    with (
        stream,
        counting() as counts,
        session_of(setting.plan, device, model, OPTIMIZERS[setting.optimizer]) as session,
    ):
        run = _train(session, setting, device)
    run.updates = counts["updates"]
    return run


def plain(setting: Setting, world_size: int) -> PlainRun:
    """Train in one process without sharding, on the same device."""
    case, precision, grad = MODELS[setting.model], setting.plan.precision, setting.plan.grad
    device = device_of_rank(setting.device_type)
    batches = make_batches(case, world_size, STEPS, setting.micro_batches, setting.dtype)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return case.loss(model, to_device(batch, device))

    recipe = PlainRecipe(
        max_norm=grad.max_norm,
        norm_type=grad.norm_type,
        param_dtype=precision.param_dtype,
        loss_scale=precision.scaler.initial_scale if precision.scaler else 1.0,
    )

    def factory() -> nn.Module:
        model = case.factory(setting.dtype).to(device)
        CHANGES[setting.change if setting.change == "fp8" else ""](model)
        return model

    run = train_plain(factory, loss, OPTIMIZERS[setting.optimizer], batches, recipe)
    run.gradients = [_on_cpu(step) for step in run.gradients]
    run.masters = [_on_cpu(step) for step in run.masters]
    # A module on a CUDA device cannot be sent to another process, and it is not needed.
    run.model, run.optimizer = nn.Identity(), torch.optim.SGD([torch.zeros(1)])
    return run


class Stack(nn.Module):
    """``depth`` square layers: parameters dominate, activations are few. Input and output (rows, width)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def both_passes(session: Session, rows: Tensor) -> Tensor:
    """Run forward and backward of a :class:`Stack` and return the loss, without waiting for it."""
    loss = session.module(rows).float().square().mean()
    session.backward(loss)
    return loss.detach()


def one_step(session: Session, rows: Tensor) -> Tensor:
    """Run both passes and the update, and return the loss."""
    loss = both_passes(session, rows)
    session.optimizer.step()
    session.optimizer.zero_grad()
    return loss


def rows_of(width: int, seed: int, device: torch.device, count: int = 8) -> Tensor:
    """Return inputs of a :class:`Stack`."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(device)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes by the CUDA allocator of one rank and by the session's report, and the losses of all steps."""

    while_building: int
    after_build: int
    in_step: int
    after_step: int
    reported: int
    """Device memory in the session's report."""
    on_host: int
    ledger: int
    losses: list[float]


def measure_memory(
    plan: Plan, width: int, depth: int, steps: int = 3, resets: Sequence[int] = (1,), lag_cycles: int = 0
) -> Bytes:
    """Train a :class:`Stack` and read the allocator, whose peak is reset in the steps ``resets``. CUDA only.

    The GPU sleeps for ``lag_cycles`` at the start of each step, so that it is late.
    """
    device = device_of_rank("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with session_of(plan, device, Stack(width, depth)) as session:
        while_building = torch.cuda.max_memory_allocated(device) - before
        after_build = torch.cuda.memory_allocated(device) - before
        highest, losses = 0, []
        for index in range(steps):
            rows = rows_of(width, index, device)
            if index in resets:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            if lag_cycles:
                torch.cuda._sleep(lag_cycles)
            loss = both_passes(session, rows)
            # The engine may reset the allocator's peak to trace a step, so it is read after each pass.
            highest = max(highest, torch.cuda.max_memory_allocated(device) - before) if index >= resets[0] else 0
            session.optimizer.step()
            session.optimizer.zero_grad()
            losses.append(float(loss))
        torch.cuda.synchronize(device)
        report = session.memory()
        return Bytes(
            while_building=while_building,
            after_build=after_build,
            in_step=max(highest, torch.cuda.max_memory_allocated(device) - before),
            after_step=torch.cuda.memory_allocated(device) - before,
            reported=report.tier_bytes("device"),
            on_host=report.tier_bytes("host"),
            ledger=session.ledger.peak_bytes,
            losses=losses,
        )


def overflow_then_train(device_type: str) -> tuple[list[bool], list[float], str | None]:
    """Train in fp16: two infinite losses are skipped, the scale is halved, and the next step trains."""
    device = device_of_rank(device_type)
    skipped, scales, reason = [], [], None
    with session_of(zero(3, torch.float16), device, Stack(16, 2)) as session:
        optimizer = session.optimizer
        for factor in (1.0, float("inf"), float("inf"), 1.0):
            session.backward(session.module(torch.ones(4, 16, device=device)).float().mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.last_step_skipped)
            reason = optimizer.skipped_because or reason
            scales.append(float(optimizer.scaler.scale))
    return skipped, scales, reason
