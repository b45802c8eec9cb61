"""The three whole files: model, optimizer, learning-rate scheduler.

These functions touch files only; who calls them on which rank is the front-end's business (see
:mod:`shardwise.checkpoint.agreement`). The optimizer's hyper-parameters and scaler travel as JSON in the header of the
same safetensors file as its tensors, so that one rename commits both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import tree
from shardwise.checkpoint.files import (
    CheckpointError,
    read_json,
    read_safetensors,
    read_torch,
    write_json,
    write_safetensors,
)

__all__ = [
    "align_model_state",
    "check_optimizer_state",
    "model_names",
    "read_lr_scheduler",
    "read_model",
    "read_optimizer",
    "target",
    "write_lr_scheduler",
    "write_model",
    "write_optimizer",
]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
HEADER = "shardwise"

Shapes = Sequence[tuple[int, ...]]


def target(path: str | Path, suffix: str) -> Path:
    """The file to write.

    Raises:
        ValueError: its ending is that of a torch pickle.
    """
    wanted = Path(path)
    if wanted.suffix in TORCH_SUFFIXES:
        raise ValueError(
            f"checkpoint={str(wanted)!r}: files are written as {suffix}, not in torch's pickle format; "
            f"give {str(wanted.with_suffix(suffix))!r} (torch's files can still be loaded)"
        )
    return wanted


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata.get(HEADER, "{}"))
    except ValueError as error:
        raise CheckpointError(f"the header of {path} is not JSON ({error}); load another copy") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {path} is {header!r:.80} and not an object; load another copy")
    return header


# -- model


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def write_model(state: Mapping[str, object], path: str | Path) -> None:
    """Write a full model state (name -> tensor) as one safetensors file.

    Names that are one tensor in memory (tied weights) are stored once; the file lists the other names. Entries that are
    not tensors (``get_extra_state``) are stored as JSON.

    Raises:
        ValueError: the name has a torch suffix (.pt, .pth, .bin, .ckpt).
        TypeError: an extra state cannot be written as JSON.
        OSError: the file cannot be written.
    """
    file = target(path, ".safetensors")
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, object] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            extra[name] = value
            continue
        kept = first.setdefault(_memory(value), name) if value.numel() else name
        if kept == name:
            tensors[name] = _own_memory(value)
        else:
            aliases[name] = kept
    encoded = tree.encode(extra, tensors, "$extra")
    header = json.dumps({"kind": "model", "aliases": aliases, "extra": encoded}, allow_nan=False)
    write_safetensors(file, tensors, {"format": "pt", HEADER: header})


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def read_model(path: str | Path) -> dict[str, Any]:
    """The model state in a file: ours, any safetensors file, or a torch file (read with ``weights_only=True``).

    A directory stands for the ``model.safetensors`` or ``pytorch_model.bin`` in it.

    Raises:
        FileNotFoundError: nothing there.
        NotImplementedError: the directory holds a checkpoint in several files.
        CheckpointError: the file is damaged or holds no dictionary.
    """
    source = _source(Path(path))
    if source.suffix in TORCH_SUFFIXES:
        state = read_torch(source)
        if not isinstance(state, dict):
            raise CheckpointError(f"{source} holds a {type(state).__name__}, not a dictionary of tensors")
        return state
    tensors, metadata = read_safetensors(source)
    header = _header(source, metadata)
    extra = tree.decode(header.get("extra", {}), tensors)
    state = {name: tensor for name, tensor in tensors.items() if not name.startswith("$extra")}
    for name, kept in header.get("aliases", {}).items():
        if kept not in state:
            raise CheckpointError(f"{source} names {name!r} as another name of {kept!r}, which it does not hold")
        state[name] = state[kept]
    return {**state, **extra}


def _source(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return path / name
    indices = sorted(item.name for item in path.glob("*.index.json"))
    if indices:
        raise NotImplementedError(
            f"checkpoint={str(path)!r} is in several files ({indices[0]}); only whole files are read for now"
        )
    raise FileNotFoundError(f"{path} is a directory without model.safetensors or pytorch_model.bin; give a file")


def model_names(module: nn.Module) -> list[list[str]]:
    """Groups of names that are one tensor of the module (tied weights), each of two names or more."""
    groups: dict[int, list[str]] = {}
    for found in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in found:
            groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def align_model_state(
    state: Mapping[str, Any], expected: Mapping[str, Any], tied: Iterable[Sequence[str]], strict: bool
) -> dict[str, Any]:
    """``state`` with the names that ``expected`` has, or one error that lists everything that does not fit.

    Args:
        state: what a file holds.
        expected: the model's own ``state_dict()``; of its tensors only the shapes are read.
        tied: groups of names that are one tensor; one name of a group in ``state`` is enough.
        strict: also refuse names that are missing from ``state`` or unknown to the model. A shape that differs is
            always refused.

    Raises:
        ValueError: with every missing, unexpected and differently shaped name.
    """
    given = dict(state)
    for names in tied:
        present = [name for name in names if name in given]
        for name in names:
            if present and name in expected:
                given.setdefault(name, given[present[0]])
    problems = []
    for name, own in expected.items():
        if name in given:
            shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in (given[name], own)]
            if shapes[0] != shapes[1]:
                problems.append(f"{name}: shape {shapes[0]} in the checkpoint, {shapes[1]} in the model")
        elif strict:
            problems.append(f"{name}: missing from the checkpoint")
    problems += [f"{name}: not in the model" for name in given if name not in expected and strict]
    if problems:
        raise ValueError(
            f"the checkpoint does not fit the model, nothing was loaded ({len(problems)} names):\n  "
            + "\n  ".join(problems)
            + ("\npass strict=False to ignore missing and unexpected names" if strict else "")
        )
    return {name: value for name, value in given.items() if name in expected}


# -- optimizer


def write_optimizer(state: Mapping[str, Any], shapes: Sequence[Shapes] | None, path: str | Path) -> None:
    """Write an optimizer's ``state_dict()`` (full tensors, per parameter index) as one safetensors file.

    Everything in it that is not a tensor (param_groups, steps, the scaler) is JSON in the header.

    Args:
        state: keys ``state`` and ``param_groups``, and ``scaler`` where there is one.
        shapes: by group, the shape of every parameter; checked when loading. ``None``: unknown.
        path: the file to write.

    Raises:
        ValueError: the name has a torch suffix.
        TypeError: the state holds something that is neither a tensor nor JSON.
        OSError: the file cannot be written.
    """
    file = target(path, ".safetensors")
    tensors: dict[str, torch.Tensor] = {}
    encoded = tree.encode(state, tensors)
    header = {"kind": "optimizer", "shapes": shapes, "state": encoded}
    write_safetensors(file, tensors, {"format": "pt", HEADER: json.dumps(header, allow_nan=False)})


def read_optimizer(path: str | Path) -> tuple[dict[str, Any], list[Shapes] | None]:
    """The optimizer state in a file and by group the shapes of its parameters (``None`` where the file has none).

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: the file is damaged, or is not an optimizer's.
    """
    source = Path(path)
    if source.is_dir():
        raise IsADirectoryError(f"{source} is a directory; give the file that save_optimizer wrote")
    if source.suffix in TORCH_SUFFIXES:
        state = read_torch(source)
        if not isinstance(state, dict) or "param_groups" not in state:
            raise CheckpointError(f"{source} is not an optimizer's state: it has no 'param_groups'")
        return state, None
    tensors, metadata = read_safetensors(source)
    header = _header(source, metadata)
    if header.get("kind") != "optimizer":
        raise CheckpointError(f"{source} is not an optimizer's file (kind {header.get('kind')!r}); see save_optimizer")
    shapes = header["shapes"]
    known: list[Shapes] | None = None if shapes is None else [[tuple(shape) for shape in group] for group in shapes]
    return tree.decode(header["state"], tensors), known


def check_optimizer_state(state: Mapping[str, Any], saved: Sequence[Shapes] | None, own: Sequence[Shapes]) -> None:
    """Compare a read state with the optimizer that is to take it.

    Args:
        state: what :func:`read_optimizer` found.
        saved: the shapes it found, or ``None``: then only numbers are compared.
        own: by group, the shapes of the optimizer's parameters.

    Raises:
        ValueError: other number of groups, other number of parameters in one, or other shapes; all are listed.
    """
    groups = state["param_groups"]
    if len(groups) != len(own):
        raise ValueError(
            f"the checkpoint has {len(groups)} parameter groups and the optimizer {len(own)}; "
            "build the optimizer with the same groups as when saving"
        )
    problems = []
    for index, (group, shapes) in enumerate(zip(groups, own, strict=True)):
        count = len(group["params"])
        if count != len(shapes):
            problems.append(f"group {index}: {count} parameters in the checkpoint, {len(shapes)} in the optimizer")
        elif saved is not None:
            problems += [
                f"group {index}, parameter {place}: shape {old} in the checkpoint, {new} in the optimizer"
                for place, (old, new) in enumerate(zip(saved[index], shapes, strict=True))
                if old != new
            ]
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(f"the checkpoint does not fit the optimizer, nothing was loaded:\n  {listed}")


# -- learning-rate scheduler


def write_lr_scheduler(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a scheduler's ``state_dict()`` as JSON.

    Raises:
        ValueError: the name has a torch suffix.
        TypeError: the state holds something that JSON cannot; it is named.
        OSError: the file cannot be written.
    """
    file = target(path, ".json")
    tensors: dict[str, torch.Tensor] = {}
    encoded = tree.encode(state, tensors)
    write_json(file, {"kind": "lr_scheduler", "state": encoded, "tensors": tree.inline(tensors)})


def read_lr_scheduler(path: str | Path) -> dict[str, Any]:
    """The scheduler state in a file: our JSON, or a torch file (read with ``weights_only=True``).

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: the file is damaged, or is not a scheduler's.
    """
    source = Path(path)
    if source.suffix in TORCH_SUFFIXES:
        state = read_torch(source)
        if not isinstance(state, dict):
            raise CheckpointError(f"{source} holds a {type(state).__name__}, not a scheduler's state")
        return state
    data = read_json(source)
    if not isinstance(data, dict) or data.get("kind") != "lr_scheduler":
        raise CheckpointError(f"{source} is not a scheduler's file; give the one that save_lr_scheduler wrote")
    decoded: dict[str, Any] = tree.decode(data["state"], tree.outline(data["tensors"]))
    return decoded
