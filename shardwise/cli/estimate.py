"""Print the memory that parameters, gradients and optimizer state take on one rank. Nothing is allocated.

MODEL is a folder with a Hugging Face config.json, the name of a cached model of the Hugging Face hub, or a function of
a Python file or module that returns a model. The model is created on the meta device if it can be, and from a
config.json in fp32. Options have the names and meanings of the settings of shardwise.shard(), except that --offload
disk stands for any directory. Activations and gathered layers are not included.

examples:
  shardwise estimate llama/ --stage 3 --ranks 8 --offload host
  shardwise estimate llama/ --ranks 8 --offload disk --offload-params device
  shardwise estimate train.py:build --stage 2 --ranks 4 --optimizer SGD --json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from functools import partial
from typing import Any

from shardwise.cli.errors import BadInput, option
from shardwise.cli.parser import texts
from shardwise.cli.trace import call_on_meta, guarded, load_module, make_optimizer, split_target
from shardwise.core.base.sizes import size_text
from shardwise.core.base.validate import MOST_RANKS, integer

KINDS = ("parameters", "gradients", "masters", "optimizer state", "buffers", "total")
TIERS = ("device", "host", "disk")
EXPLAINED = (ValueError, TypeError, NotImplementedError)  # their messages say what to do


def add_parser(commands: Any) -> None:
    """Add ``estimate`` to the command's subparsers."""
    parser = commands.add_parser("estimate", **texts(__doc__))
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a Hugging Face model, or FILE:FUNCTION")
    add("--ranks", type=int, default=1, metavar="N", help="number of ranks")
    add("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="bf16 and fp16 keep fp32 masters")
    add("--offload", choices=TIERS[1:], help="where masters, state and stage 3 parameters are stored (default: device)")
    add("--offload-params", choices=TIERS, help="where parameters are kept at stage 3 (default: as --offload)")
    add("--optimizer", default="AdamW", metavar="NAME", help="optimizer of torch.optim")
    add("--tp", type=int, default=1, metavar="N", help="number of tensor-parallel ranks")
    add("--sp", type=int, default=1, metavar="N", help="number of sequence-parallel ranks")
    add("--replicas", type=int, default=1, metavar="N", help="number of copies of the sharded model")
    add("--pp", type=int, default=1, help=argparse.SUPPRESS)
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device of the ranks")
    add("--rank", type=int, default=0, metavar="R", help="index among the ranks that shard; 0 has the most")
    add("--json", action="store_true", help="print the same numbers as JSON")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Print the estimate; return 0, or 2 for bad input."""
    option("--ranks", integer, options.ranks, 1, MOST_RANKS)
    if options.pp != 1:
        instead = "a function that returns the modules of one stage, with the ranks of that stage as --ranks"
        raise BadInput(f"--pp {options.pp} cannot be estimated; estimate {instead}")
    if options.offload_params not in (None, "device") and options.stage < 3:
        raise BadInput(f"--offload-params {options.offload_params} with --stage {options.stage}: use --stage 3")
    if options.optimizer == "Adafactor":
        raise BadInput("--optimizer Adafactor cannot be estimated: its state is factored; give another optimizer")
    _check_target(options.model)

    from shardwise.session import estimate_memory

    try:
        plan = _plan(options)
        if options.rank > 1 and options.ranks == 1:
            raise BadInput(f"--rank {options.rank} with --ranks 1: did you mean --ranks {options.rank}?")
        option("--rank", integer, options.rank, 0, plan.mesh.resolve(options.ranks).dp_shard - 1)
        model = _model(options.model)
        built = model, make_optimizer(options.optimizer, model), plan
        run = partial(estimate_memory, *built, options.ranks, options.rank, options.device)
        by_tier = guarded("the estimate", run, *EXPLAINED)
    except EXPLAINED as problem:
        start = "Start another number with torchrun or 'shardwise run'"
        raise BadInput(str(problem).replace(start, "Change --ranks")) from None
    print(_report(by_tier, sum(each.numel() for each in model.parameters()), options.json))
    return 0


def _plan(options: argparse.Namespace) -> Any:
    from shardwise.plan import DiskPlan
    from shardwise.session import Settings

    sizes = {name: getattr(options, name) for name in ("stage", "precision", "replicas", "tp", "sp")}
    state = options.offload or "device"
    homes = {"state": state, "param": options.offload_params or (state if options.stage == 3 else "device")}
    shares: dict[str, Any] = {f"{kind}_{home}_fraction": 1.0 for kind, home in homes.items() if home != "device"}
    if "disk" in homes.values():
        shares["disk"] = DiskPlan(directory="unused")
    return Settings(**sizes).plan().but(**shares)


def _check_target(target: str) -> None:
    """Check what can be checked before the import of torch."""
    if target.endswith(".py"):
        raise BadInput(f"{target}: name a function of it that returns a model, as in {target}:build")
    if os.path.isdir(target) or ":" not in target:
        local = os.path.exists(target) or target.endswith("/")  # otherwise it may be cached
        if local and not os.path.isfile(os.path.join(target, "config.json")):
            raise BadInput(f"{target}: is no folder with a config.json; give one, or FILE_OR_MODULE:FUNCTION")
    elif (source := split_target(target)[0]).endswith(".py") and not os.path.isfile(source):
        raise BadInput(f"{source}: no such file; give a Python file or a module name")


def _model(target: str) -> Any:
    import torch

    if ":" in target and not os.path.isdir(target):
        source, function = split_target(target)
        made = call_on_meta(load_module(source), function, target)
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

    if os.path.exists(target):
        return guarded(f"creating the model of {target}", build)
    try:
        return guarded(f"creating the model of {target}", build, OSError, *EXPLAINED)
    except OSError:
        advice = "give one of the two, or download a model with `hf download NAME`"
        raise BadInput(f"{target}: no such folder, and no cached model of the hub; {advice}") from None


def _report(by_tier: dict[str, dict[str, int]], numel: int, as_json: bool) -> str:
    """Return the estimate as a table or as JSON."""
    tiers = {tier: {**own, "total": sum(own.values())} for tier, own in by_tier.items()}
    if as_json:
        sizes = {tier: {f"{k.replace(' ', '_')}_bytes": own.get(k, 0) for k in KINDS} for tier, own in tiers.items()}
        return json.dumps({"num_parameters": numel, **sizes}, indent=2)
    rows = [["on one rank", *tiers], *([k, *(size_text(own.get(k, 0)) for own in tiers.values())] for k in KINDS)]
    notes = f"\n{numel:,} parameters. Activations and gathered layers are not included."
    return "\n".join(f"{row[0]:16}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows) + notes
