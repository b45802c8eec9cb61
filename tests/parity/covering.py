"""Covering arrays: few rows in which every allowed pair of values occurs, and fewer in which every value occurs.

The algorithm is greedy and deterministic.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Row = dict[str, str]
_Pair = tuple[str, str, str, str]
_T = TypeVar("_T")


def _pair(first: str, value: str, second: str, other: str) -> _Pair:
    return (first, value, second, other) if first < second else (second, other, first, value)


def allowed_pairs(factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]) -> list[_Pair]:
    """Yield every pair of values of two factors that may occur together, in a fixed order."""
    return [
        _pair(first, value, second, other)
        for first, second in combinations(factors, 2)
        for value in factors[first]
        for other in factors[second]
        if allowed({first: value, second: other})
    ]


class _Design:
    def __init__(
        self, factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool], costs: Mapping[str, float]
    ) -> None:
        self.factors, self.allowed, self.costs = factors, allowed, costs
        self.open = dict.fromkeys(allowed_pairs(factors, allowed))
        self.spent = {factor: dict.fromkeys(values, 0.0) for factor, values in factors.items()}
        self.rows: list[Row] = []

    def add(self, fixed: Mapping[str, str]) -> None:
        """Add a row with the values ``fixed``.

        Each other factor takes the value with most missing pairs, or else the one that has cost least so far.
        """
        row = dict(fixed)
        while len(row) < len(self.factors):
            choices = [
                (-self._gain(row, factor, value), self.spent[factor][value], order, factor, value)
                for factor, values in self.factors.items()
                if factor not in row
                for order, value in enumerate(values)
                if self.allowed({**row, factor: value})
            ]
            if len({choice[3] for choice in choices}) + len(row) < len(self.factors):
                raise ValueError(f"{row} cannot be completed: relax what is allowed")
            *_, factor, value = min(choices)
            row[factor] = value
        for (first, value), (second, other) in combinations(row.items(), 2):
            self.open.pop(_pair(first, value, second, other), None)
        for factor, value in row.items():
            self.spent[factor][value] += self.costs.get(value, 1.0)
        self.rows.append({factor: row[factor] for factor in self.factors})

    def _gain(self, row: Row, factor: str, value: str) -> int:
        return sum(_pair(factor, value, other, chosen) in self.open for other, chosen in row.items())


def cover(
    factors: Mapping[str, Sequence[str]],
    allowed: Callable[[Row], bool] = lambda row: True,
    seeds: Iterable[Mapping[str, str]] = (),
    costs: Mapping[str, float] | None = None,
) -> list[Row]:
    """Return rows over ``factors`` (values by factor name) in which every allowed pair of values occurs.

    Args:
        factors: the values of each factor.
        allowed: whether values can be combined; it is called with parts of rows, so it must not judge missing factors.
        seeds: parts of rows that must occur, in any number; they are completed to cover as much as they can.
        costs: costs of values, by default 1. Of two values that would cover as much, one that costs three times as much
            is used a third as often.

    Raises:
        ValueError: an allowed pair or a seed cannot be completed to a row.
    """
    design = _Design(factors, allowed, costs or {})
    for seed in seeds:
        design.add(seed)
    while design.open:
        first, value, second, other = next(iter(design.open))
        design.add({first: value, second: other})
    return design.rows


def each_once(
    rows: Sequence[_T], values: Callable[[_T], Iterable[Hashable]], cost: Callable[[_T], float] = lambda row: 1.0
) -> list[_T]:
    """Return few and cheap ones of ``rows``, in their order, in which all ``values`` of all rows occur.

    Among rows with equal gain for their cost, one whose values have occurred less often is chosen.
    """
    found = [set(values(row)) for row in rows]
    missing: set[Hashable] = set().union(*found)
    seen: Counter[Hashable] = Counter()
    chosen: set[int] = set()

    def rank(at: int) -> tuple[float, int, int]:
        return len(found[at] & missing) / cost(rows[at]), -sum(seen[value] for value in found[at]), -at

    while missing:
        best = max(range(len(rows)), key=rank)
        chosen.add(best)
        missing -= found[best]
        seen.update(found[best])
    return [rows[at] for at in sorted(chosen)]
