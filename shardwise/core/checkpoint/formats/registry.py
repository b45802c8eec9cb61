"""The registry of formats: how each format is detected, opened and written; opens a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base.validate import as_path
from shardwise.core.checkpoint.directory import LATEST, scan
from shardwise.core.checkpoint.formats.colossalai import (
    find_parts,
    open_colossalai,
    write_colossalai_model,
    write_colossalai_optimizer,
)
from shardwise.core.checkpoint.formats.dcp import open_dcp, write_dcp
from shardwise.core.checkpoint.formats.deepspeed import find_step, open_deepspeed
from shardwise.core.checkpoint.formats.huggingface import INDEX, SINGLE_FILES, open_huggingface, write_huggingface
from shardwise.core.checkpoint.formats.lazy_tensors import closed_on_error, renamed
from shardwise.core.checkpoint.formats.native import NativeSource, write_native
from shardwise.core.checkpoint.formats.peft import CONFIG, open_peft, write_peft
from shardwise.core.checkpoint.formats.shard_index import read_index
from shardwise.core.checkpoint.formats.single_file import open_single, write_single
from shardwise.core.checkpoint.formats.torch_file import TORCH_SUFFIXES
from shardwise.core.checkpoint.formats.trainer import STATE, find_latest, kind_of, open_trainer
from shardwise.core.checkpoint.input_checks import check_state, checked_names, checked_total, reading
from shardwise.core.checkpoint.native_format import MANIFEST, has_pieces
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError, CheckpointSource, OpenSource


@dataclass(frozen=True)
class OpenOptions:
    """Arguments of :func:`open_checkpoint` for a format, passed to :attr:`Format.open`.

    Attributes:
        optimizer: the optimizer's own directory.
        parameter_names: names of an optimizer's parameters in its own order, for files that only number them.
    """

    optimizer: str | Path | None = None
    parameter_names: Sequence[str] | None = None


@dataclass(frozen=True)
class Format:
    """A checkpoint format, for :func:`register_format`.

    Attributes:
        name: value of ``open_checkpoint(format=...)``.
        is_at: whether a directory (a file, with :attr:`of_file`) has this format. It should open as few files as
            possible, and not raise if the format is another.
        open: returns a source and executes nothing of the content; raises ``CheckpointError`` and ``CheckpointDamage``.
        takes: the attributes of :class:`OpenOptions` that it uses; others are errors.
        of_run: a directory that also has a model of another format among its files.
        of_file: the format is one file; ``is_at`` is called with files, not directories.
        needs: the file that identifies a directory, for the message if no format is found.
        write: writes a source at a path completely or not at all; ``None``: the format is read-only.
        options: the keyword arguments that ``write`` takes.
    """

    name: str
    is_at: Callable[[Path], bool]
    open: Callable[[Path, OpenOptions], OpenSource]
    takes: frozenset[str] = frozenset()
    of_run: bool = False
    of_file: bool = False
    needs: str = ""
    write: Callable[..., object] | None = None
    options: frozenset[str] = frozenset({"dtype"})


def _is_native(path: Path) -> bool:
    return (path / MANIFEST).is_file() or has_pieces(str(path)) or bool(scan(str(path)))


def _is_colossalai(path: Path) -> bool:
    model, optimizer = find_parts(path)
    if optimizer is not None or (model is not None and (model.parent != path or model.name not in INDEX)):
        return True
    # Hugging Face numbers its shards "-00001-of-00002", ColossalAI "-00001".
    return model is not None and not any("-of-" in file for file in read_index(model)[1].values())


def _is_huggingface(path: Path) -> bool:
    single, index = (any((path / name).is_file() for name in names) for names in (SINGLE_FILES, INDEX))
    return single or (index and not _is_colossalai(path))


def loose_files(path: Path) -> list[Path]:
    """Return the files of a directory that may each be a checkpoint."""
    files = sorted(f for f in path.iterdir() if f.suffix in (".safetensors", *TORCH_SUFFIXES) and f.is_file())
    return [file for file in files if file.name != "training_args.bin"]  # this file of Trainer is never a model


def _only_file(path: Path) -> Path:
    files = loose_files(path)
    if len(files) != 1:
        listed = ", ".join(file.name for file in files[:5]) or "no .safetensors or torch file"
        raise CheckpointError(f"{path} holds {len(files)} files and no index ({listed}); name the file to open")
    return files[0]


def _native_directory(path: Path) -> Path:
    if (path / MANIFEST).is_file() or has_pieces(str(path)):
        return path
    newest = next(iter(scan(str(path))), None)
    if newest is None:
        raise FileNotFoundError(f"{path} has no complete checkpoint; check the path")
    if newest.head is None:  # it is unknown which checkpoint is the newest
        raise CheckpointDamage(newest.damage, f"name one of the checkpoints in {path}")
    return Path(newest.path)


def _open_run(path: Path, options: OpenOptions) -> OpenSource:
    return open_trainer(path, options.parameter_names)


def _write_colossalai(
    source: CheckpointSource,
    path: str | Path,
    size_per_shard: float = 1024.0,
    safetensors: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model into ``path``, or model and optimizer into two directories below it."""
    optimizers = source.state().get("optimizers") or []
    has_optimizer = any(group["params"] for each in optimizers[:1] for group in each.get("groups", []))
    place = Path(path, "model") if has_optimizer else Path(path)
    write_colossalai_model(source, place, size_per_shard, None, safetensors, dtype)
    if has_optimizer:
        write_colossalai_optimizer(source, Path(path, "optimizer"), size_per_shard)


