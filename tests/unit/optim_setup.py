"""What the tests of the Adam family share: parameters of odd shapes, gradients, and a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.core.optim import CPUAdam, FusedAdam, HybridAdam

SHAPES = [(3,), (), (0,), (1, 1), (17, 5), (129,), (2, 3, 4), (64, 33)]
KINDS = [CPUAdam, HybridAdam, FusedAdam]
Kind = Callable[..., Any]


def make_params(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], seed: int, skip: int = -1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(params):
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = None if index == skip else value


def assert_close(actual: list[Any], expected: list[Any], tolerance: float) -> None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        difference = (a.detach().double() - b.detach().double()).abs()
        # "not all <=" so that NaN fails.
        assert bool((difference <= tolerance * (1 + b.detach().double().abs())).all()), (index, difference.max())
