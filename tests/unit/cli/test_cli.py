"""Tests of the command line without training: arguments, one-line errors, and how commands end.

- ``shardwise run``: arguments for torch's launcher, exit statuses, signals, kills, and launches across hosts.
- Commands whose standard output is closed or full end with a status and at most one line.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from shardwise.cli import run
from shardwise.cli.errors import BadInput
from shardwise.cli.main import _parser, main
from shardwise.cli.run import launch
from shardwise.core.checkpoint.formats import write_single
from shardwise.core.checkpoint.formats.lazy_tensors import LazySource, entry_of_tensor
from shardwise.core.comm.mapped_memory import start_time
from shardwise.core.memory.trace.stats import MemStats, Moment
from tests.support.launching import SECONDS, Forked, finished, forked, started, written
from tests.support.on_ranks import raises
from tests.support.program_setup import forked_python, python, status, surroundings, until
from tests.support.sets import campaign, full

BAD_RUN = [
    ("--nproc 0 SCRIPT", "--nproc 0"),
    ("--nproc 100000 SCRIPT", "--nproc 100000: give the number of ranks on this host, <= 4096"),
    ("--nproc many SCRIPT", "--nproc many: give a number of ranks, or gpu, cpu or auto"),
    ("--node-rank -1 SCRIPT", "--node-rank -1: give a whole number >= 0"),
    ("--max-restarts -1 SCRIPT", "--max-restarts -1"),
    ("/nowhere.py", "/nowhere.py: no such file"),
    ("/tmp", "/tmp: is a folder; give a Python script"),
    ("--num_gpus 2 SCRIPT", "unrecognized arguments: --num_gpus; use --nproc (see"),
    ("--as horovod SCRIPT", "argument --as: invalid choice: 'horovod' (choose from"),
    ("--nnodes 2 SCRIPT", "--nnodes 2"),
    *(
        (f"--nnodes {wrong} --rdzv-endpoint host:1 SCRIPT", f"--nnodes {wrong}: give a number of hosts >= 1")
        for wrong in ("abc", "0", "0:2", "3:2", "2:", "-1", "1:2:3", "9999999999")
    ),
    ("--nnodes 2 --node-rank 2 --rdzv-endpoint host:1 SCRIPT", "--node-rank 2: --nnodes 2 has hosts 0 to 1"),
    ("--nnodes 2:4 --node-rank 4 --rdzv-endpoint host:1 SCRIPT", "--node-rank 4: --nnodes 2:4 has hosts 0 to 3"),
    ("--node-rank 1 SCRIPT", "--node-rank 1: --nnodes 1 has hosts 0 to 0"),
    ("--nnodes 2 --rdzv-endpoint host:port SCRIPT", "--rdzv-endpoint host:port: 'port' is no port"),
    ("--nnodes 2 --rdzv-endpoint host:99999 SCRIPT", "--rdzv-endpoint host:99999: '99999' is no port"),
    ("", "the following arguments are required: SCRIPT (see"),
]


def _words(options: str) -> list[str]:
    """Split the options, and put the path of this file, which may have spaces, in place of ``SCRIPT``."""
    return [__file__ if each == "SCRIPT" else each for each in options.split()]


@pytest.mark.parametrize(("command", "rest"), [("run", "--nprc 3"), ("checkpoint verify", "x --forma y")])
def test_unknown_option(command: str, rest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*command.split(), *rest.split()) == 2
    text, program = capsys.readouterr().err, f"shardwise {command}"
    assert text.startswith(f"{program}: error: unrecognized") and f"{program} --help" in text and "did you mean" in text
    assert status("rnu") == 2 and "did you mean 'run'?" in capsys.readouterr().err
    assert status("help", *command.split()) == 0 and program in capsys.readouterr().out


@pytest.mark.parametrize(("options", "expected"), BAD_RUN)
def test_invalid_run_options_print_one_line(options: str, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert status("run", *_words(options)) == 2
    shown = capfd.readouterr().err
    assert expected in shown and shown.count("\n") == 1


def _run_options(text: str) -> tuple[list[str], list[str]]:
    options = _parser().parse_args(["run", *_words(text)])
    return run.launcher_arguments(options), run.program(options)


def test_run_passes_the_script_its_own_options() -> None:
    launcher, script = _run_options("--nproc_per_node 4 SCRIPT --nproc 9 --n_1 1 -m --help")
    assert launcher == ["--nproc-per-node=4", "--max-restarts=0", "--standalone", "--local-addr=127.0.0.1"]
    assert script == [__file__, "--nproc", "9", "--n_1", "1", "-m", "--help"]


@pytest.mark.parametrize(
    ("gpus", "options", "ranks"), [(3, "", 3), (3, "--nproc gpu", 3), (0, "", 1), (0, "--nproc auto", 5)]
)
def test_run_starts_a_rank_for_each_gpu(gpus: int, options: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(run, "threads_per_rank", lambda ranks: 5)
    assert _run_options(f"{options} SCRIPT")[0][0] == f"--nproc-per-node={ranks}"
    if not gpus:
        raises(BadInput, "--nproc gpu: torch finds no GPU here", _run_options, "--nproc gpu SCRIPT")


def test_env_describes_the_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert status("env") == 0
    text = capsys.readouterr().out
    assert "\nVerdict\n  " in text and "WORLD_SIZE=2 is set without RANK" in text


def test_run_options_for_several_hosts() -> None:
    launcher, _ = _run_options("--nproc 8 --nnodes 2 --node-rank 1 --rdzv-endpoint h:1 --rdzv-id job SCRIPT")
    assert "--standalone" not in launcher
    expected = {"--nnodes=2", "--rdzv-endpoint=h:1", "--rdzv-id=job", "--node-rank=1", "--rdzv-conf=is_host=0"}
    assert expected <= set(launcher)
    launcher, _ = _run_options("--nnodes 2:4 --node-rank 3 --rdzv-endpoint h:1 SCRIPT")
    assert {"--nnodes=2:4", "--node-rank=3"} <= set(launcher)


@pytest.mark.parametrize(
    ("flag", "status", "whole"), [("kill", 137, False), *full(("exit", 5, True)), *campaign(("kill", 137, True))]
)
def test_run_returns_the_status_of_the_script(tmp_path: Path, flag: str, status: int, whole: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nos.kill(os.getpid(), 9) if sys.argv[1] == 'kill' else sys.exit(5)\n")
    command = ["shardwise", "run", "--nproc", "1", str(script), flag, "--nproc=2"]
    found, shown = finished(*command, log=tmp_path / "log", whole=whole, fork_ranks=False)
    assert found == status, shown
    assert "rank 0 ended with" in shown and "Traceback" not in shown and "warning: --nproc after the script" in shown


MEETING = """
import os, pathlib, sys
import torch, torch.distributed as dist
from shardwise.core.mesh.launch import init_distributed, shutdown

