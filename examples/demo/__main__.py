"""Train a byte-level GPT on text files over several ranks: ``make demo``, or ``python examples/demo``.

Options are checked here; ``demo.train`` is what each rank runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from shardwise import parse_size
from shardwise.cli.run import threads_per_rank

# By plugin, its ZeRO stages and its number formats; the first of each is the default on a CPU.
STAGES: dict[str, tuple[int, ...]] = {"low_level_zero": (2, 1), "hybrid_parallel": (1, 2)}
PRECISIONS = {
    "low_level_zero": ("fp32", "bf16", "fp16"),
    "gemini": ("bf16", "fp16", "fp32"),
    "ddp": ("fp32", "bf16", "fp16"),
    "fsdp": ("fp32", "bf16"),
    "hybrid_parallel": ("fp32", "bf16", "fp16"),
}
TIERS = ("device_memory", "offload_optim", "offload_params", "placement", "nvme_dir", "nvme_optim")
ADAM_BYTES = 16
"""A parameter's training state in fp32: parameter, gradient and Adam's two moments."""
TIMES_LARGER = 4
"""Unsharded training state of the model that is chosen for ``--device-memory``, as a multiple of that."""
ACTIVATION_VALUES = 26
"""What a block keeps for its backward pass, per position and feature."""
MOST_RANKS, MOST_STEPS, MOST_PARAMETERS = 4096, 2**31 - 1, 10**12


class Parser(argparse.ArgumentParser):
    """Its errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: error: {' '.join(message.split())}\n")


def parser() -> Parser:
    """Return the parser of the demo's options. Options that are not given and depend on others are ``None``."""
    made = Parser(
        prog="demo", description="Train a byte-level GPT on the text files of a folder; run it again to continue."
    )
    add = made.add_argument
    add("--plugin", choices=list(PRECISIONS), help="which plugin trains (default: low_level_zero)")
    add("--stage", type=int, help="ZeRO stage, 1 or 2, of low_level_zero (default: 2) and hybrid_parallel (default: 1)")
    add("--precision", choices=["fp32", "bf16", "fp16"], help="number format; the default suits plugin and device")
    add("--nproc", type=int, help="ranks on this host (default: 2, with --device-memory 1)")
    add("--tp", type=int, default=1, help="ranks that hold parts of the same layers (plugin hybrid_parallel)")
    add("--pp", type=int, default=1, help="ranks that hold stages of the model (plugin hybrid_parallel)")
    add("--data", type=Path, help="folder with text files (default: the Python standard library's source)")
    add("--out", type=Path, default=Path("demo-run"), help="folder for the checkpoints (default: demo-run)")
    add("--steps", type=int, default=500, help="steps to train (default: 500); when done, the same number again")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: GPUs where every rank has one")
    add("--seed", type=int, default=0, help="of the initial parameters and the order of the text (default: 0)")
    add("--size", metavar="COUNT", help="parameters, such as 20M, instead of width, depth and heads")
    add("--width", type=int, help="features of the model (default: 192)")
    add("--depth", type=int, help="blocks of the model (default: 3)")
    add("--heads", type=int, help="attention heads (default: 6)")
    add("--context", type=int, help="bytes that the model sees at once (default: 128)")
    add("--batch", type=int, help="sequences per rank and step (default: 4)")
    add("--learning-rate", type=float, help="the highest one of the schedule (default: 0.003)")
    add("--sample", type=int, default=200, help="bytes of text to generate at the end (default: 200)")
    add = made.add_argument_group("memory beyond the device (any of these trains with gemini)").add_argument
    add("--device-memory", metavar="SIZE", help="memory of each device, such as 64MiB, enforced; the model is chosen "
        "so that its unsharded training state is 4 times that")  # fmt: skip
    add("--offload-optim", metavar="SHARE", type=float, help="share of masters and optimizer state kept on the host "
        "(default: what is not on disk)")  # fmt: skip
    add("--offload-params", metavar="SHARE", type=float, help="the same for parameters (default: 0 where they take up "
        "to a third of the device, otherwise 1)")  # fmt: skip
    add("--placement", choices=["static", "auto"], help="static: by these shares; auto: by a trace of the first step")
    add("--nvme-dir", metavar="DIR", type=Path, help="folder on a disk for optimizer state")
    add("--nvme-optim", metavar="SHARE", type=float, help="share of optimizer state in --nvme-dir (default: 1)")
    return made


