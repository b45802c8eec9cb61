"""``python -m benchmarks.largest``: the largest GPT that one device and its host train with full fp32 Adam.

Models grow until one does not fit. Each is made under ``deferred_init``, so that it never exists whole anywhere but in
its shards; bf16 weights, fp32 masters and two moments span device and host by shares computed from both capacities;
gradients are used as they come. Every size is a fresh process, which takes real steps and checks that the loss falls.

One H100 with 80 GB beside 128 GiB of host memory::

    python -m benchmarks.largest --host-memory 120GiB --sizes 1.3B,6.7B,9B,11B,12B,13B

``--dry`` runs the same at small scale on a CPU, whose "device" is an accounted pool of a declared capacity.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.train import Checkpointed
from benchmarks.job import Size
from benchmarks.launch import available_bytes
from benchmarks.model import GPT, batch
from benchmarks.table import replace_section
from benchmarks.training import machine
from shardwise.cli.end_with_parent import command_that_follows
from shardwise.core.base.sizes import parse_size, size_text
from shardwise.core.deferred import deferred_init
from shardwise.core.memory.ledger import DeviceMemoryError
from shardwise.plan import Plan, on_device, zero
from shardwise.session import build

__all__ = [
    "Case",
    "Fractions",
    "Result",
    "fitting",
    "fractions_for",
    "from_json",
    "plan_of",
    "run_case",
    "size_of",
    "summary",
    "table",
]

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "inside" / "offload.md"
STATE_BYTES, WEIGHT_BYTES, GRADIENT_BYTES = 12, 2, 2
"""A parameter: fp32 master and two moments; bf16 weights; bf16 gradient, which only exists for a few blocks at a time
where updates are made during backward."""
HOST_RESERVE = 0.12
"""Of the host's memory: the program, CUDA's own, exchange buffers, and what allocators round up to. All of it is
page-locked, so a system that has too little left ends processes, and not only ours."""
DRY = {"device": "24MiB", "host": "160MiB", "sizes": "1M,2M,4M,6M,8M,12M", "sequence": 32}
DRY_RESERVE = 0.0  # the program of a CPU run is not part of the declared capacities
HEADS_OF = 128


@dataclass(frozen=True)
class Case:
    """One process. Capacities in bytes. ``offload``: ``"none"``, ``"state"`` (all of it) or ``"needed"`` (as little as
    fits)."""

    parameters: int
    system: str
    device: str
    device_bytes: int
    host_bytes: int
    sequence: int
    micro_batch: int
    steps: int
    update: str
    offload: str
    checkpointing: bool
    dry: bool


@dataclass(frozen=True)
class Fractions:
    """Shares on the host."""

    params: float
    state: float


@dataclass(frozen=True)
class Result:
    """What a process measured; ``error`` is empty where it trained."""

    parameters: int
    fractions: Fractions
    tokens_per_second: float
    peak_device_bytes: int
    host_tier_bytes: int
    rss_bytes: int
    losses: list[float]
    error: str


def size_of(parameters: int, sequence: int, micro_batch: int) -> Size:
    """A GPT of about that many parameters: width about 128 times its depth (of 64 for small ones)."""
    vocabulary = 50304 if parameters > 10**8 else 512
    ratio = 128 if parameters > 10**8 else 32
    step = HEADS_OF if parameters > 10**8 else 32
    width = max(step, round((ratio * parameters / 12) ** (1 / 3) / step) * step)
    rest = parameters - (2 * vocabulary + sequence) * width
    layers = max(2, round(rest / (12 * width**2)))
    return Size(width, layers, max(1, width // step), vocabulary, sequence, micro_batch)


def working_bytes(size: Size, checkpointing: bool) -> int:
    """What the device needs beside shards and state, roughly: gathered blocks and their whole gradients (the head and
    the embedding are the largest units), and activations."""
    block = 12 * size.width**2 + 13 * size.width
    largest = max(block, size.vocabulary * size.width)
    units = (3 * max(block, largest) + 3 * block) * (WEIGHT_BYTES + GRADIENT_BYTES)
    rows = size.micro_batch * size.sequence
    inside = 34 * rows * size.width * 2
    kept = size.layers * rows * size.width * 2 if checkpointing else size.layers * inside
    logits = 4 * rows * size.vocabulary * 4
    return units + kept + inside + logits


def fractions_for(case: Case, size: Size, parameters: int) -> Fractions:
    """The smallest shares on the host with which the device holds the rest: state goes first, then weights.

    Raises:
        DeviceMemoryError: device and host together are too small.
    """
    if case.offload != "needed":
        return Fractions(0.0, 1.0 if case.offload == "state" else 0.0)
    gradient = 0 if case.update == "backward" else GRADIENT_BYTES
    per_state, per_weight = (STATE_BYTES + gradient) * parameters, WEIGHT_BYTES * parameters
    device = case.device_bytes - working_bytes(size, case.checkpointing)
    host = case.host_bytes * (1 - (DRY_RESERVE if case.dry else HOST_RESERVE))
    state = min(1.0, max(0.0, (per_state + per_weight - device) / per_state))
    params = min(1.0, max(0.0, (per_weight - device) / per_weight)) if state >= 1.0 else 0.0
    wanted = state * per_state + params * per_weight
    if device < 0 or wanted > host:
        raise DeviceMemoryError(
            f"{parameters / 1e9:.3g}B parameters: {size_text(wanted)} on a host with {size_text(host)}, and "
            f"{size_text(max(device, 0))} for shards and state on a device of {size_text(case.device_bytes)}: "
            "add memory"
        )
    return Fractions(params, state)


def fitting(case: Case) -> int:
    """The most parameters, in steps of 1e8, for which there are shares (:func:`fractions_for`); at least 1e8."""
    parameters = 10**8
    while True:
        larger = parameters + 10**8
        size = size_of(larger, case.sequence, case.micro_batch)
        try:
            fractions_for(replace(case, parameters=larger), size, larger)
        except DeviceMemoryError:
            return parameters
        parameters = larger


def plan_of(case: Case, fractions: Fractions) -> Plan:
    """ZeRO-3 in bf16 with the shares, one block ahead."""
    tiers = replace(
        on_device(),
        param_host_fraction=fractions.params,
        state_host_fraction=fractions.state,
        device_capacity_bytes=case.device_bytes,
        pin_memory=case.device.startswith("cuda"),
    )
    plan = zero(3, torch.bfloat16).but(tiers=tiers, prefetch=1)
    return plan if case.update == "step" else plan.but(update=case.update)


def _model(size: Size, checkpointing: bool) -> GPT:
    torch.manual_seed(20)
    model = GPT(size)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    if checkpointing:
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def run_case(case: Case) -> Result:
    """Train ``case.steps`` steps after one to warm up, in this process."""
    size = size_of(case.parameters, case.sequence, case.micro_batch)
    if case.system == "deepspeed":
        return _run_deepspeed(case, size)
    device = torch.device(case.device)
    with deferred_init():
        model = _model(size, case.checkpointing)
        parameters = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    fractions = fractions_for(case, size, parameters)
    session = build(model, optimizer, plan_of(case, fractions), device=device)

    held = [0]

    def step(index: int) -> float:
        loss = session.module(*(part.to(device) for part in batch(size, 0, index)))
        held.append(sum(session.ledger.bytes_by_kind().values()))
        session.backward(loss)
        held.append(sum(session.ledger.bytes_by_kind().values()))
        session.optimizer.step()
        return float(loss.detach())

    losses, seconds = _steps(step, case.steps)
    report, ledger = session.memory(), session.ledger
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else max(ledger.peak_bytes, *held)
    return Result(
        parameters=parameters,
        fractions=fractions,
        tokens_per_second=size.micro_batch * size.sequence / seconds,
        peak_device_bytes=peak,
        host_tier_bytes=report.tier_bytes("host"),
        rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        losses=losses,
        error="" if losses[-1] < losses[0] else f"the loss does not fall: {losses}",
    )


def _steps(step: Any, count: int) -> tuple[list[float], float]:
    """Losses, and the mean seconds of the steps after the first."""
    losses = [step(0)]
    began = time.perf_counter()
    losses += [step(0) for _ in range(count)]  # the same text, so that the loss has to fall
    return losses, (time.perf_counter() - began) / count


def _run_deepspeed(case: Case, size: Size) -> Result:
    """ZeRO-3 with state on the host by DeepSpeed, its published settings for that."""
    import deepspeed

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    offload = {"device": "cpu", "pin_memory": True}
    zero_part: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    if case.offload != "none":
        zero_part |= {"offload_optimizer": offload, "offload_param": offload}
    settings = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": zero_part,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    deepspeed.init_distributed(auto_mpi_discovery=False)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = _model(size, case.checkpointing)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    weights: Any = list(model.parameters())
    parameters: int = sum(p.ds_numel for p in weights)

    def step(index: int) -> float:
        loss = engine(*(part.to(engine.device) for part in batch(size, 0, index)))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    losses, seconds = _steps(step, case.steps)
    peak, rss = torch.cuda.max_memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    speed = size.micro_batch * size.sequence / seconds
    return Result(parameters, Fractions(1.0, 1.0), speed, peak, 0, rss, losses, "")


def _worker(text: str, out: Path) -> None:
    case = Case(**json.loads(text))
    try:
        result = run_case(case)
    except Exception as error:  # a size that does not fit is a result
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        result = Result(case.parameters, Fractions(math.nan, math.nan), 0.0, 0, 0, 0, [], reason)
    out.write_text(json.dumps(asdict(result)))


def measure(case: Case, timeout: float) -> Result:
    """Run ``case`` in a fresh process; a process that is killed (no host memory) is a result too."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.largest", "--worker", json.dumps(asdict(case)), str(out)]
        command = command_that_follows(command)  # none stays behind with a whole GPU where this process is killed
        log = Path(folder) / "log"
        with log.open("w") as stream:
            try:
                done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=timeout, check=False)
                reason = f"exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"no result within {timeout:.0f} s"
        if not out.exists():
            reason += ": " + "; ".join(log.read_text().splitlines()[-2:])
            return Result(case.parameters, Fractions(math.nan, math.nan), 0.0, 0, 0, 0, [], reason)
        data = json.loads(out.read_text())
    return Result(**data | {"fractions": Fractions(**data["fractions"])})


