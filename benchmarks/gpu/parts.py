"""What is run, in the order of what one wants to know first; each part is a command of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.driver import OUT, Part
from benchmarks.gpu.results import Facts

__all__ = ["FIRST_TESTS", "LARGEST_SHARES", "LATER_TESTS", "GpuTests", "parts"]

USUAL_S, LONGEST_S = 240.0, 420.0
"""Limits of a part, and of the longest ones; a call of ten minutes can end one."""
START_S, POOL_RUN_S = 15.0, 0.85
"""Until the ranks of a file have the GPU, and what one function takes on them (0.7 to 1 s)."""


@dataclass(frozen=True)
class GpuTests:
    """A file of tests/gpu, or some of it.

    Attributes:
        runs: functions that its tests have the ranks run, on one GPU.
        more_s: seconds besides, of tests that take longer.
        only, but: functions of the file; empty: all, none.
    """

    runs: int
    more_s: float = 0.0
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    @property
    def expects_s(self) -> float:
        """What it should take."""
        return START_S + POOL_RUN_S * self.runs + self.more_s


MANY, EARLY = ("test_fp32",), ("test_updates_during_backward_change_no_bit",)
FIRST_TESTS = {
    "branches": GpuTests(20),
    "devices": GpuTests(6, 80.0),  # fourteen programs, each of which imports torch
    "running_ahead": GpuTests(14, 20.0),  # the GPU sleeps
    "counts": GpuTests(32, 15.0),  # the profiler starts
    "collectives": GpuTests(2),
    "memory_and_streams": GpuTests(8, 10.0),
    "packed_weights": GpuTests(12, 20.0),
    "trace": GpuTests(4, 10.0),
    "model_parallelism": GpuTests(10, 25.0),  # models on both sides
    "tiers": GpuTests(76),
    "parity": GpuTests(164, 15.0, but=MANY),
    "auto_and_early": GpuTests(72, but=EARLY),
}
"""What would stop a run first, what would make it slow or too large next, then numbers of every kind."""
LATER_TESTS = {
    "interfaces": GpuTests(14, 60.0),  # imports of the other libraries
    "parity fp32": GpuTests(180, only=MANY),
    "auto_and_early updates": GpuTests(120, only=EARLY),
    "adam": GpuTests(78),
}
"""Many more of them, by file and a word."""
FIRST, LATER = ("fsdp2", "sw_zero3", "sw_gemini"), ("sw_zero2", "sw_zero1")
DEEPSPEED = ("ds3", "ds2", "ds1")
PARAMETERS = {"0.3B": 0.32e9, "1.3B": 1.34e9, "7B": 6.71e9}
STATE_BYTES = 16
"""Of mixed-precision Adam a parameter: weights and gradient in 16 bits, master and two moments in fp32; as much in
FSDP2, which keeps weights and gradient in fp32."""
ROOM_BYTES = 8 << 30  # activations, logits, gathered parameters
OFFLOAD_DISK_BYTES = 16 << 30  # 124.5M parameters three times, in two versions of each record
LARGEST_SHARES = (0.9, 0.8, 0.65)
"""Of the parameters that should fit: the first size that trains ends the search."""


def parts(facts: Facts, directory: str) -> list[Part]:
    """For this machine. ``directory``: on the disk that is measured."""
    return _stand_in(directory) if facts.stand_in else _on_gpu(facts, directory)


def _test(name: str, device: str, *options: str, expects_s: float, limit_s: float) -> Part:
    # By path: a package named tests that is installed would be found before the folder of that name.
    command = ("tests/gpu", f"test_{name.split()[0]}.py", "--device", device, "--json", OUT, *options)
    return Part(f"tests {name}", command, expects_s, limit_s)


def _tests_on_gpu(chosen: dict[str, GpuTests]) -> list[Part]:
    found = []
    for name, tests in chosen.items():
        options = [*(["--only", *tests.only] if tests.only else []), *(["--but", *tests.but] if tests.but else [])]
        limit_s = min(LONGEST_S, max(USUAL_S, 3 * tests.expects_s))
        found.append(_test(name, "cuda", *options, expects_s=tests.expects_s, limit_s=limit_s))
    return found


def _training(system: str, size: str, facts: Facts) -> Part:
    """``state on the host`` in every system where it does not fit on the device."""
    needed = STATE_BYTES * PARAMETERS[size] + ROOM_BYTES
    offload = needed > facts.device_bytes
    command: tuple[str, ...] = ("-m", "benchmarks.gpu.train", "--system", system, "--size", size, "--json", OUT)
    skip = ""
    if offload:
        command += ("--offload", "--steps", "3")
        if needed > facts.host_bytes:
            skip = f"needs {needed / 2**30:.0f} GiB on the device or the host, which has {facts.host_bytes / 2**30:.0f}"
    needs = ("deepspeed",) if system.startswith("ds") else ()
    expects, limit = (110.0, LONGEST_S) if offload else (30.0, 120.0)
    return Part(f"training {size} {system}", command, expects, limit, needs, skip)


def _offload(directory: str, update: str, *options: str, expects_s: float, limit_s: float, skip: str = "") -> Part:
    command = ("-m", "benchmarks.offload", directory, "--update", update, "--json", OUT, *options)
    return Part(f"offload {update}", command, expects_s, limit_s, skip=skip)


def _on_gpu(facts: Facts, directory: str) -> list[Part]:
    found = _tests_on_gpu(FIRST_TESTS)
    for size in ("0.3B", "1.3B"):
        found += [_training(system, size, facts) for system in (*FIRST, *DEEPSPEED[:1])]
    found.append(_adam("cuda", "2e8", "10"))
    large = ("--size", "base", "--dtype", "bf16", "--micro-batch", "16", "--tiles", "16")
    free, short = facts.disk_bytes, ""
    if free < OFFLOAD_DISK_BYTES:
        short = f"needs {OFFLOAD_DISK_BYTES >> 30} GiB on the disk of {directory}, which has {free / 2**30:.0f}"
    for update in ("step", "backward"):
        # At 1 GB/s about 100 s; what is measured by the limit is kept.
        options = ("--device", "cuda:0", "--repeats", "2", "--steps", "2", *large)
        found.append(_offload(directory, update, *options, expects_s=90.0, limit_s=LONGEST_S, skip=short))
    found += [_training(system, "7B", facts) for system in FIRST[:2]]
    before = ""
    for share in LARGEST_SHARES:
        found.append(_largest(share, before))
        before = found[-1].name
    found += [_training(FIRST[2], "7B", facts), *_tests_on_gpu(LATER_TESTS)]
    for size in ("0.3B", "1.3B"):
        found += [_training(system, size, facts) for system in (*LATER, *DEEPSPEED[1:])]
    found.append(_adam("cpu", "1e8", "10"))
    found += [_training(system, "7B", facts) for system in (*DEEPSPEED, *LATER)]
    return found


def _adam(device: str, numel: str, repeats: str) -> Part:
    command = ("-m", "benchmarks.adam", "--device", device, "--numel", numel, "--repeats", repeats, "--json", OUT)
    return Part(f"adam {device}", command, 30.0, 120.0)


def _largest(share: float, before: str) -> Part:
    timeout = str(LONGEST_S - 20.0)  # it says so itself, and why
    command = ("-m", "benchmarks.largest", "--fit", str(share), "--steps", "2", "--timeout", timeout, "--json", OUT)
    return Part(f"largest {share:.2f}", command, 150.0, LONGEST_S, unless=before)


def _stand_in(directory: str) -> list[Part]:
    """The same commands on a CPU with tiny models: whether everything runs, and no figure that means anything."""
    quick: dict[str, Any] = {"expects_s": 5.0, "limit_s": USUAL_S}
    files = dict.fromkeys(name.split()[0] for name in (*FIRST_TESTS, *LATER_TESTS))
    found = [_test(name, "cpu", "--every", "40", **quick) for name in files]
    for system in (*FIRST, *LATER, *DEEPSPEED):
        training = ("-m", "benchmarks.gpu.train", "--system", system, "--size", "tiny", "--device", "cpu")
        needs = ("deepspeed",) if system.startswith("ds") else ()
        found.append(Part(f"training tiny {system}", (*training, "--steps", "2", "--json", OUT), 5.0, USUAL_S, needs))
    found.append(_adam("cpu", "1e6", "2"))
    tiny = ("--device", "cpu", "--size", "tiny", "--micro-batch", "1", "--repeats", "1", "--steps", "1")
    for update in ("step", "backward"):
        found.append(_offload(directory, update, *tiny, **quick))
    command = ("-m", "benchmarks.largest", "--dry", "--sizes", "1M,2M", "--steps", "2", "--json", OUT)
    return [*found, Part("largest dry", command, 5.0, USUAL_S)]
