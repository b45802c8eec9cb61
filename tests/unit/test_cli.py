"""The command line without ranks: arguments, one-line errors, and launchers."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from program_setup import forked_python, python, surroundings

from shardwise.cli import run
from shardwise.cli.errors import BadInput
from shardwise.cli.main import _parser, main
from tests.support.launching import SECONDS, finished, started
from tests.support.sets import campaign, full

BAD_RUN = [
    ("--nproc 0 SCRIPT", "--nproc 0"),
    ("--nproc 100000 SCRIPT", "--nproc 100000: give the number of ranks on this host, <= 4096"),
    ("--nproc many SCRIPT", "--nproc many: give a number of ranks, or gpu, cpu or auto"),
    ("--node-rank -1 SCRIPT", "--node-rank -1: give a whole number >= 0"),
    ("--max-restarts -1 SCRIPT", "--max-restarts -1"),
    ("/nowhere.py", "/nowhere.py: no such file"),
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
    ("", "the following arguments are required: script (see"),
]


def _words(options: str) -> list[str]:
    """With the name of this file, which may have spaces, for a script."""
    return [__file__ if each == "SCRIPT" else each for each in options.split()]


def _status(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.mark.parametrize(
    ("words", "program"),
    [("run --stepz 3", "shardwise run"), ("checkpoint verify x --y", "shardwise checkpoint verify")],
)
def test_an_unknown_option_is_an_error_of_its_command(
    words: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(words.split())
    text = capsys.readouterr().err
    assert error.value.code == 2 and text.startswith(f"{program}: error: unrecognized") and f"{program} --help" in text


@pytest.mark.parametrize(("options", "expected"), BAD_RUN)
def test_run_refuses_in_one_line(options: str, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert _status(["run", *_words(options)]) == 2
    shown = capfd.readouterr().err
    assert expected in shown and shown.count("\n") == 1


def _run_options(text: str) -> tuple[list[str], list[str]]:
    options = _parser().parse_args(["run", *_words(text)])
    return run.launcher_arguments(options), run.program(options)


def test_run_passes_the_script_its_own_options() -> None:
    launcher, script = _run_options("--nproc 4 SCRIPT --nproc 9 --n 1 -m --help")
    assert launcher == ["--nproc-per-node=4", "--max-restarts=0", "--standalone", "--local-addr=127.0.0.1"]
    assert script == [__file__, "--nproc", "9", "--n", "1", "-m", "--help"]


@pytest.mark.parametrize(
    ("gpus", "options", "ranks"), [(3, "", 3), (3, "--nproc gpu", 3), (0, "", 1), (0, "--nproc auto", 5)]
)
def test_run_starts_a_rank_for_each_gpu(gpus: int, options: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(run, "threads_per_rank", lambda ranks: 5)
    assert _run_options(f"{options} SCRIPT")[0][0] == f"--nproc-per-node={ranks}"
    if not gpus:
        with pytest.raises(BadInput, match="--nproc gpu: torch finds no GPU here"):
            _run_options("--nproc gpu SCRIPT")


def test_env_describes_the_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert _status(["env"]) == 0
    text = capsys.readouterr().out
    for section in ("Versions", "Devices", "Communication", "Limits", "Environment", "Verdict"):
        assert f"{section}\n  " in text
    assert "WORLD_SIZE=2 is set without RANK" in text


def test_run_across_hosts() -> None:
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
    command = ["shardwise", "run", "--nproc", "1", str(script), flag]
    found, shown = finished(*command, log=tmp_path / "log", whole=whole, fork_ranks=False)
    assert found == status, shown
    assert "rank 0 ended with" in shown and "Traceback" not in shown


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
def test_launchers_of_two_hosts_make_one_group(tmp_path: Path, whole: bool) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "found"
    script.write_text(MEETING)
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["shardwise", "run", "--nproc", "1", "--nnodes", "2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "meeting"]
    logs = [tmp_path / f"log-{host}" for host in range(2)]
    with ExitStack() as stack:
        hosts = [
            started(*command, "--node-rank", str(host), str(script), str(folder), log=log, whole=whole)
            for host, log in enumerate(logs)
        ]
        launchers = [stack.enter_context(host) for host in hosts]
        statuses = [launcher.wait(SECONDS) for launcher in launchers]
    assert statuses == [0, 0], [log.read_text() for log in logs]
    by_rank = sorted(path.read_text() for path in folder.iterdir())
    assert by_rank == [f"{rank} 2 3 {rank} 2 0 1 meeting" for rank in range(2)]
    assert {path.name for path in folder.iterdir()} == {f"started-by-{launcher.pid}" for launcher in launchers}


def test_importing_the_command_line_does_not_import_torch() -> None:
    done = python("-c", "import sys; import shardwise.cli.main; sys.exit('torch' in sys.modules)")
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
def test_run_puts_our_names_in_place_of_a_library(whole: bool, tmp_path: Path) -> None:
    runs = python if whole else forked_python
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    program = tmp_path / "program.py"
    program.write_text(OURS)
    for start in ([str(program)], ["-m", "program"]):
        command = ["-m", "shardwise.cli.as_world", "deepspeed", *start, "a", "-m"]
        shown = runs(*command, cwd=tmp_path, env=surroundings(tmp_path))
        assert shown.stdout.split(maxsplit=3) == ["shardwise.deepspeed", "0.19.8", "3", "['a', '-m']\n"], shown
    program.write_text(TOO_LATE)
    shown = runs(str(program))
    assert shown.returncode == 1 and "deepspeed is imported already" in shown.stderr
    shown = runs("-m", "shardwise.cli.as_world", "horovod", "x")
    assert shown.returncode == 1 and "give one of colossalai, deepspeed" in shown.stderr