init_distributed("cpu")
total = torch.tensor(2.0 ** dist.get_rank())
dist.all_reduce(total)
names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
facts = [dist.get_rank(), dist.get_world_size(), int(total), *(os.environ[name] for name in names)]
pathlib.Path(sys.argv[1], f"started-by-{os.getppid()}").write_text(" ".join(map(str, facts)))
shutdown()
"""


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


@pytest.mark.skipif(not _is_known(socket.getfqdn()), reason="ranks meet under this host's name, which is unknown")
@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_launchers_of_two_hosts_form_one_group(tmp_path: Path, whole: bool) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "found"
    script.write_text(MEETING)
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["shardwise", "run", "--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-id", "meeting", "--node-rank"]
    ends, logs = [str(script), str(folder)], [tmp_path / f"log-{host}" for host in range(2)]
    with (
        started(*command, "0", *ends, log=logs[0], whole=whole) as first,
        started(*command, "1", *ends, log=logs[1], whole=whole) as second,
    ):
        statuses = [launcher.wait(SECONDS) for launcher in (first, second)]
    assert statuses == [0, 0], [log.read_text() for log in logs]
    by_rank = sorted(path.read_text() for path in folder.iterdir())
    assert by_rank == [f"{rank} 2 3 {rank} 2 0 1 meeting" for rank in range(2)]
    assert {path.name for path in folder.iterdir()} == {f"started-by-{launcher.pid}" for launcher in (first, second)}


def test_schedules_and_errors_about_paths_do_not_import_torch() -> None:
    commands = ["schedule --pp 2 --microbatches 2", "checkpoint inspect a", "estimate a/", "estimate a.py", "run a.py"]
    command = f"from shardwise.cli.main import main; [main(each.split()) for each in {commands}]"
    done = python("-c", f"import sys; {command}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


OURS = """
import sys, beside, deepspeed, importlib.metadata
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
print(deepspeed.__name__, importlib.metadata.version('deepspeed'), beside.VALUE, sys.argv[1:])
"""
TOO_LATE = """
import sys, types
sys.modules['deepspeed'] = types.ModuleType('deepspeed')
import shardwise.deepspeed.as_deepspeed
"""


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_run_replaces_a_library(whole: bool, tmp_path: Path) -> None:
    runs = python if whole else forked_python
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    program = tmp_path / "program.py"
    program.write_text(OURS)
    for start in ([str(program)], ["-m", "program"]):
        command = ["-m", "shardwise.cli.run_as_library", "deepspeed", *start, "a", "-m"]
        shown = runs(*command, cwd=tmp_path, env=surroundings(tmp_path))
        assert shown.stdout.split(maxsplit=3) == ["shardwise.deepspeed", "0.19.8", "3", "['a', '-m']\n"], shown
    program.write_text(TOO_LATE)
    shown = runs(str(program))
    assert shown.returncode == 1 and "deepspeed is imported already" in shown.stderr
    shown = runs("-m", "shardwise.cli.run_as_library", "horovod", "x")
    assert shown.returncode == 2 and "give one of colossalai, deepspeed" in shown.stderr


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


@pytest.mark.parametrize("whole", [False, *campaign(True)], ids=["forks", "whole"])
def test_ranks_end_with_a_killed_launcher(tmp_path: Path, whole: bool) -> None:
    """Ranks that ignore SIGTERM and SIGINT end, too."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(TRAINING)
    ranks: dict[int, int] = {}
    try:
        with started("shardwise", "run", "--nproc", "2", str(script), str(tmp_path), log=log, whole=whole) as launcher:
            until(f"two ranks: {written(log)}", lambda: len(list(tmp_path.glob("rank-?"))) == 2)
            pids = [int(path.read_text()) for path in tmp_path.glob("rank-?")]
            ranks = {pid: start_time(pid) for pid in pids}
            assert -1 not in ranks.values()
            launcher.send_signal(signal.SIGKILL)
            launcher.wait(SECONDS)
        until("the end of the ranks", lambda: all(start_time(pid) != began for pid, began in ranks.items()))
    finally:
        for pid, began in ranks.items():
            if start_time(pid) == began:
                os.kill(pid, signal.SIGKILL)


