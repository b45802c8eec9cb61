"""``python -m benchmarks.adam``: one Adam step of mixed-precision training on the host; ``--device cuda``: on a GPU.

Everybody does the same work on the same arrays: a bf16 gradient comes in, an fp32 master and two fp32 moments are
updated (AdamW), bf16 weights go out. The systems take turns within each repeat, in rotating order, with all cores; the
ratio of two is the median over repeats of the ratio within one.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.optim import AdamRule, AdamSlot, AdamTiles, FusedAdam, HybridAdam, adam_reference

SOURCE = Path(__file__).with_name("adam_kernel.c")
COMPILE = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
RULE = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
GOALS = {
    "C, one pass": (1 / 1.25, "<= 1.25x its time"),
    "torch, whole": (1.3, ">= 1.3x"),
    "DeepSpeed": (2.5, ">= 2.5x"),
    "DeepSpeed, fresh gradient": (2.5, ">= 2.5x"),
}
"""How many times as fast as each we want to be."""
Step = Callable[[], object]


@dataclass(frozen=True)
class Arrays:
    """What one step reads and writes, all of one length; ``wide`` is an fp32 gradient that is kept between steps."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    grad: Tensor
    out: Tensor
    wide: Tensor

    @staticmethod
    def make(numel: int) -> Arrays:
        """Random values; every page is touched."""
        master = torch.randn(numel)
        grad = torch.randn(numel).mul_(0.1).bfloat16()
        moments = torch.randn(numel).mul_(0.01), torch.rand(numel).mul_(0.01)
        return Arrays(master, *moments, torch.tensor(10.0), grad, master.bfloat16(), torch.zeros(numel))

    def slot(self) -> AdamSlot:
        """As our kernel takes them."""
        return AdamSlot(self.master, self.grad, self.exp_avg, self.exp_avg_sq, self.step, self.out)


class Rule(ctypes.Structure):
    """``rule_t`` of the kernel."""

    _names = ("lr", "beta1", "beta2", "eps", "weight_decay", "correction1", "correction2", "scale")
    _fields_ = tuple((name, ctypes.c_float) for name in _names)


def ours(arrays: Arrays, tile: int | None) -> Step:
    """Our tiles."""
    tiles, slots = AdamTiles(tile), [arrays.slot()]

    def step() -> None:
        arrays.step.add_(1)
        tiles.update(slots, RULE)

    return step


def c_kernel(arrays: Arrays, folder: Path) -> Step:
    """One pass over memory in C. Raises OSError or CalledProcessError where it cannot be had."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise OSError("no C compiler (cc) here")
    library = folder / "adam_kernel.so"
    subprocess.run([compiler, *COMPILE, "-o", library, SOURCE, "-lm"], check=True, capture_output=True)
    function = ctypes.CDLL(str(library)).adam
    read = (arrays.master, arrays.exp_avg, arrays.exp_avg_sq, arrays.grad, arrays.out)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in read]

    def step() -> None:
        count = arrays.step.add_(1).item()
        corrections = 1 - RULE.beta1**count, 1 - RULE.beta2**count
        rule = Rule(RULE.lr, RULE.beta1, RULE.beta2, RULE.eps, RULE.weight_decay, *corrections, 1.0)
        function(*pointers, ctypes.c_int64(arrays.master.numel()), ctypes.byref(rule))

    return step


def _optimizer_step(optimizer: torch.optim.Optimizer, parameter: Tensor, arrays: Arrays, keep: bool) -> Step:
    optimizer.state[parameter] = {"step": arrays.step, "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq}

    def step() -> None:
        parameter.grad = arrays.wide.copy_(arrays.grad) if keep else arrays.grad.float()
        optimizer.step()
        arrays.out.copy_(parameter.detach())
        parameter.grad = None

    return step


def torch_whole(arrays: Arrays, keep: bool) -> Step:
    """Cast, fused AdamW, cast, each over the whole arrays."""
    parameter = torch.nn.Parameter(arrays.master)
    betas = RULE.beta1, RULE.beta2
    optimizer = torch.optim.AdamW([parameter], RULE.lr, betas, RULE.eps, RULE.weight_decay, fused=True)
    return _optimizer_step(optimizer, parameter, arrays, keep)


def deepspeed(arrays: Arrays, keep: bool) -> Step:
    """Cast, DeepSpeedCPUAdam, cast. Raises ImportError where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError("DeepSpeed is not installed (extra: bench)")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(arrays.master)
    betas = RULE.beta1, RULE.beta2
    optimizer = DeepSpeedCPUAdam([parameter], RULE.lr, betas=betas, eps=RULE.eps, weight_decay=RULE.weight_decay)
    step = _optimizer_step(optimizer, parameter, arrays, keep)
    optimizer.state[parameter]["step"] = 10
    return step


