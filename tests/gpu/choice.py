"""Which tests of a file are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Choice"]

Case = TypeVar("Case")


@dataclass(frozen=True)
class Choice:
    """Of a file's functions those of ``only`` (empty: all) and none of ``but``; then one test in ``every``."""

    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    every: int = 1

    def of(self, cases: Sequence[Case], function: Callable[[Case], str]) -> list[Case]:
        """Those chosen of one file's ``cases``, in order; ``function``: the name of a case's."""
        kept = [case for case in cases if function(case) not in self.but]
        return [case for case in kept if not self.only or function(case) in self.only][:: self.every]
