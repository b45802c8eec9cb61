"""Tests of the commands for GPU machines.

- ``benchmarks.gpu`` continues after a failed part and after a kill, and reports what it left out.
- ``python tests/gpu``: the options select each test exactly once.
- ``benchmarks.host`` runs and counts the calls of a step.
- ``benchmarks.gpu.model`` computes the timelines of a step that the documentation shows.
"""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.gpu.driver import OUT, Part, report, run
from benchmarks.gpu.model import DOCUMENT, H100, MODELS, ON_PCIE, RANKS, Counts, home_of, timeline
from benchmarks.gpu.parts import FIRST_TESTS, LATER_TESTS, parts
from benchmarks.gpu.results import Facts, Results
from tests.support.launching import finished
from tests.support.program_setup import python, surroundings, until

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30
FACTS = Facts("a device", 78 * GIB, 120 * GIB, 60 * GIB, 1, "2.11.0", "3.12.3", False)
STAND_IN = replace(FACTS, device_bytes=0, stand_in=True)
COUNT = "open(sys.argv[2], 'a').write(sys.argv[3] + ' ')"
GOOD = f"import sys, json; {COUNT}; json.dump({{'line': 'five things', 'n': 5}}, open(sys.argv[1], 'w'))"
BAD = f"import sys; {COUNT}; print('first'); sys.exit('it is broken')"
SILENT = f"import sys; {COUNT}; print('nothing to show')"
HANGS = "import sys, json, time; json.dump({'running': 'the third'}, open(sys.argv[1], 'w')); time.sleep(10000)"
STOPS = f"""import os, sys, json, time; {COUNT}
if not os.path.exists(sys.argv[2] + '.go'):
    new, pid = sys.argv[2] + '.pid.new', sys.argv[2] + '.pid'
    open(new, 'w').write(str(os.getpid())); os.rename(new, pid)
    time.sleep(10000)
json.dump({{'line': 'ended'}}, open(sys.argv[1], 'w'))"""


def part(name: str, program: str, log: Path, **fields: object) -> Part:
    given = {"expects_s": 0.1, "limit_s": 120.0} | fields
    return Part(name, ("-c", program, OUT, str(log), name), **given)  # type: ignore[arg-type]


def started(
    chosen: list[Part], results: Results, limit_s: float = math.inf, retry: bool = False, total_s: float = 1e6
) -> bool:
    return run(chosen, results, limit_s=limit_s, total_s=total_s, retry=retry, commit="abc")


def stored(path: Path) -> dict[str, dict[str, object]]:
    return json.loads(path.read_text())["parts"]


