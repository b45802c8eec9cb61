"""What training programs take from ``utils``: seeds, paths, contexts, data loaders, recomputation."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as computed_again
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from shardwise.checked import as_kind, refuse

__all__ = [
    "Randomizer",
    "checkpoint",
    "clear_layout_converter",
    "conditional_context",
    "disposable",
    "ensure_path_exists",
    "get_dataloader",
    "get_non_persistent_buffers_set",
    "is_compatible_with_meta",
    "is_ddp_ignored",
    "print_rank_0",
    "set_seed",
]


def set_seed(seed: int) -> None:
    """Start Python's, NumPy's and torch's random numbers (those of every GPU, too) from ``seed``.

    Raises:
        TypeError: ``seed`` is no whole number.
    """
    as_kind("seed", seed, Integral, "a whole number")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ensure_path_exists(filename: str) -> None:
    """Make the directory that ``filename`` is in, where there is none."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def conditional_context(context_manager: AbstractContextManager[Any], enable: bool = True) -> Iterator[None]:
    """Inside ``context_manager`` where ``enable`` is True; otherwise it is not entered."""
    if not enable:
        yield
        return
    with context_manager:
        yield


def disposable(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does something the first time it is called, and nothing after that."""
    called: list[bool] = []

    @functools.wraps(func)
    def once(*args: Any, **kwargs: Any) -> Any:
        if called:
            return None
        called.append(True)
        return func(*args, **kwargs)

    return once


def is_ddp_ignored(p: torch.Tensor) -> bool:
    """Whether a program has marked the parameter (``_ddp_to_ignore``) as none of data parallelism's."""
    return bool(getattr(p, "_ddp_to_ignore", False))


def get_non_persistent_buffers_set(module: nn.Module, prefix: str = "") -> set[str]:
    """Full names of the buffers that ``state_dict()`` leaves out."""
    as_kind("module", module, nn.Module, "an nn.Module")
    start = f"{prefix}." if prefix else ""
    kept = set(module.state_dict(keep_vars=True))
    return {start + name for name, _ in module.named_buffers(remove_duplicate=False) if name not in kept}


def print_rank_0(msg: str, logger: Any = None) -> None:
    """Say it on rank 0: to ``logger.info``, or by ``print``."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        print(msg, flush=True) if logger is None else logger.info(msg)


def is_compatible_with_meta() -> bool:
    """Whether torch has a meta device: every version that is supported does."""
    return True


def checkpoint(function: Callable[..., Any], activation_offload: bool, *args: Any, use_reentrant: bool = False) -> Any:
    """``function(*args)``, computed again in backward instead of keeping what it made; random numbers are the same.

    Args:
        function: of a model's part.
        activation_offload: only False.
        args: of the function.
        use_reentrant: both values are the same: torch's way that is not reentrant, which gives what either would.

    Raises:
        NotImplementedError: ``activation_offload=True``.
    """
    if activation_offload:
        refuse(
            "activation_offload",
            activation_offload,
            "give False; torch.autograd.graph.save_on_cpu() around the forward pass keeps activations on the host",
        )
    as_kind("function", function, Callable, "what runs a part of a model")  # type: ignore[arg-type]
    return computed_again(function, *args, use_reentrant=False)


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader[Any]:
    """A ``DataLoader`` of this rank's part of ``dataset``.

    Args:
        dataset: with a length.
        shuffle: another order each epoch; call ``dataloader.sampler.set_epoch(epoch)`` where there are several ranks.
        seed: of the order over several ranks, and of the workers.
        add_sampler: False: every rank sees all.
        drop_last: drop what does not fill a batch.
        pin_memory: see ``DataLoader``.
        num_workers: see ``DataLoader``.
        kwargs: further arguments of ``DataLoader``.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sampler: DistributedSampler[Any] | None = None
    if add_sampler and ranks > 1:
        sampler = DistributedSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def seed_worker(worker: int) -> None:
        set_seed(seed)

    return DataLoader(
        dataset,
        shuffle=shuffle if sampler is None else None,
        sampler=sampler,
        worker_init_fn=seed_worker,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **kwargs,
    )


def clear_layout_converter() -> None:
    """Nothing is kept that could be cleared."""


class Randomizer:
    """Numbers the random states of layers that are cut; here they follow from each rank's seed, and none is kept.

    Raises:
        NotImplementedError: one is made.
    """

    def __init__(self, seed: int) -> None:
        refuse("Randomizer(seed)", seed, "set_seed(seed) starts all random numbers; cut layers draw by their ranks")

    @staticmethod
    def reset_index() -> None:
        """Nothing is counted that could start anew."""