def _count(text: str) -> int:
    factor = {"K": 10**3, "M": 10**6, "B": 10**9}[text[-1].upper()]
    return round(float(text[:-1]) * factor)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.largest", description=__doc__.split("\n\n")[0])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    parser.add_argument("--device-memory", help="default: 0.92 of the GPU's")
    parser.add_argument("--host-memory", help="default: what is available now")
    parser.add_argument("--sizes", help="growing, such as 1.3B,6.7B,11B,13B; the first also runs without offload")
    parser.add_argument("--fit", type=float, help="one size instead: this share of what should fit")
    parser.add_argument("--json", type=Path, help="write the results here, after each size")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="after one to warm up")
    parser.add_argument("--update", choices=("step", "backward"), default="backward", help="backward: gradients stream")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a size")
    parser.add_argument("--write", action="store_true", help=f"rewrite the table in {DOCUMENT.name}")
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace) -> list[Case]:
    dry = options.dry
    if not dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: give --dry for a run at small scale on this CPU")
    device_text = options.device_memory or (DRY["device"] if dry else None)
    host_text = options.host_memory or (DRY["host"] if dry else None)
    total = 0 if dry else torch.cuda.get_device_properties(0).total_memory
    common = {
        "device": "cpu" if dry else "cuda:0",
        "device_bytes": parse_size(str(device_text)) if device_text else int(0.92 * total),
        "host_bytes": parse_size(str(host_text)) if host_text else available_bytes(),
        "sequence": int(str(DRY["sequence"])) if dry else options.sequence,
        "micro_batch": 1 if dry else options.micro_batch,
        "steps": options.steps,
        "update": options.update,
        "checkpointing": not options.no_checkpointing,
        "dry": dry,
    }
    if options.fit is not None:
        parameters = round(options.fit * fitting(Case(0, "shardwise", offload="needed", **common)), -8)
        return [Case(parameters, "shardwise", offload="needed", **common)]
    sizes = [_count(text) for text in str(options.sizes or (DRY["sizes"] if dry else "1.3B,6.7B,11B,13B")).split(",")]
    cases = [Case(sizes[0], "shardwise", offload=offload, **common) for offload in ("none", "state")]
    cases += [Case(size, "shardwise", offload="needed", **common) for size in sizes]
    if not dry and _has_deepspeed():
        cases += [Case(size, "deepspeed", offload="needed", **common) for size in sizes]
    return cases