def test_failures_are_recorded_and_the_run_continues(tmp_path: Path) -> None:
    path, log = tmp_path / "r.json", tmp_path / "log"
    chosen = [
        part("bad", BAD, log),
        part("silent", SILENT, log),
        part("hangs", HANGS, log, limit_s=1.0),
        part("absent", GOOD, log, needs=("no_such_package",)),
        part("too large", GOOD, log, skip="needs 900 GiB"),
        part("good", GOOD, log),
        part("smaller", GOOD, log, unless="good"),
        part("second choice", GOOD, log, unless="bad"),
    ]
    results = Results(path, FACTS, fresh=False)
    assert started(chosen, results)
    found = stored(path)
    assert found["bad"]["error"] == "exit status 1; first; it is broken"
    assert found["silent"]["error"] == "ended without figures; nothing to show"
    assert str(found["hangs"]["error"]).startswith("no end within 1 s")
    assert found["absent"]["skipped"] == "no_such_package is not installed"
    assert found["too large"]["skipped"] == "needs 900 GiB"
    assert found["smaller"]["skipped"] == "not needed: good succeeded"
    assert found["good"]["figures"] == {"line": "five things", "n": 5} == found["second choice"]["figures"]
    assert all(each["date"] and each["commit"] == "abc" and each["command"] for each in found.values())
    assert json.loads(path.read_text())["facts"]["device"] == "a device"
    kinds = [line.split()[0] for line in report(chosen, results)]
    assert kinds == ["FAILED"] * 3 + ["skipped"] * 3 + ["done"] * 2, "the worst first"
    # A second call has nothing to do, unless it retries the failed parts.
    before = log.read_text()
    assert started(chosen, Results(path, FACTS, fresh=False)) and log.read_text() == before
    retried = [replace(chosen[0], command=part("bad", GOOD, log).command), *chosen[1:2]]
    assert started(retried, Results(path, FACTS, fresh=False), retry=True)
    assert not stored(path)["bad"]["error"] and stored(path)["silent"]["error"]


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/unit/project")
from test_gpu_driver import FACTS, GOOD, STOPS, Results, part, started
path, log = Path(sys.argv[1]), Path(sys.argv[2])
started([part("one", GOOD, log), part("two", STOPS, log), part("three", GOOD, log)], Results(path, FACTS, fresh=False))
"""


def killed(path: Path, log: Path) -> None:
    """Start a run and kill it in its second part."""
    command = [sys.executable, "-c", DRIVER, str(path), str(log)]
    pid = Path(f"{log}.pid")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=surroundings(), **streams) as driver:
        until("the second part", pid.exists, driver.poll)
        driver.kill()
    inner = int(pid.read_text())
    until("the end of the part, which does not outlive what started it", lambda: not _alive(inner))
    pid.unlink()


def test_killed_run_resumes(tmp_path: Path) -> None:
    path, log = tmp_path / "r.json", tmp_path / "log"
    killed(path, log)
    found = stored(path)
    assert list(found) == ["one", "two"] and found["one"]["date"]
    assert found["two"]["cut"] == 1 and not found["two"]["date"], "a kill without a word is known to the next call"
    Path(f"{log}.go").touch()
    chosen = [part("one", GOOD, log), part("two", STOPS, log), part("three", GOOD, log)]
    assert started(chosen, Results(path, FACTS, fresh=False))
    assert log.read_text().split() == ["one", "two", "two", "three"], "what was done is not done again"
    assert [each["error"] for each in stored(path).values()] == ["", "", ""]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_time_limit_leaves_parts_for_the_next_call(tmp_path: Path) -> None:
    path, log = tmp_path / "r.json", tmp_path / "log"
    chosen = [part("one", GOOD, log), part("long", GOOD, log, expects_s=5000.0), part("last", GOOD, log)]
    assert not started(chosen, Results(path, FACTS, fresh=False), limit_s=600.0)
    assert log.read_text().split() == ["one"]
    left = [line for line in report(chosen, Results(path, FACTS, fresh=False)) if line.startswith("not run yet")]
    assert left == ["not run yet  long", "not run yet  last"]
    # A call begins with the part that the previous one left, even if it is expected to exceed the limit.
    assert started(chosen, Results(path, FACTS, fresh=False), limit_s=600.0)
    assert log.read_text().split() == ["one", "long", "last"]


@pytest.mark.parametrize("facts", [FACTS, replace(FACTS, device_bytes=139 * GIB), STAND_IN], ids=["80", "141", "cpu"])
def test_parts_for_a_machine(facts: Facts) -> None:
    found = parts(facts, "/disk")
    names = [each.name for each in found]
    assert len(set(names)) == len(names)
    files = {path.name.removeprefix("test_").removesuffix(".py") for path in (ROOT / "tests/gpu").glob("test_*.py")}
    tests = {each.name.split()[1] for each in found if each.name.startswith("tests")}
    assert tests == files, "every file of tests/gpu runs"
    by_name = {each.name: each for each in found}
    assert all(each.limit_s >= each.expects_s > 0 and each.limit_s <= 420.0 for each in found)
    usual = [each for each in found if not each.needs and not each.unless]
    if facts.stand_in:
        assert sum(each.expects_s for each in usual) < 1500.0
    else:
        assert [name for name in names if name.startswith("tests")] == [f"tests {n}" for n in FIRST_TESTS | LATER_TESTS]
        assert all(each.limit_s >= 2 * each.expects_s for each in found)
        upto = usual[: 1 + [each.name for each in usual].index("largest 0.90")]
        assert sum(each.expects_s for each in upto) < 1500.0, "what matters most fits into the 25 minutes"
        assert {"training 7B sw_zero3", "offload backward", "adam cuda"} < {each.name for each in upto}
        assert ("--offload" in by_name["training 7B fsdp2"].command) == (facts.device_bytes < 100 * GIB)
        assert "--offload" not in by_name["training 1.3B sw_zero3"].command
        assert by_name["training 7B ds3"].needs == ("deepspeed",)


def _names(log: Path, *way: str) -> set[str]:
    status, shown = finished("tests.gpu", "--collect", "--device", "cpu", *way, log=log)
    assert status == 0, shown
    return {line.removeprefix("tests/gpu/") for line in shown.splitlines() if "::" in line}


@pytest.mark.full
def test_parts_select_every_test_once(tmp_path: Path) -> None:
    """Parts that select some tests of a file select all of them together, and have enough time."""
    expected, taken = _names(tmp_path / "all"), list[str]()
    for part, tests in (FIRST_TESTS | LATER_TESTS).items():
        of_file = [name for name in expected if name.startswith(f"test_{part.split()[0]}.py::")]
        functions = {name: name.partition("::")[2].partition("[")[0] for name in of_file}
        chosen = [n for n, f in functions.items() if f not in tests.but and (not tests.only or f in tests.only)]
        assert len(chosen) < 40 or tests.expects_s >= 0.7 * len(chosen), part
        taken += chosen
    assert len(expected) > 400 and sorted(taken) == sorted(expected)


@pytest.mark.full
def test_host_benchmark_runs_every_system() -> None:
    given = ["--ranks", "2", "--blocks", "2", "--rounds", "1"]
    done = python("-W", "ignore", "-m", "benchmarks.host", *given)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()[2:]]
    calls = {row[3].strip(): int(row[6]) for row in rows}
    assert list(calls) == ["the model alone", "shardwise zero3", "torch FSDP2"]
    assert calls["the model alone"] < min(calls["shardwise zero3"], calls["torch FSDP2"])


LAYER, REST = Counts(50, 6.0, 0, 8.0, 2, 1), Counts(25, 0.0, 12, 0.0, 2, 2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("system", ON_PCIE)
def test_timeline_parts_add_up(system: str, name: str, ranks: int) -> None:
    size, home = MODELS[name], home_of(MODELS[name], ranks)
    assert (home == "") == (name == "70B" and ranks == 1)
    found = asdict(timeline(system, size, ranks, LAYER, REST))
    parts = ("compute", "copies", "update", "exposed_gathers", "exposed_reductions", "exposed_host")
    assert found["total"] == pytest.approx(sum(found[part] for part in parts))
    block, tokens = 12 * size.width**2 + 13 * size.width, size.micro_batch * size.sequence
    flops = (8 * block * size.layers + 6 * size.width * size.vocabulary) * tokens
    assert found["compute"] == pytest.approx(flops / (0.6 * 989e12))
    if home == "device":
        assert found["total"] >= found["gathers"] + found["reductions"] + found["update"]
        free = replace(H100, hbm=1e30, nvlink=1e30, network=1e30, hop_s=0.0, operator_s=0.0)
        assert timeline(system, size, ranks, LAYER, REST, free).total == pytest.approx(found["compute"])
        slow = timeline(system, size, ranks, LAYER, REST, replace(H100, nvlink=1e9, network=1e8))
        link = slow.gathers + slow.reductions + slow.update if ranks > 1 else found["total"]
        assert slow.total == pytest.approx(link, rel=0.1)


@pytest.mark.full
def test_documented_timelines_are_computed_from_counts() -> None:
    done = python("-W", "ignore", "-m", "benchmarks.gpu.model")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:2] == "| "]
    counts = {(row[0], row[1]): row[2:] for row in rows if len(row) == 9 and row[0].isdigit()}
    for ranks in map(str, RANKS):
        ours, theirs = counts[ranks, "shardwise"], counts[ranks, "FSDP2"]
        assert ours[1:3] == theirs[1:3] == (["0", "0"] if ranks == "1" else ["2", "1"])  # for each layer
        assert float(ours[5]) < float(theirs[5]), "fewer bytes are copied in passes"
    timelines = {" | ".join(row[:3]) for row in rows if len(row) == 11}
    assert len(timelines) == 18 and all(row in DOCUMENT.read_text() for row in timelines)
