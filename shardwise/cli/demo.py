"""``shardwise demo``: arguments of the demo, checked before any rank is started."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.cli.errors import BadInput
from shardwise.cli.launch import launch

__all__ = ["DemoConfig", "add_parser", "check", "main"]

# For each plugin: its stages (the first is the default) and its number formats (the first is the default on CPU).
STAGES: dict[str, tuple[int, ...]] = {"low_level_zero": (2, 1), "gemini": (), "ddp": (), "fsdp": ()}
PRECISIONS: dict[str, tuple[str, ...]] = {
    "low_level_zero": ("fp32", "bf16", "fp16"),
    "gemini": ("bf16", "fp16"),
    "ddp": ("fp32", "bf16", "fp16"),
    "fsdp": ("fp32", "bf16"),
}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the ranks are told. Sizes of the model as in :class:`~shardwise.cli.demo_model.ModelSize`; ``batch`` is
    sequences a rank and step; ``data`` and ``out`` are absolute paths; ``device`` is ``auto``, ``cpu`` or ``cuda``."""

    plugin: str
    stage: int | None
    precision: str | None
    nproc: int
    data: str
    out: str
    steps: int
    device: str
    seed: int
    width: int
    depth: int
    heads: int
    context: int
    batch: int
    learning_rate: float
    sample: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoConfig:
        """What :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def add_parser(commands: Any) -> None:
    """Add ``demo`` to the command's subparsers."""
    parser = commands.add_parser(
        "demo",
        help="train a byte-level GPT on text files over several ranks",
        description="Train a byte-level GPT on the text files of a folder; run it again to continue.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--plugin", default="low_level_zero", choices=list(STAGES), help="which plugin trains")
    add("--stage", type=int, help="ZeRO stage of low_level_zero: 1 or 2")
    add("--precision", choices=["fp32", "bf16", "fp16"], help="number format; the default suits plugin and device")
    add("--nproc", type=int, default=2, help="ranks on this host")
    add("--data", type=Path, help="folder with text files; the Python standard library's source if left out")
    add("--out", type=Path, default=Path("demo-run"), help="folder for the checkpoint")
    add("--steps", type=int, default=500, help="steps to train; when they are done, the same number again")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: GPUs where every rank has one")
    add("--seed", type=int, default=0, help="of the initial parameters and the order of the text")
    add("--width", type=int, default=192, help="features of the model")
    add("--depth", type=int, default=3, help="blocks of the model")
    add("--heads", type=int, default=6, help="attention heads")
    add("--context", type=int, default=128, help="bytes that the model sees at once")
    add("--batch", type=int, default=4, help="sequences a rank and step")
    add("--learning-rate", type=float, default=3e-3, help="the highest one of the schedule")
    add("--sample", type=int, default=200, help="bytes of text to generate at the end")
    parser.set_defaults(main=main)


def _need_at_least(options: argparse.Namespace, low: int, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value < low:
            raise BadInput(f"--{name} {value}: give a number >= {low}")


def check(options: argparse.Namespace) -> DemoConfig:
    """The options as a config, with what goes with what checked; reads no file's content.

    Raises:
        BadInput: naming the option, its value and what to do.
    """
    from shardwise.cli.demo_data import default_folder

    _need_at_least(options, 1, "nproc", "steps", "width", "depth", "heads", "context", "batch")
    _need_at_least(options, 0, "sample", "seed")
    plugin, stage, precision = options.plugin, options.stage, options.precision
    if stage is not None and not STAGES[plugin]:
        raise BadInput(f"--stage {stage}: the plugin {plugin} has no stages; leave it out or use low_level_zero")
    if stage is not None and stage not in STAGES[plugin]:
        raise BadInput(f"--stage {stage}: {plugin} has stages 1 and 2; stage 3 is --plugin gemini")
    if precision is not None and precision not in PRECISIONS[plugin]:
        raise BadInput(f"--precision {precision}: {plugin} trains in {' or '.join(PRECISIONS[plugin])}")
    if options.width % (2 * options.heads):
        raise BadInput(f"--width {options.width}: give a multiple of 2 x --heads ({2 * options.heads})")
    if not options.learning_rate > 0:
        raise BadInput(f"--learning-rate {options.learning_rate}: give a number > 0")
    out = options.out.absolute()
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {options.out}: is a file; give a folder")
    values = {name: getattr(options, name) for name in DemoConfig.__dataclass_fields__}
    default_stage = STAGES[plugin][0] if STAGES[plugin] else None
    values |= {"stage": stage or default_stage, "data": str(options.data or default_folder()), "out": str(out)}
    return DemoConfig(**values)


def main(options: argparse.Namespace) -> int:
    """Start the ranks, and return 0, 2 (bad input), 130 or 143 (stopped and saved), or a failed rank's status."""
    from shardwise.cli.demo_data import require_text

    config = check(options)
    require_text(Path(config.data), *text_needed(config))
    Path(config.out).mkdir(parents=True, exist_ok=True)
    arguments = ["--standalone", f"--nproc-per-node={config.nproc}", "--module"]
    status = launch(arguments, ["shardwise.cli.demo_rank", config.to_json()], config.nproc)
    if status in (130, 143):
        print(f"stopped; the same command continues from {config.out}", file=sys.stderr)
    return status


def text_needed(config: DemoConfig) -> tuple[int, int]:
    """Bytes of training text for one step of all ranks, and of held-out text for one window."""
    return config.context * config.batch * config.nproc + 1, config.context + 1