def _has_deepspeed() -> bool:
    from importlib.util import find_spec

    return find_spec("deepspeed") is not None


def table(results: Sequence[tuple[Case, Result]]) -> str:
    """One row a case."""
    head = (
        "| system | parameters | state on host | weights on host | tokens/s | device peak | host tier | RSS | remark |"
    )
    lines = [head, "|---" * 9 + "|"]
    for case, result in results:
        name = case.system + {"none": ", no offload", "state": ", all state on host", "needed": ""}[case.offload]
        start = f"| {name} | {result.parameters / 1e6:,.1f}M | "
        if not result.losses:
            lines.append(f"{start}| | | | | | {result.error.replace('|', '/')} |")
            continue
        f = result.fractions
        lines.append(
            f"{start}{f.state:.2f} | {f.params:.2f} | {result.tokens_per_second:,.0f} | "
            f"{size_text(result.peak_device_bytes)} of {size_text(case.device_bytes)} | "
            f"{size_text(result.host_tier_bytes)} of {size_text(case.host_bytes)} | {size_text(result.rss_bytes)} | "
            f"{result.error or f'loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}'} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Grow until it does not fit, print, and optionally write into the document."""
    options = parse(arguments)
    if options.worker:
        _worker(options.worker[0], Path(options.worker[1]))
        return
    results: list[tuple[Case, Result]] = []
    over: set[str] = set()
    for case in _cases(options):
        if case.system in over:
            continue
        result = measure(case, options.timeout)
        results.append((case, result))
        if case.offload == "needed" and not result.losses:
            over.add(case.system)
        said = result.error or f"{result.tokens_per_second:,.0f} tokens/s"
        if options.json:
            options.json.write_text(json.dumps(_to_json(results)))
        print(
            f"{case.system} {case.parameters / 1e6:,.1f}M offload {case.offload}: {said}", file=sys.stderr, flush=True
        )
    where = machine() if options.dry else f"{machine()}; {torch.cuda.get_device_name(0)}"
    facts = f"{where}; torch {torch.__version__}; bf16 with fp32 Adam, updates in {options.update}."
    text = f"{facts} {summary(results)}\n\n{table(results)}\n"
    print(text)
    if options.write:
        replace_section(DOCUMENT, "largest-dry" if options.dry else "largest", text)
    if options.fit is not None and not results[0][1].losses:
        raise SystemExit(results[0][1].error)  # who asked for one size wants it to train


def _to_json(results: Sequence[tuple[Case, Result]]) -> dict[str, Any]:
    return {"line": summary(results), "results": [[asdict(case), asdict(result)] for case, result in results]}


def from_json(row: Sequence[dict[str, Any]]) -> tuple[Case, Result]:
    """One of the ``results`` that ``--json`` wrote."""
    case, result = row
    return Case(**case), Result(**result | {"fractions": Fractions(**result["fractions"])})


def summary(results: Sequence[tuple[Case, Result]]) -> str:
    """In one or two sentences."""
    good = [(case, r) for case, r in results if r.losses and not r.error and case.system == "shardwise"]
    if not good:
        return "Nothing trained."
    largest = max(r.parameters for _, r in good)
    text = f"Largest that trained: {largest / 1e6:,.1f}M parameters"
    by_kind = {case.offload: r for case, r in good if case.offload != "needed"}
    if len(by_kind) == 2:
        ratio = by_kind["state"].tokens_per_second / by_kind["none"].tokens_per_second
        text += f"; with all state on the host {ratio:.2f} of the speed without offload, at a size that fits both"
    return text + "."


if __name__ == "__main__":
    main()
