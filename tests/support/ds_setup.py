"""Setup for tests of the DeepSpeed front-end: configurations, engines, and the model of the recorded checkpoints."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from tests.support import engine_setup

scaler = functools.partial(engine_setup.scaler, initial_scale=2.0**16, hysteresis=2, max_scale=2.0**126, growth_delay=1)
"""The loss scaler of DeepSpeed's defaults, with changes."""


def optimizer_block(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


def ds_config(stage: int, micro: int = 1, zero: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a configuration with SGD, without clipping or persistent small parameters; ``zero`` extends that block."""
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.0,
        "optimizer": optimizer_block("SGD", lr=0.1),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        **changes,
    }


def start(model: nn.Module, config: dict[str, Any], **arguments: Any) -> deepspeed.DeepSpeedEngine:
    """Return an engine; its warnings are suppressed."""
    with warnings.catch_warnings(action="ignore"):
        engine: deepspeed.DeepSpeedEngine = deepspeed.initialize(model=model, config=config, **arguments)[0]
    return engine


def close(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    """End the engine, and return its last state."""
    state: dict[str, Tensor] = engine.state_dict()
    engine.destroy()
    engine.session.mesh.close()
    return state


class Recorded(nn.Module):
    """The model of tests/data/make_deepspeed.py: tied weights, a frozen parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.middle = nn.Embedding(7, 3), nn.Linear(3, 5)
        self.back, self.frozen = nn.Linear(5, 3), nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        inside = torch.tanh(self.middle(self.embed(tokens)) + self.frozen)
        return self.head(self.back(inside) + self.offset.to(inside.dtype)).float().logsumexp(-1).mean()
