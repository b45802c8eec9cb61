"""The demo: it learns, continues, stops on a signal, and prints a sample.

Most runs are in one launch, since a launch takes many seconds; those that get a signal come from the command line, and
a whole one in test_demo_memory.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--width 32 --depth 2 --heads 2 --context 32 --batch 4 --sample 10 --device cpu"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text("the cat sat on the mat and looked at the rat. " * 20, "utf-8")
    return folder


def _options(text: Path, out: Path, options: str) -> list[str]:
    return ["--data", str(text), "--out", str(out), *SMALL.split(), *options.split()]


def _shardwise(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardwise", *arguments]


def _output(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _state(out: Path) -> dict[str, int]:
    (folder,) = list(out.iterdir())
    state: dict[str, int] = json.loads((folder / "state.json").read_text("utf-8"))
    return state


def _bits(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"validation: ([\d.]+) bits per byte", output)]


def _learned(first: str) -> float:
    start, end = _bits(first)
    assert start > 7 and end < start - 2
    assert "sample, after the prompt" in first and "step 30/30" in first
    return end


def _continued(second: str, end: float, out: Path) -> None:
    assert "resumed at step 30, which was the last one: training 30 steps further, to 60" in second
    # What was loaded is what was saved: the same held-out text gives the same loss.
    assert _bits(second)[0] == pytest.approx(end, abs=0.002)
    assert _state(out)["step"] == 60


def _stopped(command: list[str], number: signal.Signals, log_path: Path, out: Path) -> tuple[str, dict[str, int]]:
    """What is shown and saved by a run that gets a signal at its first line of progress."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # A file rather than a pipe: nobody reads while the demo runs.
    with log_path.open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while not re.search("^step ", log_path.read_text("utf-8"), re.M) and time.monotonic() < deadline:
                assert process.poll() is None, log_path.read_text("utf-8")
                time.sleep(0.2)
            process.send_signal(number)
            assert process.wait(60) == 128 + number, log_path.read_text("utf-8")
        finally:
            process.kill()
            process.wait()
        shown = log_path.read_text("utf-8")
    state = _state(out)
    assert f"stopping after step {state['step']}" in shown and "Traceback" not in shown
    return shown, state


@pytest.fixture(scope="module")
def several(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path]]:
    """What runs printed, and their folders."""
    folder = tmp_path_factory.mktemp("several")
    runs = {name: f"--plugin {name} --steps 30 --learning-rate 0.01" for name in ("gemini", "fsdp", "low_level_zero")}
    runs |= {"diverging": "--plugin low_level_zero --steps 30 --learning-rate 1e6"}
    order = ["gemini", "gemini", "fsdp", "fsdp", "low_level_zero", "diverging"]
    arguments = [shlex.join(_options(text, folder / name, runs[name])) for name in order]
    script = str(Path(__file__).with_name("demo_several.py"))
    printed = _output(_shardwise("run", "--nproc", "2", script, *arguments)).split("== --data")[1:]
    return [(shown, folder / name) for shown, name in zip(printed, order, strict=True)]


@pytest.mark.parametrize(("index", "plugin"), [(0, "gemini"), (2, "fsdp")])
def test_it_learns_and_continues(several: list[tuple[str, Path]], index: int, plugin: str) -> None:
    (first, out), (second, _) = several[index : index + 2]
    assert out.name == plugin and f"parameters; {plugin}, " in first
    _continued(second, _learned(first), out)


def test_a_training_that_diverges_stops_on_all_ranks_and_saves_nothing(several: list[tuple[str, Path]]) -> None:
    shown, out = several[5]
    assert len(re.findall("refused: --learning-rate 1000000.0: the loss is (?:nan|inf) at step", shown)) == 2
    assert "\nsaved " not in shown and list(out.iterdir()) == []


def test_signals_stop_it_and_other_plugins_and_numbers_of_ranks_continue(
    several: list[tuple[str, Path]], text: Path, tmp_path: Path
) -> None:
    """What two ranks learned goes on under another plugin on one until SIGTERM, and on two until Ctrl-C."""
    first, out = several[4]
    end = _learned(first)

    def stopped(options: str, number: signal.Signals) -> tuple[str, dict[str, int]]:
        command = _shardwise("demo", *_options(text, out, f"{options} --steps 100000 --learning-rate 0.01"))
        return _stopped(command, number, tmp_path / "log", out)

    before = _state(out)
    shown, state = stopped("--plugin ddp --nproc 1", signal.SIGTERM)
    assert "resumed at step 30 (saved by low_level_zero on 2 ranks) of 100000" in shown
    assert _bits(shown)[0] == pytest.approx(end, abs=0.002)  # what was loaded is what was saved
    assert state["step"] > 30 and state["windows"] - before["windows"] == (state["step"] - 30) * 4

    before = state
    shown, state = stopped("--plugin low_level_zero --stage 1 --nproc 2", signal.SIGINT)
    assert f"resumed at step {before['step']} (saved by ddp on 1 ranks) of 100000" in shown
    assert _bits(shown)[0] < _bits(first)[0] - 2
    assert state["step"] > before["step"]
    assert state["windows"] - before["windows"] == (state["step"] - before["step"]) * 8
