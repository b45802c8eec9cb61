"""``python -m tests.parity [ARCHITECTURE ...]``: every architecture under every way to split a model, in fp64 and fp32.

Ranks are reused from one architecture to the next. The table at the end has the largest error of a gradient: relative
to its tensor in fp64 (1e-11 at most), relative to the norm of all gradients in fp32 (1e-6, or twice the error of one
process against fp64, if that is more). Losses, norms before clipping and parameters after three steps are compared as
well; ``refused`` marks a model that cannot be split in this way.
"""

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS)]  # as pytest sets them

from shardwise.testing import close_pools, run_ranks  # noqa: E402
from tests.parity.hybrid import LAYOUTS, Found, measured  # noqa: E402
from tests.support.tensor_cases import CASES  # noqa: E402

TIMEOUT = 1800.0


def main() -> int:
    """Print a line for each case and the table; the exit status is 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="default: all")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--dtypes", nargs="+", choices=("float64", "float32"), default=["float64", "float32"])
    args = parser.parse_args()
    unknown = sorted({*args.architectures} - {*CASES})
    if unknown:
        parser.error(f"{', '.join(unknown)}: give some of {', '.join(sorted(CASES))}")
    table: dict[str, dict[str, Found]] = {}
    for architecture in args.architectures or sorted(CASES):
        for ranks in sorted({LAYOUTS[name][0] for name in args.layouts}):
            names = [name for name in args.layouts if LAYOUTS[name][0] == ranks]
            by_rank = run_ranks(ranks, measured, architecture, names, args.dtypes, timeout=TIMEOUT)
            for each in zip(*by_rank, strict=True):
                worst = max(each, key=lambda found: (bool(found.wrong), found.error))
                table.setdefault(architecture, {})[f"{worst.layout} {worst.dtype}"] = worst
                print(f"{architecture} {worst.layout} {worst.dtype}: {told(worst)}", flush=True)
    close_pools()
    for dtype in args.dtypes:
        print(f"\n{dtype:<12}" + "".join(f"{name:>17}" for name in args.layouts))
        for architecture, row in table.items():
            cells = (cell(row[f"{name} {dtype}"]) for name in args.layouts)
            print(f"{architecture:<12}" + "".join(f"{each:>17}" for each in cells))
    every = [found for row in table.values() for found in row.values()]
    wrong = sum(bool(found.wrong) and not found.refused for found in every)
    print(f"\n{len(every)} cases, {sum(found.refused for found in every)} refused, {wrong} wrong")
    return int(wrong > 0)


def told(found: Found) -> str:
    if found.refused:
        return f"refused: {found.wrong}"
    padding = ", with padding" if found.padded else ""
    return f"{found.error:.1e}{padding}" + (f", WRONG: {found.wrong}" if found.wrong else "")


def cell(found: Found) -> str:
    if found.refused:
        return "refused"
    return f"{found.error:.1e}" + ("!" if found.wrong else "*" if found.padded else "")


if __name__ == "__main__":
    sys.exit(main())
