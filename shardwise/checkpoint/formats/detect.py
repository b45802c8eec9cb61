"""Which format is at a path, and a :class:`CheckpointSource` for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardwise.checkpoint.bounds import checked_names, checked_total, reading
from shardwise.checkpoint.directory import scan
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.format import MANIFEST, has_pieces
from shardwise.checkpoint.formats.colossalai import find_parts, open_colossalai
from shardwise.checkpoint.formats.dcp import open_dcp
from shardwise.checkpoint.formats.deepspeed import find_step, open_deepspeed
from shardwise.checkpoint.formats.huggingface import INDEX, WHOLE, open_huggingface
from shardwise.checkpoint.formats.indexed import read_index
from shardwise.checkpoint.formats.peft import CONFIG, open_peft
from shardwise.checkpoint.formats.renamed import renamed
from shardwise.checkpoint.formats.single import open_single
from shardwise.checkpoint.formats.torch_file import TORCH_SUFFIXES
from shardwise.checkpoint.formats.trainer import find_latest, kind_of, open_trainer
from shardwise.checkpoint.read import NativeSource
from shardwise.checkpoint.source import CheckpointDamage, OpenSource
from shardwise.checkpoint.state_check import check_state

__all__ = ["FORMATS", "detect_format", "located", "open_checkpoint"]

FORMATS = ("native", "huggingface", "single", "dcp", "colossalai", "deepspeed", "peft", "trainer", "accelerate")
RUNS = ("trainer", "accelerate")
"""Directories with a model of another format among their files."""


def _is_native(path: Path) -> bool:
    return (path / MANIFEST).is_file() or has_pieces(str(path)) or bool(scan(str(path)))


def _model_index(path: Path) -> Path | None:
    return next((path / name for name in INDEX if (path / name).is_file()), None)


def _is_colossalai(path: Path) -> bool:
    model, optimizer = find_parts(path)
    if optimizer is not None or (model is not None and (model.parent != path or model.name not in INDEX)):
        return True
    # Hugging Face numbers its shards "-00001-of-00002", ColossalAI "-00001".
    return model is not None and not any("-of-" in file for file in read_index(model)[1].values())


def _is_huggingface(path: Path) -> bool:
    if any((path / name).is_file() for name in WHOLE):
        return True
    index = _model_index(path)
    return index is not None and not _is_colossalai(path)


def _files(path: Path) -> list[Path]:
    known = (".safetensors", *TORCH_SUFFIXES)
    found = sorted(item for item in path.iterdir() if item.suffix in known and item.is_file())
    return [item for item in found if item.name != "training_args.bin"]  # of Trainer's, never a model


_TESTS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    ("native", _is_native),
    ("dcp", lambda path: (path / ".metadata").is_file()),
    ("peft", lambda path: (path / CONFIG).is_file()),
    ("deepspeed", lambda path: find_step(path) is not None),
    ("colossalai", _is_colossalai),
    ("huggingface", _is_huggingface),
    ("trainer", lambda path: kind_of(path) == "trainer"),
    ("accelerate", lambda path: kind_of(path) == "accelerate"),
)


def located(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the last by number of a Trainer's or accelerate's in it."""
    if not path.is_dir() or any(test(path) for _, test in _TESTS) or _files(path):
        return path
    return find_latest(path) or path


def detect_format(path: str | Path, part: str | None = None) -> str:
    """One of :data:`FORMATS`.

    Args:
        path: a directory or a file.
        part: ``"model"`` or ``"optimizer"``, where only that is wanted from a directory that has several.

    Raises:
        FileNotFoundError: nothing is there, or nothing that is known.
        CheckpointError: several formats are in the directory; they are named.
    """
    place = Path(path)
    if place.is_file() and not place.name.endswith(".json"):
        return "single"
    if place.is_file():
        one_of_several = ".index" in place.name and place.name not in INDEX
        return "colossalai" if one_of_several else detect_format(place.parent, part)
    if not place.is_dir():
        raise FileNotFoundError(f"{place}: no such file or directory")
    place = located(place)
    found = [name for name, test in _TESTS if test(place)]
    if any(name in found for name in RUNS):  # one of our own that stands beside it holds all of it
        found = ["native"] if "native" in found else [name for name in found if name in RUNS]
    if part is not None and found == ["colossalai", "huggingface"]:
        return "huggingface" if part == "model" else "colossalai"  # the optimizer beside a model in one file
    if len(found) > 1:
        raise CheckpointError(f"{place} holds checkpoints of several formats: {', '.join(found)}; say which (format=)")
    if found:
        return found[0]
    files = _files(place)
    if len(files) == 1:
        return "single"
    if files:
        listed = ", ".join(file.name for file in files[:5])
        raise CheckpointError(f"{place} holds {len(files)} files and no index ({listed}); name the file to open")
    raise FileNotFoundError(
        f"{place} holds no checkpoint: none of {MANIFEST}, .metadata, {CONFIG}, *_model_states.pt, an index or a "
        "single .safetensors or torch file is in it; if a save did not finish, use an earlier one"
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
        format: one of :data:`FORMATS`; ``None``: found out.
        optimizer: ColossalAI only: the optimizer's directory, where it is not beside the model.
        parameter_names: names of an optimizer's parameters in its own order, for files that only number them.
        rename: names in it, or regular expressions, and what they become; see
            :func:`~shardwise.checkpoint.formats.renamed.renamed`.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: ``format`` is not one of the names, or a rule of ``rename`` fits nothing.
        CheckpointError: several formats, or content that is not known.
        RefusedPickle: a file that could only be read by running code; it says which classes it names.
        CheckpointDamage: a file is missing, cut off or changed.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format={format!r}: known are {', '.join(FORMATS)}")
    source = _opened(path, format, optimizer, parameter_names)
    if not rename:
        return source
    try:
        return renamed(source, rename)
    except BaseException:
        source.close()
        raise


def _opened(
    path: str | Path, format: str | None, optimizer: str | Path | None, parameter_names: Sequence[str] | None
) -> OpenSource:
    place = located(Path(path))
    name = format or detect_format(place)
    if place.is_file() and place.name.endswith(".json") and name != "colossalai":
        place = place.parent
    if name == "native":
        return NativeSource(_native_directory(place))
    if optimizer is not None and name != "colossalai":
        raise ValueError(f"optimizer={str(optimizer)!r}: {place} is of format {name}, which keeps it with the model")
    if parameter_names is not None and name not in ("colossalai", "single", *RUNS):
        raise ValueError(f"parameter_names given, but {place} is of format {name}, which has names")
    if name == "single":
        place = _files(place)[0] if place.is_dir() else place
    readers: dict[str, Callable[[Path], OpenSource]] = {
        "colossalai": lambda path: open_colossalai(path, optimizer, parameter_names),
        "single": lambda path: open_single(path, parameter_names),
        "huggingface": open_huggingface,
        "dcp": open_dcp,
        "deepspeed": open_deepspeed,
        "peft": open_peft,
        "trainer": lambda path: open_trainer(path, parameter_names),
        "accelerate": lambda path: open_trainer(path, parameter_names),
    }
    with reading(place):
        return _checked(readers[name](place), (place, optimizer))


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


def _native_directory(path: Path) -> Path:
    if (path / MANIFEST).is_file() or has_pieces(str(path)):
        return path
    newest = next(iter(scan(str(path))), None)
    if newest is None:
        raise FileNotFoundError(f"{path} holds no complete checkpoint")
    if newest.head is None:  # which one is the newest cannot be said
        raise CheckpointDamage(f"{newest.damage}; name one of the checkpoints in {path}")
    return Path(newest.path)
