"""Setup for checkpoint tests: plans in every tier and precision, a deterministic run, and comparison of two runs."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.core.checkpoint.atomic import FileSystem
from shardwise.core.checkpoint.checkpointer import Checkpointer
from shardwise.plan import ByNumel, ByTensor, Plan, TierPlan, replicated, zero
from shardwise.session import Session
from tests.support.engine_setup import scaler
from tests.support.models import MODELS, ModelCase
from tests.support.tier_setup import shared

# the batches of a step, over all ranks, where runs of different world sizes are compared: a multiple of 1, 2, 3 and 4
BATCHES = 12

SCALER = scaler(initial_scale=256.0, growth_interval=2, max_scale=2.0**20)


class Held(FileSystem):
    """Delays writes until they are released; then they may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.fail = threading.Event(), False

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        assert self.go.wait(60)
        if self.fail:
            raise OSError(28, "No space left on device", "a file")
        super().write(fd, data, offset)


def tiers(directory: str, param: tuple[float, float], state: tuple[float, float]) -> TierPlan:
    """Return shares on (host, disk) for parameters and for state."""
    return shared((*param, *state), directory, block_bytes=16384, param_buffers=4)


def plans(directory: str) -> dict[str, Plan]:
    """Return plans by name; ``directory`` is for the disk tier."""
    half = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16, "cast_inputs": True}
    base = zero(3)
    return {
        "ddp": replicated(),
        "zero1": zero(1),
        "zero2": zero(2),
        "zero3": base,
        "tensor": base.but(packing=ByTensor(persist_numel=8)),
        "straddling": base.but(packing=ByNumel(chunk_numel=50)),
        "gloo": zero(2).but(shared_memory=False),
        "hybrid": zero(3, dp_replicate=2),
        "host": base.but(tiers=tiers(directory, (1, 0), (1, 0))),
        "disk": base.but(tiers=tiers(directory, (0, 1), (0, 1))),
        "mixed": zero(2).but(tiers=tiers(directory, (0.3, 0.3), (0.3, 0.3))),
        "state disk": zero(1).but(tiers=tiers(directory, (0, 0), (0, 1))),
        "bf16": base.but(**half),
        "bf16 disk": base.but(**half, tiers=tiers(directory, (0, 1), (0, 1))),
        "fp16": zero(2, torch.float16).but(scaler=SCALER, cast_inputs=True),
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 3e-3}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, eps=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return two optimizers over alternating parameters; the last parameter is in neither."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.Adam(params[:-1:2], lr=1e-2, eps=1e-2), torch.optim.SGD(params[1:-1:2], lr=0.05, momentum=0.9)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {"adamw": adamw, "sgd": sgd, "two": two}


@dataclass
class Run:
    """A session in training, and the random numbers and losses of its steps."""

    case: ModelCase
    session: Session
    saver: Checkpointer
    schedulers: list[Any]
    dtype: torch.dtype = torch.float32
    noise: bool = True
    batches: int = BATCHES

    def steps(self, first: int, last: int) -> list[float]:
        """Return the loss of each step, summed over this rank's batches; noise like dropout's comes from three
        generators."""
        losses, rank, size = [], self.session.mesh.rank, self.session.mesh.size
        for step in range(first, last):
            total = 0.0
            for index in range(rank, self.batches, size):
                batch = self.case.batch(1000 * step + index, self.dtype)
                loss = self.case.loss(self.session.module, batch)
                if self.noise:
                    loss = loss * (1 + 0.1 * (torch.rand(()).item() + random.random() + np.random.rand()))
                total += float(loss.detach())
                self.session.backward(loss / (self.batches // size))
            for optimizer in self.session.optimizers:
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            losses.append(total)
        return losses


def start(session_of: Callable[..., Session], model: str, optimizer: str, plan: Plan, **how: Any) -> Run:
    """Start a run: ``seed`` of the weights, ``dtype`` of the model, ``batches`` of a step on all ranks."""
    case = MODELS[model]
    dtype, seed = how.get("dtype", torch.float32), how.get("seed", 0)
    module = case.factory(dtype, seed)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    made = OPTIMIZERS[optimizer](module)
    first = made[0] if isinstance(made, list) else made
    session = session_of(module, made, plan)
    torch.manual_seed(seed + session.mesh.rank)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(first, 20)]
    batches = how.get("batches", BATCHES)
    return Run(case, session, Checkpointer(session), schedulers, dtype, how.get("noise", True), batches)


def everything(session: Session) -> dict[str, Any]:
    """Return the full model and optimizer state under flat names; collective."""
    found: dict[str, Any] = {f"model/{n}": v for n, v in session.module.state_dict().items()}
    for index, optimizer in enumerate(session.optimizers):
        state = optimizer.state_dict()
        for number, entry in state["state"].items():
            found |= {f"{index}/{number}/{key}": value for key, value in entry.items()}
        for number, group in enumerate(state["param_groups"]):
            found |= {f"{index}/group {number}/{key}": value for key, value in group.items()}
        found |= {f"{index}/scaler/{key}": value for key, value in state.get("scaler", {}).items()}
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names whose values differ in any bit."""
    names = [name for name in one.keys() | other.keys() if name not in one or name not in other]
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))
        else:
            same = type(a) is type(b) and a == b
        names += [] if same else [name]
    return sorted(names)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def close_to(actual: Sequence[float], expected: Sequence[float], rtol: float) -> bool:
    """Return whether they are close; False for NaN."""
    pairs = zip(actual, expected, strict=False)
    return len(actual) == len(expected) and all(abs(a - e) <= rtol * abs(e) for a, e in pairs)
