"""Which format is at a path, and a :class:`CheckpointSource` for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.core.checkpoint.bounds import checked_names, checked_total, reading
from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.formats.huggingface import INDEX
from shardwise.core.checkpoint.formats.known import Given, formats_at, known_formats, loose_files
from shardwise.core.checkpoint.formats.renamed import renamed
from shardwise.core.checkpoint.formats.trainer import find_latest
from shardwise.core.checkpoint.source import OpenSource
from shardwise.core.checkpoint.state_check import check_state

__all__ = ["detect_format", "located", "open_checkpoint"]


def located(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the last by number of a Trainer's or accelerate's in it."""
    if not path.is_dir() or next(formats_at(path), None) or loose_files(path):
        return path
    return find_latest(path) or path


def detect_format(path: str | Path, part: str | None = None) -> str:
    """The name of one of :func:`known_formats`.

    Args:
        path: a directory or a file.
        part: ``"model"`` or ``"optimizer"``, where only that is wanted from a directory that has several.

    Raises:
        FileNotFoundError: nothing is there, or nothing that is known.
        CheckpointError: several formats are in the directory; they are named.
    """
    place = Path(path)
    file_format = next(formats_at(place), None) if place.is_file() else None
    if file_format is not None:
        return file_format.name
    if place.is_file() and not place.name.endswith(".json"):
        return "single"
    if place.is_file():
        one_of_several = ".index" in place.name and place.name not in INDEX
        return "colossalai" if one_of_several else detect_format(place.parent, part)
    if not place.is_dir():
        raise FileNotFoundError(f"{place}: no such file or directory")
    place = located(place)
    at = list(formats_at(place))
    runs = [each.name for each in at if each.of_run]
    found = [each.name for each in at]
    if runs:  # one of our own that stands beside it holds all of it
        found = ["native"] if "native" in found else runs
    if part is not None and found == ["colossalai", "huggingface"]:
        return "huggingface" if part == "model" else "colossalai"  # the optimizer beside a model in one file
    if len(found) > 1:
        raise CheckpointError(f"{place} holds checkpoints of several formats: {', '.join(found)}; say which (format=)")
    if found:
        return found[0]
    files = loose_files(place)
    if len(files) == 1:
        return "single"
    if files:
        listed = ", ".join(file.name for file in files[:5])
        raise CheckpointError(f"{place} holds {len(files)} files and no index ({listed}); name the file to open")
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
    """Open a checkpoint of any format for reading. Nothing in it is executed. The end of a ``with`` block closes it.

    Args:
        path: a directory or a file. A directory of native checkpoints stands for the newest of them, one of a Trainer
            or of accelerate for the last ``checkpoint-N`` or ``checkpoint_N`` by its number.
        format: the name of one of :func:`known_formats`; ``None``: found out.
        optimizer: ColossalAI only: the optimizer's directory, where it is not beside the model.
        parameter_names: names of an optimizer's parameters in its own order, for files that only number them.
        rename: names in it, or regular expressions, and what they become; see
            :func:`~shardwise.core.checkpoint.formats.renamed.renamed`.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: ``format`` is not one of the names, or a rule of ``rename`` fits nothing.
        CheckpointError: several formats, or content that is not known.
        RefusedPickle: a file that could only be read by running code; it says which classes it names.
        CheckpointDamage: a file is missing, cut off or changed.
    """
    names = [each.name for each in known_formats()]
    if format is not None and format not in names:
        raise ValueError(f"format={format!r}: known are {', '.join(names)}")
    source = _opened(path, format, Given(optimizer, parameter_names))
    if not rename:
        return source
    try:
        return renamed(source, rename)
    except BaseException:
        source.close()
        raise


def _opened(path: str | Path, format: str | None, given: Given) -> OpenSource:
    optimizer = given.optimizer
    place = located(Path(path))
    name = format or detect_format(place)
    if place.is_file() and place.name.endswith(".json") and name != "colossalai":
        place = place.parent
    known = next(each for each in known_formats() if each.name == name)
    if name == "native":
        return known.open(place, Given())
    if optimizer is not None and "optimizer" not in known.takes:
        raise ValueError(f"optimizer={str(optimizer)!r}: {place} is of format {name}, which keeps it with the model")
    if given.parameter_names is not None and "parameter_names" not in known.takes:
        raise ValueError(f"parameter_names given, but {place} is of format {name}, which has names")
    if name == "single":
        place = loose_files(place)[0] if place.is_dir() else place
    with reading(place):
        return _checked(known.open(place, given), (place, optimizer))


def _checked(source: OpenSource, places: Sequence[str | Path | None]) -> OpenSource:
    """What a foreign file says of its tensors and of its state is believed as far as it can be true."""
    where, there = places[0], 0
    try:
        for place in (Path(each) for each in places if each is not None):
            files = place.rglob("*") if place.is_dir() else place.parent.iterdir()
            there += sum(file.stat().st_size for file in files if file.is_file())
        checked_names(source.tensors(), where)
        checked_total(source.tensors(), there, where)
        check_state(source.state(), where)
    except BaseException:
        source.close()
        raise
    return source
