"""The table of results in ``docs/versions.md``: one row for each cell that was run; other rows do not change."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from tests.matrix.cells import ROOT, Cell, minor_of

PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
HEAD = "| Python | torch | date | passed | failed |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Row:
    """The result of a cell.

    Attributes:
        python, torch: the exact versions.
        date: the date of the run.
        passed, failed: numbers of tests; -1 if the tests did not run with these versions.
    """

    python: str
    torch: str
    date: str
    passed: int = -1
    failed: int = -1

    @property
    def cell(self) -> Cell:
        return Cell(minor_of(self.python), minor_of(self.torch))

    @property
    def good(self) -> bool:
        """Whether tests ran and all of them passed."""
        return self.passed > 0 and self.failed == 0

    def __str__(self) -> str:
        numbers = ("" if n < 0 else str(n) for n in (self.passed, self.failed))
        return f"| {' | '.join((self.python, self.torch, self.date, *numbers))} |"


def today() -> str:
    """Return the date for a row."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _split(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no {BEGIN} with {END} after it, where the table is")
    return before + begin, inside, end + after


def read(text: str) -> dict[Cell, Row]:
    """Return the rows of a page.

    Raises:
        ValueError: the page has no markers, a row is invalid, or a cell has two rows.
    """
    rows: dict[Cell, Row] = {}
    _, inside, _ = _split(text)
    for line in inside.strip().splitlines()[2:]:
        fields = [part.strip() for part in line.strip().strip("|").split("|")]
        try:
            python, torch, date, *numbers = fields
            row = Row(python, torch, date, *(int(n) if n else -1 for n in numbers))
            cell = row.cell
        except (ValueError, TypeError) as error:
            raise ValueError(f"{PAGE.name}: {line!r} is no row of the table: {error}") from None
        if cell in rows:
            raise ValueError(f"{PAGE.name}: {cell} has two rows")
        rows[cell] = row
    return rows


def written(text: str, rows: Mapping[Cell, Row]) -> str:
    """Return the page with these rows, in the order of their cells."""
    before, _, after = _split(text)
    lines = "".join(f"{rows[cell]}\n" for cell in sorted(rows))
    return f"{before}\n{HEAD}{lines}{after}"


def add(row: Row) -> None:
    """Write one row into the page, in place of an earlier result of the same cell."""
    text = PAGE.read_text("utf-8")
    PAGE.write_text(written(text, {**read(text), row.cell: row}), "utf-8")
