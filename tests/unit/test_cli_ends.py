"""How ``shardwise run`` ends: killed, interrupted while it waits for other hosts, and where there are none."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run
from shardwise.cli.errors import BadInput
from shardwise.cli.main import _parser
from shardwise.cli.run import launch
from shardwise.core.comm.mapping import start_time
from tests.support.launching import SECONDS, Forked, forked, started, written
from tests.support.sets import campaign, full

TRAINING = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
place = pathlib.Path(sys.argv[1], f"rank-{os.environ['RANK']}")
place.with_suffix(".new").write_text(str(os.getpid()))
place.with_suffix(".new").rename(place)
while True:
    time.sleep(0.05)
"""


def _until(what: str, happened: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {SECONDS} s"
        time.sleep(0.02)


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, whole: bool) -> None:
    """Also those that are deaf to what can be refused."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(TRAINING)
    ranks: dict[int, int] = {}
    try:
        with started("shardwise", "run", "--nproc", "2", str(script), str(tmp_path), log=log, whole=whole) as launcher:
            _until(f"two ranks: {written(log)}", lambda: len(list(tmp_path.glob("rank-?"))) == 2)
            pids = [int(path.read_text()) for path in tmp_path.glob("rank-?")]
            ranks = {pid: start_time(pid) for pid in pids}
            assert -1 not in ranks.values()
            launcher.send_signal(signal.SIGKILL)
            launcher.wait(SECONDS)
        _until("the end of the ranks", lambda: all(start_time(pid) != began for pid, began in ranks.items()))
    finally:
        for pid, began in ranks.items():
            if start_time(pid) == began:
                os.kill(pid, signal.SIGKILL)


def _launch(port: int) -> None:
    """Waits for a host that never answers, as long as torch lets it."""
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"]
    sys.exit(launch([*meeting, "--rdzv-conf=is_host=0,read_timeout=100000"], [__file__], 1))


@pytest.mark.parametrize("number", [signal.SIGTERM, *full(signal.SIGINT)])
def test_a_signal_ends_a_launcher_that_waits_for_another_host(number: signal.Signals) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(SECONDS)
        launcher = Forked(forked(_launch, silent.getsockname()[1]))
        try:
            peer, _ = silent.accept()  # from here on it is in torch's C++ code
            with contextlib.closing(peer):
                launcher.send_signal(number)
                assert launcher.wait(SECONDS) == 128 + number
        finally:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()


def _check(monkeypatch: pytest.MonkeyPatch, options: str, unknown: set[str], until: int = 10**9) -> list[str]:
    """The names that were looked up; those of ``unknown`` are known from the look-up number ``until`` on."""
    asked: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> list[object]:
        asked.append(host)
        if host in unknown and len(asked) < until:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(run.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(run.socket, "getfqdn", lambda: "this-host")
    run.check_hosts(_parser().parse_args(["run", *options.split(), __file__]))
    return asked


def test_a_meeting_place_that_cannot_be_found_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = "--nnodes 2 --rdzv-endpoint "
    assert _check(monkeypatch, "", set()) == []
    assert _check(monkeypatch, two + "host0:29500", set()) == ["host0", "this-host"]
    assert _check(monkeypatch, two + "[::1]:29500 --node-rank 1", set()) == ["::1"]
    assert _check(monkeypatch, two + "host0 --node-rank 1", set()) == ["host0"]
    assert capsys.readouterr().err == ""
    assert _check(monkeypatch, two + "host0:1 --node-rank 1", {"host0"}, 2) == ["host0", "host0"]
    assert "--rdzv-endpoint host0:1: [Errno -2] Name or service not known; waiting" in capsys.readouterr().err
    monkeypatch.setattr(run, "RESOLVE_S", 0.0)
    with pytest.raises(
        BadInput, match=r"--rdzv-endpoint nowhere:1: host name 'nowhere' cannot be resolved \(.*not know"
    ):
        _check(monkeypatch, two + "nowhere:1", {"nowhere"})
    with pytest.raises(BadInput, match=r"the name of this host, this-host: .* cannot be resolved .* /etc/hosts"):
        _check(monkeypatch, two + "host0:1 --node-rank 0", {"this-host"})
