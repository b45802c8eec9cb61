"""The scenarios that run on the late device for each removed place; see ``late_*.py`` in ``tests/support``."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.late_setup import Found

HOMES = {
    "late_axes": ("axis_of_parts", "messages_over_gloo", "parts_of_sequences", "waited_elsewhere"),
    "late_places": ("discarded", "disk", "failed_gather", "loaded_over", "program_waits", "renewed", "traced_graph"),
    "late_stages": ("stages",),
}
"""Functions by their module, if it is not ``late_setup``; each is imported when it is needed."""
READS = ("state", "state in the compute dtype", "gathered", "one by one", "own state", "unsharded", "as in a trace")
READS += ("waited for", "saved apart", "loaded apart")
ALONE = ("written_after_forward", "side_copies", "lent_memory", "later_values", "locked_memory", "program_waits")
ALONE += ("failed_gather", "discarded")
"""Functions for one rank that take a name for messages and a seed."""


@dataclass(frozen=True)
class Scenario:
    """A function on ranks.

    Attributes:
        ranks: how many.
        function: a function of one of the modules.
        plan: its first argument, the name of a plan or of a variant.
        more: further arguments, after the seed.
    """

    ranks: int
    function: str
    plan: str = "alone"
    more: tuple[Any, ...] = ()

    def __str__(self) -> str:
        words = [self.function.replace("_", " ")]
        if self.plan != "alone":
            words = ([] if self.function == "train" else words) + [self.plan]
        words += [str(each) if each is not True else "changing streams" for each in self.more]
        return f"{', '.join(words)} ({self.ranks} {'rank' if self.ranks == 1 else 'ranks'})"

    def on_rank(self, seed: int) -> Found:
        """Run it on this rank's late device."""
        home = next((home for home, functions in HOMES.items() if self.function in functions), "late_setup")
        function: Callable[..., Found] = getattr(importlib.import_module(f"tests.support.{home}"), self.function)
        return function(self.plan, seed, *self.more)


TRAINED = (
    (1, "host early_host mixed clipped zero2_state_host zero3", ()),
    (1, "host mixed", ("mlp", True)),
    (2, "host ahead zero1 zero2 eight_bits early_host mixed ddp on_use", ()),
    (2, "ahead eight_bits", ("mlp", True)),
    (2, "zero3 on_use", ("mixture",)),
    (2, "few_chunks", ("branches",)),
    (2, "frozen_host", ("frozen",)),
    (4, "replicas replicas_host secondary replicas_eight_bits secondary_eight_bits", ()),
    (4, "replicas replicas_in_pieces", ("gpt",)),
)
"""Ranks, plan, model, and whether the program changes streams."""


def scenarios() -> list[Scenario]:
    """Return all scenarios."""
    found = [Scenario(1, name) for name in ALONE]
    found += [Scenario(2, name) for name in ("late_norm", "axis_of_parts", "loaded_over", "traced_graph")]
    found += [Scenario(2, "renewed", name) for name in READS]
    found += [Scenario(2, "parts_of_sequences", "ring over gloo"), Scenario(2, "waited_elsewhere")]
    found += [Scenario(ranks, "parts_of_sequences", name) for ranks in (2, 3) for name in ("ring", "heads")]
    found += [Scenario(ranks, "messages_over_gloo") for ranks in (2, 3)]
    found += [Scenario(2, "disk", "p_disk"), Scenario(4, "secondary_twice")]
    found += [Scenario(2, "stages", name) for name in ("1f1b", "zbv", "described")]
    found += [Scenario(3, "stages", name) for name in ("1f1b", "odd_described")]
    found += [Scenario(1, "train_and_save", "host"), Scenario(2, "train_and_save", "on_use")]
    found += [Scenario(ranks, "train", name, more) for ranks, names, more in TRAINED for name in names.split()]
    return found
