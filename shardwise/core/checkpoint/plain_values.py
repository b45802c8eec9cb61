"""Plain values of a checkpoint, decoded and compared with those of the run before anything is changed.

Options of parameter groups, small optimizer state, loss scale, schedulers and random number generators have to be of
the kind that the run has in their place: a string as a learning rate would fail in the next step, after the weights
were replaced. The random number generators are read and restored here, too.
"""

from __future__ import annotations

import copy
import numbers
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shardwise.core.base.checksum import checksum
from shardwise.core.base.device import random_state, set_random_state
from shardwise.core.checkpoint.input_checks import generator_state
from shardwise.core.checkpoint.load_plan import LoadPlan
from shardwise.core.checkpoint.training_run import Run, RunOptimizer
from shardwise.core.engine.checkpoint_state import Stored

FUNCTIONS = ("lr_lambdas",)
"""Lists in the state of torch's schedulers that have ``None`` for a function, or attributes for an object."""


def kind_mismatch(value: object, own: object, length: bool = True, none: bool = False) -> str:
    """Return why ``value`` cannot replace the run's ``own``; empty if it can.

    Args:
        length: compare the lengths of sequences, too.
        none: accept ``None`` for any value, not only for a bool.
    """
    if own is None or (value is None and (none or isinstance(own, bool))):
        return ""
    for kind in (str, Mapping, numbers.Real):
        if isinstance(own, kind) != isinstance(value, kind) and not (kind is numbers.Real and _is_number(value)):
            return f"{_short_value(value)} where the run has {_short_value(own)}"
    if isinstance(own, Mapping) and isinstance(value, Mapping):
        common = [key for key in own if key in value]
        by_key = ((key, kind_mismatch(value[key], own[key], length, none or key in FUNCTIONS)) for key in common)
        return next((f"{key!r:.40}: {why}" for key, why in by_key if why), "")
    if isinstance(own, list | tuple):
        if not isinstance(value, list | tuple) or (length and len(value) != len(own)):
            return f"{_short_value(value)} where the run has {_short_value(own)}"
        models = own if len(own) == len(value) else [own[0]] * len(value) if own else [None] * len(value)
        reasons = (kind_mismatch(each, model, length, none) for each, model in zip(value, models, strict=True))
        return next((why for why in reasons if why), "")
    if isinstance(own, torch.Tensor):
        fits = own.numel() == 1 and _is_number(value)
        fits = fits or (isinstance(value, torch.Tensor) and value.shape == own.shape and not value.is_complex())
        return "" if fits else f"{_short_value(value)} where the run has {_short_value(own)}"
    return ""


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


def _short_value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, list | tuple | Mapping):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a number of many digits"
    return f"{type(value).__name__} {text[:60]}"


def check_scheduler(scheduler: Any, saved: object, where: str) -> None:
    """Check that the values of ``saved``, the state of a scheduler of this class, are of the right kinds.

    Lengths of lists are not compared: milestones may change, and
    :meth:`~shardwise.core.checkpoint.schedulers.SavedScheduler.misfit` compares groups.

    Raises:
        ValueError: they are not; ``where`` and the entry are named.
    """
    own = scheduler.state_dict()
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise ValueError(f"{where}: the state of a scheduler is {_short_value(saved)}; nothing was loaded")
    third_party = not type(scheduler).__module__.startswith("torch.")
    for key, value in saved.items():
        none = third_party or key in FUNCTIONS
        why = kind_mismatch(value, own[key], False, none) if key in own else _reserved(scheduler, key)
        if why:
            kind = type(scheduler).__name__
            raise ValueError(f"{where}: {key!r:.60} does not fit {kind} ({why}); nothing was loaded")


def _reserved(scheduler: Any, key: str) -> str:
    # torch's schedulers set every attribute that their state names, methods and the optimizer included.
    reserved = key == "optimizer" or key.startswith("__") or callable(getattr(scheduler, key, None))
    return "a name that the scheduler reserves" if reserved else ""


class Options:
    """Options of the parameter groups and the loss scale of a checkpoint, checked against a run.

    Raises:
        CheckpointDamage: a value is not one that a save writes.
        ValueError: a value is of another kind than that of the run.
    """

    def __init__(self, run: Run, match: LoadPlan) -> None:
        self._run = run
        self._groups: list[tuple[RunOptimizer, int, dict[str, Any]]] = []
        for index, adopted in match.adopted.items():
            trainer = run.optimizers[index]
            for number, (own, options) in enumerate(zip(trainer.param_groups, adopted.options, strict=True)):
                fits = copy.deepcopy(checked_options(own, options, f"optimizer {index}, group {number}"))
                self._groups.append((trainer, number, fits))
            _check_small(trainer, match, index)
        self._scale = match.state.get("scaler")  # its form was checked with the other state

    def apply(self) -> None:
        """Set these options in the run."""
        for trainer, number, options in self._groups:
            trainer.param_groups[number].update(options)  # torch created new groups when it loaded the state
        scaler = self._run.optimizers[0].scaler if self._run.optimizers else None
        if scaler is not None and self._scale is not None:
            scaler.load_state_dict(self._scale)


def checked_options(own: Mapping[str, Any], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the ``options`` of a param group after a check that each is of the kind that ``own`` has.

    Raises:
        ValueError: an option is of another kind; the message has ``where`` and its name.
    """
    for key, value in options.items():
        why = "the parameters are not an option" if key == "params" else kind_mismatch(value, own.get(key))
        if own.get(key) is None and isinstance(value, torch.Tensor) and not _is_number(value):
            why = f"{_short_value(value)} for an option"
        if why:
            raise ValueError(f"{where}: {key!r:.60} does not fit ({why}); nothing was loaded")
    return dict(options)


def _check_small(trainer: RunOptimizer, match: LoadPlan, index: int) -> None:
    """Check that state of one key is of one kind for all parameters, and that step counts are numbers.

    Raises:
        ValueError: a parameter's state is of another kind.
    """
    entries = [(n, match.state_of(n) or {}) for names in match.local_state.group_names(trainer) for n in names]
    element_wise = {key for _, entry in entries for key, value in entry.items() if isinstance(value, Stored)}
    # Step counts are all tensors or (in older files) all numbers, because optimizers look at only one of them.
    counted = any(isinstance(entry.get("step"), torch.Tensor) for _, entry in entries)
    for name, entry in entries:
        for key, value in entry.items():
            if isinstance(value, Stored):
                continue
            tensor = value is None or isinstance(value, torch.Tensor)
            step = key == "step" and (not _is_number(value) or isinstance(value, torch.Tensor) != counted)
            if (key in element_wise and not tensor) or step:
                raise ValueError(
                    f"optimizer {index}: {key!r:.60} of {name} is {_short_value(value)}; nothing was loaded"
                )


def read_generators(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and the GPU's if ``device`` is one."""
    state = generator_state(random.getstate(), np.random.get_state(legacy=True))
    state["torch"], on_gpu = random_state(device)
    return state if on_gpu is None else {**state, "cuda": on_gpu}


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Set the states of :func:`read_generators`. The GPU's state is set if it was saved and ``device`` is a GPU."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state((numpy["name"], numpy["keys"].numpy(), numpy["position"], numpy["has_gauss"], numpy["cached"]))
    set_random_state(device, (state["torch"], state.get("cuda") if device.type == "cuda" else None))


def spread_generators(state: dict[str, Any], rank: int) -> None:
    """Seed the generators of ``rank``, which has none in the checkpoint, from rank 0's ``state`` and its number."""
    seed = (checksum(state["torch"].numpy()) + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
