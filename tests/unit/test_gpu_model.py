"""The computed timeline of a step: its parts add up, each bound is one, and the table of the docs comes from counts."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from program_setup import python

from benchmarks.gpu.model import DOCUMENT, H100, MODELS, ON_PCIE, RANKS, Counts, home_of, timeline

LAYER, REST = Counts(50, 6.0, 0, 8.0, 2, 1), Counts(25, 0.0, 12, 0.0, 2, 2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("system", ON_PCIE)
def test_parts_add_up(system: str, name: str, ranks: int) -> None:
    size, home = MODELS[name], home_of(MODELS[name], ranks)
    assert (home == "") == (name == "70B" and ranks == 1)
    found = asdict(timeline(system, size, ranks, LAYER, REST))
    parts = ("compute", "copies", "update", "exposed_gathers", "exposed_reductions", "exposed_host")
    assert found["total"] == pytest.approx(sum(found[part] for part in parts))
    block, tokens = 12 * size.width**2 + 13 * size.width, size.micro_batch * size.sequence
    flops = (8 * block * size.layers + 6 * size.width * size.vocabulary) * tokens
    assert found["compute"] == pytest.approx(flops / (0.6 * 989e12))
    if home == "device":
        assert found["total"] >= found["gathers"] + found["reductions"] + found["update"]
        free = replace(H100, hbm=1e30, nvlink=1e30, network=1e30, hop_s=0.0, operator_s=0.0)
        assert timeline(system, size, ranks, LAYER, REST, free).total == pytest.approx(found["compute"])
        slow = timeline(system, size, ranks, LAYER, REST, replace(H100, nvlink=1e9, network=1e8))
        link = slow.gathers + slow.reductions + slow.update if ranks > 1 else found["total"]
        assert slow.total == pytest.approx(link, rel=0.1)


@pytest.mark.full
def test_the_table_is_computed_from_counts() -> None:
    done = python("-W", "ignore", "-m", "benchmarks.gpu.model")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:2] == "| "]
    counts = {(row[0], row[1]): row[2:] for row in rows if len(row) == 9 and row[0].isdigit()}
    for ranks in map(str, RANKS):
        ours, theirs = counts[ranks, "shardwise"], counts[ranks, "FSDP2"]
        assert ours[1:3] == theirs[1:3] == (["0", "0"] if ranks == "1" else ["2", "1"])  # a layer
        assert float(ours[5]) < float(theirs[5]), "fewer bytes are copied in passes"
    timelines = {" | ".join(row[:3]) for row in rows if len(row) == 11}
    assert len(timelines) == 18 and all(row in DOCUMENT.read_text() for row in timelines)
