"""The demo: it learns, continues past a damaged checkpoint, stops on a signal, and prints a sample.

Most runs are on ranks of one pool, since a launch takes many seconds; those that get a signal come from the
command line, in forks by default, and a whole one is in test_demo_memory.py.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import demo_several
import pytest
from launching import started, written
from sets import full

from shardwise.checkpoint.directory import scan
from shardwise.checkpoint.format import read_manifest
from shardwise.testing import RankPool

SMALL = "--width 32 --depth 2 --heads 2 --context 32 --batch 4 --sample 10 --device cpu"
LEARNING = "--steps 30 --learning-rate 0.01"
DAMAGE = {"gemini": "flip", "fsdp": "halve"}  # what happens to the newest checkpoint of which runs
OTHER = f"--plugin low_level_zero {LEARNING}"
RUNS = {
    "gemini": [f"--plugin gemini {LEARNING}"] * 2,
    "fsdp": [f"--plugin fsdp {LEARNING}"] * 2,
    "low_level_zero": [OTHER],
    "diverging": ["--plugin low_level_zero --steps 30 --learning-rate 1e6"],
    "full": ["--plugin low_level_zero --steps 2"],
    "parts": [f"--tp 2 {LEARNING}", OTHER],
    "stages": [f"--pp 2 {LEARNING}", OTHER],
}
for name, how in DAMAGE.items():
    RUNS[name] += [how, f"--plugin {name} --steps 2", f"--plugin {name} --heads 1"]
Runs = tuple[Path, list[str]]
Several = Callable[[str], Runs]
PLUGINS = ["gemini", *full("fsdp")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text("the cat sat on the mat and looked at the rat. " * 20, "utf-8")
    return folder


def _options(text: Path, out: Path, options: str) -> list[str]:
    return ["--data", str(text), "--out", str(out), *SMALL.split(), *options.split()]


def _state(out: Path) -> dict[str, Any]:
    """What the newest checkpoint says that is not damaged; there are at most two whole ones, and one that is not."""
    found = [each for each in scan(str(out)) if each.head is not None]
    assert 1 <= len(found) <= 3
    state = read_manifest(found[0].path).state
    return {**state["user_state"], "windows": state["data_position"][0]}


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
    assert f"saved {out}/step-60\n" in second


def _stopped(command: list[str], number: signal.Signals, log: Path, whole: bool) -> str:
    """What is shown by a run that gets a signal during its first steps."""
    with started("shardwise", *command, log=log, whole=whole) as process:
        deadline = time.monotonic() + 120
        while not re.search("^validation: ", written(log), re.M):
            assert process.poll() is None and time.monotonic() < deadline, written(log)
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(60) == 128 + number, log.read_text("utf-8")
    return log.read_text("utf-8")


@pytest.fixture(scope="module")
def several(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """The runs of a name, made when they are first asked for: their folder, and what each printed, in order."""
    folder = tmp_path_factory.mktemp("several")
    with RankPool(2) as ranks:  # which keep the groups of all these runs

        @cache
        def runs(name: str) -> Runs:
            out, arguments = folder / name, []
            for options in RUNS[name]:
                damage = options in DAMAGE.values()
                arguments.append([options, str(out)] if damage else ["demo", *_options(text, out, options)])
            by_rank = ranks.run(demo_several.trained, arguments, name == "full", timeout=180)
            return out, ["".join(each) for each in zip(*by_rank, strict=True)]

        yield runs


@pytest.mark.parametrize("plugin", PLUGINS)
def test_it_learns_and_continues(several: Several, plugin: str) -> None:
    out, (first, second, *_) = several(plugin)
    assert f"parameters; {plugin}, " in first
    _continued(second, _learned(first), out)


@pytest.mark.full
@pytest.mark.parametrize(("name", "how"), [("parts", "layers cut over 2"), ("stages", "2 stages")])
def test_a_model_that_ranks_hold_together_goes_on_whole(several: Several, name: str, how: str) -> None:
    out, (first, second) = several(name)
    assert f"parameters; hybrid_parallel stage 1, {how}, fp32, 2 ranks" in first
    assert "(saved by hybrid_parallel on 2 ranks)" in second
    if name == "stages":
        first = first.replace("no sample: text is", "sample, after the prompt: text is")
    _continued(second.replace(" (saved by hybrid_parallel on 2 ranks)", ""), _learned(first), out)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_damaged_checkpoint_is_skipped(several: Several, plugin: str) -> None:
    """A byte is changed, or half of the files are removed: it says so and goes on from the one before."""
    out, (first, second, damage, third, _) = several(plugin)
    assert damage == ""
    skipped = re.escape(f"{out}/step-60")
    assert re.search(rf"^checkpoint skipped: rank \d could not load {skipped}\b", third, re.M), third
    assert "resumed at step 30, which was the last one: training 2 steps further, to 32" in third
    loaded = _bits(third)[0]
    assert loaded == pytest.approx(_bits(first)[1], abs=0.002) and abs(loaded - _bits(second)[1]) > 0.01
    # The schedule is the checkpoint's, not a new one.
    assert re.search(r"^step 32/32 .* lr 1\.00e-02$", third, re.M), third
    assert _state(out)["step"] == 32
    assert (out / "step-30").is_dir(), "the damaged one is not one of the two that remain"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_model_of_other_sizes_is_refused_on_all_ranks(several: Several, plugin: str) -> None:
    out, (*_, refused) = several(plugin)
    holds = (
        rf"refused: --out {re.escape(str(out))} holds a model with {{.*'heads': 2.*}}, not {{.*'heads': 1.*}}; remove"
    )
    assert len(re.findall(holds, refused)) == 2, refused


@pytest.mark.full
def test_a_training_that_diverges_stops_on_all_ranks_and_saves_nothing(several: Several) -> None:
    out, (shown_once,) = several("diverging")
    assert len(re.findall("refused: --learning-rate 1000000.0: the loss is (?:nan|inf) at step", shown_once)) == 2
    assert "\nsaved " not in shown_once and list(out.iterdir()) == []


def test_a_full_disk_of_rank_0_is_told_on_all_ranks(several: Several) -> None:
    out, (shown_once,) = several("full")
    told = f"refused: --out {re.escape(str(out))}: rank 0 could not .*ENOSPC"
    assert len(re.findall(told, shown_once)) == 2, shown_once
    assert "step 2/2" in shown_once and "\nsaved " not in shown_once and list(out.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["forks", "whole"])
def test_signals_stop_it_and_other_plugins_and_numbers_of_ranks_continue(
    several: Several, text: Path, tmp_path: Path, whole: bool
) -> None:
    """What two ranks learned goes on under another plugin on one until SIGTERM, and on two until Ctrl-C."""
    learned, (first,) = several("low_level_zero")
    out = tmp_path / "low_level_zero"
    shutil.copytree(learned, out)
    end = _learned(first)

    def stopped(options: str, number: signal.Signals) -> tuple[str, dict[str, Any]]:
        command = ["demo", *_options(text, out, f"{options} --steps 100000 --learning-rate 0.01")]
        shown, state = _stopped(command, number, tmp_path / f"log-{number}", whole), _state(out)
        assert f"stopping after step {state['step']}" in shown and "Traceback" not in shown
        return shown, state

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
