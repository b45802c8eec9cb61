"""The lane of asynchronous saves, in one process."""

from __future__ import annotations

import pytest
from program_setup import forked_python, python

from tests.support.sets import campaign

PROGRAM = """
import multiprocessing, sys, time
from shardwise.core.checkpoint.snapshot import AsyncSaver

def save(late, lane):
    def write(ranks, copied):
        time.sleep(0.3 * late)
        raise OSError("no space left")
    lane.start(False, lambda image: None, write)

def main(how):
    print(f"-- {how}", file=sys.stderr, flush=True)
    lane = AsyncSaver()
    save(how == "late", lane)
    if how in ("waited for", "twice"):
        try:
            lane.wait_for_saves()
        except Exception:
            print("heard", file=sys.stderr)
    if how == "twice":
        save(True, lane)

for how in ("let go of", "late", "waited for", "twice"):  # by multiprocessing, where atexit does nothing
    child = multiprocessing.get_context("fork").Process(target=main, args=(how,))
    child.start()
    child.join()
main("by itself")
"""
SAID = "shardwise: an asynchronous save failed, and the program ended without waiting for it: no space left. Call wait"


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_a_failed_save_that_nobody_waits_for_is_told_at_the_end(whole: bool) -> None:
    ended = (python if whole else forked_python)("-c", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    parts = dict(part.split("\n", 1) for part in ended.stderr.split("-- ")[1:])
    assert {how: (text.count(SAID), text.count("heard")) for how, text in parts.items()} == {
        "let go of": (1, 0),
        "late": (1, 0),
        "waited for": (0, 1),
        "twice": (1, 1),
        "by itself": (1, 0),
    }, ended.stderr