def systems(arrays: Arrays, tile: int | None, folder: Path) -> tuple[dict[str, Step], dict[str, str]]:
    """Every system's step, and why the missing ones are missing."""
    makers: dict[str, Callable[[], Step]] = {
        "shardwise": lambda: ours(arrays, tile),
        "C, one pass": lambda: c_kernel(arrays, folder),
        "torch, whole": lambda: torch_whole(arrays, True),
        "torch, whole, fresh gradient": lambda: torch_whole(arrays, False),
        "DeepSpeed": lambda: deepspeed(arrays, True),
        "DeepSpeed, fresh gradient": lambda: deepspeed(arrays, False),
    }
    made, missing = {}, {}
    for name, maker in makers.items():
        try:
            made[name] = maker()
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            missing[name] = str(error)
    return made, missing


def check(tile: int | None, folder: Path) -> list[str]:
    """Largest difference of each system's weights from the plain formula after one step on small arrays."""
    torch.manual_seed(0)
    expected = Arrays.make(10_007)
    start = [tensor.clone() for tensor in vars(expected).values()]
    expected.step.add_(1)
    adam_reference(expected.slot(), RULE)
    lines = []
    for name in systems(expected, tile, folder)[0]:
        arrays = Arrays(*[tensor.clone() for tensor in start])
        systems(arrays, tile, folder)[0][name]()
        worst = (arrays.master - expected.master).abs().max().item()
        rounded = (arrays.out.float() - expected.out.float()).abs().max().item()
        lines.append(f"{name}: masters differ from the formula by {worst:.1e}, weights by {rounded:.1e}")
    return lines


def _busy_cores(seconds: float) -> float:
    """Cores that all processes keep busy while this one sleeps."""

    def ticks() -> tuple[int, int]:
        fields = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields) - fields[3] - fields[4], sum(fields)

    busy, total = ticks()
    time.sleep(seconds)
    busy_after, total_after = ticks()
    return (busy_after - busy) / max(1, total_after - total) * (os.cpu_count() or 1)


def wait_until_quiet(cores: float, limit_s: float = 120.0) -> None:
    """Return once others keep at most ``cores`` busy, or after ``limit_s`` seconds; at once if that is negative."""
    end = time.monotonic() + limit_s
    while 0 <= cores < _busy_cores(0.3) and time.monotonic() < end:
        pass