def parameters(width: int, depth: int) -> int:
    """Count the parameters of :class:`demo.model.ByteGPT`."""
    return depth * (12 * width**2 + 13 * width) + 258 * width


def shape_for(count: int) -> dict[str, int]:
    """Return the sizes of a GPT with at least ``count`` parameters, about 64 features a block."""
    width = min((64 * count / 12) ** (1 / 3), math.sqrt(count / 72))
    step = 64 if width >= 128 else 16
    width = max(step * int(width / step), 16)
    block = parameters(width, 2) - parameters(width, 1)
    depth = 1 + max(0, math.ceil((count - parameters(width, 1)) / block))
    return {"width": width, "depth": depth, "heads": max(width // 64, 1)}


def config(arguments: list[str]) -> dict[str, Any]:
    """Check the options and return what the ranks are told, with every default filled in."""
    made = parser()
    options = vars(made.parse_args(arguments))
    fail = made.error
    tiers = [name for name in TIERS if options[name] is not None]
    device_bytes = None
    if options["device_memory"] is not None:
        try:
            device_bytes = parse_size(options["device_memory"])
        except ValueError as problem:
            fail(f"--device-memory: {problem}")
    together = options["tp"] * options["pp"]
    plugin = options["plugin"] or ("gemini" if tiers else "hybrid_parallel" if together > 1 else "low_level_zero")
    options["plugin"] = plugin
    _choose_sizes(options, device_bytes, fail)
    ranges = dict.fromkeys(("nproc", "tp", "pp"), (1, MOST_RANKS)) | {"seed": (0, 2**63 - 1), "sample": (0, MOST_STEPS)}
    ranges |= dict.fromkeys(("steps", "width", "depth", "heads", "context", "batch"), (1, MOST_STEPS))
    for name, (least, most) in ranges.items():
        if not least <= options[name] <= most:
            fail(f"--{name} {options[name]}: give a number from {least} to {most}")
    most = 4 * threads_per_rank(1)
    if options["nproc"] > most:
        fail(f"--nproc {options['nproc']}: too many ranks for this machine; give at most {most}, 4 for each core")
    width, depth, heads, nproc = (options[name] for name in ("width", "depth", "heads", "nproc"))
    if width % (2 * heads) or parameters(width, depth) > MOST_PARAMETERS:
        fail(f"--width {width} --depth {depth}: give a multiple of 2 x --heads ({2 * heads}), at most 10^12 parameters")
    if not 0 < options["learning_rate"] < math.inf:
        fail(f"--learning-rate {options['learning_rate']}: give a finite number > 0, such as 3e-3")
    if together > 1 and plugin != "hybrid_parallel":
        fail(f"--tp and --pp: --plugin {plugin} does not divide the model; leave it out or use hybrid_parallel")
    if nproc % together or heads < options["tp"] or depth < options["pp"]:
        fail(
            f"--tp {options['tp']} --pp {options['pp']}: --nproc {nproc} has to be a multiple of {together}, --heads "
            f"{heads} and --depth {depth} at least as many"
        )
    if options["stage"] is not None and options["stage"] not in STAGES.get(plugin, ()):
        fail(f"--stage {options['stage']}: low_level_zero and hybrid_parallel have stages 1 and 2; gemini is stage 3")
    options["stage"] = options["stage"] or STAGES.get(plugin, (0,))[0]
    if options["precision"] not in (None, *PRECISIONS[plugin]):
        fail(f"--precision {options['precision']}: {plugin} trains in {' or '.join(PRECISIONS[plugin])}")
    options["tiers"] = _tiers(options, tiers, device_bytes, fail) if tiers else None
    for name in TIERS:
        del options[name]
    _check_folders(options, fail)
    return options


def _choose_sizes(options: dict[str, Any], device_bytes: int | None, fail: Any) -> None:
    """Fill in ranks, shape, context, batch and learning rate, to go with the memory of a device."""
    shape, given = {"width": 192, "depth": 3, "heads": 6}, options.pop("size")
    own = [name for name in shape if options[name] is not None]
    if given is not None:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmb]?)", given.lower())
        count = round(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]]) if match else 0
        if not 1 <= count <= MOST_PARAMETERS:
            fail(f"--size {given}: give a number of parameters such as 20M, 1.5B or 400K")
        if own:
            fail(f"--size {given} with --{own[0]}: give either the size or the shape")
        shape = shape_for(count)
    elif device_bytes is not None and not own:
        shape = shape_for(math.ceil(TIMES_LARGER * device_bytes / ADAM_BYTES))
    defaults = {**shape, "nproc": 2, "context": 128, "batch": 4, "learning_rate": 3e-3}
    if device_bytes is not None:
        wide, deep = (options[name] or shape[name] for name in ("width", "depth"))
        position = max(1, deep * wide * ACTIVATION_VALUES * _value_bytes(options))
        defaults["nproc"] = 1
        defaults["context"] = min(128, max(16, int(0.6 * device_bytes / position) // 16 * 16))
        defaults["batch"] = min(
            4, max(1, int(device_bytes / 4 / (position * (options["context"] or defaults["context"]))))
        )
        defaults["learning_rate"] = 3e-3 / max(wide / 192, 1.0)
    for name, default in defaults.items():
        options[name] = default if options[name] is None else options[name]


def _value_bytes(options: dict[str, Any]) -> int:
    fp32 = options["precision"] == "fp32" or (options["precision"] is None and options["device"] != "cuda")
    return 4 if fp32 else 2


def _tiers(options: dict[str, Any], names: list[str], device_bytes: int | None, fail: Any) -> dict[str, Any]:
    """Return where state is to be, for the plugin."""
    if options["plugin"] != "gemini":
        flag = names[0].replace("_", "-")
        fail(f"--plugin {options['plugin']} with --{flag}: only gemini offloads; leave one of them out")
    for name in ("offload_optim", "offload_params", "nvme_optim"):
        if options[name] is not None and not 0.0 <= options[name] <= 1.0:
            fail(f"--{name.replace('_', '-')} {options[name]}: give a share from 0 to 1")
    directory, disk, host = options["nvme_dir"], options["nvme_optim"], options["offload_optim"]
    if directory is None and disk:
        fail(f"--nvme-optim {disk}: name a folder on the disk with --nvme-dir")
    if directory is not None and not directory.is_dir():
        fail(f"--nvme-dir {directory}: no such folder; make it, or give another")
    if directory is None:
        disk = 0.0
    elif disk is None:
        disk = 1.0 - (host or 0.0)
    host = 1.0 - disk if host is None else host
    if host + disk > 1.0:
        fail(f"--offload-optim {host} and --nvme-optim {disk} are more than 1 together; lower one of them")
    auto = options["placement"] == "auto"
    if auto and set(names) - {"placement", "device_memory"}:
        fail("--placement auto decides the shares; leave them out, or use static")
    params = options["offload_params"]
    if params is None:
        rank_bytes = _value_bytes(options) * parameters(options["width"], options["depth"]) / options["nproc"]
        params = float(device_bytes is not None and rank_bytes > device_bytes / 3)
    return {
        "device_bytes": device_bytes,
        "placement": "auto" if auto else "static",
        "optim_host": host,
        "optim_disk": disk,
        "params_host": 0.0 if auto else params,
        "disk_directory": None if directory is None else str(directory.absolute()),
    }


def _check_folders(options: dict[str, Any], fail: Any) -> None:
    data = options["data"] or Path(os.path.dirname(os.__file__))
    if not data.is_dir():
        fail(f"--data {data}: {'is a file' if data.exists() else 'no such folder'}; give a folder with text files")
    out = options["out"].absolute()
    if out.exists() and not out.is_dir():
        fail(f"--out {options['out']}: is a file; give a folder")
    options |= {"data": str(data), "out": str(out)}


def main(arguments: list[str]) -> NoReturn:
    """Start the ranks in the place of this process."""
    told = config(arguments)
    try:
        Path(told["out"]).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser().error(f"--out {told['out']}: cannot be made ({problem.strerror}); give another folder")
    run = ["-m", "shardwise", "run", "--nproc", str(told["nproc"]), "-m", "demo.train", json.dumps(told)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    os.execve(sys.executable, [sys.executable, *run], os.environ | {"PYTHONPATH": path})


if __name__ == "__main__":
    main(sys.argv[1:])
