"""The command for a machine with a GPU: it goes on after a kill, past a failure, and says what it left out."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from program_setup import python, surroundings, until

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu.driver import OUT, Part, report, run
from benchmarks.gpu.parts import FIRST_TESTS, LATER_TESTS, parts
from benchmarks.gpu.results import Facts, Outcome, Results, ResultsError

ROOT = Path(__file__).resolve().parents[2]
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
    found: dict[str, dict[str, object]] = json.loads(path.read_text())["parts"]
    return found


def test_a_failure_is_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
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
    lines = report(chosen, results)
    kinds = [line.split()[0] for line in lines]
    assert kinds == ["FAILED"] * 3 + ["skipped"] * 3 + ["done"] * 2, "the worst first"
    # A second call has nothing left to do, unless it is to try again what failed.
    before = log.read_text()
    assert started(chosen, Results(path, FACTS, fresh=False)) and log.read_text() == before
    retried = [replace(chosen[0], command=part("bad", GOOD, log).command), *chosen[1:2]]
    assert started(retried, Results(path, FACTS, fresh=False), retry=True)
    assert not stored(path)["bad"]["error"] and stored(path)["silent"]["error"]


def test_what_hangs_says_where(tmp_path: Path) -> None:
    """Python may need a while to come there."""
    for limit_s in (1.0, 5.0, 25.0, 125.0):
        results = Results(tmp_path / "r.json", FACTS, fresh=True)
        assert started([part("hangs", HANGS, tmp_path / "log", limit_s=limit_s)], results)
        if results.outcomes["hangs"].figures:
            break
    assert results.outcomes["hangs"].error == f"no end within {limit_s:.0f} s, at the third"


DRIVER = """
import json, math, signal, sys
from pathlib import Path
sys.path.insert(0, "tests/unit")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
from test_gpu_driver import FACTS, GOOD, STOPS, Results, part, started
path, log = Path(sys.argv[1]), Path(sys.argv[2])
started([part("one", GOOD, log), part("two", STOPS, log), part("three", GOOD, log)], Results(path, FACTS, fresh=False))
"""


def killed(path: Path, log: Path, number: int = signal.SIGKILL) -> None:
    """A call that is ended by a signal in its second part."""
    command = [sys.executable, "-c", DRIVER, str(path), str(log)]
    pid = Path(f"{log}.pid")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=surroundings(), **streams) as driver:
        until("the second part", pid.exists, driver.poll)
        driver.send_signal(number)
    inner = int(pid.read_text())
    until("the end of the part, which does not outlive what started it", lambda: not _alive(inner))
    pid.unlink()


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
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


@pytest.mark.full
def test_a_part_in_which_two_calls_were_killed_is_a_failure(tmp_path: Path) -> None:
    """Else each call would begin with it and be killed, for ever."""
    path, log = tmp_path / "r.json", tmp_path / "log"
    killed(path, log)
    killed(path, log, signal.SIGTERM)
    assert stored(path)["two"]["cut"] == 2
    chosen = [part("one", GOOD, log), part("two", STOPS, log), part("three", GOOD, log)]
    assert started(chosen, Results(path, FACTS, fresh=False))
    assert log.read_text().split() == ["one", "two", "two", "three"], "not a third time"
    assert stored(path)["two"]["error"] == "the end of 2 calls came while it ran" and stored(path)["two"]["date"]
    assert [line.split()[0] for line in report(chosen, Results(path, FACTS, fresh=False))] == ["FAILED", "done", "done"]
    Path(f"{log}.go").touch()
    assert started(chosen, Results(path, FACTS, fresh=False), retry=True)
    assert not stored(path)["two"]["error"] and stored(path)["two"]["cut"] == 0


def test_seconds_count_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those before Python was: imports and CUDA's start are of the caller's limit. A shell that becomes Python
    has begun when the system says that this process did."""
    ask = "import os; print(os.getpid(), open('/proc/self/stat').read().rpartition(')')[2].split()[19])"
    script = 'echo $$ $(cut -d" " -f22 /proc/$$/stat); exec "$0" -S -c "$1"'
    done = subprocess.run(["sh", "-c", script, sys.executable, ask], capture_output=True, check=True)
    shell, program = done.stdout.split(b"\n")[:2]
    assert shell == program, "exec changes neither the process nor when it began"
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    began = ticks / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(command_line.time, "clock_gettime", lambda clock: {time.CLOCK_BOOTTIME: began + 7.5}[clock])
    assert command_line.since_start() == pytest.approx(7.5, abs=1e-6)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_limit_leaves_the_rest_for_the_next_call(tmp_path: Path) -> None:
    path, log = tmp_path / "r.json", tmp_path / "log"
    chosen = [part("one", GOOD, log), part("long", GOOD, log, expects_s=5000.0), part("last", GOOD, log)]
    assert not started(chosen, Results(path, FACTS, fresh=False), limit_s=600.0)
    assert log.read_text().split() == ["one"]
    lines = report(chosen, Results(path, FACTS, fresh=False))
    assert [line for line in lines if line.startswith("not run yet")] == ["not run yet  long", "not run yet  last"]
    # A call begins with what the last one left, whatever it expects to take.
    assert started(chosen, Results(path, FACTS, fresh=False), limit_s=600.0)
    assert log.read_text().split() == ["one", "long", "last"]


