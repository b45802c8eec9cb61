"""``pytest --seed-shift N`` and ``--rounding``: run the tests with other numbers, as other inputs or processors give.

A test that passes only with some numbers compares a value that is only rounding error: for example, a gradient that is
zero up to rounding becomes a full step in an optimizer without a large epsilon.

``--seed-shift N`` adds N to each seed that tests give to torch, in this process and on the ranks of pools.

``--rounding`` changes gradients before an optimizer of this process steps: to each nonzero element it adds at most half
a unit in the last place of the largest gradient. The optimizers of this process are the plain ones that ranks are
compared with, so tests that compare bits, or that round to 16 bits after each step, cannot pass with it.
"""

import os
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.testing import pool, worker

VARIABLE = "SHARDWISE_TESTS_SEED_SHIFT"
"""Passes the shift to the ranks: their server process imports this module before it forks the first one."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options; for ``pytest_addoption``."""
    parser.addoption("--seed-shift", type=int, default=0, help="add it to every seed that tests give to torch")
    parser.addoption("--rounding", action="store_true", help="round the gradients of plain optimizers otherwise")


def configure(config: pytest.Config) -> None:
    """Apply the options; for ``pytest_configure``, before test modules are imported."""
    if config.getoption("--seed-shift"):
        folder = os.path.dirname(__file__)
        os.environ[VARIABLE] = str(config.getoption("--seed-shift"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        pool._PRELOAD.append(__name__)
        shift_seeds()
    if config.getoption("--rounding"):
        register_optimizer_step_pre_hook(round_otherwise)


def options(config: pytest.Config) -> list[str]:
    """Return the options above that ``config`` was given."""
    shifted = ["--seed-shift", str(config.getoption("--seed-shift"))] if config.getoption("--seed-shift") else []
    return shifted + (["--rounding"] if config.getoption("--rounding") else [])


def shift() -> int:
    """Return the shift of the seeds in this process."""
    return int(os.environ.get(VARIABLE, "0")) if hasattr(torch.Generator, "shifted") else 0


def shift_seeds() -> None:
    """Shift the seeds of ``torch.manual_seed`` and of generators of this process."""
    by = int(os.environ.get(VARIABLE, "0"))
    if not by or hasattr(torch.Generator, "shifted"):
        return
    seed_all, plain = torch.manual_seed, torch.Generator

    class Kind(type(plain)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, plain)

    class Generator(plain, metaclass=Kind):  # type: ignore[misc, valid-type]
        shifted = True

        def manual_seed(self, seed: int) -> torch.Generator:
            super().manual_seed(int(seed) + by)
            return self

    def manual_seed(seed: int) -> torch.Generator:
        return seed_all(int(seed) + by)

    torch.Generator, torch.manual_seed = Generator, manual_seed  # type: ignore[misc]
    worker._SEED += by


def seed(number: int) -> None:
    """Seed torch without the overhead of ``torch.manual_seed``, which formats the stack for each kind of device."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number + shift())


def round_otherwise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Change gradients as another order of the same sums would; zeros stay zero."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [g for g in gradients if g.numel() and g.dtype in (torch.float32, torch.float64) and not g.is_sparse]
    largest = max((float(g.abs().max()) for g in gradients), default=0.0)
    state = torch.get_rng_state()
    for gradient in gradients:
        noise = torch.empty_like(gradient).uniform_(-0.5, 0.5) * (torch.finfo(gradient.dtype).eps * largest)
        gradient += torch.where(gradient == 0, 0.0, noise)
    torch.set_rng_state(state)


shift_seeds()
