"""Read directories of Hugging Face's Trainer (``checkpoint-N``) and of accelerate's ``save_state``.

A directory has a model of another format (``model.safetensors``, an adapter, DCP of FSDP, a DeepSpeed step),
``optimizer.pt`` or ``optimizer.bin`` (``optimizer_1.bin``, ...; ``optimizer_0/`` in DCP), ``scheduler.pt`` or ``.bin``,
``rng_state*.pth``, ``scaler.pt`` and ``trainer_state.json``. The optimizers number their parameters in the order of
their groups; in Trainer's optimizers, parameters with weight decay come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.base import tree
from shardwise.core.checkpoint.formats.dcp import open_dcp
from shardwise.core.checkpoint.formats.deepspeed import find_step, open_deepspeed
from shardwise.core.checkpoint.formats.huggingface import INDEX, SINGLE_FILES, open_huggingface
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, LazySource, entries_of, entry_of_tensor
from shardwise.core.checkpoint.formats.optimizer_state import Shapes, from_numbered
from shardwise.core.checkpoint.formats.peft import CONFIG, open_peft
from shardwise.core.checkpoint.formats.single_file import open_single
from shardwise.core.checkpoint.formats.torch_file import load_torch
from shardwise.core.checkpoint.input_checks import check_generators, generator_state, read_json, reading
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError

STATE = "trainer_state.json"
FSDP_FOLDER, FSDP_FILE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?\.(?:pt|bin)")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_(\d+)")
_OPTIMIZER_OF_RANK = re.compile(r"optimizer(_\d+)?_rank\d+\.bin|pytorch_model_fsdp(_\d+)?_rank\d+\.bin")
_SCHEDULER = re.compile(r"scheduler(?:_(\d+))?\.(?:pt|bin)")
_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
_RANDOM_OF_ACCELERATE = re.compile(r"random_states_\d+\.pkl")
_OTHER_MODEL = re.compile(r"(?:model|pytorch_model|pytorch_model_fsdp)_([1-9]\d*)(?:\.safetensors|\.bin)?")
_LEFT_OUT = re.compile(r"training_args\.bin|custom_checkpoint_\d+\.pkl|(?:sampler|dl_state_dict)(?:_\d+)?\.bin")
_CHECKPOINT = re.compile(r"checkpoint[-_](\d+)")
_STATE_KEYS = ("global_step", "epoch", "max_steps", "num_train_epochs", "train_batch_size", "best_metric", "total_flos")


def kind_of(path: Path) -> str | None:
    """Return ``"trainer"`` or ``"accelerate"`` if the directory is theirs, otherwise ``None``."""
    if (path / STATE).is_file():
        return "trainer"
    names = [item.name for item in path.iterdir()]
    files = (_OPTIMIZER, _RANDOM, _RANDOM_OF_ACCELERATE)
    files_of_run = [name for name in names if any(each.fullmatch(name) for each in files)]
    files_of_run += [
        name for name in names if _OPTIMIZER_FOLDER.fullmatch(name) and (path / name / ".metadata").is_file()
    ]
    if not files_of_run or _model_reader(path) is None:
        return None
    return "trainer" if any(name.endswith((".pt", ".pth")) for name in files_of_run) else "accelerate"


def find_latest(path: Path) -> Path | None:
    """Return the checkpoint with the highest number.

    It is ``checkpoint-N`` in Trainer's directory, as for ``resume_from_checkpoint=True``, and ``checkpoint_N`` in
    accelerate's directory or in ``checkpoints`` of its project.
    """
    for folder in (path, path / "checkpoints"):
        folders = [item for item in folder.iterdir() if _CHECKPOINT.fullmatch(item.name)] if folder.is_dir() else []
        numbered = {int(item.name[len("checkpoint") + 1 :]): item for item in folders if item.is_dir()}
        if numbered:
            return numbered[max(numbered)]
    return None


def scheduler_files(path: Path) -> list[Path]:
    """Return the files of the learning-rate schedulers in a directory, in order."""
    return _numbered(path, _SCHEDULER)


def open_trainer(path: str | Path, parameter_names: Sequence[str] | None = None) -> LazySource:
    """Open model, optimizers, schedulers, loss scale and, for Trainer, random number generators.

    Args:
        path: the directory of one checkpoint.
        parameter_names: names of the optimizer's parameters in its own order. If the files only number them, the groups
            of the optimizer that loads the checkpoint give the names.

    Raises:
        FileNotFoundError: there is no model.
        CheckpointError: a part has a form that cannot be read; the message names it.
        CheckpointDamage: a file is missing or truncated.
        RefusedPickle: a file holds objects that could run code.
    """
    directory = Path(path)
    reader = _model_reader(directory)
    if reader is None:
        divided = sorted(item.name for item in directory.iterdir() if _OPTIMIZER_OF_RANK.fullmatch(item.name))
        if divided:
            raise CheckpointError(
                f"{directory / divided[0]} is one rank's shard without its position in the full tensors; save "
                "with FULL_STATE_DICT, or with SHARDED_STATE_DICT through torch's distributed checkpoints"
            )
        raise FileNotFoundError(f"{directory} has no model: none of {', '.join(SINGLE_FILES + INDEX)}")
    with ExitStack() as opened:  # close all files if a later one is damaged
        return _with_state(directory, reader(), opened, parameter_names)


def _model_reader(path: Path) -> Callable[[], LazySource] | None:
    if find_step(path) is not None:
        return lambda: open_deepspeed(path)
    if (path / FSDP_FOLDER / ".metadata").is_file():
        return lambda: open_dcp(path / FSDP_FOLDER)
    if (path / FSDP_FILE).is_file():
        return lambda: open_single(path / FSDP_FILE)
    if any((path / name).is_file() for name in SINGLE_FILES + INDEX):
        return lambda: open_huggingface(path)
    return (lambda: open_peft(path)) if (path / CONFIG).is_file() else None


def _with_state(
    directory: Path, model: LazySource, opened: ExitStack, parameter_names: Sequence[str] | None
) -> LazySource:
    opened.callback(model.close)
    entries, state, notes = entries_of(model), dict(model.state()), list(model.notes)
    if not state.get("optimizers"):
        sources = _optimizers(directory, model, opened, parameter_names, notes)
        state["optimizers"] = [record for _, record in sources]
        for states, _ in sources:
            entries.update(states)
    _add_schedulers(directory, state, entries, notes)
    _add_generators(directory, state, entries, notes)
    scale = directory / "scaler.pt"
    if scale.is_file():
        state["scaler"] = _scale(scale)
    kind = kind_of(directory) or "trainer"
    state["other"] = {**(state.get("other") or {}), "format": kind}
    if (directory / STATE).is_file():
        content = read_json(directory / STATE)
        if not isinstance(content, dict):
            raise CheckpointDamage(f"{directory / STATE} holds a {type(content).__name__}")
        state["step"] = state["updates"] = _count(content.get("global_step"), directory / STATE)
        state["other"]["trainer_state"] = {key: content[key] for key in _STATE_KEYS if _plain(content.get(key))}
    else:
        state["step"] = state["updates"] = _updates(state)
    for item in sorted(directory.iterdir()):
        if _OTHER_MODEL.fullmatch(item.name):
            notes.append(f"{item} is another model than the first: open it by itself")
        elif _RANDOM_OF_ACCELERATE.fullmatch(item.name):
            notes.append(f"{item} holds a rank's random number generators, and was left out: seed them")
        elif _LEFT_OUT.fullmatch(item.name):
            notes.append(f"{item} holds objects of Python's, or a place in the data, and was left out")
    return LazySource(kind, entries, state, notes, opened.pop_all().close)


# ---- optimizers

Numbered = tuple[dict[str, Entry], dict[str, Any]]


def _numbered(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    numbered = [(int(match[1] or 0), item) for item in directory.iterdir() if (match := pattern.fullmatch(item.name))]
    ordered = [item for _, item in sorted(numbered)]
    if [number for number, _ in sorted(numbered)] != list(range(len(numbered))):
        listed = ", ".join(item.name for item in ordered)
        raise CheckpointDamage(f"{directory} holds {listed}, which are not numbered from 0")
    return ordered


def _optimizers(
    directory: Path, model: LazySource, opened: ExitStack, names: Sequence[str] | None, notes: list[str]
) -> list[Numbered]:
    folders = [item for item in directory.iterdir() if _OPTIMIZER_FOLDER.fullmatch(item.name)]
    if any((folder / ".metadata").is_file() for folder in folders):
        return [_of_folder(folder, i, opened) for i, folder in enumerate(_numbered(directory, _OPTIMIZER_FOLDER))]
    optimizers = []
    # Safetensors are sorted by name, so their order differs from the optimizer's.
    ordered = not any(item.suffix == ".safetensors" for item in directory.iterdir())
    shapes: Shapes = {n.removeprefix("model/"): f.shape for n, f in model.tensors().items()} if ordered else {}
    for index, file in enumerate(_numbered(directory, _OPTIMIZER)):
        content = load_torch(file)
        if not isinstance(content, Mapping):
            raise CheckpointDamage(f"{file} holds a {type(content).__name__}, not an optimizer's state")
        with reading(file):
            entries, record, more = from_numbered(content, index, shapes, names if index == 0 else None, str(file))
        notes += more
        optimizers.append((entries, record.to_json()))
    return optimizers


def _of_folder(folder: Path, index: int, opened: ExitStack) -> Numbered:
    source = open_dcp(folder)
    opened.callback(source.close)
    records = source.state().get("optimizers", [])
    if len(records) != 1:
        raise CheckpointError(f"{folder} holds {len(records)} optimizers, and one is expected; load another copy")
    start = "optimizer/0/"
    selected = ((name, entry) for name, entry in entries_of(source).items() if name.startswith(start))
    return {f"optimizer/{index}/{name.removeprefix(start)}": entry for name, entry in selected}, records[0]


def _updates(state: Mapping[str, Any]) -> int:
    """Return the number of optimizer steps, if the optimizer state has it."""
    most = 0
    for record in state.get("optimizers", []):
        for small in record["small"].values():
            value = tree.decode(small.get("step", 0), None)
            number = float(value) if isinstance(value, int | float | torch.Tensor) else 0.0
            most = max(most, int(number) if 0 <= number < 2**63 else 0)
    return most


# ---- schedulers, random number generators, loss scale


def _add_schedulers(directory: Path, state: dict[str, Any], entries: dict[str, Entry], notes: list[str]) -> None:
    states = []
    for index, file in enumerate(_numbered(directory, _SCHEDULER)):
        tensors: dict[str, torch.Tensor] = {}
        try:
            states.append(tree.encode(load_torch(file), tensors, f"lr_schedulers/{index}"))
        except (CheckpointError, TypeError) as error:
            if isinstance(error, CheckpointDamage):
                raise
            notes.append(f"{file} was left out, and the schedulers after it: {error}")
            break
        entries.update({f"state/{name}": entry_of_tensor(tensor) for name, tensor in tensors.items()})
    if states:
        state["lr_schedulers"] = states


def _add_generators(directory: Path, state: dict[str, Any], entries: dict[str, Entry], notes: list[str]) -> None:
    files: dict[int, Path] = {}
    for item in directory.iterdir():
        if match := _RANDOM.fullmatch(item.name):
            files[int(match[1] or 0)] = item
    if not files:
        return
    if sorted(files) != list(range(len(files))):
        notes.append(f"{directory} has random number generators of the ranks {sorted(files)} only: they were left out")
        return
    generators = []
    for rank in range(len(files)):
        tensors: dict[str, torch.Tensor] = {}
        generators.append(tree.encode(read_random_states(files[rank]), tensors, f"rng/{rank}"))
        entries.update({f"state/{name}": entry_of_tensor(tensor) for name, tensor in tensors.items()})
    state["rng"] = generators


def _scale(path: Path) -> dict[str, float]:
    content = load_torch(path)
    with reading(path):
        good = content.get("_growth_tracker", 0)
        return {"scale": float(content["scale"]), "overflows": 0.0, "good_steps": float(good)}


def _count(value: object, where: Path) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise CheckpointDamage(f"{where}: global_step is {value!r:.80}")
    return value


def _plain(value: object) -> bool:
    return isinstance(value, int | str) or (isinstance(value, float) and abs(value) < float("inf"))


class _Array:
    """Receives the fields of a pickled array."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def words(self) -> np.ndarray[Any, Any]:
        """Return the array's 32-bit numbers."""
        _, shape, dtype, _, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.name not in ("u4", "uint32") or not isinstance(content, bytes):
            raise ValueError(f"no array of 32-bit numbers: {dtype!r:.40}, {shape!r:.40}")
        values = np.frombuffer(content, dtype=f"{'>' if dtype.order == '>' else '<'}u4").astype(np.uint32)
        if shape != values.shape:
            raise ValueError(f"an array of shape {shape} has {len(values)} numbers")
        return values


