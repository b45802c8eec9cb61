"""The process that reads: it gets a seed or a recipe per line, and answers each with two lines.

``python -m tests.faults.fuzz.child PLACE``. A request is ``{"seed": ...}`` or a recipe; the answers are first the
recipe, then ``{"outcome": ...}``, so that a recipe is known even if it kills its reader.
"""

import contextlib
import json
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from tests.faults.fuzz.changes import apply_change, draw_changes
from tests.faults.fuzz.subjects import SUBJECTS
from tests.faults.fuzz.trial import PLANTED, Bounds, Trials, ways_of
from tests.faults.fuzz.values import Stale

ADDRESS_BYTES = 24 << 30
"""Address space in addition to that at the start of the process. :class:`Bounds` limits used memory much more
closely."""


def draw_recipe(seed: int, trials: Trials) -> dict[str, Any]:
    """Return the recipe of a seed, of changes that are possible."""
    chance = random.Random(seed)
    (name,) = chance.choices(list(SUBJECTS), [each.share for each in SUBJECTS.values()])
    subject = SUBJECTS[name]
    recipe: dict[str, Any] = {"subject": name, "way": chance.choice(ways_of(subject))}
    while "changes" not in recipe:
        changes = draw_changes(chance, trials.fresh(subject))
        with contextlib.suppress(Stale):
            for change in changes:
                apply_change(trials.folder, change)
            recipe["changes"] = changes
    if recipe["way"].startswith("convert") and chance.random() < 0.3:
        recipe["planted"] = chance.sample(PLANTED, chance.randrange(1, len(PLANTED)))
    return recipe


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything that readers print is no answer
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + ADDRESS_BYTES, own + ADDRESS_BYTES))
    trials = Trials(Path(sys.argv[1]).resolve())
    for line in sys.stdin:
        recipe = json.loads(line)
        if "seed" in recipe:
            recipe = draw_recipe(recipe["seed"], trials)
        print(json.dumps(recipe), file=answers, flush=True)
        try:
            outcome = {"outcome": trials.run(recipe)}
        except Stale as error:
            outcome = {"outcome": f"stale: {error}"}
        print(json.dumps({**outcome, "seconds": Bounds.of(trials.folder).seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
