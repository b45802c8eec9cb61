"""The benchmark of two hosts: what it counts, what it keeps, and that it goes on where it was cut off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.hosts import Wire
from benchmarks.job import Job
from benchmarks.launch import JobFailed, Outcome
from tests.support.hosts import TwoHosts

ASKED = ["--sizes", "24 units", "--ranks", "1", "2", "--delays", "0", "2", "--gbit", "10"]
OPTIONS = hosts.parse([*ASKED, "--systems", "sw_zero3", "fsdp2", "--turns", "2"])


class Stand:
    """In the place of ranks: a step waits 3 times a rank for the wire, in FSDP2 10 times; the second turn is slower."""

    begun: list[tuple[str, int]]

    def __init__(self, size: str, ranks: int, options: object) -> None:
        self.place = size, ranks
        self.begun.append(self.place)

    def __enter__(self) -> Stand:
        return self

    def measured(self, wire: Wire, turns: int) -> list[Outcome]:
        assert turns == (1 if wire.delay_ms == 20.0 else 2)
        found = []
        for system, waits in (("sw_zero3", 3 * self.place[1]), ("fsdp2", 10)):
            job = Job(system, self.place[0], 2 * self.place[1], "fp32", False, 10, 3, 2 * self.place[1])
            seconds = 0.1 + waits * 2 * wire.delay_ms / 1e3
            error = "it fell over" if system == "fsdp2" and wire.delay_ms == 2.0 else ""
            found.append(Outcome(job, step_seconds=seconds, losses=(1.0, 0.5), error=error))
        return found

    def __exit__(self, *_: object) -> None:
        pass


def test_it_counts_waits_and_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Stand.begun = []
    monkeypatch.setattr(hosts, "SideBySide", Stand)
    path, results = tmp_path / "kept.json", hosts.kept(None)
    for number, _ in enumerate(hosts.measure(OPTIONS, results)):
        hosts.keep(path, results)
        if number == 3:  # all wires of one rank a host, and one of two
            break
    again = hosts.kept(path)
    assert {key: hosts.step_ms(each) for key, each in again.items()} == {
        key: hosts.step_ms(each) for key, each in results.items()
    }
    assert len(again) == 4
    assert len(list(hosts.measure(OPTIONS, again))) == 2
    assert Stand.begun == [("24 units", 1), ("24 units", 2), ("24 units", 2)]
    text = hosts.section(hosts.in_order(again, OPTIONS), OPTIONS)
    assert "| 24 | 1 | 10 | 0 | 100 | 100 | 1.00x |" in text and "| 24 | 2 | 10 | 2 | 124 | failed |  |" in text
    assert "| 24 | 1 | 3.0 | 10.0 |" in text and "| 24 | 2 | 6.0 | 10.0 |" in text and "20 ms" in text
    assert "| 10 | 20 |" not in text, "the wire for counting is no line of the table"


def test_losses_that_differ_and_waits_that_nobody_knows_are_said() -> None:
    job = Job("sw_zero3", "24 units", 2, "fp32", False, 10, 3, 2)
    own = Outcome(job, step_seconds=0.1, losses=(1.0,))
    results = {("24 units", 1, Wire(20.0, 10.0)): [own, replace(own, job=replace(job, system="fsdp2"), losses=(2.0,))]}
    assert "| 24 | 1 | – | – |" in hosts.section(results, OPTIONS)
    at_once = {("24 units", 1, Wire(0.0, 10.0)): next(iter(results.values()))}
    assert "100 (other losses)" in hosts.section(at_once, OPTIONS)
    with pytest.raises(SystemExit):
        hosts.parse(["--delays", "0", "20"])


@pytest.mark.skipif(TwoHosts.why_not(True) is not None, reason=str(TwoHosts.why_not(True)))
def test_a_system_that_ends_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        def __init__(self, job: Job, _hosts: TwoHosts) -> None:
            self.job, self.turns = job, 0

        def warm_up(self) -> Outcome:
            if self.job.system == "ddp":
                raise JobFailed("no memory")
            return Outcome(self.job)

        def turn(self, outcome: Outcome, number: int) -> Outcome:
            self.turns += 1
            if self.job.system == "fsdp2" and self.turns == 3:
                raise JobFailed("it hangs")
            return replace(outcome, step_seconds=float(self.turns))

        def end(self) -> None:
            pass

    monkeypatch.setattr(hosts, "Spread", Ranks)
    monkeypatch.setattr(hosts, "SETTLE_S", 0.0)
    options = hosts.parse([*ASKED, "--systems", "sw_zero3", "ddp", "fsdp2"])
    with hosts.SideBySide("24 units", 1, options) as systems:
        rows = [systems.measured(wire, turns) for wire, turns in ((Wire(0.0, 10.0), 1), (Wire(2.0, 10.0), 3))]
    told = [[(one.job.system, one.error or one.step_seconds) for one in row] for row in rows]
    # The first turn on each wire does not count.
    assert told[0] == [("sw_zero3", 2.0), ("ddp", "no memory"), ("fsdp2", 2.0)]
    assert told[1] == [("sw_zero3", 5.0), ("ddp", "no memory"), ("fsdp2", "it hangs")]
