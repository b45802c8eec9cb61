"""Removes one wait, event or ``record_stream`` of the library at a time, and checks that the late device detects it.

``python -m tests.late.mutations`` examines all places and writes the table of docs/inside/late-device.md; with words as
arguments, the places with one of them in their names. Every scenario first runs unchanged, to record which places it
reaches. Then each place is removed in the scenarios that reach it, the quickest first. Results are stored in
:data:`KEPT` as long as the library's sources are the same, so an interrupted run can be resumed.
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
"""One seed for each kind of order."""
FEW = 6
"""Number of scenarios that run with further seeds: a missing order is detected with any of them."""
PATIENCE_S, ERRORS = 60.0, 2
"""Time after which a run counts as a hang; number of errors after which no better reason is looked for."""


def run_without(place: Place | None, scenario: Scenario, seed: int) -> Found:
    """Run a scenario on this rank with one place removed (``None``: unchanged)."""
    if place is None:
        return scenario.on_rank(seed)
    with taken_out(place):
        return scenario.on_rank(seed)


def run_noted(chosen: Sequence[Place], scenario: Scenario, seed: int) -> tuple[Found, set[int], float]:
    """Run a scenario on this rank; return the numbers of the places that it reaches, and its CPU seconds."""
    with noted(chosen) as numbers:
        start = time.process_time()
        found = scenario.on_rank(seed)
        return found, set(numbers), time.process_time() - start


class Pools(dict[int, RankPool]):
    """Pools by number of ranks, each created at its first use and closed with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, ranks: int) -> RankPool:
        self[ranks] = self._stack.enter_context(RankPool(ranks))
        return self[ranks]


def reach(pool: RankPool, scenario: Scenario, chosen: Sequence[Place]) -> tuple[list[str], float]:
    """Return the places that a scenario reaches on any rank, and its seconds.

    Raises:
        RuntimeError: the unchanged library fails it.
    """
    found = pool.run(run_noted, chosen, scenario, 0, timeout=4 * PATIENCE_S)
    wrong = [each for each, _, _ in found if not each.right]
    if wrong:
        raise RuntimeError(f"{scenario} with nothing taken out: {wrong}")
    numbers = sorted({number for _, own, _ in found for number in own})
    return [str(chosen[number]) for number in numbers], sum(seconds for _, _, seconds in found)


def verdict(place: Place, quickest: Sequence[Scenario], pools: Pools) -> str:
    """Return which of the scenarios that reach the place detects its removal, and how; empty if none does."""
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


# ---- stored results


def _digest() -> str:
    found = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        if "testing" not in path.parts:
            found.update(path.read_bytes())
    return found.hexdigest()


class Kept:
    """A file of results: what detected which place, and which places scenarios reach.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, sources = path, _digest()
        known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        fresh: dict[str, Any] = {"sources": sources, "found": {}, "reach": {}}
        self._known = known if known.get("sources") == sources else fresh
        self.found: dict[str, str] = self._known["found"]
        """The detecting scenario, by place."""
        self.reach: dict[str, tuple[list[str], float]] = self._known["reach"]
        """The result of :func:`reach`, by scenario."""

    def write(self) -> None:
        """Write the file."""
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(self._known, indent=1), "utf-8")

    def quickest(self, place: Place) -> list[Scenario]:
        """Return the scenarios that reach the place, the quickest first."""
        mine = [s for s in scenarios() if str(place) in self.reach.get(str(s), ([], 0.0))[0]]
        return sorted(mine, key=lambda scenario: self.reach[str(scenario)][1])


def table(kept: Kept) -> str:
    """Return the table for the docs page."""
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
    """Examine the places, and write the table; the exit status is 1 if a removal was not detected."""
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
    # Under its name, so that ranks find its functions.
    from tests.late import mutations

    sys.exit(mutations.main(sys.argv[1:]))
