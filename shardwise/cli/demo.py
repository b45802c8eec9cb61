"""``shardwise demo``: arguments of the demo, checked before any rank is started."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.checked import MOST_COUNT, MOST_NUMEL, MOST_RANKS, MOST_SEED, number, whole
from shardwise.cli.demo_tiers import (
    MEMORY_MARKER,
    Shape,
    TierOptions,
    add_options,
    batch_for,
    check_tiers,
    context_for,
    parse_count,
    shape_for,
    shape_for_device,
)
from shardwise.cli.errors import BadInput, option
from shardwise.cli.launch import launch

__all__ = ["DemoConfig", "add_parser", "check", "main"]

# For each plugin: its stages (the first is the default) and its number formats (the first is the default on CPU).
STAGES: dict[str, tuple[int, ...]] = {
    "low_level_zero": (2, 1),
    "gemini": (),
    "ddp": (),
    "fsdp": (),
    "hybrid_parallel": (1, 2),
}
PRECISIONS: dict[str, tuple[str, ...]] = {
    "low_level_zero": ("fp32", "bf16", "fp16"),
    "gemini": ("bf16", "fp16"),
    "ddp": ("fp32", "bf16", "fp16"),
    "fsdp": ("fp32", "bf16"),
    "hybrid_parallel": ("fp32", "bf16", "fp16"),
}
# Where memory is limited the numbers may be fp32 on Gemini too, which a CPU without 16-bit instructions is faster in.
PRECISIONS_IN_TIERS = ("fp32", "bf16", "fp16")
DEFAULT_PLUGIN, DEFAULT_SHAPE, DEFAULT_BATCH = "low_level_zero", Shape(width=192, depth=3, heads=6), 4
DEFAULT_CONTEXT, DEFAULT_RATE, DEFAULT_RANKS = 128, 3e-3, 2


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the ranks are told. Sizes of the model as in :class:`~shardwise.cli.demo_model.ModelSize`; ``batch`` is
    sequences a rank and step; ``data`` and ``out`` are absolute paths; ``device`` is ``auto``, ``cpu`` or ``cuda``;
    ``tiers`` is ``None`` where nothing was said about memory."""

    plugin: str
    stage: int | None
    precision: str | None
    nproc: int
    tp: int
    pp: int
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
    tiers: TierOptions | None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoConfig:
        """What :meth:`to_json` wrote."""
        values = json.loads(text)
        tiers = values.pop("tiers")
        return cls(**values, tiers=None if tiers is None else TierOptions(**tiers))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Without a word on defaults that are none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def add_parser(commands: Any) -> None:
    """Add ``demo`` to the command's subparsers."""
    parser = commands.add_parser(
        "demo",
        help="train a byte-level GPT on text files over several ranks",
        description="Train a byte-level GPT on the text files of a folder; run it again to continue.",
        formatter_class=_Help,
    )
    add = parser.add_argument
    absent = argparse.SUPPRESS  # their defaults depend on other options
    add("--plugin", choices=list(STAGES), default=absent, help=f"which plugin trains (default: {DEFAULT_PLUGIN})")
    add("--stage", type=int, help="ZeRO stage, 1 or 2, of low_level_zero (default: 2) and hybrid_parallel (default: 1)")
    add("--precision", choices=["fp32", "bf16", "fp16"], help="number format; the default suits plugin and device")
    add(
        "--nproc",
        type=int,
        default=absent,
        help=f"ranks on this host (default: {DEFAULT_RANKS}, 1 with --device-memory)",
    )
    add("--tp", type=int, default=1, help="ranks that hold parts of the same layers (plugin hybrid_parallel)")
    add("--pp", type=int, default=1, help="ranks that hold stages of the model (plugin hybrid_parallel)")
    add("--data", type=Path, help="folder with text files; the Python standard library's source if left out")
    add("--out", type=Path, default=Path("demo-run"), help="folder for the checkpoints")
    add("--steps", type=int, default=500, help="steps to train; when they are done, the same number again")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: GPUs where every rank has one")
    add("--seed", type=int, default=0, help="of the initial parameters and the order of the text")
    shape = DEFAULT_SHAPE
    add("--size", metavar="COUNT", default=absent, help="parameters, such as 20M, instead of width, depth and heads")
    add("--width", type=int, default=absent, help=f"features of the model (default: {shape.width})")
    add("--depth", type=int, default=absent, help=f"blocks of the model (default: {shape.depth})")
    add("--heads", type=int, default=absent, help=f"attention heads (default: {shape.heads})")
    add("--context", type=int, default=absent, help=f"bytes that the model sees at once (default: {DEFAULT_CONTEXT})")
    add("--batch", type=int, default=absent, help=f"sequences a rank and step (default: {DEFAULT_BATCH})")
    rate_help = f"the highest one of the schedule (default: {DEFAULT_RATE}, less for a wider model chosen for a device)"
    add("--learning-rate", type=float, default=absent, help=rate_help)
    add("--sample", type=int, default=200, help="bytes of text to generate at the end")
    add_options(parser)
    parser.set_defaults(main=main)


