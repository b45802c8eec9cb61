"""Hostile and damaged files: every reader is given changed checkpoints in a process of its own.

Each trial is a recipe: a checkpoint of :mod:`subjects`, changes to it (:mod:`changes`) and a way to read it
(:mod:`trial`). It either reads or ends in one documented error; no code runs, nothing outside is touched, nothing is
changed before an error, and time and memory are bounded by the size of the files. Recipes that once found something are
kept in ``tests/data/fuzz`` and tried by the tests.
"""

from tests.faults.fuzz.campaign import Reader, campaign

__all__ = ["Reader", "campaign"]