def measure(steps: dict[str, Step], repeats: int, quiet: float = -1.0) -> dict[str, list[float]]:
    """Seconds of each system's step by repeat; the first turn of all warms up."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        at = repeat % len(names)
        wait_until_quiet(quiet)
        for name in names[at:] + names[:at]:
            begin = time.perf_counter()
            steps[name]()
            if repeat:
                times[name].append(time.perf_counter() - begin)
    return times


def table(times: dict[str, list[float]], missing: dict[str, str], numel: int) -> str:
    """Markdown: nanoseconds an element, and how many times as fast we are."""
    lines = ["| system | ns an element | least | shardwise is faster by | goal |", "|---" * 5 + "|"]
    own = times["shardwise"]
    for name, seconds in times.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds, own, strict=True))
        goal, words = GOALS.get(name, (0.0, ""))
        verdict = f"{words}: {'met' if ratio >= goal else 'missed'}" if words else ""
        typical, least = statistics.median(seconds) / numel * 1e9, min(seconds) / numel * 1e9
        lines.append(f"| {name} | {typical:.3f} | {least:.3f} | {ratio:.2f}x | {verdict} |")
    lines += [f"| {name} | – | – | – | {reason} |" for name, reason in missing.items()]
    return "\n".join(lines)


def piecewise(pieces: int, numel: int, repeats: int) -> str:
    """``optimizer.step()`` over fp32 pieces as the engine makes it: HybridAdam against torch's fused AdamW."""
    params = [torch.nn.Parameter(torch.randn(numel)) for _ in range(pieces)]
    for param in params:
        param.grad = torch.randn(numel)
    torch_adam = torch.optim.AdamW(params, fused=True)
    steps: dict[str, Step] = {"torch": torch_adam.step, "shardwise": HybridAdam(params, weight_decay=0.01).step}
    times = measure(steps, repeats)
    ratio = statistics.median(theirs / mine for theirs, mine in zip(*times.values(), strict=True))
    micro = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
    return (
        f"{pieces} fp32 pieces of {numel} elements, optimizer.step(): torch.optim.AdamW(fused=True) "
        f"{micro['torch']:.0f} us, HybridAdam {micro['shardwise']:.0f} us, ratio {ratio:.3f}"
    )


def on_device(numel: int, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of ``optimizer.step()`` on the GPU by system, over fp32 parameters of about 4M elements as a model has
    them; and their elements. Each step is waited for."""
    pieces = max(1, numel // (1 << 22))
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "shardwise": lambda params: FusedAdam(params, weight_decay=0.01),
        "shardwise HybridAdam": lambda params: HybridAdam(params, weight_decay=0.01),
        "torch, fused": lambda params: torch.optim.AdamW(params, fused=True),
        "torch, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    }

    def waited(optimizer: torch.optim.Optimizer) -> Step:
        def step() -> None:
            optimizer.step()
            torch.cuda.synchronize()

        return step

    params = [torch.nn.Parameter(torch.randn(1 << 22, device="cuda")) for _ in range(pieces)]
    for param in params:
        param.grad = torch.randn_like(param)
    return measure({name: waited(make(params)) for name, make in kinds.items()}, repeats), pieces << 22


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adam", description=__doc__)
    parser.add_argument("--numel", type=float, default=1e8, help="parameters (default 1e8)")
    parser.add_argument("--repeats", type=int, default=15, help="measured turns (default 15)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads (default: all cores)")
    parser.add_argument("--tile", type=int, help="elements a tile (default: what the package chooses)")
    parser.add_argument("--quiet", type=float, default=-1.0, help="start a turn when others use at most so many cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: optimizer.step() on the GPU")
    parser.add_argument("--json", type=Path, help="write the table and its figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":
        times, numel = on_device(int(options.numel), options.repeats)
        head = f"Adam on the GPU, {numel:.3g} fp32 parameters, {options.repeats} repeats"
        missing: dict[str, str] = {}
    else:
        numel = int(options.numel)
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            print("\n".join(check(options.tile, Path(name))), flush=True)
            steps, missing = systems(Arrays.make(numel), options.tile, Path(name))
            times = measure(steps, options.repeats, options.quiet)
        head = f"Adam on the host, {numel:.3g} parameters, {options.threads} threads, {options.repeats} repeats"
    text = f"{head}; load of the machine, 1 minute: {os.getloadavg()[0]:.1f}\n\n{table(times, missing, numel)}"
    print(text, flush=True)
    if options.json:
        typical = {name: statistics.median(seconds) / numel * 1e9 for name, seconds in times.items()}
        line = "ns an element: " + ", ".join(f"{name} {each:.3f}" for name, each in typical.items())
        options.json.write_text(json.dumps({"line": line, "text": text, "seconds": times, "missing": missing}))
    if options.device == "cpu":
        print()
        for pieces, each in ((1, 1 << 20), (8, 1 << 17), (64, 1 << 10)):
            print(piecewise(pieces, each, options.repeats * 4))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
