"""Tests of the Adam family on a GPU without the engine: parameters on the device, on the host, or on both."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpu.on_device import device_of_rank
from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.testing import RankPool

KINDS: dict[str, Callable[..., Any]] = {"cpu": CPUAdam, "fused": FusedAdam, "hybrid": HybridAdam}
SHAPES = [(3,), (), (17, 5), (129,), (2, 3, 4), (300, 33)]
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
STEPS = 6


def _params(device: torch.device, where: str, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    on_device = [where == "device" or (where == "mixed" and index % 2 == 0) for index in range(len(values))]
    return [nn.Parameter(v.to(device) if there else v) for v, there in zip(values, on_device, strict=True)]


def _set_gradients(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if (index + step) % 4 == 0 else (gradient * factor).to(param.device)


def _assert_close(ours: list[nn.Parameter], theirs: list[nn.Parameter], tolerance: float) -> None:
    for value, expected in zip(ours, theirs, strict=True):
        close = (value.detach().float().cpu() - expected.cpu()).abs() <= tolerance * (1 + expected.cpu().abs())
        assert bool(close.all()), (value, expected)


def check(device_type: str, kind: str, where: str, dtype: torch.dtype, adamw_mode: bool, scale: float) -> None:
    """Compare with torch on the CPU in fp32; 16-bit values are rounded after each step, as ours are."""
    device = device_of_rank(device_type)
    ours = _params(device, where, dtype)
    theirs = [nn.Parameter(value.detach().float().cpu()) for value in ours]
    own = KINDS[kind](ours, adamw_mode=adamw_mode, **OPTIONS)
    reference = (torch.optim.AdamW if adamw_mode else torch.optim.Adam)(theirs, foreach=False, **OPTIONS)  # type: ignore[arg-type]
    for step in range(STEPS):
        _set_gradients(ours, step, scale)
        for param, other in zip(ours, theirs, strict=True):
            other.grad = None if param.grad is None else param.grad.float().cpu() / scale
        own.step(div_scale=scale if scale != 1.0 else -1)
        reference.step()
        for other in theirs:
            other.data = other.data.to(dtype).float()
    # Values may occasionally be on the other side of a rounding boundary.
    _assert_close(ours, theirs, 1e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps)
    for index, param in enumerate(ours):
        state = own.state[param]
        assert float(state["step"]) == sum((index + step) % 4 != 0 for step in range(STEPS))
        assert {value.device.type for value in state.values()} == {param.device.type}


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("adamw_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["device", "mixed", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_adam_equals_torch(
    one_rank: RankPool, device_type: str, kind: str, where: str, dtype: torch.dtype, adamw_mode: bool, scale: float
) -> None:
    one_rank.run(check, device_type, kind, where, dtype, adamw_mode, scale, timeout=120.0)


def there_and_back(device_type: str, kind: str, fused: bool) -> None:
    """Move the state from torch to our optimizer and back, and compare with torch all the way."""
    device = device_of_rank(device_type)
    straight, travelling = _params(device, "device", torch.float32), _params(device, "device", torch.float32)

    def torchs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=fused, **OPTIONS)  # type: ignore[arg-type]

    reference, current = torchs(straight), torchs(travelling)
    for step in range(9):
        if step in (3, 6):
            state = copy.deepcopy(current.state_dict())
            current = KINDS[kind](travelling) if step == 3 else torchs(travelling)
            current.load_state_dict(state)
        for params, optimizer in ((straight, reference), (travelling, current)):
            _set_gradients(params, step)
            optimizer.step()
    _assert_close(travelling, straight, 1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adam_state_is_compatible_with_torch(one_rank: RankPool, device_type: str, kind: str, fused: bool) -> None:
    """torch keeps step counts on the host, or on the GPU with ``fused=True``."""
    one_rank.run(there_and_back, device_type, kind, fused, timeout=120.0)
