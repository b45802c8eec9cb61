"""Two pytest processes on the same files report as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import os, pathlib, time
import pytest
from side_by_side import add_options as pytest_addoption, configure as pytest_configure

@pytest.fixture
def other():
    # Waits until both processes have a file, so that neither does everything.
    folder = pathlib.Path(__file__).parent / "who"
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + 300
    while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.01)
"""
FILES = {
    "test_a.py": "import os\ndef test_first(other): pass\ndef test_wrong(): assert 1 == 2, 'seen in a'",
    "test_b.py": "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_more(i): pass",
    "test_c.py": "import pytest\ndef test_skipped(): pytest.skip('no reason')",
    "test_d.py": "import warnings\ndef test_last(other): warnings.warn('seen in d')\n"
    "def test_bad(): assert 3 == 4, 'and in d'",
}


def run(folder: Path, *options: str, **changed: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in {**FILES, **changed}.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", *options, "."]
    # Other packages' plugins have no part in this, and importing them takes most of a run's time.
    bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONUTF8": "1"}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])} | bare
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.run(command, cwd=folder, env=environment, timeout=600, check=False, **streams)


def test_one_summary_and_both_halves_failures(tmp_path: Path) -> None:
    done = run(tmp_path, "--workers", "2")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"2 failed, 7 passed, 1 skipped, 1 warning in", done.stdout.splitlines()[-1]), done.stdout
    for text in ("collected 10 items", "seen in a", "and in d", "UserWarning: seen in d", "100%"):
        assert done.stdout.count(text) >= 1, done.stdout
    for name in FILES:
        assert len(re.findall(rf"^{name} [.Fs]+", done.stdout, re.M)) == 1, "each file once, in one piece"
    assert len(list((tmp_path / "who").iterdir())) == 2
    alone = run(tmp_path)
    assert "2 failed, 7 passed, 1 skipped, 1 warning in" in alone.stdout.splitlines()[-1]


def test_a_second_process_that_dies_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "--workers", "2", **{"test_d.py": "import os\ndef test_last(other): os._exit(0)"})
    assert done.returncode != 0 and "passed" in done.stdout.splitlines()[-1], done.stdout
    assert re.search(r"code 0; .*1 of test_\w.py were not finished by it", done.stdout), done.stdout
