"""The demo from its command line: it learns, continues, stops on a signal, and prints a sample."""

from __future__ import annotations

import json
import os
import re
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


def _command(text: Path, out: Path, options: str) -> list[str]:
    folders = ["--data", str(text), "--out", str(out)]
    return [sys.executable, "-m", "shardwise", "demo", *folders, *SMALL.split(), *options.split()]


def _demo(text: Path, out: Path, options: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = _command(text, out, options)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _state(out: Path) -> dict[str, int]:
    (folder,) = list(out.iterdir())
    state: dict[str, int] = json.loads((folder / "state.json").read_text("utf-8"))
    return state


def _bits(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"validation: ([\d.]+) bits per byte", output)]


@pytest.mark.parametrize("plugin", ["low_level_zero --stage 2", "gemini", "fsdp"])
def test_it_learns_and_continues(text: Path, tmp_path: Path, plugin: str) -> None:
    first = _demo(text, tmp_path, f"--plugin {plugin} --steps 30 --learning-rate 0.01")
    start, end = _bits(first)
    assert start > 7 and end < start - 2
    assert "sample, after the prompt" in first and "step 30/30" in first
    second = _demo(text, tmp_path, f"--plugin {plugin} --steps 30 --learning-rate 0.01")
    assert "resumed at step 30, which was the last one: training 30 steps further, to 60" in second
    # What was loaded is what was saved: the same held-out text gives the same loss.
    assert _bits(second)[0] == pytest.approx(end, abs=0.002)
    assert _state(tmp_path)["step"] == 60


def test_another_plugin_and_number_of_ranks_continue(text: Path, tmp_path: Path) -> None:
    first = _demo(text, tmp_path, "--plugin ddp --nproc 1 --steps 20 --learning-rate 0.01")
    second = _demo(text, tmp_path, "--plugin low_level_zero --stage 1 --nproc 2 --steps 40 --learning-rate 0.01")
    assert "resumed at step 20 (saved by ddp on 1 ranks) of 40" in second
    assert _bits(second)[0] == pytest.approx(_bits(first)[1], abs=0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits(text: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = _command(text, tmp_path, "--steps 100000")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # A file rather than a pipe: nobody reads while the demo runs.
    with (tmp_path.parent / f"{tmp_path.name}.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while "step " not in Path(log.name).read_text("utf-8") and time.monotonic() < deadline:
                assert process.poll() is None, Path(log.name).read_text("utf-8")
                time.sleep(0.2)
            process.send_signal(number)
            assert process.wait(60) == 128 + number, Path(log.name).read_text("utf-8")
        finally:
            process.kill()
            process.wait()
        shown = Path(log.name).read_text("utf-8")
    state = _state(tmp_path)
    assert f"stopping after step {state['step']}" in shown and "Traceback" not in shown
    assert state["windows"] == state["step"] * 8
