"""Inspect, convert, verify and compare checkpoints. The format of a checkpoint is detected.

examples:
  shardwise checkpoint inspect runs/step-1000
  shardwise checkpoint convert runs/step-1000 llama --to huggingface
  shardwise checkpoint verify runs/step-1000

`shardwise checkpoint ACTION --help` has the options of an action. Under a launcher only rank 0 does the
work; other ranks exit. No code in a checkpoint is executed: from pickle files only tensors and plain containers are
read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.cli.errors import BadInput, option
from shardwise.cli.parser import nonempty_path, size, texts
from shardwise.core.base.sizes import size_text
from shardwise.core.base.validate import number, printable

if TYPE_CHECKING:
    import torch

    from shardwise.core.checkpoint.source import CheckpointSource, TensorInfo

WRITTEN = ("native", "huggingface", "single", "dcp", "torchtitan", "colossalai", "peft")
LAYOUTS = {"dcp": "fsdp2", "torchtitan": "torchtitan"}
"""Layouts of DCP by format name."""
OPTION_FORMATS: dict[str, tuple[str, ...]] = {
    "max_shard_size": ("huggingface", "colossalai"),
    "safetensors": ("colossalai",),
    "config": ("huggingface",),
} | dict.fromkeys(("adapter_config", "adapter", "lora_alpha", "base"), ("peft",))
"""Options that only some formats have."""


def write(source: CheckpointSource, options: argparse.Namespace, dtype: torch.dtype | None) -> None:
    """Write ``source`` as the options say.

    Raises:
        CheckpointError, OSError, ValueError, TypeError: the target cannot be written; no half-written file is left.
    """
    from shardwise.core.checkpoint.formats.registry import formats_at, write_checkpoint
    from shardwise.core.checkpoint.source import CheckpointError

    format = "dcp" if options.to in LAYOUTS else options.to
    with suppress(CheckpointError):  # a damaged checkpoint is replaced
        for other in formats_at(options.target) if options.target.is_dir() else ():
            if other.name != format and not other.of_run:
                what = f"holds a checkpoint of format {other.name}, which --to {options.to} does not replace"
                raise ValueError(f"{options.target}: {what}; give another path, or remove it")
    for name, kinds in OPTION_FORMATS.items():
        value = getattr(options, name)
        if value is not None and value is not False and options.to not in kinds:
            takers = f"--to {' and '.join(kinds)} alone {'takes' if len(kinds) == 1 else 'take'} it"
            raise ValueError(f"--{name.replace('_', '-')}: {takers}; leave it out")
    more: dict[str, Any] = {}
    if options.to in OPTION_FORMATS["max_shard_size"]:
        more["size_per_shard"] = (options.max_shard_size or 5e9) / 1024**2
    if options.to == "huggingface":
        more |= {name: _read_config(options.source, name) for name in ("config", "generation_config")}
        if options.config is not None:
            more["config"] = _configuration(options.config, "config.json")
    elif options.to in LAYOUTS:
        more["layout"] = LAYOUTS[options.to]
    elif options.to == "peft":
        more |= _adapter(source, options)
    elif options.to == "colossalai":
        more["safetensors"] = options.safetensors
    write_checkpoint(source, options.target, format, dtype=dtype, **more)


def _adapter(source: CheckpointSource, options: argparse.Namespace) -> dict[str, Any]:
    """Return which adapter to write, and its configuration."""
    from shardwise.core.checkpoint.formats.peft import deduced_config, the_adapter

    if options.lora_alpha is not None and not 0 < options.lora_alpha < float("inf"):
        raise ValueError(f"--lora-alpha {options.lora_alpha}: give a number above 0")
    if options.lora_alpha is not None and options.adapter_config is not None:
        raise ValueError(f"--lora-alpha {options.lora_alpha} is in {options.adapter_config}: give one of the two")
    adapter = options.adapter or the_adapter(source)
    config: dict[str, Any] | None = None
    if options.adapter_config is not None:
        config = _configuration(options.adapter_config, "adapter_config.json")
    elif options.lora_alpha is not None:
        config = deduced_config(source, adapter, options.lora_alpha)
    else:
        state = source.state()
        config = state.get("peft") or (state.get("adapters") or {}).get(adapter)
    if config is not None and options.base is not None:
        config = {**config, "base_model_name_or_path": options.base}
    return {"config": config, "adapter": adapter}


def _configuration(path: Path, name: str) -> dict[str, Any]:
    from shardwise.core.checkpoint.input_checks import read_json

    file = path / name if path.is_dir() else path
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a configuration")
    return content


def _read_config(path: Path, name: str) -> Any:
    from shardwise.core.checkpoint.formats.registry import located
    from shardwise.core.checkpoint.input_checks import read_json
    from shardwise.core.checkpoint.source import CheckpointError

    try:
        content = read_json(located(path) / f"{name}.json")
    except (OSError, ValueError, CheckpointError):
        return None
    return content if isinstance(content, dict) else None


def _says(value: Any) -> bool:
    """Return True if a value has any content; ranks without a data position have None each."""
    return any(each is not None for each in value) if isinstance(value, list) else bool(value)


def notes_of(source: CheckpointSource, options: argparse.Namespace) -> list[str]:
    """Return notes about values that were left out or that the target format cannot hold."""
    state = source.state()
    lost = []
    if options.to in ("huggingface", "single", "peft") and state.get("optimizers"):
        lost.append("optimizer state")
    if options.to == "colossalai" and len(state.get("optimizers") or []) > 1:
        lost.append("all optimizers but the first")
    if options.to != "native":
        entries = ("scaler", "lr_schedulers", "rng", "data_position", "user_state")
        lost += [f"state {key!r}" for key in entries if _says(state.get(key))]
    notes = [f"{options.to} has no place for {', '.join(lost)}: left out"] if lost else []
    if options.to == "huggingface" and not (options.target / "config.json").is_file():
        notes.append(
            f"{options.target} has no config.json, which from_pretrained needs: neither {options.source} nor the run "
            "that saved it had one. Put it there, or give --config and --overwrite"
        )
    return notes


TEMPORARY = r"(^|/)\.[^/]*(\.partial|saving-[0-9a-f]+)(/|$)"
"""Paths that writers use until the target is complete."""
READ = ("native", "huggingface", "single", "dcp", "colossalai", "deepspeed", "peft", "trainer", "accelerate")
DTYPES = ("float32", "float16", "bfloat16", "float64")
SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def add_parser(commands: Any) -> None:
    """Add ``checkpoint`` to the command's subparsers."""
    parser = commands.add_parser("checkpoint", **texts(__doc__))
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION")
    inspect = _add_action(actions, "inspect", _inspect)
    _add_source(inspect, "path", "")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    _add_convert(_add_action(actions, "convert", _convert))
    _add_source(_add_action(actions, "verify", _verify), "path", "", rename=False)
    diff = _add_action(actions, "diff", _diff)
    _add_source(diff, "first", "-a")
    _add_source(diff, "second", "-b")
    diff.add_argument("--rtol", type=float, default=0.0, metavar="NUMBER", help="relative difference that is allowed")
    diff.add_argument("--atol", type=float, default=0.0, metavar="NUMBER", help="absolute difference that is allowed")
    diff.add_argument("--model-only", action="store_true", help="do not compare optimizer state")
    diff.add_argument("--ignore-dtype", action="store_true", help="compare values only")


