"""The demo in ``examples/demo``: training, resuming, stopping on a signal, offloading, and one-line errors."""

import contextlib
import io
import json
import re
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from demo import __main__ as options
from demo.model import ByteGPT, ModelSize, generate
from demo.text import SEPARATOR, ByteWindows, load_corpus, text_files
from demo.train import BadInput, StopRequest, train
from torch import nn

from shardwise.testing import RankPool
from tests.support.sets import full

SMALL = "--width 32 --depth 2 --heads 2 --context 32 --batch 4 --sample 10 --device cpu --learning-rate 0.01"
TIERS = "--size 300K --context 32 --batch 1 --steps 3 --sample 0 --device cpu"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text("the cat sat on the mat and looked at the rat. " * 20, "utf-8")
    return folder


def trained(commands: list[list[str]], stop_at: int = 0) -> list[str]:
    """Run the demo once per command on this rank; return what each run printed."""
    shown = []
    for command in commands:
        out, config = io.StringIO(), Namespace(**options.config(command))
        Path(config.out).mkdir(parents=True, exist_ok=True)
        stop = StopRequest()
        stop.signal = stop_at
        # The process group belongs to the pool, so the demo must not destroy it.
        with contextlib.redirect_stdout(out), patch("demo.train.shutdown"):
            try:
                print("status", train(config, stop))
            except BadInput as problem:
                print(f"refused: {problem}")
        shown.append(out.getvalue())
    return shown


def command(text: Path, out: Path, rest: str) -> list[str]:
    return ["--data", str(text), "--out", str(out), *rest.split()]


def bits(shown: str) -> list[float]:
    return [float(found) for found in re.findall(r"validation: ([\d.]+) bits per byte", shown)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--plugin low_level_zero", "--plugin gemini --precision fp32"),
        *full(("--plugin fsdp", "--plugin ddp"), ("--tp 2", "--pp 2"), ("--plugin gemini", "--plugin low_level_zero")),
    ],
)
def test_demo_learns_and_resumes_under_another_plugin(
    text: Path, tmp_path: Path, own_pool: RankPool, first: str, second: str
) -> None:
    out = tmp_path / "out"
    commands = [command(text, out, f"{SMALL} {plugin} --steps 30") for plugin in (first, second)]
    (learned, continued), _ = own_pool.run(trained, commands, timeout=180)
    before, after = bits(learned)
    assert before > 7 and after < before - 2 and "step 30/30" in learned and f"saved {out}/step-30\n" in learned
    assert "sample, after the prompt" in learned
    assert "resumed at step 30, which was the last one: training 30 steps further, to 60" in continued
    assert bits(continued)[0] == pytest.approx(after, abs=0.01)  # the loaded model is the saved one
    assert "step 60/60" in continued and continued.endswith("status 0\n")


def test_signal_saves_and_the_run_resumes(text: Path, tmp_path: Path, own_pool: RankPool) -> None:
    again = [command(text, tmp_path, f"{SMALL} --steps 40")]
    ((stopped,), _) = own_pool.run(trained, again, int(signal.SIGTERM))
    assert "stopping after step 1\n" in stopped and f"status {128 + signal.SIGTERM}" in stopped
    ((resumed,), _) = own_pool.run(trained, again)
    assert "resumed at step 1 of 40" in resumed and "step 40/40" in resumed


def test_other_model_and_diverging_loss_fail_on_all_ranks(text: Path, tmp_path: Path, own_pool: RankPool) -> None:
    first = command(text, tmp_path, f"{SMALL} --steps 2")
    other = command(text, tmp_path, f"{SMALL} --steps 2 --width 16")
    diverging = command(text, tmp_path / "new", f"{SMALL} --steps 30".replace("0.01", "1e6"))
    for _, refused, diverged in own_pool.run(trained, [first, other, diverging]):
        assert f"refused: --out {tmp_path}: " in refused and "\nsaved" not in refused
        assert re.search("refused: --learning-rate 1000000.0: the loss is (?:nan|inf) at step", diverged)
    assert list((tmp_path / "new").iterdir()) == []