def test_what_two_calls_could_not_end_is_a_failure(tmp_path: Path) -> None:
    path, log = tmp_path / "r.json", tmp_path / "log"
    # However late this machine is, the call has what the part expects, so that it begins it.
    chosen = [part("hangs", HANGS, log, expects_s=-math.inf), part("last", GOOD, log)]
    assert not started(chosen, Results(path, FACTS, fresh=False), limit_s=0.2)
    assert stored(path)["hangs"]["cut"] == 1 and not stored(path)["hangs"]["date"]
    started(chosen, Results(path, FACTS, fresh=False), limit_s=0.2)
    assert stored(path)["hangs"]["error"] == "the end of 2 calls came while it ran"
    assert started(chosen, Results(path, FACTS, fresh=False))
    assert stored(path)["last"]["figures"]


def test_all_calls_together_have_a_limit(tmp_path: Path) -> None:
    path, log = tmp_path / "r.json", tmp_path / "log"
    results = Results(path, FACTS, fresh=False)
    results.put("before", Outcome("x", seconds=1490.0, date="2026-01-01", figures={"n": 1}))
    chosen = [part("more", GOOD, log, expects_s=1000.0)]
    assert started(chosen, results, total_s=1500)
    assert stored(path)["more"]["skipped"] == "all parts together have 1500 s, and 1490 are used (--total)"
    assert started(chosen, Results(path, FACTS, fresh=False), total_s=1500) and not log.exists()
    # What a limit skipped is no end: with a larger one, or with a package that is there now, it runs.
    assert not started([part("first", GOOD, log), *chosen], Results(path, FACTS, fresh=False), 900.0, total_s=3000)
    assert [line.split()[0] for line in report(chosen, Results(path, FACTS, fresh=False))] == ["not"]
    assert started(chosen, Results(path, FACTS, fresh=False), total_s=3000)
    assert log.read_text().split() == ["first", "more"]
    assert stored(path)["more"]["figures"] and not stored(path)["more"]["skipped"]
    absent = part("absent", GOOD, log, needs=("no_such_package",))
    assert started([absent], Results(path, FACTS, fresh=False)) and stored(path)["absent"]["skipped"]
    assert started([replace(absent, needs=("json",))], Results(path, FACTS, fresh=False))
    assert stored(path)["absent"]["figures"] and not stored(path)["absent"]["skipped"]


def test_results_of_something_else_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Results(path, FACTS, fresh=False).put("one", Outcome("x", date="2026-01-01"))
    with pytest.raises(ResultsError, match=r"device was 'a device' and is 'another'; give --fresh"):
        Results(path, replace(FACTS, device="another"), fresh=False)
    with pytest.raises(ResultsError, match=r"torch was '2\.11\.0' and is '3\.0'"):
        Results(path, replace(FACTS, torch="3.0"), fresh=False)
    assert list(Results(path, replace(FACTS, host_bytes=1), fresh=False).outcomes) == ["one"]
    for text in ("", "[]", '{"facts": 3}', '{"format": 1}'):
        path.write_text(text)
        with pytest.raises(ResultsError, match="not the results of a run"):
            Results(path, FACTS, fresh=False)
    assert not Results(path, FACTS, fresh=True).outcomes


@pytest.mark.parametrize("facts", [FACTS, replace(FACTS, device_bytes=139 * GIB), STAND_IN], ids=["80", "141", "cpu"])
def test_parts_of_a_machine(facts: Facts) -> None:
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


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    found = {each.name: each for each in parts(replace(FACTS, host_bytes=20 * GIB), "/disk")}
    assert found["training 7B sw_zero3"].skip == "needs 108 GiB on the device or the host, which has 20"
    assert not found["training 1.3B sw_zero3"].skip and not found["offload step"].skip
    found = {each.name: each for each in parts(replace(FACTS, disk_bytes=3 * GIB), "/disk")}
    assert found["offload step"].skip == "needs 16 GiB on the disk of /disk, which has 3"


def _figures(system: str, speed: float, **more: object) -> dict[str, object]:
    return {
        "system": system,
        "size": "0.3B",
        "offload": False,
        "tokens_per_second": speed,
        "model_flops_per_second": speed * 2e9,
        "peak_device_bytes": 10 * GIB,
        "rss_bytes": GIB,
        "host_seconds": 0.0125,
        "host_waits": 2,
    } | more


