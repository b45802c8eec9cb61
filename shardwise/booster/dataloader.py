"""Data loaders whose batches are divided over the data-parallel ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.core.base.validate import MOST_SEED, boolean, integer
from shardwise.core.base.warnings import warn_user

__all__ = ["distributed_dataloader", "is_dataloader"]


def is_dataloader(value: object) -> bool:
    """Return True for a data loader, or any object of the user that yields batches; a loss function is not one."""
    return isinstance(value, DataLoader) or (hasattr(value, "__iter__") and not callable(value))


def distributed_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    data_parallel: Callable[[], tuple[int, int]],
    *,
    shuffle: bool,
    seed: int,
    cls: type[Any] | None,
    options: dict[str, Any],
) -> DataLoader[Any]:
    """Return a ``DataLoader`` for one rank.

    Workers use a generator seeded with ``seed`` and the rank, so they differ between ranks and between epochs and a run
    is reproducible.

    Args:
        dataset: a map-style dataset.
        batch_size: that of this rank.
        data_parallel: returns this rank's index among the data-parallel ranks, and their number.
        shuffle: use another order in every epoch (``sampler.set_epoch``), derived from ``seed``.
        seed: seed of the order; the same on every rank.
        cls: class of the sampler; ``None``: ``DistributedSampler``.
        options: ``drop_last``, ``pin_memory``, ``num_workers`` and further arguments of ``DataLoader``.

    Raises:
        TypeError: the dataset is iterable-style, which no sampler can divide over ranks, or an argument has a wrong
            type.
        ValueError: ``options`` has an argument that the sampler defines, or a number is out of range.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length, so no sampler can divide it over the ranks; divide it in its own "
            "__iter__ (torch.distributed.get_rank()) and pass your own DataLoader to boost"
        )
    if batch_size is not None:
        integer("batch_size", batch_size, 1, what="a number of samples")
    integer("seed", seed, 0, MOST_SEED)
    integer("num_workers", options["num_workers"], 0, what="a number of processes")
    for name in ("drop_last", "pin_memory"):
        boolean(name, options[name])
    boolean("shuffle", shuffle)
    replicas = data_parallel()
    sampler = _sampler(dataset, replicas, shuffle, seed, options["drop_last"], cls or DistributedSampler)
    clash = sorted({"sampler", "batch_sampler"} & options.keys())
    if clash:
        raise ValueError(
            f"{clash[0]}={options[clash[0]]!r}: prepare_dataloader makes the sampler itself; give "
            "distributed_sampler_cls, or build torch.utils.data.DataLoader yourself and pass it to boost"
        )
    if "generator" not in options:
        options = {**options, "generator": torch.Generator().manual_seed(seed + replicas[0])}
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)


def _sampler(
    dataset: Dataset[Any], replicas: tuple[int, int], shuffle: bool, seed: int, drop_last: bool, cls: type[Any]
) -> Any:
    """Return a sampler of class ``cls``.

    It is called as ``cls(dataset, num_replicas=, rank=, shuffle=)``, and with ``seed=`` and ``drop_last=`` if its
    signature has them; a warning names those that it does not have.
    """
    rank, size = replicas
    accepted = inspect.signature(cls).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    options = {"seed": seed, "drop_last": drop_last}
    missing = [name for name in options if not (anything or name in accepted)]
    needed = [name for name in missing if (shuffle if name == "seed" else drop_last)]
    if needed:
        warn_user(f"{cls.__name__} takes no {' and no '.join(needed)}, so it is not passed on")
    options = {name: value for name, value in options.items() if name not in missing}
    return cls(dataset, num_replicas=size, rank=rank, shuffle=shuffle, **options)
