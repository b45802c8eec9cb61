"""Data loaders whose batches are divided over the data-parallel ranks."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader, Dataset

from shardwise.core.base.warnings import warn_user


def is_dataloader(value: object) -> bool:
    """Return True for a data loader, or any object of the user that yields batches; a loss function is not one."""
    return isinstance(value, DataLoader) or (hasattr(value, "__iter__") and not callable(value))


def sampler_of(
    dataset: Dataset[Any], replicas: tuple[int, int], shuffle: bool, seed: int, drop_last: bool, cls: type[Any]
) -> Any:
    """Return a sampler of class ``cls`` for a rank: ``replicas`` are its index and the number of data-parallel ranks.

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
