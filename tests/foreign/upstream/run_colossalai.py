"""``python -m tests.foreign.upstream.run_colossalai CHECKOUT [FILE ...]``: ColossalAI's own tests, ported and run.

They are copied with ``colossalai.testing``, and their imports are changed by ``shardwise port``; those over several
models go on after one that fails. ``without_gpu`` makes their GPU this machine's CPU, and what they catch fail.
``--write`` puts the table into ``docs/inside/porting.md``, with the reasons of ``colossalai_reasons.py``.
``--results FILE`` keeps outcomes, so that it can be made of several runs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as Tree
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.compat import alias_table
from shardwise.compat.port import rewritten
from tests.foreign.running import REPOSITORY, python_path, reason, write_table
from tests.foreign.upstream.colossalai_reasons import REASONS
from tests.launcher_variables import without_launcher

START, END = "<!-- what ran of ColossalAI -->\n", "<!-- end of what ran of ColossalAI -->\n"
FOLDERS = (
    "test_booster",
    "test_checkpoint_io",
    "test_optimizer",
    "test_zero",
    "test_lazy",
    "test_cluster",
    "test_lora",
)
ON_REQUEST = ("test_pipeline", "test_shardformer")
"""Most of them are about its schedules, or read the layers of a model that ColossalAI has cut, and their gradients."""
LEFT_OUT = "test_adam_kernel.py"
"""It calls kernels of optimizers by hand, which are not here."""
SECONDS = 240.0
LLAMA = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM, logging
logging.disable_progress_bar()
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).save_pretrained(sys.argv[1], max_shard_size="32KB")
"""
"""Some of them load a Llama from a path in the environment; a small one will do."""


@dataclass(frozen=True)
class Outcome:
    """Of one of their tests: ``passed``, ``skipped``, or ``failed`` for ``why``."""

    file: str
    test: str
    status: str
    why: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.file}::{self.test}"