NUMBERED = frozenset({"parameter_names"})
_FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format(
            "native",
            _is_native,
            lambda path, options: NativeSource(_native_directory(path)),
            needs=MANIFEST,
            write=write_native,
        ),
        Format(
            "dcp",
            lambda path: (path / ".metadata").is_file(),
            lambda path, options: open_dcp(path),
            needs=".metadata",
            write=write_dcp,
            options=frozenset({"dtype", "layout"}),
        ),
        Format(
            "peft",
            lambda path: (path / CONFIG).is_file(),
            lambda path, options: open_peft(path),
            needs=CONFIG,
            write=write_peft,
            options=frozenset({"dtype", "config", "adapter"}),
        ),
        Format(
            "deepspeed",
            lambda path: find_step(path) is not None,
            lambda path, options: open_deepspeed(path),
            needs="*_model_states.pt",
        ),
        Format(
            "colossalai",
            _is_colossalai,
            lambda path, options: open_colossalai(path, options.optimizer, options.parameter_names),
            takes=NUMBERED | {"optimizer"},
            needs="an index",
            write=_write_colossalai,
            options=frozenset({"dtype", "size_per_shard", "safetensors"}),
        ),
        Format(
            "huggingface",
            _is_huggingface,
            lambda path, options: open_huggingface(path),
            write=write_huggingface,
            options=frozenset({"dtype", "size_per_shard", "config", "generation_config"}),
        ),
        Format(
            "single",
            lambda path: False,  # a single file that matches no other format
            lambda path, options: open_single(path, options.parameter_names),
            takes=NUMBERED,
            needs="a single .safetensors or torch file",
            write=write_single,
        ),
        Format("trainer", lambda path: kind_of(path) == "trainer", _open_run, takes=NUMBERED, of_run=True),
        Format("accelerate", lambda path: kind_of(path) == "accelerate", _open_run, takes=NUMBERED, of_run=True),
    )
}


def known_formats() -> Iterator[Format]:
    """Iterate over the built-in formats, then over the registered formats."""
    yield from list(_FORMATS.values())


def formats_at(path: Path) -> Iterator[Format]:
    """Iterate over the formats that recognize ``path``; each may raise for damage."""
    is_file = path.is_file()
    return (each for each in known_formats() if each.of_file == is_file and each.is_at(path))