def _add_action(actions: Any, name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, **texts(run.__doc__))
    parser.set_defaults(main=main, action_main=run)
    return parser


def _add_convert(parser: argparse.ArgumentParser) -> None:
    _add_source(parser, "source", "")
    add = parser.add_argument
    add("target", type=nonempty_path, metavar="TARGET", help="path of the file or directory to write")
    add("--to", required=True, choices=WRITTEN, metavar="FORMAT", help=f"format to write: {', '.join(WRITTEN)}")
    shown = f"model dtype: {', '.join(DTYPES)}, or short as bf16 (default: unchanged)"
    add("--dtype", type=lambda text: SHORT.get(text, text), choices=DTYPES, metavar="DTYPE", help=shown)
    add("--overwrite", action="store_true", help="replace a checkpoint of this format; other files stay")
    add = parser.add_argument_group("options of one format").add_argument
    largest = "huggingface, colossalai: largest file of the model (default: 5GB)"
    add("--max-shard-size", type=size, metavar="SIZE", help=largest)
    add("--safetensors", action="store_true", help="colossalai: safetensors shards instead of .bin")
    add("--config", type=Path, metavar="FILE", help="huggingface: config.json or its directory (default: the source's)")
    file = "peft: adapter_config.json or its directory (default: the source's, or from --lora-alpha)"
    add("--adapter-config", type=Path, metavar="FILE", help=file)
    add("--adapter", metavar="NAME", help="peft: the adapter's name (default: the only one)")
    add("--lora-alpha", type=float, metavar="ALPHA", help="peft: lora_alpha; rank and targets are those of the tensors")
    add("--base", metavar="NAME", help="peft: base_model_name_or_path, a name or a directory")