def main() -> int:
    """Print a line for each test; 1 if one fails that no reason is known for."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign.upstream.run_colossalai", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of hpcaitech/ColossalAI")
    parser.add_argument("files", nargs="*", metavar="FILE", help="or folder, below tests/ (default: all)")
    seconds = f"for the ranks of one test (default: {SECONDS:.0f})"
    parser.add_argument("--seconds", type=float, default=SECONDS, help=seconds)
    parser.add_argument("--zoo", action="store_true", help="all models of their zoo, where a few stand for them else")
    parser.add_argument("--keep", type=Path, help="a folder for ported tests and what each file printed")
    parser.add_argument("--results", type=Path, help="a file of outcomes that this run adds to, a line of JSON each")
    parser.add_argument("--write", action="store_true", help="put the table of all results into docs/inside/porting.md")
    args = parser.parse_intermixed_args()
    if not (args.checkout / "tests" / "kit").is_dir():
        parser.error(f"{args.checkout} has no tests/kit: give a checkout of the repository, not an installed package")
    if args.write and args.files and not args.results:
        parser.error(f"--write is for all files, and there are {args.files}: give --results, with those of the others")
    with TemporaryDirectory(prefix="upstream-") as name:
        folder = (args.keep or Path(name)).absolute()
        ported(args.checkout, folder)
        begins = args.files or [name for name in FOLDERS if (folder / "tests" / name).is_dir()]
        found = [each for begin in begins for each in outcomes(folder, begin, args.seconds, args.zoo)]
    unknown = [each.name for each in found if each.status == "failed" and each.name not in REASONS]
    print(f"{counted(found)}; without a known reason: {unknown or 'none'}")
    known = {each.name: each for each in kept(args.results)} | {each.name: each for each in found}
    if args.results:
        args.results.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in known.values()), "utf-8")
    if args.write:
        write_table(START, END, table([*known.values()]))
    return int(bool(unknown))


def kept(results: Path | None) -> list[Outcome]:
    """What earlier runs have left in the file."""
    if results is None or not results.exists():
        return []
    return [Outcome(**json.loads(line)) for line in results.read_text("utf-8").splitlines()]


def ported(checkout: Path, folder: Path) -> None:
    """Copy the tests, and the package they are written with; their imports of ColossalAI become imports of ours."""
    among = [alias_table("colossalai")]
    for name, source in (("tests", checkout / "tests"), ("upstream_testing", checkout / "colossalai" / "testing")):
        shutil.rmtree(folder / name, ignore_errors=True)
        for path in source.rglob("*.py"):
            where = path.relative_to(source)
            chosen = len(where.parts) == 1 or where.parts[0] in ("kit", *FOLDERS, *ON_REQUEST)
            if chosen and path.name != LEFT_OUT:
                target = folder / name / where
                target.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text("utf-8").replace("early_stop: bool = True", "early_stop: bool = False")
                text = text.replace("colossalai.testing", "upstream_testing")
                target.write_text(rewritten(text, among), "utf-8")


def outcomes(folder: Path, begin: str, seconds: float, zoo: bool = False) -> list[Outcome]:
    """Run one folder of tests in a process group of its own; what ranks have not ended after ``seconds`` fails."""
    report = folder / "reports" / f"{begin.replace('/', '-')}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    llama = folder / "llama"
    path = python_path(Path(__file__).parent / "without_gpu", folder, REPOSITORY)
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"FAST_TEST": str(int(not zoo)), "UPSTREAM_SECONDS": str(seconds), "LLAMA_PATH": str(llama)}
    environment = without_launcher(os.environ) | own
    if not llama.exists():
        make = [sys.executable, "-W", "ignore", "-c", LLAMA, str(llama)]
        subprocess.run(make, env=environment, check=True, stdin=subprocess.DEVNULL)
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command.append("--continue-on-collection-errors")  # one file that is not imported would end all of a folder
    command += [f"--rootdir={folder}", str(folder / "tests" / begin)]
    with report.with_suffix(".log").open("w") as log:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        ended = subprocess.run(command, cwd=folder, env=environment, check=False, start_new_session=True, **streams)
    if not report.exists():
        said = report.with_suffix(".log").read_text("utf-8", "replace")
        raise SystemExit(f"pytest ended with {ended.returncode}: {said[-2000:]}")
    found = [_outcome(case) for case in Tree.parse(report).iter("testcase")]
    for each in found:
        print(f"{each.status:8}{each.seconds:5.0f} s  {each.name}  {each.why}", flush=True)
    return found


def _outcome(case: Tree.Element) -> Outcome:
    test, seconds = case.get("name", ""), float(case.get("time", "0"))
    whole = not case.get("classname")  # a file that was not imported
    name = (test if whole else case.get("classname", "")).removeprefix("tests.").replace(".", "/") + ".py"
    test = "not imported" if whole else test
    for kind, status in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (node := case.find(kind)) is not None:
            why = reason(f"{node.get('message', '')}\n{node.text or ''}", True, "ProcessRaisedException")
            return Outcome(name, test, status, why, seconds)
    return Outcome(name, test, "passed", "", seconds)


def counted(found: Iterable[Outcome]) -> str:
    """How many passed, failed and were skipped."""
    statuses = [each.status for each in found]
    return ", ".join(f"{statuses.count(name)} {name}" for name in ("passed", "failed", "skipped"))


def table(found: list[Outcome]) -> str:
    """Rows in Markdown: a line for each folder, then one for each test that does not pass."""
    rows = ["| folder | passed | failed | skipped |", "|---|---|---|---|"]
    for folder in FOLDERS:
        statuses = [each.status for each in found if each.file.startswith(f"{folder}/")]
        counts = (str(statuses.count(status)) for status in ("passed", "failed", "skipped"))
        rows.append(f"| `{folder}` | {' | '.join(counts)} |")
    rows += ["", "| test that does not pass | kind | why |", "|---|---|---|"]
    for each in sorted(found, key=lambda each: each.name):
        if each.status == "failed":
            unknown = "slow" if each.why.startswith("TimeoutError") else "unknown"
            kind, why = REASONS.get(each.name, (unknown, each.why))
            rows.append(f"| `{each.name}` | {kind} | {why} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