def write_checkpoint(source: CheckpointSource, path: str | Path, format: str, **options: Any) -> None:
    """Write ``source`` at ``path``; an existing checkpoint is replaced in one step, or unchanged if this raises.

    Args:
        source: the result of :func:`open_checkpoint`.
        path: a directory or a file, as the format has it.
        format: ``"native"``, ``"huggingface"``, ``"dcp"``, ``"single"``, ``"peft"``, ``"colossalai"``, or a registered
            name.
        options: further arguments of the writer, such as those of :func:`write_huggingface`.

    Raises:
        ValueError: an unknown format or option.
        CheckpointError: the source lacks values that the format needs.
        OSError: the checkpoint cannot be written.

    Examples:
        >>> with shardwise.open_checkpoint("checkpoints") as source:
        ...     shardwise.write_checkpoint(source, "model.pt", "single", dtype=torch.bfloat16)
    """
    known = {each.name: each for each in known_formats() if each.write is not None}
    chosen = known.get(format)
    if chosen is None or chosen.write is None:
        raise ValueError(f"format={format!r} cannot be written; use one of {', '.join(known)}")
    for name, value in options.items():
        if name not in chosen.options:
            raise ValueError(f"{name}={value!r:.80}: format {format} has no such option; leave it out")
    chosen.write(source, Path(as_path("path", path)), **options)


def register_format(format: Format) -> Callable[[], None]:
    """Register a format, so that its checkpoints are recognized, opened and written like those of the built-in formats.

    Args:
        format: a :class:`Format`: its name, and functions that recognize, open and write it.

    Returns:
        A function that removes the format again.

    Raises:
        TypeError: ``format`` is not a :class:`Format`.
        ValueError: a format of that name exists.

    Examples:
        >>> def open_npz(path, options):
        ...     raise shardwise.CheckpointError(f"{path} cannot be opened yet")
        >>> form = shardwise.Format("npz", lambda path: path.suffix == ".npz", open_npz, of_file=True)
        >>> take_back = shardwise.register_format(form)
        >>> take_back()
    """
    if not isinstance(format, Format):
        raise TypeError(f"register_format({format!r:.80}): give a Format")
    if format.name in _FORMATS:
        raise ValueError(f"register_format: there is a format {format.name!r} already; give another name")
    _FORMATS[format.name] = format

    def take_back() -> None:
        _FORMATS.pop(format.name, None)

    return take_back


def located(path: Path) -> Path:
    """Return ``path``, or the checkpoint of Trainer or accelerate in ``path`` with the highest number.

    A file that describes its directory, such as ``config.json`` or ``latest``, stands for the directory.
    """
    if path.is_file() and path.name in (MANIFEST, CONFIG, LATEST, STATE, "config.json"):
        path = path.parent
    if not path.is_dir() or next(formats_at(path), None) or loose_files(path):
        return path
    return find_latest(path) or path


def detect_format(path: str | Path, part: str | None = None) -> str:
    """Return the name of the format at ``path``, one of :func:`known_formats`.

    Args:
        path: a directory or a file.
        part: ``"model"`` or ``"optimizer"``, to choose in a directory that has both in different formats.

    Raises:
        FileNotFoundError: there is no checkpoint of a known format.
        CheckpointError: the directory has several formats; the message names them.
    """
    place = located(Path(path))
    file_format = next(formats_at(place), None) if place.is_file() else None
    if file_format is not None:
        return file_format.name
    if place.is_file() and place.name not in INDEX:
        return "colossalai" if ".index" in place.name and place.suffix == ".json" else "single"
    if place.is_file():
        return detect_format(place.parent, part)
    if not place.is_dir():
        raise FileNotFoundError(f"{place}: no such file or directory; check the path")
    at = list(formats_at(place))
    runs = [each.name for each in at if each.of_run]
    names = [each.name for each in at]
    if runs:  # a native checkpoint next to it has everything
        names = ["native"] if "native" in names else runs
    if part is not None and names == ["colossalai", "huggingface"]:
        return "huggingface" if part == "model" else "colossalai"  # an optimizer next to a model in one file
    if len(names) > 1:
        raise CheckpointError(f"{place} holds several formats: {', '.join(names)}; choose one with format=")
    if names:
        return names[0]
    if loose_files(place):
        _only_file(place)
        return "single"
    needs = ", ".join(each.needs for each in known_formats() if each.needs)
    raise FileNotFoundError(
        f"{place} holds no checkpoint: none of {needs} is in it; if a save did not finish, use an earlier one"
    )


