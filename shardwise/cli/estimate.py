"""``shardwise estimate``: print the bytes of model data by tier that a build would account for."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from typing import Any

from shardwise.cli.errors import BadInput, option
from shardwise.cli.trace import call, guarded, load_module, make_optimizer, split_target
from shardwise.core.base.sizes import size_text
from shardwise.core.base.validate import MOST_RANKS, integer

EXAMPLES = """
MODEL is a folder with a Hugging Face config.json, the name of a cached model of the Hugging Face hub, or a function of
a Python file or module that returns a model. The model is created on the meta device, in fp32, and takes no memory.

  shardwise estimate llama/ --stage 3 --devices 8 --offload-optimizer cpu
  shardwise estimate train.py:build --stage 2 --devices 4 --precision fp32 --optimizer SGD --json
"""
KINDS = ("parameters", "gradients", "masters", "optimizer state", "buffers", "total")
TIERS = {"cpu": "host", "nvme": "disk"}


def add_parser(commands: Any) -> None:
    """Add ``estimate`` to the command's subparsers."""
    parser = commands.add_parser(
        "estimate",
        help="print the memory for parameters, gradients and optimizer state",
        description="Print the memory of one rank for parameters, gradients and optimizer state. Nothing is allocated.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a Hugging Face model, or FILE_OR_MODULE:FUNCTION")
    add("--stage", type=int, choices=range(4), default=3, help="ZeRO stage (default 3)")
    add("--devices", type=int, default=1, metavar="N", help="number of ranks (default 1)")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="precision (default bf16)")
    add("--offload-params", choices=TIERS, help="where parameters are kept; needs stage 3 (default: device)")
    add("--offload-optimizer", choices=TIERS, help="where masters and optimizer state are kept (default: device)")
    add("--optimizer", default="AdamW", metavar="NAME", help="optimizer of torch.optim (default AdamW)")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    add("--rank", type=int, default=0, metavar="R", help="index of the rank to print (default 0, which has the most)")
    add("--json", action="store_true", help="print bytes by tier and kind as JSON")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Print the estimate; return 0, or 2 for bad input."""
    option("--devices", integer, options.devices, 1, MOST_RANKS)
    option("--tp", integer, options.tp, 1, options.devices)
    if options.devices % options.tp:
        raise BadInput(f"--tp {options.tp}: does not divide --devices {options.devices}; give a divisor")
    shard = options.devices // options.tp if options.stage else 1
    option("--rank", integer, options.rank, 0, shard - 1)
    if options.offload_params and options.stage < 3:
        raise BadInput(f"--offload-params {options.offload_params} with --stage {options.stage}: use --stage 3")

    from shardwise.plan import DiskPlan
    from shardwise.session import Settings, estimate_memory

    offload = {"param": options.offload_params, "state": options.offload_optimizer}
    shares: dict[str, Any] = {f"{kind}_{TIERS[to]}_fraction": 1.0 for kind, to in offload.items() if to}
    if "nvme" in offload.values():
        shares["disk"] = DiskPlan(directory="unused")
    plan = Settings(stage=options.stage, precision=options.precision, tp=options.tp).plan().but(**shares)
    model = _model(options.model)
    built = model, make_optimizer(options.optimizer, model), plan
    by_tier = guarded("the estimate", lambda: estimate_memory(*built, options.devices, options.rank))
    print(json.dumps(by_tier, indent=2) if options.json else _table(by_tier, model))
    return 0


def _model(target: str) -> Any:
    import torch

    if target.endswith(".py"):
        raise BadInput(f"{target}: name a function of it that returns a model, as in {target}:build")
    if ":" in target and not os.path.isdir(target):
        source, function = split_target(target)
        with torch.device("meta"):
            made = call(load_module(source), function, target)
        model = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(model, torch.nn.Module):
            raise BadInput(f"{target} returned {type(made).__name__}: return a torch.nn.Module")
        return model
    if not importlib.util.find_spec("transformers"):
        raise BadInput(f"{target}: a Hugging Face model needs transformers, which is not installed")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    def build() -> Any:
        config = transformers.AutoConfig.from_pretrained(target, local_files_only=True)
        kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        with torch.device("meta"):
            create = kind._from_config if hasattr(kind, "_from_config") else kind.from_config
            return create(config, dtype=torch.float32)

    return guarded(f"{target} (a folder with config.json, or a cached model of the hub)", build)


def _table(by_tier: dict[str, dict[str, int]], model: Any) -> str:
    tiers = [{**own, "total": sum(own.values())} for own in by_tier.values()]
    rows = [["on one rank", *by_tier]]
    rows += [[kind, *(size_text(own.get(kind, 0)) for own in tiers)] for kind in KINDS]
    numel = sum(each.numel() for each in model.parameters())
    notes = f"\n{numel:,} parameters. Activations and gathered layers are not included."
    return "\n".join(f"{row[0]:16}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows) + notes
