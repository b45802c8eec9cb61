"""Run one training step of a model and draw its memory. The picture shows model data, activations and the peak.

FUNCTION takes no arguments and returns a model, (model, batch) or (model, batch, loss). The batch is a tensor, a tuple
of arguments or a dict of keyword arguments; loss(model, batch) returns the scalar loss. With --device meta nothing is
allocated or computed, and FUNCTION runs on that device, too, if it can. --stats draws a trace that --json or
MemStats.save has saved.

examples:
  shardwise trace train.py:build --batch first_batch --optimizer AdamW --capacity 24GiB
  shardwise trace package.models:tiny --device meta --json stats.json
  shardwise trace --stats stats.json --out trace.svg
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from shardwise.cli.errors import BadInput, check_writable, writing
from shardwise.cli.parser import size, texts
from shardwise.core.base.validate import did_you_mean
from shardwise.core.memory.trace.stats import NON_MODEL, MemStats

T = TypeVar("T")


def add_parser(commands: Any) -> None:
    """Add ``trace`` to the command's subparsers."""
    parser = commands.add_parser("trace", **texts(__doc__))
    add = parser.add_argument
    add("target", nargs="?", metavar="FILE_OR_MODULE:FUNCTION", help="function that returns the model, see below")
    add("--batch", metavar="FUNCTION", help="function in the same module that returns the batch")
    add("--optimizer", metavar="NAME", help="optimizer of torch.optim to step, such as AdamW (default: none)")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 or meta (default: the device of the model)")
    add("--capacity", type=size, metavar="SIZE", help="memory of the device, such as 24GiB (default: that of the GPU)")
    add("--stats", type=Path, metavar="FILE", help="draw this saved trace instead of running a step")
    add("--out", type=Path, default=Path("trace.svg"), metavar="FILE", help="path of the picture, as SVG")
    add("--json", type=Path, metavar="FILE", help="save the trace as JSON, for --stats")
    add("--dump", type=Path, metavar="FILE", help="save the trace as a text table")
    add("--quiet", action="store_true", help="print one line, without the picture in text")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Trace or load, write the files, print; return 0, or 2 for bad input. Under a launcher only rank 0 writes and
    prints.
    """
    if (options.target is None) == (options.stats is None):
        count = "neither" if options.target is None else "both"
        raise BadInput(f"{count} of FILE_OR_MODULE:FUNCTION and --stats given: give one of them")
    for path in (options.out, options.json, options.dump):
        if path is not None:
            check_writable(path)
    stats = _saved(options) if options.stats is not None else _traced(options)
    if os.environ.get("RANK", "0") == "0":
        _show(options, stats)
    return 0


def _saved(options: argparse.Namespace) -> MemStats:
    from dataclasses import replace

    for name in ("batch", "optimizer", "device"):
        if getattr(options, name) is not None:
            raise BadInput(f"--{name} {getattr(options, name)}: has no meaning with --stats; leave it out")
    try:
        stats = MemStats.load(options.stats)
    except OSError as problem:
        wrong = f"--stats {options.stats}: {problem.strerror or problem}"
        raise BadInput(f"{wrong}; give a file that --json or MemStats.save has written") from None
    except ValueError as problem:
        raise BadInput(f"--stats {problem}") from None
    return stats if options.capacity is None else replace(stats, capacity_bytes=options.capacity)


def _show(options: argparse.Namespace, stats: MemStats) -> None:
    from shardwise.core.base.sizes import size_text
    from shardwise.core.memory.trace.picture import draw, dump_memory_stats, shortened, timeline_text

    title = options.target or options.stats.name
    with writing(options.out):
        options.out.write_text(draw(stats, f"Memory of one training step: {title}"), encoding="utf-8")
    if options.json is not None:
        with writing(options.json):
            stats.save(options.json)
    if options.dump is not None:
        with writing(options.dump):
            dump_memory_stats(stats, options.dump)
    if not options.quiet:
        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        width = shutil.get_terminal_size((100, 24)).columns
        print(timeline_text(stats, width, ascii_only=not encoding.startswith("utf")), end="")
    peak = stats.moments[stats.peak_index] if stats.moments else None
    where = f" at {shortened(peak.name)} ({peak.phase}), {size_text(peak.non_model_bytes)} {NON_MODEL}" if peak else ""
    capacity = f" of {size_text(stats.capacity_bytes)}" if stats.capacity_bytes is not None else ""
    print(f"peak {size_text(stats.peak_bytes)}{capacity}{where}; picture in {options.out}")


def _traced(options: argparse.Namespace) -> MemStats:
    import torch
    from torch import nn

    from shardwise.core.deferred.construction import adopt
    from shardwise.core.memory.trace.standalone import trace_memory

    source, function = split_target(options.target)
    module = load_module(source)
    made = (call_on_meta if options.device == "meta" else call)(module, function, options.target)
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module) or (len(parts) == 3 and not callable(parts[2])):
        kinds = ", ".join(type(part).__name__ for part in parts) or "()"
        raise BadInput(f"{options.target} returned {kinds}: return a model, (model, batch) or (model, batch, loss)")
    model, batch, loss = (*parts, None, None)[:3]
    if options.batch is not None:
        batch = call(module, options.batch, f"{source}:{options.batch}")
    if batch is None:
        raise BadInput(f"{options.target} returned no batch: return (model, batch), or name a function with --batch")
    if options.device is not None:
        try:
            device = torch.device(options.device)
        except RuntimeError:
            raise BadInput(f"--device {options.device}: no such device; give cpu, cuda, cuda:1 or meta") from None
        try:
            if device.type == "meta":
                for each in (*model.parameters(), *model.buffers()):
                    adopt(each, torch.empty_like(each, device="meta"))  # tied modules share it, unlike after to()
            model, batch = model.to(device), _move(batch, device)
        except (RuntimeError, AssertionError) as problem:
            raise BadInput(f"--device {options.device}: {str(problem).splitlines()[0]}; use cpu or meta") from None
    optimizer = make_optimizer(options.optimizer, model) if options.optimizer is not None else None
    step = partial(trace_memory, model, batch, loss, optimizer=optimizer, capacity_bytes=options.capacity)
    return guarded(f"the step of {options.target}", step)


def split_target(text: str) -> tuple[str, str]:
    """Return file or module, and function, of ``FILE_OR_MODULE:FUNCTION``."""
    source, _, function = text.rpartition(":")
    if not source or not function.isidentifier():
        raise BadInput(f"{text}: give FILE_OR_MODULE:FUNCTION, such as train.py:build or package.models:tiny")
    return source, function


def load_module(source: str) -> ModuleType:
    """Import a module by its name or file."""
    path = Path(source)
    if path.suffix != ".py" and os.sep not in source:
        sys.path.insert(0, os.getcwd())
        try:
            return guarded(f"importing {source}", lambda: importlib.import_module(source), ModuleNotFoundError)
        except ModuleNotFoundError as problem:
            missing = problem.name or source
            if source == missing or source.startswith(missing + "."):
                raise BadInput(f"{source}: no such module; give a module that can be imported, or a .py file") from None
            raise BadInput(f"importing {source}: it needs {missing}, which is not installed") from None
    if not path.is_file():
        raise BadInput(f"{source}: no such file; give a Python file or a module name")
    # As in a normal run, modules in the script's folder can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{source}: is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    loader = spec.loader
    guarded(f"running {source}", lambda: loader.exec_module(module))
    return module


def call(module: ModuleType, name: str, shown: str) -> Any:
    """Return what the module's function ``name`` returns; ``shown`` is its name in errors."""
    function = getattr(module, name, None)
    if not callable(function):
        own = ((n, f) for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__)
        known = [n for n, _ in own if not n.startswith("_")]
        raise BadInput(f"{shown}: no such function; it has {', '.join(sorted(known)) or 'none'}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []  # not implemented in Python
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if needed:
        raise BadInput(f"{shown}: needs arguments ({', '.join(needed)}); give a function that takes none")
    return guarded(f"{shown}()", function)


def call_on_meta(module: ModuleType, name: str, shown: str) -> Any:
    """Call on the meta device, so that the model takes no memory; on the CPU if that fails, as ``from_pretrained``."""
    import torch

    with suppress(BadInput), torch.device("meta"):
        return call(module, name, shown)
    return call(module, name, shown)


def guarded(what: str, action: Callable[[], T], *through: type[Exception]) -> T:
    """Turn errors of the user's code into one line that says where they come from."""
    try:
        return action()
    except through:
        raise
    except SystemExit as end:
        raise BadInput(f"{what} ended with exit status {end.code or 0}"[:200]) from None
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        # For a file that cannot be read or compiled it is in Python's import system, and the message names the file.
        where = "" if last.filename.startswith("<frozen") else f" ({last.filename}:{last.lineno})"
        message = (str(problem).splitlines() or [""])[0]
        raise BadInput(f"{what} raised {type(problem).__name__}: {message}{where}") from problem


def make_optimizer(name: str, model: Any) -> Any:
    """Return an optimizer of ``torch.optim`` over the model's parameters."""
    import torch

    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        known = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "RMSprop", "SGD")
        hint = did_you_mean(name, known, "give one such as AdamW, Adam or SGD")
        raise BadInput(f"--optimizer {name}: no optimizer of torch.optim; {hint}")
    construct: Callable[[Any], Any] = kind
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise BadInput(f"--optimizer {name}: the model has no parameter that needs a gradient; leave it out")
    return guarded(f"torch.optim.{name}", lambda: construct(trained))


def _move(value: Any, device: Any) -> Any:
    import torch

    from shardwise.core.base.torch_internals import map_leaves_of

    if hasattr(value, "to") and not isinstance(value, torch.Tensor):
        return value.to(device)
    return map_leaves_of(torch.Tensor, lambda tensor: tensor.to(device), value)