def open_checkpoint(
    path: str | Path,
    format: str | None = None,
    optimizer: str | Path | None = None,
    parameter_names: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> OpenSource:
    """Open a checkpoint of any format for reading. No code in it is executed. A ``with`` block closes the source.

    Args:
        path: a directory or a file. In a directory of native checkpoints, opens the newest; in one of a Trainer or of
            accelerate, the ``checkpoint-N`` or ``checkpoint_N`` with the highest number.
        format: ``"native"``, ``"huggingface"``, ``"dcp"``, ``"single"``, ``"peft"``, ``"deepspeed"``, ``"colossalai"``,
            ``"trainer"``, ``"accelerate"``, or a registered name; ``None``: detect it.
        optimizer: ColossalAI only: the optimizer's directory, if it is not next to the model.
        parameter_names: names of an optimizer's parameters in its own order, for files that only number them.
        rename: names in the checkpoint, or regular expressions, with their new names, as for
            ``session.checkpoints.load``.

    Returns:
        The source, which a writer reads tensor by tensor.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: an unknown ``format``, or a rule of ``rename`` that matches nothing.
        CheckpointError: several formats, or unknown content.
        RefusedPickle: a file that can only be read by running code; the message names its classes.
        CheckpointDamage: a file is missing, cut off or changed.

    Examples:
        >>> with shardwise.open_checkpoint("checkpoints") as source:
        ...     path = shardwise.write_single(source, "model.safetensors")
    """
    names = [each.name for each in known_formats()]
    if format is not None and format not in names:
        raise ValueError(f"format={format!r} is not known; use one of {', '.join(names)}")
    source = _opened(path, format, OpenOptions(optimizer, parameter_names))
    if not rename:
        return source
    with closed_on_error(source):
        return renamed(source, rename)


def _opened(path: str | Path, format: str | None, options: OpenOptions) -> OpenSource:
    place = located(Path(as_path("path", path)))
    name = format or detect_format(place)
    if place.is_file() and place.name in INDEX and name != "colossalai":
        place = place.parent
    known = next(each for each in known_formats() if each.name == name)
    if options.optimizer is not None and "optimizer" not in known.takes:
        raise ValueError(
            f"optimizer={str(options.optimizer)!r}: format {name} of {place} keeps it with the model; leave it out"
        )
    if options.parameter_names is not None and "parameter_names" not in known.takes:
        raise ValueError(f"parameter_names: {place} is of format {name}, which has names; leave them out")
    if name == "native":
        return known.open(place, options)
    if name == "single":
        place = _only_file(place) if place.is_dir() else place
    with reading(place):
        return _checked(known.open(place, options), (place, options.optimizer))


def _checked(source: OpenSource, places: Sequence[str | Path | None]) -> OpenSource:
    """Check that names, sizes and state of a foreign file are plausible."""
    where, there = places[0], 0
    with closed_on_error(source):
        for place in (Path(each) for each in places if each is not None):
            files = place.rglob("*") if place.is_dir() else place.parent.iterdir()
            there += sum(file.stat().st_size for file in files if file.is_file())
        checked_names(source.tensors(), where)
        checked_total(source.tensors(), there, where)
        check_state(source.state(), where)
    return source
