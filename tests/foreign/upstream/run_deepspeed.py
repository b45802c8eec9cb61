"""``python -m tests.foreign.upstream.run_deepspeed --checkout PATH [FILE ...]``: runs DeepSpeed's unit tests on
shardwise.

Each runs unchanged, on one or two ranks of a CPU, while ``import deepspeed`` means ``shardwise.deepspeed``. It prints a
table of folders, and below it every error with the number of tests that it ended.

``--kept FILE ...`` runs nothing: the table is of outcomes that earlier runs stored (``--results``), each test's last
one.

It needs the folder ``tests`` of a checkout of DeepSpeed, and pytest before 8.4, since later versions reject fixtures
that are classes, as theirs are: ``--packages`` is a folder into which pip installed it, hjson and py-cpuinfo.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.foreign.running import REPOSITORY, python_path

HERE = Path(__file__).parent
CHOSEN = (
    *(f"runtime/test_ds_{name}.py" for name in ("config_dict", "initialize")),
    *(f"runtime/test_precision_config_{name}_scale.py" for name in ("dynamic", "loss")),
    *(f"runtime/test_{name}.py" for name in ("lr_schedulers", "data", "multi_output_model", "multiple_models")),
    *(f"runtime/test_{name}.py" for name in ("no_sync_ctxt", "runtime_utils")),
    *(f"runtime/{name}" for name in ("half_precision", "sparse_tensor", "utils", "zero")),
    *("v1/half_precision", "v1/zero", "checkpoint", "comm", "launcher"),
    *("ops/adagrad", "ops/adam", "ops/lion", "ops/muon", "utils"),
)
"""Files of ``tests/unit`` about features that exist here, without inference, pipelines, experts, compression,
autotuning and kernels."""


def main() -> int:
    """Run, and print the table; the exit status is 2 if nothing could be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign.upstream.run_deepspeed", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="of tests/unit (default: all that concern us)")
    parser.add_argument("--checkout", type=Path, help="of DeepSpeed")
    parser.add_argument("--packages", type=Path, help="a folder with pytest < 8.4, hjson and py-cpuinfo")
    parser.add_argument("--results", type=Path, help="where each test's outcome is kept, a line of JSON for each")
    parser.add_argument("--kept", type=Path, nargs="+", help="run nothing: files that --results made, the oldest first")
    parser.add_argument("--seconds", type=float, default=120.0, help="that a test may take (default: %(default)s)")
    args = parser.parse_args()
    if args.kept:
        return _told(kept(args.kept))
    if args.checkout is None:
        parser.error("--checkout is missing: give DeepSpeed's repository, or --kept with files of earlier runs")
    tests = args.checkout.resolve() / "tests"
    known = tests / "unit" / "common.py"
    if not known.is_file():
        parser.error(f"--checkout {args.checkout}: there is no {known}; give DeepSpeed's repository")
    with TemporaryDirectory(prefix="upstream-") as folder:
        results = (args.results or Path(folder) / "results.jsonl").resolve()
        results.unlink(missing_ok=True)
        _run(tests, args.files or CHOSEN, args.packages, results, args.seconds)
        return _told(kept([results]) if results.exists() else [])


def kept(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the outcomes of runs, the oldest first: if several have a test, its last one. A truncated line is
    skipped."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            if line.endswith("}"):
                each = json.loads(line)
                found[each["test"]] = each
    return list(found.values())


def _told(found: list[dict[str, Any]]) -> int:
    if not found:
        print("no test was run", file=sys.stderr)
        return 2
    print(f"{table(found)}\n\n{reasons(found)}")
    return 0


def _run(tests: Path, files: Iterable[str], packages: Path | None, results: Path, seconds: float) -> None:
    path = python_path(*([packages.resolve()] if packages else []), HERE / "beside", REPOSITORY, tests)
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment = os.environ | own | {"UPSTREAM_RESULTS": str(results), "UPSTREAM_SECONDS": str(seconds)}
    options = ["-q", "--tb=short", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    plugin = ["-p", "tests.foreign.upstream.deepspeed_harness"]
    command = [sys.executable, "-m", "pytest", *plugin, *options, *(f"unit/{file}" for file in files)]
    subprocess.run(command, cwd=tests, env=environment, check=False)


def table(found: Iterable[Mapping[str, Any]]) -> str:
    """Return rows in Markdown: folder, passed, failed, skipped, and files that could not be imported."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        file = each["test"].partition("::")[0].removeprefix("unit/")
        for row in (str(Path(file).parent), "all"):
            counts[row][each["outcome"]] += 1
    kinds = ("passed", "failed", "skipped", "not collected")
    rows = [f"| {row} | {' | '.join(str(counts[row][kind]) for kind in kinds)} |" for row in sorted(counts)]
    return "\n".join([f"| tests/unit | {' | '.join(kinds)} |", "|---|" + "--:|" * len(kinds), *rows])


def reasons(found: Iterable[Mapping[str, Any]]) -> str:
    """Return errors, the most frequent first, each with the number of tests and one of them."""
    tests: dict[str, list[str]] = defaultdict(list)
    for each in found:
        if each["outcome"] in ("failed", "not collected"):
            tests[re.sub(r"0x[0-9a-f]+", "0x...", each["why"])[:240]].append(each["test"])
    ordered = sorted(tests.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n".join(f"{len(names):4d}  {why}\n      {names[0]}" for why, names in ordered)


if __name__ == "__main__":
    sys.exit(main())
