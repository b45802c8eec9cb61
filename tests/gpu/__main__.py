"""``python tests/gpu``: run the tests of this folder, or some of them, under pytest with a record of each test.

Run it by path: an installed package named ``tests`` would be found instead of this folder by name. The exit status is 0
if all tests passed, and nonzero if one failed or none ran.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
# This folder itself is not on the search path, since its module names are too common.
sys.path[:] = [str(HERE.parent), str(HERE.parents[1]), *(each for each in sys.path if Path(each).resolve() != HERE)]
tests = ModuleType("tests")
tests.__path__ = [str(HERE.parent)]  # Without __init__.py an installed package named tests would take precedence.
sys.modules["tests"] = tests

try:
    import pytest
except ImportError:
    sys.exit(
        "pytest is not installed: pip install pytest. For a machine without a network: "
        "pip install --target FOLDER pytest elsewhere, copy FOLDER, and set PYTHONPATH=FOLDER."
    )
from gpu.records import Records  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python tests/gpu", description=__doc__.split("\n\n")[0])
    known = sorted(path.name for path in HERE.glob("test_*.py"))
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, what in (("only", "no others"), ("but", "all but these")):
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="TEST", help=f"functions' names: {what}")
    parser.add_argument("--every", type=int, default=1, help="run one test in so many of each file (default 1: all)")
    parser.add_argument("--collect", action="store_true", help="name the tests, and run none")
    parser.add_argument("--json", type=Path, help="what became of each test, rewritten after every one")

    chosen = parser.parse_args(arguments)
    if chosen.every < 1:
        parser.error(f"--every {chosen.every}: give a number >= 1")
    if unknown := set(chosen.files) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: give some of {', '.join(known)}")
    chosen.files = [HERE / name for name in chosen.files or known]
    text = "".join(path.read_text("utf-8") for path in chosen.files)
    if unknown := {name for name in (*chosen.only, *chosen.but) if f"\ndef {name}(" not in text}:
        parser.error(f"{', '.join(sorted(unknown))}: no test of {', '.join(path.name for path in chosen.files)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and print the failures."""
    options = parse(arguments)
    records = Records(options)
    settings = ["-q", "-p", "no:cacheprovider", "--rootdir", str(HERE.parents[1]), "--gpu-device", options.device]
    settings += ["--collect-only"] if options.collect else []
    files = [str(path) for path in options.files]
    status = int(pytest.main([*settings, *files], plugins=[records]))
    for test in records.failed:
        print(f"FAILED {test}", file=sys.stderr)
    print(records.line)
    return status


if __name__ == "__main__":
    sys.exit(main())
