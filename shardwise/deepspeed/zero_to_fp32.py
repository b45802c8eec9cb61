"""``zero_to_fp32``: the full model of a checkpoint in fp32, in one process and without executing content of files.

Checkpoints of DeepSpeed's ``save_checkpoint`` and of shardwise's engines are read, and any other format that
:func:`~shardwise.core.checkpoint.formats.open_checkpoint` reads.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.core.base.sizes import parse_size
from shardwise.core.base.validate import as_path
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint.directory import LATEST
from shardwise.core.checkpoint.formats.atomic_files import (
    one_at_a_time,
    output_file,
    output_files,
    split_by_size,
    write_text,
    write_torch,
)
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, model_entries, to_tensor
from shardwise.core.checkpoint.formats.registry import open_checkpoint
from shardwise.core.checkpoint.formats.safetensors_file import write_safetensors_stream
from shardwise.core.checkpoint.input_checks import read_name
from shardwise.core.checkpoint.source import CheckpointError, OpenSource

__all__ = [
    "FROZEN",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "enable_universal_checkpoint",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "write_program",
]


FROZEN = "frozen"
"""The entry of an engine's checkpoint with the names of frozen parameters."""
PROGRAM = '''#!/usr/bin/env python
"""The model of this directory's newest checkpoint in fp32: python zero_to_fp32.py . OUTPUT_DIRECTORY"""

from shardwise.deepspeed.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_WEIGHTS = re.compile(r"(pytorch_model|model)(-\d+-of-\d+)?\.(bin|safetensors)(\.index\.json)?")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """Return the model's state on the CPU for ``load_state_dict``: masters and other floating-point tensors in fp32.

    Args:
        checkpoint_dir: a directory of checkpoints.
        tag: name of the checkpoint; ``None``: the one that ``latest`` names, or the newest.
        exclude_frozen_parameters: leave out frozen parameters.
        lazy_mode: no effect: tensors are in memory.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: the checkpoint is damaged or unknown; or frozen parameters are excluded, and it does not name
            them.
    """
    source, entries, tied = _opened(checkpoint_dir, tag, exclude_frozen_parameters, torch.float32)
    with source:
        state: dict[str, Any] = {name: to_tensor(entry) for name, entry in entries.items()}
    return state | {other: state[first] for other, first in tied.items()}


def _opened(
    directory: str | Path, tag: str | None, exclude_frozen: bool, dtype: torch.dtype
) -> tuple[OpenSource, dict[str, Entry], dict[str, str]]:
    """Return a checkpoint, its tensors, and the other names of tied tensors."""
    root = Path(as_path("checkpoint_dir", directory, "a directory of checkpoints"))
    tag = tag or read_name(root / LATEST)
    source = open_checkpoint(root / tag if tag else root)
    try:
        state = source.state()
        frozen = _frozen(state, directory) if exclude_frozen else set()
        entries = {n: e for n, e in model_entries(source, dtype).items() if n not in frozen}
        if not entries:
            raise CheckpointError(f"{directory} has no model, or only frozen parameters: name another checkpoint")
        return source, entries, {n: first for n, first in state.get("aliases", {}).items() if first in entries}
    except BaseException:
        source.close()
        raise


def _frozen(state: Mapping[str, Any], directory: str | Path) -> set[str]:
    user_state = state.get("user_state", state)
    names = user_state.get(FROZEN) if isinstance(user_state, Mapping) else None
    if not isinstance(names, list):
        raise CheckpointError(
            f"exclude_frozen_parameters: {directory} does not say which parameters were frozen; give "
            "exclude_frozen_parameters=True to save_checkpoint, which leaves them out"
        )
    return set(names)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the model in files for transformers and ``torch.load``, with one file at a time in memory.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: see :func:`get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: gets ``pytorch_model.bin``, or several files with an index; other files in it stay. Several ranks
            may write to the same directory: each waits for the previous one.
        dtype: dtype of floating-point tensors, or its name ("bf16").
        max_shard_size: size of a file, in bytes or as a string; ``None``: one file.
        safe_serialization: write ``model.safetensors`` instead.

    Raises:
        ValueError: an unsupported dtype, or an invalid size.
        OSError: the directory cannot be written; earlier files in it are unchanged.
    """
    float_dtype = DTYPES.get(str(dtype).removeprefix("torch."))
    if float_dtype is None:
        raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}")
    limit = parse_size(str(max_shard_size)) if max_shard_size is not None else float("inf")
    source, entries, tied = _opened(checkpoint_dir, tag, exclude_frozen_parameters, float_dtype)
    base, kind = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    weight_map: dict[str, str] = {}
    target = Path(output_dir)
    with (
        source,
        one_at_a_time(target),
        output_files(target, lambda name: _WEIGHTS.fullmatch(name) is not None) as fresh,
    ):
        shards = split_by_size([(name, entry.nbytes) for name, entry in entries.items()], limit)
        for number, names in enumerate(shards, 1):
            file = f"{base}-{number:05d}-of-{len(shards):05d}.{kind}" if len(shards) > 1 else f"{base}.{kind}"
            also = {other: first for other, first in tied.items() if first in names}
            _write(fresh / file, {name: entries[name] for name in names}, also)
            weight_map |= dict.fromkeys([*names, *also], file)
        if len(shards) > 1:
            total = sum(entry.nbytes for entry in entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_text(fresh / f"{base}.{kind}.index.json", json.dumps(index, indent=2) + "\n")


def _write(path: Path, entries: dict[str, Entry], tied: Mapping[str, str]) -> None:
    if path.suffix == ".safetensors":
        every = entries | {other: entries[first] for other, first in tied.items()}
        write_safetensors_stream(path, every, {"format": "pt"})
        return
    values = {name: to_tensor(entry) for name, entry in entries.items()}
    write_torch(path, values | {other: values[first] for other, first in tied.items()})


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Call :func:`convert_zero_checkpoint_to_state_dict` with fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load a checkpoint into ``model`` on the CPU, and return it. One warning lists names that only one of them has.

    Raises:
        CheckpointError: ``checkpoint_dir`` has no checkpoint that can be read.
    """
    model = model.cpu()
    keys = model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    if keys.missing_keys or keys.unexpected_keys:
        warn_user(
            f"{checkpoint_dir}: not in it {_some(keys.missing_keys)}; not in the model {_some(keys.unexpected_keys)}"
        )
    return model


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return (", ".join(listed[:5]) or "nothing") + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return DeepSpeed's files of optimizer state in a directory, in the order of their numbers.

    Raises:
        FileNotFoundError: there are none.
    """
    return _numbered(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """Return DeepSpeed's files of model state in a directory; see :func:`get_optim_files`."""
    return _numbered(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return rank 0's file of :func:`get_model_state_files`, whose name depends on the stage."""
    ranks = "zero_pp_rank_0_mp_rank_00" if zero_stage > 2 else "mp_rank_00"
    return _numbered(checkpoint_dir, f"{ranks}_model_states.pt")[0]


def _numbered(folder: str | Path, pattern: str) -> list[str]:
    paths = [str(path) for path in Path(folder).glob(pattern)]
    if not paths:
        raise FileNotFoundError(
            f"{folder} has no {pattern}; get_fp32_state_dict_from_zero_checkpoint reads shardwise's own checkpoints"
        )
    return sorted(paths, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


def write_program(directory: str | Path) -> None:
    """Write ``zero_to_fp32.py`` next to the checkpoints, as DeepSpeed does.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(directory) / "zero_to_fp32.py"
    if not path.exists():
        with output_file(path) as unfinished:
            write_text(unfinished, PROGRAM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python zero_to_fp32.py CHECKPOINTS OUTPUT``, with DeepSpeed's options."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint_dir", help="what was saved into")
    parser.add_argument("output_dir", help="where the model is written")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file (%(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch files")
    parser.add_argument("-t", "--tag", help="which checkpoint; by default what latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error comes from")
    options = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            options.max_shard_size,
            options.safe_serialization,
            options.tag,
            options.exclude_frozen_parameters,
        )
    except (CheckpointError, OSError, ValueError) as error:
        if options.debug:
            raise
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()


# ---- DeepSpeed's universal checkpoints, which are read like any other and never written.


def enable_universal_checkpoint(param_list: Iterable[Any]) -> None:
    """Do nothing: engines load any checkpoint into parameters as they are."""
