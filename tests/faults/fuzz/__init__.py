"""Hostile and damaged files: every reader gets changed checkpoints in a separate process.

Each trial is a recipe: a checkpoint of :mod:`subjects`, changes to it (:mod:`changes`) and a way to read it
(:mod:`trial`). The reader either succeeds or raises one documented error; no code runs, nothing outside is touched,
nothing is changed before an error, and time and memory are bounded by the size of the files. Recipes that once detected
a fault are in ``tests/data/fuzz``, and the tests repeat them.
"""

from tests.faults.fuzz.campaign import Reader, campaign

__all__ = ["Reader", "campaign"]
