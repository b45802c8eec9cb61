"""Setup for the Booster's checkpoint tests: plugins, a small odd model, and the calls of users."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardwise.booster import Booster
from shardwise.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from tests.support.engine_setup import scaler

M = 2**20

SCALER = scaler(initial_scale=2.0**16, hysteresis=2)
OTHER_SCALER: dict[str, float] = {
    "initial_scale": 1024.0,
    "min_scale": 2.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 10,
    "hysteresis": 1,
    "max_scale": 2.0**20,
}
TINY = 1e-4  # MB: about one tensor per shard file
SMALL = {"min_chunk_size_m": 1e-4, "hidden_dim": 8, "search_range_m": 0.01}

Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
zero = functools.partial(LowLevelZeroPlugin, precision="fp32")
gemini = functools.partial(GeminiPlugin, precision="fp32")

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": functools.partial(TorchFSDPPlugin, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    "fsdp-grad-op": functools.partial(TorchFSDPPlugin, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp-no-shard": functools.partial(TorchFSDPPlugin, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp-hybrid": functools.partial(TorchFSDPPlugin, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "fsdp-offload": functools.partial(TorchFSDPPlugin, cpu_offload=CPUOffload(offload_params=True)),
    "zero1": functools.partial(zero, stage=1),
    "zero1-late": functools.partial(zero, stage=1, overlap_allgather=True),
    "zero2": functools.partial(zero, stage=2),
    "zero2-after-backward": functools.partial(zero, stage=2, overlap_communication=False),
    "zero2-offload": functools.partial(zero, stage=2, cpu_offload=True),
    "gemini": functools.partial(gemini, **SMALL),
    "gemini-half": functools.partial(gemini, shard_param_frac=0.5, max_prefetch=1, **SMALL),
    "gemini-replicas": functools.partial(gemini, extra_dp_size=2, **SMALL),
    "gemini-kept": functools.partial(gemini, chunk_config_dict={2: {"chunk_size": 64, "keep_gathered": True}}),
    "gemini-offload": functools.partial(
        gemini, offload_optim_frac=0.5, offload_param_frac=0.5, chunk_config_dict={2: {"chunk_size": 40}}
    ),
}


class Net(nn.Module):
    """Tied weights, a buffer, extra state, a frozen and an empty parameter; two ranks do not share its rows evenly."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(5, hidden), nn.Linear(hidden, hidden, bias=False)
        self.again = nn.Linear(hidden, hidden)
        self.again.weight = self.tied.weight
        self.last, self.frozen = nn.Linear(hidden, 3), nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.extra: dict[str, Any] = {"calls": 0, "mark": torch.ones(2)}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.tied(torch.tanh(self.first(inputs))))))
        self.extra["calls"] += 1
        return self.last(hidden) + self.frozen

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.extra)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def two_groups(model: Net) -> torch.optim.Optimizer:
    first = list(model.first.parameters())
    other = [p for p in model.parameters() if all(p is not f for f in first) and p.requires_grad]
    return torch.optim.AdamW([{"params": first, "lr": 3e-2}, {"params": other, "weight_decay": 0.1}], lr=1e-2)


def start(seed: int = 3, hidden: int = 7, make: Optimizers | None = None) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Net(hidden)
    optimizer = two_groups(model) if make is None else make(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


def plain(steps: int, passes: int = 1, make: Optimizers | None = None) -> dict[str, Any]:
    """Return the state after ``steps`` of several backward passes over full batches, in one plain process."""
    model, optimizer, scheduler = start(make=make)
    for step in range(steps):
        for index in range(passes):
            inputs, targets = batch(step * passes + index)
            nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


class Run:
    """A boosted run with the calls of users; ``noise`` uses random numbers in every step."""

    def __init__(
        self, plugin: Plugin | None, seed: int = 3, hidden: int = 7, noise: bool = False, make: Optimizers | None = None
    ) -> None:
        self.net, self.optimizer, self.scheduler = start(seed, hidden, make)
        self.noise = noise
        self.booster = Booster(plugin=plugin)
        self.model, self.optimizer, self.criterion, _, self.scheduler = self.booster.boost(  # type: ignore[assignment]
            self.net, self.optimizer, nn.MSELoss(), lr_scheduler=self.scheduler
        )

    def backward(self, index: int) -> float:
        """Run a backward pass over this rank's rows of a batch."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        inputs, targets = batch(index)
        loss = self.criterion(self.model(inputs[rank::size]), targets[rank::size])
        if self.noise:
            loss = loss * (1 + torch.rand(()))
        self.booster.backward(loss, self.optimizer)
        return float(loss.item())

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            losses.append(self.backward(step))
            self.finish()
        return losses


def assert_same(state: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def save(run: Run, folder: Path, **how: Any) -> None:
    run.booster.save_model(run.model, folder / "model", shard=True, size_per_shard=TINY, **how)
    run.booster.save_optimizer(run.optimizer, folder / "optimizer", shard=True, size_per_shard=TINY, **how)
    run.booster.save_lr_scheduler(run.scheduler, folder / "scheduler.json")


def load(run: Run, folder: Path) -> None:
    run.booster.load_model(run.model, folder / "model")
    run.booster.load_optimizer(run.optimizer, folder / "optimizer")
    run.booster.load_lr_scheduler(run.scheduler, folder / "scheduler.json")
