"""Takes one wait, event or ``record_stream`` out of the library at a time, and has the late device find it.

``python -m tests.late.mutations`` looks at all places and writes the table of docs/inside/late-device.md; with words,
at those that have one of them in their names. First every scenario is run as it is, to learn where it comes. A place is
then taken out in those that come there, the quickest first. What was found is kept in :data:`KEPT` as long as the
library's sources are the same, so a run that was cut off goes on.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import torch

from shardwise.testing import RankError, RankPool
from tests.late.places import ROOT, Place, noted, places, taken_out
from tests.late.scenarios import Found, Scenario, scenarios

REPOSITORY = Path(__file__).resolve().parents[2]
KEPT = REPOSITORY / "build" / "late-mutations.json"
PAGE = REPOSITORY / "docs" / "inside" / "late-device.md"
BEGIN, END = "<!-- mutations:start -->\n", "<!-- mutations:end -->"
SEEDS = range(4)
"""One of each kind of order."""
FEW = 6
"""Scenarios that are run with further seeds: what is not ordered is found with any of them."""
PATIENCE_S, ERRORS = 60.0, 2
"""How long a run may take before it counts as one without an end; errors after which no better reason is looked for."""


def run_without(place: Place | None, scenario: Scenario, seed: int) -> Found:
    """A scenario on this rank, with one place taken out (``None``: as it is)."""
    if place is None:
        return scenario.on_rank(seed)
    with taken_out(place):
        return scenario.on_rank(seed)


def run_noted(chosen: Sequence[Place], scenario: Scenario, seed: int) -> tuple[Found, set[int], float]:
    """A scenario on this rank, the numbers of the places that it comes to, and its seconds of the processor."""
    with noted(chosen) as numbers:
        start = time.process_time()
        found = scenario.on_rank(seed)
        return found, set(numbers), time.process_time() - start


class Pools(dict[int, RankPool]):
    """Of ranks by their number, each made when it is asked for first, until ``stack`` ends."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, ranks: int) -> RankPool:
        self[ranks] = self._stack.enter_context(RankPool(ranks))
        return self[ranks]


def reach(pool: RankPool, scenario: Scenario, chosen: Sequence[Place]) -> tuple[list[str], float]:
    """The places that a scenario comes to on any rank, and its seconds.

    Raises:
        RuntimeError: it is wrong as it is.
    """
    found = pool.run(run_noted, chosen, scenario, 0, timeout=4 * PATIENCE_S)
    wrong = [each for each, _, _ in found if not each.right]
    if wrong:
        raise RuntimeError(f"{scenario} with nothing taken out: {wrong}")
    numbers = sorted({number for _, own, _ in found for number in own})
    return [str(chosen[number]) for number in numbers], sum(seconds for _, _, seconds in found)


def verdict(place: Place, quickest: Sequence[Scenario], pools: Pools) -> str:
    """What found it, of scenarios that come to it, or the empty text."""
    errors: list[str] = []
    for seed in SEEDS:
        for scenario in quickest[: None if seed == SEEDS[0] else FEW]:
            where = f"{scenario}, seed {seed}" if seed else str(scenario)
            try:
                found = pools[scenario.ranks].run(run_without, place, scenario, seed, timeout=PATIENCE_S)
            except RankError as error:
                kind = "no end" if "did not finish" in str(error) else f"an error ({_kind_of(error)})"
                errors.append(f"{kind}: {where}")
                if len(errors) > ERRORS:
                    return errors[0]
                continue
            kinds = [
                kind for kind, name in (("order", "races"), ("values", "wrong")) if any(vars(f)[name] for f in found)
            ]
            if kinds:
                return f"{' and '.join(kinds)}: {where}"
    return errors[0] if errors else ""


def _kind_of(error: RankError) -> str:
    names = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception|Interrupt))\b", str(error), re.MULTILINE)
    return str(names[-1]) if names else "RankError"


# ---- what is known so far


def _digest() -> str:
    found = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        if "testing" not in path.parts:
            found.update(path.read_bytes())
    return found.hexdigest()


class Kept:
    """What found which place, and where scenarios come, in a file.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self._path, sources = path, _digest()
        known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        fresh: dict[str, Any] = {"sources": sources, "found": {}, "reach": {}}
        self._known = known if known.get("sources") == sources else fresh
        self.found: dict[str, str] = self._known["found"]
        """By place."""
        self.reach: dict[str, tuple[list[str], float]] = self._known["reach"]
        """By scenario: :func:`reach`."""

    def write(self) -> None:
        """Keep it."""
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(self._known, indent=1), "utf-8")

    def quickest(self, place: Place) -> list[Scenario]:
        """The scenarios that come to it."""
        mine = [s for s in scenarios() if str(place) in self.reach.get(str(s), ([], 0.0))[0]]
        return sorted(mine, key=lambda scenario: self.reach[str(scenario)][1])


def table(kept: Kept) -> str:
    """For the page."""
    chosen, left_out = places(), places(counted=False)
    lines = [
        f"| `{place.file}` `{place.inside}`: `{_short(place)}` | {kept.found.get(str(place), '**not found**')} |"
        for place in chosen
    ]
    found = sum(str(place) in kept.found for place in chosen)
    reasons = dict.fromkeys(place.why_not for place in left_out)
    others = "Calls of the same names that do not concern a device, by reason:\n\n"
    for why in reasons:
        own = [place for place in left_out if place.why_not == why]
        files = ", ".join(f"`{file}`" for file in dict.fromkeys(place.file for place in own))
        others += f"* {len(own)}: {why} ({files}).\n"
    head = f"{date.today():%-d %B %Y}, torch {torch.__version__.split('+')[0]}: {found} of {len(chosen)} places found."
    return f"{head}\n\n| Taken out | Found by |\n|---|---|\n" + "\n".join(lines) + f"\n\n{others}"


def _short(place: Place) -> str:
    again = "" if place.number == 1 else f" ({place.number})"
    return (place.text if len(place.text) < 70 else place.text[:66] + "...") + again


def main(words: Sequence[str]) -> int:
    """Look, and write the table; 1 where something was not found."""
    kept, every = Kept(KEPT), places()
    chosen = [place for place in every if not words or any(word in str(place) for word in words)]
    with ExitStack() as stack:
        pools = Pools(stack)
        if any(str(place) not in kept.found for place in chosen):
            for scenario in scenarios():
                if str(scenario) not in kept.reach:
                    kept.reach[str(scenario)] = reach(pools[scenario.ranks], scenario, every)
                    kept.write()
        for place in chosen:
            if str(place) not in kept.found and (found := verdict(place, kept.quickest(place), pools)):
                kept.found[str(place)] = found
                kept.write()
            print(f"{place} | {kept.found.get(str(place), 'NOT FOUND')}", flush=True)
    if not words:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + table(kept) + END + rest.split(END)[1], "utf-8")
    return int(any(str(place) not in kept.found for place in chosen))


if __name__ == "__main__":
    # By its name, so that ranks find its functions.
    from tests.late import mutations

    sys.exit(mutations.main(sys.argv[1:]))
