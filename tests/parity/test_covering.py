"""``tests.parity.covering``: few rows, all pairs, deterministic."""

import pytest

from tests.parity.covering import Row, allowed_pairs, cover, each_once
from tests.parity.matrix import FACTORS, allowed, dangerous_product, default_rows, quick_rows

BITS = dict.fromkeys("abcdefg", ("0", "1"))


def test_pairs_of_seven_bits_need_few_rows() -> None:
    rows = cover(BITS)
    assert len(rows) <= 10  # all combinations are 128
    assert all(any(r[f] == v and r[g] == w for r in rows) for f, v, g, w in allowed_pairs(BITS, lambda row: True))


def test_forbidden_pairs_do_not_occur_and_seeds_do() -> None:
    rows = cover(BITS, lambda row: not (row.get("a") == "1" and row.get("b") == "1"), [{"c": "1", "d": "1"}] * 3)
    assert not any(row["a"] == row["b"] == "1" for row in rows)
    assert all(row["c"] == row["d"] == "1" for row in rows[:3])


def test_an_impossible_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be completed"):
        cover({"a": ("0",), "b": ("0",), "c": ("0",)}, lambda row: len(row) < 3)


def test_matrix_has_every_allowed_pair_and_the_full_dangerous_product() -> None:
    rows = default_rows()
    assert rows == default_rows()
    assert all(allowed(row) for row in rows)
    found = {(f, v, g, w) for row in rows for f, v in row.items() for g, w in row.items()}
    assert not [pair for pair in allowed_pairs(FACTORS, allowed) if pair not in found]
    quick = quick_rows(rows)
    assert quick == quick_rows(rows) == [row for row in rows if row in quick] and len(quick) <= 40
    assert {item for row in quick for item in row.items()} == {(f, v) for f, values in FACTORS.items() for v in values}
    wanted = {tuple(part.items()) for part in dangerous_product()}
    assert wanted <= {tuple((f, row[f]) for f in ("model", "plan", "ranks", "numbers")) for row in rows}


def test_expensive_value_is_used_less_often_and_every_pair_occurs() -> None:
    factors = {"a": tuple("01234"), "b": tuple("01234"), "c": ("cheap", "dear")}
    rows = cover(factors, costs={"dear": 4.0})
    assert not [pair for pair in allowed_pairs(factors, lambda row: True) if not _occurs(pair, rows)]
    dear = sum(row["c"] == "dear" for row in rows)
    assert dear < sum(row["c"] == "dear" for row in cover(factors)) and dear <= len(rows) / 3


def test_every_value_once_needs_few_and_cheap_rows() -> None:
    rows = [{"a": a, "b": b, "c": c} for a in "01234" for b in "01234" for c in ("cheap", "dear")]
    chosen = each_once(rows, dict.items, lambda row: 4.0 if row["c"] == "dear" else 1.0)
    assert {item for row in chosen for item in row.items()} == {item for row in rows for item in row.items()}
    assert len(chosen) <= 6 and sum(row["c"] == "dear" for row in chosen) == 1
    assert [row for row in rows if row in chosen] == chosen


def _occurs(pair: tuple[str, str, str, str], rows: list[Row]) -> bool:
    first, value, second, other = pair
    return any(row[first] == value and row[second] == other for row in rows)
