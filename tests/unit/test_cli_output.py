"""Commands whose output nobody takes or that has no room, and files that are refused: a status, and at most a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
import torch

from shardwise.cli.main import main
from shardwise.core.checkpoint.formats import write_single
from shardwise.core.checkpoint.formats.lazy import LazySource, entry_of_tensor
from shardwise.core.memory.trace.stats import MemStats, Moment

COMMANDS = ["schedule", "trace", "checkpoint inspect", "checkpoint inspect --json", "port"]


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], list[str]]:
    """The arguments of a command that prints."""

    def found(name: str) -> list[str]:
        if name == "schedule":
            return ["schedule", "--pp", "8", "--microbatches", "32"]
        if name == "trace":
            MemStats([Moment(0, "layer", "forward", 5, 3)], "cpu").save(tmp_path / "s.json")
            return ["trace", "--stats", str(tmp_path / "s.json"), "--out", str(tmp_path / "trace.svg")]
        if name == "port":
            (tmp_path / "train.py").write_text("import deepspeed\ndeepspeed.init_distributed()\n")
            return ["port", str(tmp_path / "train.py")]
        source = LazySource("m", {"model/a": entry_of_tensor(torch.ones(2))})
        file = write_single(source, tmp_path / "m.safetensors")
        return [*name.split()[:2], str(file), *name.split()[2:]]

    return found


def closed() -> TextIO:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def ended(arguments: list[str], output: TextIO, monkeypatch: pytest.MonkeyPatch) -> int:
    with output, monkeypatch.context() as patch:  # leaving it writes what is left, as the end of a program does
        patch.setattr(sys, "stdout", output)
        return main(arguments)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_where_nobody_reads_on_a_command_ends_as_by_the_signal(
    name: str,
    buffered: bool,
    command: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments, output = command(name), closed()
    output.reconfigure(write_through=not buffered)  # type: ignore[attr-defined]
    assert ended(arguments, output, monkeypatch) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_standard_output_without_room_is_one_line(
    name: str, command: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as output:
        assert ended(command(name), output, monkeypatch) == 2
    told = capfd.readouterr().err
    assert told == f"shardwise {name.split()[0]}: error: standard output: No space left on device\n"
