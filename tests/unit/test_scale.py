"""The benchmark of scale goes on where it was cut off, and says which numbers it did not take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scale

ASKED = ["--plans", "zero1,zero3", "--blocks", "2", "--ranks", "8,64", "--files", "8", "--no-times"]


def test_rows_that_were_kept_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, drawn = tmp_path / "rows.json", tmp_path / "rows.svg"
    with monkeypatch.context() as cut:
        measure = scale.measure

        def dies(name: str, blocks: int, ranks: int, transport: str, times: bool) -> scale.Row:
            if (name, ranks) == ("zero3", 64):
                raise KeyboardInterrupt
            return measure(name, blocks, ranks, transport, times)

        cut.setattr(scale, "measure", dies)
        with pytest.raises(KeyboardInterrupt):
            scale.main([*ASKED, "--json", str(kept)])
    assert len(json.loads(kept.read_text())["rows"]) == 3
    again: list[tuple[str, int]] = []

    def only_new(name: str, blocks: int, ranks: int, transport: str, times: bool) -> scale.Row:
        again.append((name, ranks))
        return measure(name, blocks, ranks, transport, times)

    monkeypatch.setattr(scale, "measure", only_new)
    scale.main([*ASKED, "--json", str(kept), "--svg", str(drawn)])
    assert again == [("zero3", 64)]
    told = capsys.readouterr().out
    assert "No times were taken" in told and "| zero3 | 2 | 64 | – |" in told and "| 8 | " in told
    picture = drawn.read_text()
    assert picture.startswith("<svg") and "collectives a step" in picture and "host time" not in picture
    rows, files = json.loads(kept.read_text())["rows"], json.loads(kept.read_text())["files"]
    assert [row["step_s"] for row in rows] == [None] * 4 and all(row["calls"] > 100 for row in rows)
    assert files[0]["read_s"] is None and files[0]["pieces"] > 0