def _add_source(parser: argparse.ArgumentParser, name: str, suffix: str, rename: bool = True) -> None:
    parser.add_argument(name, type=nonempty_path, metavar=name.upper(), help="a checkpoint: directory or file")

    def add(flag: str, end: str, help: str, **more: Any) -> None:
        parser.add_argument(f"--{flag}{suffix}", dest=f"{name}_{end}", help=help, **more)

    kinds = f"format to read: {', '.join(READ)} (default: detected)"
    add("format", "format", kinds, choices=READ, metavar="FORMAT")
    where = "colossalai: the optimizer's directory, if it is not next to the model"
    add("optimizer", "optimizer", where, type=Path, metavar="DIR")
    names = "names in the optimizer's order, one per line, for formats that number parameters"
    add("parameter-names", "names", names, type=Path, metavar="FILE")
    if rename:
        rule = "read tensors named OLD under the name NEW; OLD is a name or a regular expression, up to the last '='"
        add("rename", "rename", f"{rule}; may be repeated", action="append", default=[], metavar="OLD=NEW")


def main(options: argparse.Namespace) -> int:
    """Run one action on rank 0 of a launcher (or without one); the other ranks do nothing."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    for path in filter(None, (getattr(options, name, None) for name in ("path", "source", "first", "second"))):
        if not path.exists():  # before the import of torch
            raise BadInput(f"{path}: no such file or directory; check the path")
    return int(options.action_main(options))


@contextmanager
def _opened(options: argparse.Namespace, name: str) -> Iterator[CheckpointSource]:
    from shardwise.core.checkpoint.source import CheckpointError

    source = _open(options, name)
    for note in getattr(source, "notes", ()):
        _say(f"note: {note}", sys.stderr)
    try:
        yield source
    except CheckpointError as problem:
        raise BadInput(str(problem)) from None
    finally:
        source.close()


def _open(options: argparse.Namespace, name: str) -> CheckpointSource:
    from shardwise.core.checkpoint.formats.registry import open_checkpoint
    from shardwise.core.checkpoint.source import CheckpointError

    path: Path = getattr(options, name)
    format, optimizer = getattr(options, f"{name}_format"), getattr(options, f"{name}_optimizer")
    listed: Path | None = getattr(options, f"{name}_names")
    try:
        names = listed.read_text("utf-8").split() if listed is not None else None
        rules = dict(_rule(each) for each in getattr(options, f"{name}_rename"))
        return open_checkpoint(path, format, optimizer, names, rules)
    except (ValueError, CheckpointError) as problem:
        raise BadInput(str(problem)) from None


def _rule(text: str) -> tuple[str, str]:
    old, divided, new = text.rpartition("=")
    if not divided or not old:
        raise ValueError(f"--rename {text!r}: give OLD=NEW")
    return old, new


def _say(text: str, stream: TextIO | None = None) -> None:
    """Print a line with control characters escaped, because text of files must not control a terminal."""
    print(printable(text), file=stream or sys.stdout)


class _Watched:
    """A source that shows how much of it is read, on standard error if that is a terminal; the line is rewritten."""

    def __init__(self, source: CheckpointSource, what: str) -> None:
        self._source, self._what, self._shown, self.done = source, what, "", 0
        self._facts = source.tensors()
        self._total = max(sum(fact.nbytes for fact in self._facts.values()), 1)

    def show(self, text: str) -> None:
        """Replace the line by ``text``."""
        if text != self._shown and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        self._shown = text

    def tensors(self) -> Any:
        return self._facts

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        values = self._source.read(name, start, numel)
        self.done += values.nbytes
        self.show(f"{self._what} {min(100, self.done * 100 // self._total):3d} %")
        return values

    def state(self) -> dict[str, Any]:
        return self._source.state()

    def close(self) -> None:
        self._source.close()


# ---- inspect


def _inspect(options: argparse.Namespace) -> int:
    """List the tensors of a checkpoint. The last lines have the size of the other state.

    examples:
      shardwise checkpoint inspect runs/step-1000
      shardwise checkpoint inspect llama --json
    """
    with _opened(options, "path") as source:
        facts, state = source.tensors(), source.state()
        kinds: dict[str, list[int]] = {}
        for name, fact in facts.items():
            kinds.setdefault(name.split("/")[0] if "/" in name else "other", []).append(fact.nbytes)
        state_bytes = len(json.dumps(state))
        if options.json:
            listed = {n: {"shape": list(f.shape), "dtype": _dtype_text(f)} for n, f in facts.items()}
            content = {"format": _format_of(source), "tensors": listed, "state_bytes": state_bytes}
            print(json.dumps(content, indent=2))
            return 0
        _say(f"{_place_of(source, options.path)}: {_format_of(source)}")
        width = max((len(name) for name in facts), default=0)
        for name, fact in facts.items():
            shape = "x".join(map(str, fact.shape)) or "scalar"
            _say(f"  {name:<{width}}  {_dtype_text(fact):<9} {shape:<16} {size_text(fact.nbytes)}")
        for kind, sizes in kinds.items():
            _say(f"{kind}: {len(sizes)} tensors, {size_text(sum(sizes))}")
        _say(f"state: {size_text(state_bytes)} of JSON" + (f" ({', '.join(sorted(state))})" if state else ""))
        for number, optimizer in enumerate(state.get("optimizers", [])):
            groups = ", ".join(str(len(group.get("params", []))) for group in optimizer.get("groups", []))
            _say(f"optimizer {number} {optimizer.get('class', '')}: groups of {groups or 'no'} parameters")
        for name, target in state.get("aliases", {}).items():
            _say(f"tied: {name} is {target}")
    return 0


def _format_of(source: CheckpointSource) -> str:
    return str(getattr(source, "format", "native"))


def _place_of(source: CheckpointSource, path: Path) -> str:
    """Return the checkpoint that is read if ``path`` is a directory of several."""
    return str(getattr(source, "directory", path) if _format_of(source) == "native" else path)


def _dtype_text(fact: TensorInfo) -> str:
    return str(fact.dtype).removeprefix("torch.")


# ---- convert


def _convert(options: argparse.Namespace) -> int:
    """Write a checkpoint in another format. Notes on standard error say what the format cannot hold.

    examples:
      shardwise checkpoint convert runs/step-1000 llama --to huggingface
      shardwise checkpoint convert runs/step-1000 llama --to single --dtype bf16
      shardwise checkpoint convert deepspeed-run resume/step-1000 --to native
      shardwise checkpoint convert trainer-output resume/step-1000 --to native
      shardwise checkpoint convert run/step-9 adapter --to peft --lora-alpha 16
    """
    if os.path.realpath(options.source) == os.path.realpath(options.target):
        raise BadInput(f"{options.target}: source and target are the same; give another place to write to")
    existed = _check_target(options.target, options.overwrite)

    import torch

    from shardwise.core.checkpoint.atomic import DISK
    from shardwise.core.checkpoint.source import CheckpointError

    dtype = getattr(torch, options.dtype) if options.dtype else None
    with _opened(options, "source") as source:
        watched = _Watched(source, f"writing {options.target}")
        try:
            write(watched, options, dtype)
        except (CheckpointError, OSError, ValueError, TypeError) as problem:
            if not existed:  # a format of several directories may have written the first ones
                DISK.remove_tree(str(options.target))
            if isinstance(problem, OSError):
                if re.search(TEMPORARY, os.fsdecode(problem.filename or "")):
                    raise BadInput(f"{options.target}: cannot be written: {problem.strerror}") from None
                raise
            raise BadInput(str(problem)) from None
        finally:
            watched.show("")
        _say(f"{options.target}: {options.to}, {size_text(watched.done)} of tensors read")
        for note in notes_of(source, options):
            _say(f"note: {note}", sys.stderr)
    return 0


def _check_target(target: Path, overwrite: bool) -> bool:
    """Return True if ``target`` exists, and refuse what must not be replaced."""
    there = target.exists()
    if there and not target.is_dir() and not target.is_file():
        raise BadInput(f"{target}: is no directory and no regular file; give another path")
    if there and not overwrite and (target.is_file() or any(target.iterdir())):
        what = "is a file" if target.is_file() else "is not empty"
        raise BadInput(f"{target}: {what}; give another path, or --overwrite to replace what is there")
    return there


# ---- verify


def _verify(options: argparse.Namespace) -> int:
    """Read everything and compare checksums, if the format has them. The exit status is 1 if there is damage.

    examples:
      shardwise checkpoint verify runs/step-1000
    """
    from shardwise.core.checkpoint.formats.native import NativeSource
    from shardwise.core.checkpoint.formats.registry import open_checkpoint
    from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError

    try:
        with closing(open_checkpoint(options.path, options.path_format, options.path_optimizer)) as source:
            native = isinstance(source, NativeSource)
            problems = source.problems() if isinstance(source, NativeSource) else _read_through(source, options.path)
    except CheckpointDamage as damage:
        _say(str(damage))
        return 1
    except (OSError, ValueError, CheckpointError) as problem:
        raise BadInput(str(problem)) from None
    for each in problems:
        _say(each)
    if not problems:
        how = "every byte is as written" if native else "everything can be read (no checksums in this format)"
        _say(f"{_place_of(source, options.path)}: {_format_of(source)}, {how}")
    return 1 if problems else 0


def _read_through(source: CheckpointSource, path: Path) -> list[str]:
    from shardwise.core.checkpoint.formats.lazy_tensors import blocks
    from shardwise.core.checkpoint.formats.torch_file import TORCH_SUFFIXES, check_zip
    from shardwise.core.checkpoint.source import CheckpointDamage

    problems = []
    watched = _Watched(source, f"reading {path}")
    for name, fact in source.tensors().items():
        try:
            for start, numel in blocks(fact):
                watched.read(name, start, numel)
        except (CheckpointDamage, OSError) as problem:
            problems.append(str(problem))
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.suffix in TORCH_SUFFIXES and file.is_file():
            try:
                check_zip(file)
            except CheckpointDamage as problem:
                problems.append(str(problem))
    watched.show("")
    return problems


# ---- diff


def _diff(options: argparse.Namespace) -> int:
    """Compare names, shapes, dtypes and values of two checkpoints. The exit status is 1 if there is a difference.

    examples:
      shardwise checkpoint diff runs/step-1000 runs/step-2000 --model-only
      shardwise checkpoint diff runs/step-1000 llama --rtol 1e-2
    """
    for name in ("rtol", "atol"):
        option(f"--{name}", number, getattr(options, name), "[0, inf)", "a finite number >= 0")
    with _opened(options, "first") as first, _opened(options, "second") as second:
        ours, theirs = (_named(source, options.model_only) for source in (first, second))
        differences = 0
        for name in sorted(ours.keys() ^ theirs.keys()):
            _say(f"{name}: only in {options.first if name in ours else options.second}")
            differences += 1
        common = [name for name in ours if name in theirs]
        watched = _Watched(first, "comparing")
        for name in common:
            text = _compare(watched, ours[name], second, theirs[name], options)
            if text:
                _say(f"{name}: {text}")
                differences += 1
        watched.show("")
    count = f"{len(common)} tensors"
    summary = f"{differences} difference{'s' if differences > 1 else ''}"
    _say(f"{summary}, {count} in both" if differences else f"equal: {count}")
    return 1 if differences else 0


def _named(source: CheckpointSource, model_only: bool) -> dict[str, str]:
    """Return names to compare with their tensors, including the other names of tied tensors."""
    names = {name: name for name in source.tensors() if not model_only or name.startswith("model/")}
    for other, target in source.state().get("aliases", {}).items():
        if f"model/{target}" in names:
            names[f"model/{other}"] = f"model/{target}"
    return names


def _compare(
    first: CheckpointSource, name: str, second: CheckpointSource, other: str, options: argparse.Namespace
) -> str:
    """Return a description of the difference; empty without one."""
    import torch

    from shardwise.core.checkpoint.formats.lazy_tensors import blocks
    from shardwise.core.checkpoint.source import CheckpointDamage

    one, two = first.tensors()[name], second.tensors()[other]
    if one.shape != two.shape:
        return f"shape {one.shape} and {two.shape}"
    if one.dtype != two.dtype and not options.ignore_dtype:
        return f"dtype {_dtype_text(one)} and {_dtype_text(two)}"
    absolute = relative = 0.0
    outside = 0
    try:
        for start, numel in blocks(one):
            a, b = first.read(name, start, numel), second.read(other, start, numel)
            if torch.equal(a, b) and not a.is_complex():
                continue
            wide = torch.complex128 if a.is_complex() else torch.float64
            x, y = a.to(wide), b.to(wide)
            # Equal infinities, and NaN at the same index, are equal.
            same = (x == y) | (x.isnan() & y.isnan())
            apart = torch.where(same, 0.0, (x - y).abs())
            scale = torch.maximum(x.abs(), y.abs())
            # A NaN or an infinity on one side only exceeds every tolerance.
            allowed = apart.isfinite() & (apart <= options.atol + options.rtol * scale)
            outside += int((~same & ~allowed).sum())
            absolute = max(absolute, _most(apart))
            relative = max(relative, _most(torch.where(same, 0.0, apart / scale)))
    except CheckpointDamage as damage:
        return str(damage)
    if not outside:
        return ""
    return f"{outside} of {one.numel} elements differ, at most {absolute:.3g} (relative {relative:.3g})"


def _most(values: torch.Tensor) -> float:
    return float("inf") if values.isnan().any() else float(values.max())
