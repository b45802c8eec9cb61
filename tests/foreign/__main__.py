"""``python -m tests.foreign [PROGRAM ...]``: programs written for other libraries, ported and run on two ranks.

Each prints its last loss, which has to be plain PyTorch's. ``--write`` puts the table into ``docs/inside/porting.md``.
"""

import argparse
import sys
from collections.abc import Iterable

from tests.foreign.cases import CASES
from tests.foreign.running import Outcome, outcome, write_table

START, END = "<!-- what runs -->\n", "<!-- end of what runs -->\n"


def main() -> int:
    """Print a line for each program, and its output if it is wrong; the exit status is 1 if one is."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="how their names begin (default: all)")
    parser.add_argument("--write", action="store_true", help="write the table of docs/inside/porting.md (all programs)")
    args = parser.parse_args()
    chosen = [case for case in CASES if not args.programs or case.name.startswith(tuple(args.programs))]
    if not chosen or (args.write and args.programs):
        parser.error(f"{args.programs}: give none with --write; there are {', '.join(case.name for case in CASES)}")
    found: list[Outcome] = []
    for case in chosen:
        found.append(outcome(case))
        print(f"{case.name}: {found[-1].wrong or f'loss {found[-1].loss}'}", flush=True)
        if found[-1].wrong:
            print(found[-1].output[-4000:], file=sys.stderr, flush=True)
    wrong = sum(bool(each.wrong) for each in found)
    print(f"{len(found)} programs, {wrong} wrong")
    if args.write:
        write_table(START, END, table(found))
    return int(wrong > 0)


def table(found: Iterable[Outcome]) -> str:
    """Return the rows in Markdown."""
    rows = [
        f"| {each.case.library} | `{each.case.name}` | {each.case.what} | {each.wrong or 'as plain PyTorch'} |"
        for each in found
    ]
    return "\n".join(["| library | program | what it uses | outcome |", "|---|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