def _copies(folder: Path) -> None:
    """Of the pages with tables of GPUs."""
    for name in ("benchmarks.md", "inside/offload.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "docs" / name, folder / name)


def test_tables_are_written_from_the_results(tmp_path: Path) -> None:
    from benchmarks.gpu import documents  # needs torch, and the processes of the other tests do not

    _copies(tmp_path)
    results = Results(tmp_path / "r.json", STAND_IN, fresh=False)
    done = {"date": "2026-01-02", "commit": "abc"}
    failed = {"line": "1 failed", "failed": {"a::b": "E  wrong"}, "passed": 3, "skipped": {"needs 2": 4}}
    results.put("tests zero", Outcome("t", figures=failed, error="exit status 1; 1 | failed", **done))
    results.put("training 0.3B fsdp2", Outcome("t", figures=_figures("fsdp2", 1000.0), **done))
    results.put("training 0.3B sw_zero3", Outcome("t", figures=_figures("sw_zero3", 1500.0), **done))
    results.put("training 0.3B ds3", Outcome("t", skipped="deepspeed is not installed", **done))
    results.put("training 0.3B sw_gemini", Outcome("t", error="exit status 1; no | memory", **done))
    results.put("offload step", Outcome("t", figures={"text": "how long it took"}, **done))
    documents.main([str(results.path), str(tmp_path)])
    text = (tmp_path / "benchmarks.md").read_text()
    assert "CPU stand-in with tiny models: no measurement of a GPU" in text and "commit abc" in text
    assert "1 failed, 4 skipped, 3 passed" in text and "**tests zero failed**: exit status 1; 1 / failed" in text
    assert "| 0.3B | shardwise zero3 | 1,500 | 1.50x | 3.0 | 10.0 | 1.00x | 12.5 | 2 |  |" in text
    assert "failed: exit status 1; no / memory" in text and "DeepSpeed ZeRO-3 | |" not in text
    offload = (tmp_path / "inside/offload.md").read_text()
    assert "how long it took" in offload
    assert "Not measured yet on a GPU." in offload, "what was not measured stays"


def test_tables_of_little_and_of_failures(tmp_path: Path) -> None:
    """Parts without figures are said to have failed, and keep no table from being written."""
    from benchmarks.gpu import documents

    _copies(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.rglob("*.md")}
    results = Results(tmp_path / "r.json", FACTS, fresh=False)
    done = {"date": "2026-01-02", "commit": "abc"}
    results.put("offload step", Outcome("t", skipped="too little", date="2025-01-01", commit="old"))
    results.put("training 7B ds3", Outcome("t", error="the end of 1 call came while it ran", cut=1))
    documents.main([str(results.path), str(tmp_path)])
    assert {path.name: path.read_text() for path in tmp_path.rglob("*.md")} == before, "nothing was done yet"
    results.put("training 0.3B fsdp2", Outcome("t", figures=_figures("fsdp2", 1000.0), **done))
    results.put("tests trace", Outcome("t", error="exit status -9; nothing was printed", **done))
    results.put("adam cuda", Outcome("t", error="exit status 1; no | kernel", **done))
    results.put("largest 0.90", Outcome("t", error="no end within 420 s", **done))
    results.put("offload backward", Outcome("t", figures={"text": "1 of 2 repeats"}, error="no end", **done))
    results.put("offload step", Outcome("t", error="exit status 1", **done))
    documents.main([str(results.path), str(tmp_path)])
    text = (tmp_path / "benchmarks.md").read_text()
    assert "**adam cuda failed**: exit status 1; no / kernel" in text and "| 0.3B | torch FSDP2 | 1,000 |" in text
    assert "2026-01-02, commit abc." in text and "old" not in text.partition("gpu:start")[2].partition("gpu:end")[0]
    offload = (tmp_path / "inside/offload.md").read_text()
    assert "1 of 2 repeats" in offload and "**offload backward failed**: no end" in offload
    assert "**offload step failed**: exit status 1" in offload and "Not measured yet on a GPU." in offload


@pytest.mark.full
def test_the_command_itself(tmp_path: Path) -> None:
    """On the CPU: one part that trains and one that is skipped by name, then tables in a folder of the caller's."""
    _copies(tmp_path)
    path = tmp_path / "found.json"
    command = ["-W", "ignore", "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(path)]
    command += ["--only", "training tiny sw_zero3", "--tables", "--documents", str(tmp_path), "--commit", "abc"]
    for more in (["--limit", "30.5"], []):  # of a limit 30 s are for the end, and Python's start counts
        done = python(*command, *more, env=surroundings(RANK="x"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert not more or "not run yet  training tiny sw_zero3" in done.stdout
    assert done.stdout.startswith("CPU STAND-IN") and "done         training tiny sw_zero3" in done.stdout
    figures = stored(path)["training tiny sw_zero3"]["figures"]
    assert isinstance(figures, dict) and figures["losses"][-1] < figures["losses"][0] and figures["host_seconds"] > 0
    assert "shardwise zero3" in (tmp_path / "benchmarks.md").read_text()
