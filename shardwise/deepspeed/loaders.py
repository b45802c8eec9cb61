"""Data loaders, and values of programs' own, under DeepSpeed's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["RepeatingLoader", "clone_tensors_for_torch_save", "move_to_device"]


class RepeatingLoader:
    """Begins anew when ``loader`` has nothing more.

    Raises:
        StopIteration: it has nothing at all.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Batches until it begins anew."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def _each(item: Any, change: Callable[[Tensor], Any]) -> Any:
    """``item`` with every tensor in lists, tuples and dicts changed."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_each(value, change) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_each(value, change) for value in item)
    if isinstance(item, dict):
        return type(item)({key: _each(value, change) for key, value in item.items()})
    return item


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy whose tensors are on ``device`` and share memory with nothing."""
    return _each(item, lambda tensor: tensor.detach().to(device, copy=True))


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """``item`` with its tensors (those of which ``criterion_func`` is true) on ``device``."""
    wanted = criterion_func or (lambda _: True)
    return _each(item, lambda tensor: tensor.to(device) if wanted(tensor) else tensor)


def model_file(base_folder: str, mp_rank_str: str) -> str:
    """Where DeepSpeed puts the model's state."""
    return str(Path(base_folder) / f"mp_rank_{mp_rank_str}_model_states.pt")


def zero_file(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Where DeepSpeed puts the optimizer's state of a rank."""
    return str(Path(base_folder) / f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def optimizer_files(checkpoint_dir: str) -> list[str]:
    """Files of DeepSpeed's in a directory that hold optimizers' state, in the order of their numbers.

    Raises:
        FileNotFoundError: there are none.
    """
    return _numbered(checkpoint_dir, "*_optim_states.pt")


def model_state_files(checkpoint_dir: str) -> list[str]:
    """Files of DeepSpeed's in a directory that hold models' state; see :func:`optimizer_files`."""
    return _numbered(checkpoint_dir, "*_model_states.pt")


def model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """The first rank's of :func:`model_state_files`, whose name depends on the stage.

    Raises:
        FileNotFoundError: there is none.
    """
    ranks = "zero_pp_rank_0_mp_rank_00" if zero_stage > 2 else "mp_rank_00"
    return _numbered(checkpoint_dir, f"{ranks}_model_states.pt")[0]


def _numbered(folder: str, pattern: str) -> list[str]:
    found = [str(path) for path in Path(folder).glob(pattern)]
    if not found:
        raise FileNotFoundError(
            f"{folder} has no {pattern}; get_fp32_state_dict_from_zero_checkpoint reads shardwise's own checkpoints"
        )
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def layer_file(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Where DeepSpeed puts a layer of a pipeline."""
    return str(Path(base_folder) / f"{layer_id}-model_{tp_rank:02d}_model_states.pt")