def _need_at_least(options: argparse.Namespace, low: int, *names: str) -> None:
    for name in names:
        most = {"seed": MOST_SEED, **dict.fromkeys(("nproc", "tp", "pp"), MOST_RANKS)}.get(name, MOST_COUNT)
        option(f"--{name}", whole, getattr(options, name), low, most, "a number")


def _with_defaults(options: argparse.Namespace) -> tuple[argparse.Namespace, TierOptions | None]:
    """A copy with a plugin, a shape and a batch, and what was said about memory."""
    chosen = argparse.Namespace(**vars(options))
    chosen.plugin = getattr(options, "plugin", None)
    tiers = check_tiers(chosen)
    if chosen.plugin is None:
        chosen.plugin = (
            "gemini" if tiers is not None else "hybrid_parallel" if options.tp * options.pp > 1 else DEFAULT_PLUGIN
        )
    device_bytes = None if tiers is None else tiers.device_bytes
    chosen.nproc = getattr(options, "nproc", DEFAULT_RANKS if device_bytes is None else 1)
    given = [name for name in ("width", "depth", "heads") if hasattr(options, name)]
    shape = DEFAULT_SHAPE
    if hasattr(options, "size"):
        if given:
            raise BadInput(f"--size {options.size} with --{given[0]}: give either the size or the shape")
        shape = shape_for(parse_count(options.size))
    elif device_bytes is not None and not given:
        shape = shape_for_device(device_bytes)
    for name, value in asdict(shape).items():
        setattr(chosen, name, getattr(options, name, value))
    _need_at_least(chosen, 1, "width", "depth", "heads")
    wanted = Shape(width=chosen.width, depth=chosen.depth, heads=chosen.heads)
    if wanted.parameters > MOST_NUMEL:
        raise BadInput(f"--width {chosen.width} --depth {chosen.depth}: {wanted.parameters} parameters; give less")
    wider = max(wanted.width / DEFAULT_SHAPE.width, 1.0) if tiers is not None else 1.0
    chosen.learning_rate = getattr(options, "learning_rate", DEFAULT_RATE / wider)
    context, batch = DEFAULT_CONTEXT, DEFAULT_BATCH
    if device_bytes is not None:
        context = context_for(wanted, DEFAULT_CONTEXT, _value_bytes(options), device_bytes)
    chosen.context = getattr(options, "context", context)
    if device_bytes is not None and chosen.context > 0:
        batch = batch_for(wanted, chosen.context, _value_bytes(options), device_bytes)
    chosen.batch = getattr(options, "batch", batch)
    return chosen, tiers


def _value_bytes(options: argparse.Namespace) -> int:
    """Of a parameter; the default is known later, by the device, and the larger of the two."""
    fp32 = options.precision in (None, "fp32") and options.device != "cuda"
    return 4 if fp32 or options.precision == "fp32" else 2


