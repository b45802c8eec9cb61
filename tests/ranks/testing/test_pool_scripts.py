"""Scripts that start a pool of ranks: their own functions, and their end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pool_processes import gone

pytestmark = pytest.mark.full  # each starts Python

SCRIPT = """
import sys
import torch.distributed as dist
from dataclasses import dataclass
from shardwise.testing import RankPool, run_ranks

@dataclass
class Answer:
    rank: int

def ask(answer):
    print("rank", dist.get_rank(), flush=True)
    return Answer(dist.get_rank() + answer.rank)

{guard}
    results = run_ranks(2, ask, Answer(10))
    assert all(type(result) is Answer for result in results)
    print([result.rank for result in results], RankPool)
"""


ROOT = str(Path(__file__).parents[3])


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text, "utf-8")
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, env=environment)


def test_functions_of_a_script(tmp_path: Path) -> None:
    done = run_script(tmp_path / "script.py", SCRIPT.format(guard="if __name__ == '__main__':"))
    assert done.returncode == 0, done.stderr
    assert "[10, 11]" in done.stdout
    assert "rank 0" in done.stdout and "rank 1" in done.stdout, "the ranks' output passes through"


BY_ITS_FILE = """
import sys
import pytest
from shardwise.testing import run_ranks

def name():
    return __name__

def test_ranks():
    assert "." in name() and run_ranks(2, name) == [name()] * 2 == run_ranks(2, name)

if __name__ == "__main__":
    folder = sys.path.pop(0)
    raise SystemExit(pytest.main(["--import-mode=importlib", f"--rootdir={folder}/..", __file__]))
"""


def test_a_module_that_pytest_imports_by_its_file(tmp_path: Path) -> None:
    done = run_script(tmp_path / "test_itself.py", BY_ITS_FILE)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


KILLED = """
import os, signal, subprocess, threading, time
from shardwise.testing import RankPool

def pids():
    child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return f"{os.getpid()} {child.pid}"

def hang():
    time.sleep(300)

if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(pids), pool._directory, sep="\\n", flush=True)
    threading.Thread(target=pool.run, args=(hang,), daemon=True).start()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_leave_when_the_caller_is_killed(tmp_path: Path) -> None:
    done = run_script(tmp_path / "killed.py", KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    *pids, directory = done.stdout.splitlines()
    assert gone(tuple(map(int, " ".join(pids).split()))), "ranks, and what their tasks started"
    assert not Path(directory).exists()
