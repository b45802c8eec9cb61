"""``python -m tests.faults KILLS``: the fault campaign; the last line says what was lost.

``KILLS`` is the number of kills and scales the other parts: from 1,000 on every byte is flipped, every call fails, and
the soak has 10,000 steps; below, they have about KILLS / 1,000 of that, and the soak at least 3,000 steps, since memory
takes some to settle. Below 50 every part runs briefly, for a minute or two in all: the soak has 400 steps and no check
of memory, and of the line that says which checkpoint is the newest one bit of each byte is flipped. Readers get ten
hostile inputs per kill; inputs that make one fail are added to ``tests/data/fuzz``, which the tests read.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from shardwise.testing import close_pools
from tests.faults import flips, fuzz, io_errors, kills, soak
from tests.faults.report import Report

WHOLE = 1000  # number of kills
SHORT = 50  # with fewer kills
LEAST_STEPS, STEPS = 3_000, 10_000
SHORT_STEPS = 400
INPUTS_A_KILL = 10


def parts(count: int, seed: int, directory: str | None) -> dict[str, Callable[[], Report]]:
    """Return the parts by name, in their order: ranks can be forked only before this process has used pools."""
    share = min(count / WHOLE, 1.0)
    whole, short = share == 1, count < SHORT
    # There are some 60,000 bytes, and 250 calls per action, in all numbers of errors.
    soaked = SHORT_STEPS if short else max(round(STEPS * share), LEAST_STEPS)
    byte_stride, call_stride = (1, 1) if whole else (max(round(3 / share), 2), max(round(0.6 / share), 2))
    return {
        "kills": lambda: kills.campaign(count, seed, directory),
        "flips": lambda: flips.campaign(byte_stride, bits=8 if whole else 1, head_bits=1 if short else 8),
        "fuzz": lambda: fuzz.campaign(INPUTS_A_KILL * count, seed, directory),
        "errors": lambda: io_errors.campaign(call_stride, directory),
        "soak": lambda: soak.campaign(soaked, directory),
    }


def main() -> int:
    """Run the parts, print what each counted; the exit status is 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=("kills", "flips", "fuzz", "errors", "soak"))
    parser.add_argument("--directory", help="where checkpoints are written (default: the system's for temporary files)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    reports, chosen = [], parts(args.kills, args.seed, args.directory)
    for name in args.only or chosen:
        start = time.perf_counter()
        reports.append(chosen[name]())
        print(f"{reports[-1]}  [{time.perf_counter() - start:.0f} s]", flush=True)
    close_pools()
    lost = sum(len(report.lost) for report in reports)
    print(f"{'; '.join(f'{sum_of(report)} {report.name}' for report in reports)}; lost {lost}")
    return int(lost > 0)


def sum_of(report: Report) -> int:
    """Return the number of trials."""
    if report.name == "flips":
        return sum(n for what, n in report.counts.items() if not what.startswith(("bytes in", "in what")))
    what = {"kills": "kills", "fuzz": "inputs", "I/O errors": "injected", "soak": "steps"}
    return report.counts[what[report.name]]


if __name__ == "__main__":
    sys.exit(main())