class _Dtype:
    """Receives the fields of a pickled numpy dtype."""

    def __init__(self, *arguments: Any) -> None:
        self.name, self.order = str(arguments[0]) if arguments else "", "<"

    def __setstate__(self, state: Any) -> None:
        self.order = str(state[1]) if isinstance(state, tuple) and len(state) > 1 else "<"


class _Reconstruct:
    """Stands for the function call at the start of a pickled array."""

    def __new__(cls, *_: Any) -> Any:
        return _Array()


STAND_INS: tuple[tuple[type, str], ...] = (
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    (_Reconstruct, "numpy._core.multiarray._reconstruct"),
    (_Reconstruct, "numpy.core.multiarray._reconstruct"),
)


def read_random_states(path: Path) -> dict[str, Any]:
    """Return the generators of one rank: Python's, numpy's, torch's on the CPU and, if saved, on a GPU.

    Raises:
        CheckpointDamage: the file does not have them, or in another form.
        RefusedPickle: the file has objects of other classes.
    """
    content = load_torch(path, STAND_INS)
    if not isinstance(content, Mapping):
        raise CheckpointDamage(f"{path} holds a {type(content).__name__}, not random number generators")
    with reading(path):
        kind, keys, *numbers = content["numpy"]
        array = keys.words() if isinstance(keys, _Array) else keys
        state = {**generator_state(content["python"], (kind, array, *numbers)), "torch": content["cpu"]}
        check_generators(state)  # an error after the weights were loaded would be too late
        gpu = content.get("cuda")
        if isinstance(gpu, list | tuple) and gpu:  # saved by one process with all GPUs, which trains on the first
            gpu = gpu[0]
        if isinstance(gpu, torch.Tensor) and gpu.dtype == torch.uint8 and gpu.dim() == 1:
            state["cuda"] = gpu
    return state
