"""Tests of the recipes that fuzzing found: each damaged checkpoint is read or refused, and the judge detects bad
readers.
"""

import json
import sys
from collections.abc import Iterator

import pytest

from tests.faults.fuzz import Reader
from tests.faults.fuzz.campaign import CORPUS, corpus, reading_process
from tests.faults.fuzz.pickles import CALLS
from tests.faults.fuzz.subjects import SUBJECTS
from tests.faults.fuzz.trial import READ, REFUSED, ways_of
from tests.support.sets import full

RECIPES = corpus()
WRONG: dict[str, str] = {
    "pickle.load(open(path / '.metadata', 'rb'))": "code of the checkpoint was run",
    "open(path.parent / 'outside' / 'secret').read()": "secret",
    "open(path.parent / 'outside' / 'new', 'w').close()": "a file outside was written",
    "open(path / 'more', 'w').close()": "the checkpoint itself was changed",
    "os.dup(1)": "1 files left open",
    "bytearray(512 << 20)": "MiB of memory",
    "[None for _ in iter(lambda start=time.process_time(): time.process_time() < start + 1.5, False)]": "took ",
    "{}['key']": "KeyError",
    "raise_(ValueError('many'))": "ValueError",
    "os.kill(os.getpid(), 9)": "died with -9",
}
"""What a broken reader does, and the words of its outcome."""
BROKEN = """
import os, pickle, time
from tests.faults.fuzz import child, trial

class Nothing:
    def tensors(self): return {}
    def state(self): return {}
    def close(self): pass

def raise_(error): raise error

steps = iter(WRONG)
def read(path):
    eval(next(steps))
    return Nothing()

trial.open_checkpoint = read
trial.Bounds.SECONDS = 1.0  # what is slow here need not be as slow
child.main()
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with reading_process() as made:
        yield made


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_read_or_refused(reader: Reader, name: str) -> None:
    recipe, outcome = reader.run(RECIPES[name])
    assert outcome in (READ, REFUSED), (recipe, outcome)


OF_A_KIND = (
    *("native-root", "converted", "hf-bins", "torch-older", "titan", "colossalai-safe"),
    *("zero1", "zero2", "trainer", "accelerate"),
)
"""Not in the quick set, which has subjects of the same reader."""


@pytest.mark.parametrize("name", [*(name for name in SUBJECTS if name not in OF_A_KIND), *full(*OF_A_KIND)])
def test_undamaged_checkpoints_are_read(reader: Reader, name: str) -> None:
    ways = [way for way in dict.fromkeys(ways_of(SUBJECTS[name])) if not way.startswith("convert")]
    for way in ways:
        _, outcome = reader.run({"subject": name, "way": way, "changes": []})
        assert outcome == READ, (way, outcome)


@pytest.mark.full
def test_bad_readers_are_detected(reader: Reader) -> None:
    call = {"op": "pickle", "file": ".metadata", "do": "insert", "at": 1, "code": CALLS[0].hex()}
    code = BROKEN.replace("WRONG", repr([*WRONG]))
    broken = Reader(reader.place, [sys.executable, "-W", "ignore", "-c", code])
    try:
        for expected in WRONG.values():
            _, outcome = broken.run({"subject": "dcp", "way": "read", "changes": [call]})
            assert expected in outcome
    finally:
        broken.close()


def test_corpus_exists() -> None:
    assert CORPUS.is_dir() and len(RECIPES) >= 20
    assert all(len(json.dumps(recipe)) < 10_000 for recipe in RECIPES.values())