def _launch(port: int) -> None:
    """Wait for a host that never answers, with a very long timeout."""
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"]
    sys.exit(launch([*meeting, "--rdzv-conf=is_host=0,read_timeout=100000"], [__file__], 1))


@pytest.mark.parametrize("number", [signal.SIGTERM, *full(signal.SIGINT)])
def test_signal_ends_a_launcher_in_the_rendezvous(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(SECONDS)
        launcher = Forked(forked(_launch, silent.getsockname()[1]))
        try:
            peer, _ = silent.accept()  # the launcher now waits in torch's C++ code
            with contextlib.closing(peer):
                launcher.send_signal(number)
                assert launcher.wait(SECONDS) == 128 + number
        finally:
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()


def _check(monkeypatch: pytest.MonkeyPatch, options: str, unknown: set[str], until: int = 10**9) -> list[str]:
    """Return the host names that were looked up; those in ``unknown`` can be resolved from look-up ``until`` on."""
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


def test_unresolvable_rendezvous_endpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    two = "--nnodes 2 --rdzv-endpoint "
    assert _check(monkeypatch, "", set()) == []
    assert _check(monkeypatch, two + "host0:29500", set()) == ["host0", "this-host"]
    assert _check(monkeypatch, two + "[::1]:29500 --node-rank 1", set()) == ["::1"]
    assert _check(monkeypatch, two + "host0 --node-rank 1", set()) == ["host0"]
    assert capsys.readouterr().err == ""
    assert _check(monkeypatch, two + "host0:1 --node-rank 1", {"host0"}, 2) == ["host0", "host0"]
    assert "--rdzv-endpoint host0:1: [Errno -2] Name or service not known; waiting" in capsys.readouterr().err
    monkeypatch.setattr(run, "RESOLVE_S", 0.0)
    nowhere = r"--rdzv-endpoint nowhere:1: host name 'nowhere' cannot be resolved \(.*not know"
    raises(BadInput, nowhere, _check, monkeypatch, two + "nowhere:1", {"nowhere"})
    own = r"the name of this host, this-host: .* cannot be resolved .* /etc/hosts"
    raises(BadInput, own, _check, monkeypatch, two + "host0:1 --node-rank 0", {"this-host"})


@pytest.mark.parametrize("arguments", [[], ["checkpoint"]])
def test_without_a_command_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*arguments) == 2
    assert capsys.readouterr().err.startswith(" ".join(["usage: shardwise", *arguments, "[-h]"]))


COMMANDS = ["schedule", "trace", "checkpoint inspect", "checkpoint inspect --json", "port"]


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that makes the arguments of a command that prints."""

    def found(name: str) -> list[str]:
        if name == "schedule":
            return ["schedule", "--pp", "8", "--microbatches", "32"]
        if name == "trace":
            MemStats([Moment(0, "layer", "forward", 5, 3)], "cpu").save(tmp_path / "s.json")
            return ["trace", "--stats", str(tmp_path / "s.json"), "--out", str(tmp_path / "trace.svg")]
        if name == "port":
            (tmp_path / "train.py").write_text("import deepspeed\ndeepspeed.init_distributed()\n")
            return ["port", str(tmp_path / "train.py")]
        source = LazySource("m", {"model/a": entry_of_tensor(torch.ones(2))})
        file = write_single(source, tmp_path / "m.safetensors")
        return [*name.split()[:2], str(file), *name.split()[2:]]

    return found


def ended(arguments: list[str], output: TextIO) -> int:
    with output, contextlib.redirect_stdout(output):  # closing the file flushes it, as the end of a program does
        return main(arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_closed_or_full_standard_output(name: str, command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A closed pipe ends the command with status 141, a full device with one line."""
    for buffered in (True, False):
        reading, writing = os.pipe()
        os.close(reading)
        output = os.fdopen(writing, "w")
        output.reconfigure(write_through=not buffered)
        assert ended(command(name), output) == 141
        assert capfd.readouterr().err == ""
    with Path("/dev/full").open("w") as full_one:
        assert ended(command(name), full_one) == 2
    told = capfd.readouterr().err
    assert told == f"shardwise {name.removesuffix(' --json')}: error: standard output: No space left on device\n"
