"""What is run, in the order of what one wants to know first; each part is a command of its own."""

from __future__ import annotations

from benchmarks.gpu.driver import OUT, Part
from benchmarks.gpu.results import Facts

__all__ = ["LARGEST_SHARES", "parts"]

TESTS = (
    "branches",
    "devices",
    "running_ahead",
    "counts",
    "launch",
    "hosts",
    "memory_and_streams",
    "packed_weights",
    "trace",
    "zero",
    "activation_checkpointing",
    "tiers",
    "auto_and_early",
    "parity",
    "adam",
)
"""Files of tests/gpu: what would stop a run first, what would make it slow or too large next, then every number."""
FIRST, LATER = ("fsdp2", "sw_zero3", "sw_gemini"), ("sw_zero2", "sw_zero1")
DEEPSPEED = ("ds3", "ds2", "ds1")
PARAMETERS = {"0.3B": 0.32e9, "1.3B": 1.34e9, "7B": 6.71e9}
STATE_BYTES = 16
"""Of mixed-precision Adam a parameter: weights and gradient in 16 bits, master and two moments in fp32; as much in
FSDP2, which keeps weights and gradient in fp32."""
ROOM_BYTES = 8 << 30  # activations, logits, gathered parameters
OFFLOAD_DISK_BYTES = 16 << 30  # 124.5M parameters three times, in two versions of each record
LARGEST_SHARES = (1.0, 0.85, 0.7)
"""Of the parameters that should fit: the first size that trains ends the search."""


def parts(facts: Facts, directory: str) -> list[Part]:
    """For this machine. ``directory``: on the disk that is measured."""
    return _stand_in(directory) if facts.stand_in else _on_gpu(facts, directory)


def _test(name: str, device: str, *options: str, expects_s: float, limit_s: float) -> Part:
    command = ("-m", "tests.gpu", f"test_{name}.py", "--device", device, "--json", OUT, *options)
    return Part(f"tests {name}", command, expects_s, limit_s)


def _training(system: str, size: str, facts: Facts) -> Part:
    """``state on the host`` in every system where it does not fit on the device."""
    needed = STATE_BYTES * PARAMETERS[size] + ROOM_BYTES
    offload = needed > facts.device_bytes
    command = ("-m", "benchmarks.gpu.train", "--system", system, "--size", size, "--json", OUT)
    skip = ""
    if offload:
        command += ("--offload", "--steps", "3")
        if needed > facts.host_bytes:
            skip = f"needs {needed / 2**30:.0f} GiB on the device or the host, which has {facts.host_bytes / 2**30:.0f}"
    needs = ("deepspeed",) if system.startswith("ds") else ()
    expects, limit = (110.0, 240.0) if offload else (30.0, 120.0)
    return Part(f"training {size} {system}", command, expects, limit, needs, skip)


def _offload(directory: str, update: str, *options: str, expects_s: float, limit_s: float, skip: str = "") -> Part:
    command = ("-m", "benchmarks.offload", directory, "--update", update, "--json", OUT, *options)
    return Part(f"offload {update}", command, expects_s, limit_s, skip=skip)


def _on_gpu(facts: Facts, directory: str) -> list[Part]:
    found = [_test(name, "cuda", expects_s=20.0, limit_s=240.0) for name in TESTS]
    for size in ("0.3B", "1.3B"):
        found += [_training(system, size, facts) for system in (*FIRST, *LATER, *DEEPSPEED)]
    found.append(_adam("cuda", "2e8", "10"))
    large = ("--size", "base", "--dtype", "bf16", "--micro-batch", "16", "--repeats", "2", "--tiles", "16")
    free, short = facts.disk_bytes, ""
    if free < OFFLOAD_DISK_BYTES:
        short = f"needs {OFFLOAD_DISK_BYTES >> 30} GiB on the disk of {directory}, which has {free / 2**30:.0f}"
    for update in ("step", "backward"):
        options = ("--device", "cuda:0", *large)
        found.append(_offload(directory, update, *options, expects_s=60.0, limit_s=180.0, skip=short))
    found += [_training(system, "7B", facts) for system in FIRST]
    before = ""
    for share in LARGEST_SHARES:
        found.append(_largest(share, before))
        before = found[-1].name
    found.append(_adam("cpu", "1e8", "10"))
    found += [_training(system, "7B", facts) for system in (*LATER, *DEEPSPEED)]
    return found


def _adam(device: str, numel: str, repeats: str) -> Part:
    command = ("-m", "benchmarks.adam", "--device", device, "--numel", numel, "--repeats", repeats, "--json", OUT)
    return Part(f"adam {device}", command, 30.0, 120.0)


def _largest(share: float, before: str) -> Part:
    command = ("-m", "benchmarks.largest", "--fit", str(share), "--steps", "2", "--timeout", "230", "--json", OUT)
    return Part(f"largest {share:.2f}", command, 150.0, 240.0, unless=before)


def _stand_in(directory: str) -> list[Part]:
    """The same commands on a CPU with tiny models: whether everything runs, and no figure that means anything."""
    quick = {"expects_s": 5.0, "limit_s": 240.0}
    found = [_test(name, "cpu", "--every", "40", **quick) for name in TESTS]
    for system in (*FIRST, *LATER, *DEEPSPEED):
        command = ("-m", "benchmarks.gpu.train", "--system", system, "--size", "tiny", "--device", "cpu")
        needs = ("deepspeed",) if system.startswith("ds") else ()
        found.append(Part(f"training tiny {system}", (*command, "--steps", "2", "--json", OUT), 5.0, 240.0, needs))
    found.append(_adam("cpu", "1e6", "2"))
    tiny = ("--device", "cpu", "--size", "tiny", "--micro-batch", "1", "--repeats", "1", "--steps", "1")
    for update in ("step", "backward"):
        found.append(_offload(directory, update, *tiny, **quick))
    command = ("-m", "benchmarks.largest", "--dry", "--sizes", "1M,2M", "--steps", "2", "--json", OUT)
    return [*found, Part("largest dry", command, 5.0, 240.0)]
