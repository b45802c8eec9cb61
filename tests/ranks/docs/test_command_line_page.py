"""``docs/command-line.md`` has every command and options that exist, and shows what ``run`` and ``env`` print.

Every example in ``--help`` parses. test_documentation.py runs the other blocks of the page.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from page_blocks import ROOT, fences

from shardwise.cli import env, main
from tests.support.launching import finished

PAGE = "docs/command-line.md"


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Commands of a parser by name."""
    found = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [parser, *(leaf for below in _choices(parser).values() for leaf in _leaves(below))]


PARSERS = _leaves(main._parser())


def test_every_command_has_a_section_whose_options_exist() -> None:
    sections = re.split(r"^## ", (ROOT / PAGE).read_text("utf-8"), flags=re.MULTILINE)
    by_name = {part.split("`")[1].split()[1]: part for part in sections if part.startswith("`shardwise ")}
    commands = _choices(main._parser())
    assert by_name.keys() == commands.keys()
    for name, text in by_name.items():
        known = {option for leaf in _leaves(commands[name]) for option in leaf._option_string_actions}
        assert not (unknown := set(re.findall(r"`(--?[a-z-]+)", text)) - known), (name, unknown)


@pytest.mark.parametrize("parser", PARSERS, ids=[parser.prog for parser in PARSERS])
def test_help_has_examples_that_parse(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = parser.format_help().splitlines()
    examples = [line for line in lines if line.startswith("  shardwise ")]
    assert examples
    for line in examples:
        main._parser().parse_args(shlex.split(re.split(r" > |(?<=\w)   +", line)[0])[1:])
    described = [each for each in parser._actions if each.help is not argparse.SUPPRESS]
    assert all(each.help or each.dest in ("command", "action") for each in described), parser.prog
    assert not [each.help for each in described if each.help and each.help.endswith(".")]


def test_run_and_env_print_what_the_page_shows(tmp_path: Path) -> None:
    by_first = {fence.first: fence.text for fence in fences(PAGE)}
    (tmp_path / "ranks.py").write_text(by_first["import os"])
    command, *printed = by_first["$ shardwise run --nproc 2 ranks.py"].splitlines()
    words = command.removeprefix("$ ").replace("ranks.py", str(tmp_path / "ranks.py")).split()
    status, shown = finished(*words, log=tmp_path / "log", fork_ranks=False)
    assert status == 0 and sorted(shown.splitlines()) == printed
    report = by_first["$ shardwise env"].splitlines()[1:]
    assert [line for line in report if not line.startswith(" ")] == [*env.report()[0], "Verdict"]