def test_offloaded_training_equals_training_on_the_device(text: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    fits = command(text, tmp_path / "large", f"{TIERS} --nproc 1 --device-memory 1GiB --offload-optim 0")
    beyond = command(text, tmp_path / "small", f"{TIERS} --device-memory 1.5MiB --nvme-optim 0.4")
    with RankPool(1) as one:
        ((_, shown),) = one.run(trained, [fits, [*beyond, "--nvme-dir", str(disk)]])
    facts = [json.loads((tmp_path / name / "memory.json").read_text("utf-8")) for name in ("large", "small")]
    (roomy, small) = ({tier: sum(kinds.values()) for tier, kinds in each["tiers"].items()} for each in facts)
    assert facts[0]["losses"] == facts[1]["losses"] and len(facts[0]["losses"]) == 3
    assert 0 < small["device"] <= 1.5 * 2**20 < small["host"] and small["disk"] > 0
    assert roomy["host"] == roomy["disk"] == 0
    assert "\ndevice" in shown and "\nhost" in shown and (tmp_path / "small" / "memory-tiers.svg").is_file()


BAD = [
    ("--plugin nothing", "invalid choice: 'nothing'"),
    ("--plugin ddp --stage 2", "--stage 2"),
    ("--tp 2 --plugin ddp", "--plugin ddp does not divide"),
    ("--nproc 4000", "too many ranks for this machine; give at most"),
    ("--tp 2 --nproc 3", "--nproc 3 has to be a multiple of 2"),
    ("--plugin fsdp --precision fp16", "--precision fp16: fsdp"),
    ("--seed -1", "--seed -1: give a number from 0"),
    ("--device-memory lots", "--device-memory: 'lots' is not a size"),
    ("--plugin ddp --device-memory 64MiB", "--plugin ddp with --device-memory"),
    ("--nvme-optim 0.5", "--nvme-dir"),
    ("--size 20X", "--size 20X"),
    ("--data /nowhere/at/all", "/nowhere/at/all: no such folder"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_errors_of_bad_options_are_one_line(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        options.config(given.split())
    shown = capsys.readouterr().err
    assert stopped.value.code == 2 and said in shown and shown.count("\n") == 1


@pytest.mark.parametrize("size", ["2MiB", "64MiB", "24GiB"])
def test_model_is_four_times_its_device(size: str) -> None:
    config: dict[str, Any] = options.config(["--device-memory", size])
    assert config["plugin"] == "gemini" and config["nproc"] == 1 and config["width"] % (2 * config["heads"]) == 0
    times = 16 * options.parameters(config["width"], config["depth"]) / config["tiers"]["device_bytes"]
    assert 4.0 <= times < 5.0
    shape = options.shape_for(300_000)
    model = ByteGPT(ModelSize(**shape, context=8))
    assert sum(p.numel() for p in model.parameters()) == options.parameters(shape["width"], shape["depth"]) >= 300_000


def test_model_is_causal_and_generation_is_deterministic() -> None:
    model = ByteGPT(ModelSize(width=16, depth=2, heads=2, context=8))
    assert model.head.weight is model.embed.weight
    text = torch.randint(256, (1, 8))
    changed = text.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    assert torch.equal(model(text)[:, :-1], model(changed)[:, :-1])
    one, two = (generate(model, b"ab", 12, context=8, temperature=0.7, seed=3) for _ in range(2))
    assert one == two and len(one) == 12
    assert isinstance(model.blocks, nn.ModuleList)


def test_text_is_split_by_file_and_short_text_is_refused(tmp_path: Path, text: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / ".hidden").write_text("text", "utf-8")
    (tmp_path / "a.txt").write_text("text " * 100, "utf-8")
    assert [name for name, _ in text_files(tmp_path)] == ["a.txt"]
    corpus = load_corpus(text, 1000, 100)
    assert corpus.files == 60 and 0 < corpus.held_out_files < 20 and bytes([corpus.train[0]]) == SEPARATOR
    assert load_corpus(tmp_path, 100, 40).held_out_files == 0  # a single file: its end is held out
    windows = ByteWindows(corpus.train, 8)
    assert torch.equal(windows[0][-1:], windows[1][:1])
    with pytest.raises(ValueError, match="500 bytes of text found"):
        load_corpus(tmp_path, 10_000, 100)
