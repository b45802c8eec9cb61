"""What the ranks of the GPU tests run; every function takes the device type, so that it also runs on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.optim.lamb import Lamb
from shardwise.core.optim.muon import MuonWithAuxAdam
from shardwise.core.parallel.float8 import multiply_in_8_bits
from shardwise.plan import Plan, zero
from shardwise.session import Session, build
from shardwise.testing import PlainRecipe, PlainRun, train_plain
from tests.support.models import MODELS, make_batches

STEPS = 3


def device_of_rank(device_type: str) -> torch.device:
    """This rank's device, made current; ranks share GPUs where there are fewer of them. TF32 is off."""
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
    """Those of cuBLAS, of this thread and of autograd's: up to 32 MiB each, from the allocator that tests ask."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(8, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()
    torch.cuda.synchronize(device)


def to_device(value: Any, device: torch.device) -> Any:
    """The tensors inside dicts, lists and tuples, moved."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """A large eps, so that gradients which are zero but for rounding are not blown up to steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=1e-2, eps=1e-2)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for matrices, Adam for the rest."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == flag] for flag in (True, False))
    groups = ({"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False, "lr": 1e-2, "eps": 1e-2})
    return MuonWithAuxAdam(groups)


def compile_blocks(model: nn.Module) -> None:
    """On a CPU without code generation, which takes a compiler there."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="inductor" if next(model.parameters()).is_cuda else "aot_eager")


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"adamw": adamw, "lamb": lamb, "muon": muon}
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "": lambda model: None,
    "fp8": multiply_in_8_bits,
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
    """What becomes of the model before it is sharded: a key of :data:`CHANGES`."""


@dataclass
class Run:
    """What a rank saw, by step; tensors on the CPU."""

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)


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
        run.gradients.append(_on_cpu(session.full_gradients()))
        session.optimizer.step()
        session.optimizer.zero_grad()
        run.norms.append(session.optimizer.get_grad_norm())
        run.skipped.append(session.optimizer.last_step_skipped)
        state = session.module.state_dict()
        run.parameters.append(_on_cpu({name: state[name] for name, _ in session.module.unwrap().named_parameters()}))
    run.devices = {p.device.type for p in session.module.unwrap().parameters()}
    return run


def train(setting: Setting) -> Run:
    """Train as the plan says, optionally on a stream that is not the default one."""
    device = device_of_rank(setting.device_type)
    model = MODELS[setting.model].factory(setting.dtype)
    CHANGES[setting.change](model)
    if device.type == "cuda" and setting.side_stream:
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            return _build_and_train(model, setting, device)
    return _build_and_train(model, setting, device)


def _build_and_train(model: nn.Module, setting: Setting, device: torch.device) -> Run:
    session = build(model, OPTIMIZERS[setting.optimizer](model), setting.plan, device=device)
    try:
        return _train(session, setting, device)
    finally:
        session.close()
        session.mesh.close()


def plain(setting: Setting, world_size: int) -> PlainRun:
    """The same training in one process without sharding, on the same device."""
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
    # Modules on a CUDA device do not travel between processes here, and nobody needs them.
    run.model, run.optimizer = nn.Identity(), torch.optim.SGD([torch.zeros(1)])
    return run


class Stack(nn.Module):
    """``depth`` square layers: parameters dominate, activations are few. Input and output (rows, width)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes that the CUDA allocator of one rank counts, and what the session says of itself."""

    parameter_bytes: int
    """Of the whole unsharded model in its compute dtype."""
    while_building: int
    after_build: int
    in_step: int
    after_step: int
    reported: int


def measure_memory(plan: Plan, width: int, depth: int) -> Peak:
    """Train a :class:`Stack` for three steps and read the allocator. CUDA only."""
    device = device_of_rank("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model = Stack(width, depth)
    session = build(model, adamw(model), plan, device=device)
    while_building = torch.cuda.max_memory_allocated(device) - before
    after_build = torch.cuda.memory_allocated(device) - before
    itemsize = (plan.precision.param_dtype or torch.float32).itemsize
    for index in range(3):
        if index == 1:  # the optimizer's state exists from here on
            torch.cuda.reset_peak_memory_stats(device)
        loss = session.module(torch.randn(8, width, device=device)).float().square().mean()
        session.backward(loss)
        session.optimizer.step()
        session.optimizer.zero_grad()
        del loss
    torch.cuda.synchronize(device)
    peak = Peak(
        parameter_bytes=width * width * depth * itemsize,
        while_building=while_building,
        after_build=after_build,
        in_step=torch.cuda.max_memory_allocated(device) - before,
        after_step=torch.cuda.memory_allocated(device) - before,
        reported=session.memory().total_bytes,
    )
    session.close()
    session.mesh.close()
    return peak


def overflow_then_train(device_type: str) -> tuple[list[bool], list[float], str | None]:
    """fp16: a step with an infinite loss is skipped and halves the scale; the next one trains."""
    device = device_of_rank(device_type)
    model = Stack(16, 2)
    plan = zero(3, torch.float16)
    assert plan.precision.scaler is not None
    session = build(model, adamw(model), plan, device=device)
    optimizer = session.optimizer
    skipped, scales, reason = [], [], None
    for factor in (1.0, float("inf"), float("inf"), 1.0):
        loss = session.module(torch.ones(4, 16, device=device)).float().mean() * factor
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.last_step_skipped)
        reason = optimizer.skipped_because or reason
        scales.append(float(optimizer.scaler.scale))
    session.close()
    session.mesh.close()
    return skipped, scales, reason