def check(options: argparse.Namespace) -> DemoConfig:
    """The options as a config, with what goes with what checked; reads no file's content.

    Raises:
        BadInput: naming the option, its value and what to do.
    """
    from shardwise.cli.demo_data import default_folder

    options, tiers = _with_defaults(options)
    _need_at_least(options, 1, "nproc", "tp", "pp", "steps", "width", "depth", "heads", "context", "batch")
    _need_at_least(options, 0, "sample", "seed")
    plugin, stage, precision = options.plugin, options.stage, options.precision
    together = options.tp * options.pp
    if together > 1 and plugin != "hybrid_parallel":
        raise BadInput(
            f"--tp {options.tp} --pp {options.pp}: --plugin {plugin} does not divide the model; leave it out or use "
            "hybrid_parallel"
        )
    if options.nproc % together:
        raise BadInput(
            f"--tp {options.tp} --pp {options.pp}: --nproc {options.nproc} has to be a multiple of {together}"
        )
    if options.heads < options.tp or options.depth < options.pp:
        raise BadInput(
            f"--tp {options.tp} --pp {options.pp}: --heads {options.heads} and --depth {options.depth} have to be at "
            "least as many"
        )
    if stage is not None and not STAGES[plugin]:
        raise BadInput(f"--stage {stage}: the plugin {plugin} has no stages; leave it out or use low_level_zero")
    if stage is not None and stage not in STAGES[plugin]:
        raise BadInput(f"--stage {stage}: {plugin} has stages 1 and 2; stage 3 is --plugin gemini")
    known = PRECISIONS[plugin] if tiers is None else PRECISIONS_IN_TIERS
    if precision is not None and precision not in known:
        raise BadInput(f"--precision {precision}: {plugin} trains in {' or '.join(known)}")
    if options.width % (2 * options.heads):
        raise BadInput(f"--width {options.width}: give a multiple of 2 x --heads ({2 * options.heads})")
    option("--learning-rate", number, options.learning_rate, "(0, inf)", "a finite number > 0, such as 3e-3")
    out = options.out.absolute()
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {options.out}: is a file; give a folder")
    if tiers is not None:
        shape = Shape(width=options.width, depth=options.depth, heads=options.heads)
        tiers = tiers.for_model(_value_bytes(options) * shape.parameters / options.nproc)
    default_stage = STAGES[plugin][0] if STAGES[plugin] else None
    values: dict[str, Any] = {name: getattr(options, name, None) for name in DemoConfig.__dataclass_fields__}
    values |= {"stage": stage or default_stage, "data": str(options.data or default_folder()), "out": str(out)}
    return DemoConfig(**values | {"tiers": tiers})


def main(options: argparse.Namespace) -> int:
    """Start the ranks, and return 0, 1 (too little device memory), 2 (bad input), 130 or 143 (stopped and saved), or a
    failed rank's status."""
    from shardwise.cli.demo_data import require_text

    config = check(options)
    require_text(Path(config.data), *text_needed(config))
    try:
        Path(config.out).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"--out {options.out}: cannot be made ({problem.strerror}); give another folder") from problem
    arguments = ["--standalone", f"--nproc-per-node={config.nproc}", "--module"]
    marker = Path(config.out, MEMORY_MARKER)
    marker.unlink(missing_ok=True)
    try:
        status = launch(arguments, ["shardwise.cli.demo_rank", config.to_json()], config.nproc)
    finally:
        marker.unlink(missing_ok=True)
    if status in (130, 143):
        print(f"stopped; the same command continues from {config.out}", file=sys.stderr)
    return status


def text_needed(config: DemoConfig) -> tuple[int, int]:
    """Bytes of training text for one step of all ranks, and of held-out text for one window."""
    data_parallel = config.nproc // (config.tp * config.pp)
    return config.context * config.batch * data_parallel + 1, config.context + 1
